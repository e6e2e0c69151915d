"""A foreign checkpoint as what a reshard reads.

1. `ForeignSpec` is what workers are told; each opens the checkpoint for itself.
2. `ForeignSource` is what a reshard asks of a source. Its record says what a commit record would say: the structure as it is to
   become (`arrangement`), and in place of an attempt what tells this source from any other.
3. `ForeignReader` reads the chunks that requests touch, each once per call, in several threads, and copies the elements to where
   they are wanted. In memory are as many chunks as there are threads.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt.box import BoxArray
from shardckpt.convert.arrangement import Arrangement, is_whole
from shardckpt.convert.detect import module_of
from shardckpt.convert.naming import NameOptions
from shardckpt.io.reader import OBJECT_COPIES, OBJECT_MEMORY, OBJECT_THREADS
from shardckpt.io.stats import ReadStats
from shardckpt.io.url import parse
from shardckpt.io.wanted import Wanted
from shardckpt.io.workers import Workers
from shardckpt.record import CheckpointRecord
from shardckpt.reshard.memory import READERS, largest_chunk

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardckpt.box import Box
    from shardckpt.convert.foreign import Foreign
    from shardckpt.io.url import Location
    from shardckpt.io.wanted import Request, Target
    from shardckpt.planning.plan import Piece
    from shardckpt.planning.views import View
    from shardckpt.structure import TensorRecord

__all__ = ["ForeignReader", "ForeignSource", "ForeignSpec"]


@dataclass(frozen=True, slots=True)
class ForeignSpec:
    """Which foreign checkpoint is read, and as what."""

    url: str
    """Where it lies."""
    format: str
    """The name of its format, as `detect` has it."""
    trust_pickle: bool = False
    """Whether what only a pickle says may be read from one."""
    into: str | None = None
    """Where in the new state it goes; see `Arrangement.below`."""
    names: NameOptions = field(default_factory=NameOptions)
    """Which tensors are taken, under which names, made of what; see `Arrangement.named`."""

    def open(self) -> ForeignSource:
        """Open it.

        Raises:
            FormatError, MissingDataError: it makes no sense, or a part of it is gone.
            OptionError, NamesMismatchError, ShapeMismatchError, DtypeMismatchError: names and mappings do not suit it.
        """
        foreign: Foreign = module_of(self.format).open_foreign(parse(self.url), trust_pickle=self.trust_pickle)
        arrangement = Arrangement.named(foreign.structure, self.names, str(foreign.location))
        return ForeignSource(foreign, arrangement if self.into is None else arrangement.below(self.into))


class ForeignSource:
    """A foreign checkpoint that is open for reading: a `reshard.source.Source`."""

    def __init__(self, foreign: Foreign, arrangement: Arrangement) -> None:
        self.foreign = foreign
        self.location: Location = foreign.location
        self.stats = ReadStats()
        metadata = {name: value for name, value in foreign.metadata.items() if _is_json(value)}
        lost = [
            f"left behind: {name}, which no other JSON reader would take (NaN, or too deep)" for name in foreign.metadata.keys() - metadata
        ]
        self.notes: tuple[str, ...] = (*foreign.notes, *lost, *arrangement.notes)
        """What was seen, and what is left behind, in a line each."""
        self._arrangement = arrangement
        self._limits = READERS, OBJECT_MEMORY
        made_of = [(name, [_text(view) for view in views]) for name, views in arrangement.views.items()]
        seen = [foreign.format, foreign.identity, made_of]
        self.record = CheckpointRecord(
            attempt=hashlib.sha256(json.dumps(seen).encode()).hexdigest(),
            created="",  # the attempt of an import bears no time of its own
            writer=foreign.format,
            layout="packed",
            compression=None,
            hosts=(),
            structure=arrangement.structure,
            metadata=metadata,
            saved_by=1,
        )

    @cached_property
    def reader(self) -> ForeignReader:
        """Reads its chunks; made when it is first asked for."""
        threads, memory = self._limits
        if self.location.local is None:
            chunk = largest_chunk(self.foreign.structure.tensors.values())
            threads = max(1, min(OBJECT_THREADS, memory // max(1, OBJECT_COPIES * chunk)))
        return ForeignReader(self.foreign, self._arrangement, self.stats, threads)

    def limit_reading(self, *, threads: int | None, memory: int) -> None:
        """See `Source`. From an object store as many threads read as there is memory for."""
        self._limits = threads or READERS, memory

    def reading(self) -> AbstractContextManager[None]:
        """See `Source`. Each file is compared with what it was whenever it is opened."""
        return nullcontext()

    def process_values(self, process: int) -> dict[str, Any]:
        """None: no other format has such values."""
        del process
        return {}


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk of the foreign checkpoint, and where its elements go."""

    tensor: TensorRecord
    piece: Piece
    box: Box
    targets: list[tuple[Target, np.dtype[Any] | None]] = field(default_factory=list)
    """Each with what the elements mean, where they are converted."""


