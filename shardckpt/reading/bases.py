"""Lookup of tensors that a checkpoint has left in other checkpoints, its bases.

Each request gets the attempt that holds its tensor, and the names of the tensor's arrays there. Everything else reads all
requests alike. An attempt is opened when the first of its tensors is needed, and stays open.
"""

from __future__ import annotations

from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING

from shardckpt.commit.base_places import base_record, holder
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardckpt.format.record import CheckpointRecord
    from shardckpt.format.structure import Base, TensorRecord
    from shardckpt.io.store import Store
    from shardckpt.reading.fetch import ReadableChunks
    from shardckpt.reading.locate import Request


class Bases:
    """The attempts that hold the tensors of a checkpoint: its own and its bases'. A `Resolver`."""

    def __init__(self, place: Store, record: CheckpointRecord, open_one: Callable[[Store, CheckpointRecord], ReadableChunks]) -> None:
        """Nothing is read yet.

        Args:
            place: the checkpoint's own attempt.
            record: the checkpoint's commit record.
            open_one: opens the chunks that an attempt itself holds.
        """
        parent = place.location.parent
        assert parent is not None
        self._checkpoint = parent
        self.place = place
        self._record = record
        self._open_one = open_one
        self._opened: dict[Base | None, tuple[ReadableChunks, CheckpointRecord]] = {}
        self._opening = Lock()

    def resolve(self, requests: Sequence[Request]) -> list[Request]:
        """The requests with the attempts that hold their tensors, and the arrays there; these attempts are opened."""
        found = []
        for request in requests:
            tensor = self._record.structure.tensors[request.name]
            source, held = self._holder(tensor)
            pieces = request.pieces
            if held is not tensor:
                whole = pieces is tensor.pieces
                pieces = held.pieces if whole else [held.pieces[tensor.pieces.index(piece)] for piece in pieces]
            found.append(replace(request, pieces=pieces, source=source))
        return found

    def check_places(self, requests: Sequence[Request]) -> None:
        """See `Resolver`."""
        tensors = {_base(tensor): tensor for tensor in (self._record.structure.tensors[request.name] for request in requests)}
        for base, tensor in tensors.items():
            if base is not None:
                base_record(self._checkpoint, base, shown(tensor.name))

    def _holder(self, tensor: TensorRecord) -> tuple[ReadableChunks, TensorRecord]:
        """The attempt that holds a tensor, and the tensor's record there; opens the attempt if necessary."""
        base = _base(tensor)
        with self._opening:
            if base not in self._opened:
                at = (self.place, self._record) if base is None else base_record(self._checkpoint, base, shown(tensor.name))
                self._opened[base] = self._open_one(*at), at[1]
            source, record = self._opened[base]
        return source, tensor if base is None else holder(self._checkpoint, tensor, record)


def _base(tensor: TensorRecord) -> Base | None:
    return None if tensor.base is None else tensor.base.base
