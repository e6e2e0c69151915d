"""Reads of a checkpoint that has left some of its tensors in other checkpoints, its bases.

Requests are sorted by the checkpoint that holds their tensors, and go to that checkpoint's reader.
Each reader is opened when the first of its tensors is needed, and stays open.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING

from shardckpt.commit.base_places import base_record, holder
from shardckpt.errors import MissingDataError
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy as np

    from shardckpt.format.record import CheckpointRecord
    from shardckpt.format.structure import Base, TensorRecord
    from shardckpt.io.store import Store
    from shardckpt.plan.pieces import Piece
    from shardckpt.reading.locate import Damaged, Request
    from shardckpt.reading.reader import ChunkReader, ReadStats


class BasedReader:
    """Reads boxes of the tensors of one checkpoint, from itself and its bases; safe to use from several threads."""

    def __init__(
        self, place: Store, record: CheckpointRecord, stats: ReadStats, open_one: Callable[[Store, CheckpointRecord], ChunkReader]
    ) -> None:
        """Prepare the readers; nothing is read yet.

        Args:
            place: the checkpoint's attempt.
            record: the checkpoint's commit record.
            stats: counts all reads, including those of bases.
            open_one: makes the reader for the chunks that an attempt itself holds.
        """
        parent = place.location.parent
        assert parent is not None
        self.stats = stats
        self._checkpoint = parent
        self._store = place
        self._record = record
        self._open_one = open_one
        self._opened: dict[Base | None, tuple[ChunkReader, CheckpointRecord]] = {}
        self._opening = Lock()

    def open(self, tensors: Iterable[TensorRecord]) -> None:
        """Open the bases of some tensors.

        Raises:
            MissingDataError, FormatError: a base is gone, was replaced, or does not hold the tensor.
        """
        for tensor in tensors:
            self._holder(tensor)

    def read(self, requests: Sequence[Request]) -> None:
        """Fill every request's buffers; raises the errors of `ChunkReader.read` and `open`."""
        for base, some in self._sorted(requests).items():
            with self._may_be_gone(base, some):
                self._opened[base][0].read(some)

    def reads(self, groups: Sequence[Sequence[Request]]) -> list[Callable[[], None]]:
        """A callable for each group of requests that works like `read`, planned together; see `ChunkReader.reads`."""
        of_base: dict[Base | None, list[tuple[int, list[Request]]]] = defaultdict(list)
        for i, group in enumerate(groups):
            for base, some in self._sorted(group).items():
                of_base[base].append((i, some))
        of_group: list[list[tuple[Base | None, Sequence[Request], Callable[[], None]]]] = [[] for _ in groups]
        for base, parts in of_base.items():
            with self._may_be_gone(base, parts[0][1]):
                planned = self._opened[base][0].reads([some for _, some in parts])
            for (i, some), read in zip(parts, planned, strict=True):
                of_group[i].append((base, some, read))
        return [partial(self._read_planned, planned) for planned in of_group]

    def _read_planned(self, planned: Iterable[tuple[Base | None, Sequence[Request], Callable[[], None]]]) -> None:
        for base, some, read in planned:
            with self._may_be_gone(base, some):
                read()

    @contextmanager
    def _may_be_gone(self, base: Base | None, requests: Sequence[Request]) -> Iterator[None]:
        """Raise a clearer error if a base was replaced or deleted while it was being read."""
        try:
            yield
        except MissingDataError:
            if base is not None:
                base_record(self._checkpoint, base, shown(requests[0].name))
            raise

    def check(self, requests: Sequence[Request], damaged: Damaged, *, after: int, most: int) -> Iterator[int]:
        """Compare every chunk of tensors that one checkpoint holds with its table; see `ChunkReader.check`.

        Raises:
            MissingDataError, FormatError: a base is gone, was replaced, or does not hold the tensor.
        """
        ((base, some),) = self._sorted(requests).items()
        return self._opened[base][0].check(some, damaged, after=after, most=most)

    def stored_chunk(self, name: str, dtype: np.dtype[np.generic], piece: Piece, position: int) -> bytes:
        """A chunk's stored bytes; see `ChunkReader.stored_chunk`."""
        tensor = self._record.structure.tensors[name]
        held = self._holder(tensor)
        return self._opened[_base(tensor)][0].stored_chunk(name, dtype, held.pieces[tensor.pieces.index(piece)], position)

    def _sorted(self, requests: Sequence[Request]) -> dict[Base | None, list[Request]]:
        """Requests by the base that holds their tensors (None: this checkpoint), with the names of the pieces there."""
        found: dict[Base | None, list[Request]] = defaultdict(list)
        for request in requests:
            tensor = self._record.structure.tensors[request.name]
            held = self._holder(tensor)
            found[_base(tensor)].append(request if held is tensor else replace(request, pieces=held.pieces))
        return found

    def _holder(self, tensor: TensorRecord) -> TensorRecord:
        """A tensor's record in the checkpoint that holds it; opens that checkpoint if necessary."""
        base = _base(tensor)
        with self._opening:
            if base not in self._opened:
                at = (self._store, self._record) if base is None else base_record(self._checkpoint, base, shown(tensor.name))
                self._opened[base] = self._open_one(*at), at[1]
            return tensor if base is None else holder(self._checkpoint, tensor, self._opened[base][1])


def _base(tensor: TensorRecord) -> Base | None:
    return None if tensor.base is None else tensor.base.base