class ForeignReader:
    """Reads boxes of the tensors of an arrangement. Safe to use from several threads."""

    def __init__(self, foreign: Foreign, arrangement: Arrangement, stats: ReadStats, threads: int) -> None:
        self._foreign = foreign
        self._tensors = foreign.structure.tensors
        self._views = arrangement.views
        self._stats = stats
        self._workers = Workers(threads, "shardckpt-import")

    def read(self, requests: Sequence[Request]) -> None:
        """Fill every request's buffers.

        Raises:
            MissingDataError, CorruptionError: what is needed is not there, or damaged; names the tensor and the file.
            ReplacedError: the source has changed since it was opened.
            StorageError: it cannot be read.
        """
        self._stats.count(needed=sum(int(r.boxes.sizes().sum()) * r.dtype.itemsize for r in requests))
        chunks: dict[tuple[str, int], _Chunk] = {}
        for request in chain.from_iterable(map(self._foreign_requests, requests)):
            tensor = self._tensors[request.name]
            wanted = Wanted.of_boxes([request])
            for row, position in enumerate(wanted.position.tolist()):
                piece = wanted.part_of(row).piece
                chunk = chunks.setdefault((piece.path, position), _Chunk(tensor, piece, wanted.box(row)))
                chunk.targets.extend((target, request.convert_from) for target in wanted.targets_of(row))
        self._workers.do(self._read_chunk, chunks.values())

    def _foreign_requests(self, request: Request) -> Iterator[Request]:
        """The same elements, asked of the tensors that they come from."""
        views = self._views[request.name]
        for view in views:
            tensor = self._tensors[view.tensor]
            if is_whole(views, self._tensors):
                yield replace(request, name=tensor.name, pieces=tensor.pieces)
                continue
            boxes, inside = request.boxes, view.inside
            which = boxes.overlapping(inside)
            common = BoxArray(np.maximum(boxes.start[which], inside.start), np.minimum(boxes.stop[which], inside.stop))
            begins, ends = (common.start - boxes.start[which]).tolist(), (common.stop - boxes.start[which]).tolist()
            parts = [
                view.part(request.buffers[i][(*map(slice, begin, end), ...)])
                for i, begin, end in zip(which.tolist(), begins, ends, strict=True)
            ]
            if parts:
                yield replace(request, name=tensor.name, pieces=tensor.pieces, boxes=view.back(common), buffers=parts)

    def _read_chunk(self, chunk: _Chunk) -> None:
        """Read a chunk, and copy its elements to where they are wanted."""
        elements = self._foreign.read(chunk.tensor, chunk.piece, chunk.box)
        assert (elements.dtype, elements.shape) == (chunk.tensor.dtype.storage, chunk.box.shape)
        self._stats.count(reads=1, read=elements.nbytes)
        with np.errstate(all="ignore"):  # what is too large for another dtype becomes infinite there: that was asked for
            for (buffer, in_buffer, in_chunk), meaning in chunk.targets:
                values = elements if meaning is None else elements.view(meaning)
                np.copyto(buffer[in_buffer], values[in_chunk], casting="unsafe")


def _is_json(value: object) -> bool:
    """Whether a record can hold it. A metric may be NaN, and Python's reader makes an infinity of `1e999`."""
    try:
        json.dumps(value, allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError):
        return False
    return True


def _text(view: View) -> str:
    """Differs when the view does."""
    return f"{view.tensor} {view.box.start} {view.box.stop} {view.permutation} {view.start}"
