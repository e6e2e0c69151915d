"""Reading tensors of a checkpoint into the chunks of what is made of them, while what was read before is written.

1. Work comes in steps (`cells`): a box of one target, which holds whole chunks of it, but for those that later steps finish.
2. Small steps are taken together, into *batches* that a processor's cache holds, and reading some batches is planned together, by the
   caller's thread. A second thread reads them, one after another: source chunks go, or are scattered, straight to where they lie in the
   chunks of the target, converted on the way where dtypes differ. A target may be made of parts of several tensors, transposed
   (`plan.views`); a source chunk that several parts of a batch need is read once.
3. Meanwhile the chunks of the batch before are the caller's. Some batches are read ahead, so that neither waits for the other.
"""

from __future__ import annotations

from collections import defaultdict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt.format.zarr_arrays import CHECKSUM_BYTES, room_for
from shardckpt.io.buffers import round_up
from shardckpt.layout.box import BoxArray
from shardckpt.plan.overlaps import overlaps, touched
from shardckpt.plan.pieces import chunk_boxes
from shardckpt.reading.locate import Request
from shardckpt.reshard.memory import PARTS

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from shardckpt.format.structure import TensorRecord
    from shardckpt.layout.dtypes import DType
    from shardckpt.plan.overlaps import Overlaps
    from shardckpt.plan.pieces import Piece
    from shardckpt.plan.views import View
    from shardckpt.reshard.cells import Step
    from shardckpt.reshard.source import OpenSource

    Bytes = NDArray[np.uint8]

__all__ = ["Batch", "BatchMemory", "ChunkTarget", "Filled", "PlannedStep", "assembled"]

_AHEAD = 3
"""Batches in memory: the caller has one, one is being read, and one waits for either."""
_PLANNED = 64 << 20
"""Bytes of the batches that are planned together: planning costs about as much for few as for many."""
_PLANNED_STEPS = 4096
"""Steps of them, and of one batch; of each there are some objects."""
_NOTHING: Bytes = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class _Place:
    """What a batch has of the memory."""

    half: int
    parts: range

    def meets(self, other: _Place) -> bool:
        """Whether some of it is the other's, too."""
        return self.half == other.half and self.parts.start < other.parts.stop and other.parts.start < self.parts.stop


class BatchMemory:
    """Memory of batches, used again and again: two halves, each for one large batch or for a few small ones, in turn."""

    def __init__(self) -> None:
        self._halves: list[Bytes] = [_NOTHING, _NOTHING]
        self._last = _Place(1, range(PARTS))

    def next(self, nbytes: int, small: int) -> _Place:
        """Where the next batch lies; never where the one before it does, from which chunks may be copied that it has not finished.

        Args:
            nbytes: that it needs.
            small: bytes of a part; a batch that needs more has a half.
        """
        half, parts = self._last.half, self._last.parts
        if nbytes > small or parts.stop == PARTS:
            half, parts = 1 - half, range(0)
        self._last = _Place(half, range(PARTS) if nbytes > small else range(parts.stop, parts.stop + 1))
        return self._last

    def at(self, place: _Place, nbytes: int, small: int) -> Bytes:
        """Its bytes; for so many that it has not yet, nobody may have any of the half."""
        if self._halves[place.half].nbytes < (least := max(nbytes, PARTS * small)):
            self._halves[place.half] = _NOTHING
            self._halves[place.half] = np.empty(least, np.uint8)
        return self._halves[place.half][place.parts.start * small :]


@dataclass(frozen=True, eq=False)
class ChunkTarget:
    """What chunks are made for."""

    name: str
    dtype: DType
    pieces: Sequence[Piece]
    """Its arrays."""
    sources: Sequence[tuple[TensorRecord, View]]
    """What it is made of: tensors, and where their elements lie in it."""
    as_stored: bool
    """Whether chunks are laid out as in a checkpoint: filled up with zeros at edges, with room for a checksum behind. Otherwise they
    are cut off at edges, and nothing is behind."""

    @cached_property
    def is_one_chunk(self) -> bool:
        """As most are, by number: nothing has to be looked up in grids."""
        return len(self.pieces) == 1 and self.pieces[0].num_chunks == 1

    def nbytes(self, piece: Piece, shape: Sequence[int]) -> int:
        """Of a chunk in memory that has so many elements."""
        return room_for(piece.chunks if self.as_stored else tuple(shape), self.dtype.itemsize) - CHECKSUM_BYTES * (not self.as_stored)

    def elements(self, raw: Bytes, piece: Piece, shape: Sequence[int], tensor: TensorRecord) -> NDArray[Any]:
        """A chunk's bytes as what a tensor's elements are copied to."""
        kind = self.dtype.storage if self.dtype == tensor.dtype else self.dtype.numpy
        return raw[:-CHECKSUM_BYTES].view(kind).reshape(piece.chunks) if self.as_stored else raw.view(kind).reshape(shape)


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """A step, and the chunks of the target that it reaches into, array by array."""

    target: ChunkTarget
    step: Step

    @cached_property
    def pairs(self) -> list[tuple[Piece, Overlaps, BoxArray]]:
        """Per array its chunks in the step, and all elements of each, in the target's indices."""
        box = BoxArray.of([self.step.box], self.step.box.ndim)
        found = []
        for piece in touched(self.target.pieces, box):
            pairs = overlaps(piece, box)
            found.append((piece, pairs, chunk_boxes(piece, pairs.chunk)))
        return found

    def unfinished(self, boxes: BoxArray) -> NDArray[np.bool_]:
        """Which of some chunks a later step finishes."""
        along = self.step.along
        if not self.step.box.ndim:
            return np.zeros(len(boxes), bool)
        return boxes.stop[:, along] > self.step.box.stop[along]

    @property
    def finished(self) -> int:
        """How many chunks are whole after it."""
        if self.target.is_one_chunk:
            return 1
        return sum(int((~self.unfinished(boxes)).sum()) for _, _, boxes in self.pairs)

    @property
    def leaves_open(self) -> bool:
        """Whether a chunk is begun and not finished."""
        return not self.target.is_one_chunk and any(bool(self.unfinished(boxes).any()) for _, _, boxes in self.pairs)

    @property
    def nbytes(self) -> int:
        """Of those chunks, in memory."""
        if self.target.is_one_chunk:
            return round_up(self.target.nbytes(self.target.pieces[0], self.target.pieces[0].shape))
        itemsize, total = self.target.dtype.itemsize, 0
        for piece, pairs, boxes in self.pairs:
            if self.target.as_stored:
                total += len(pairs.chunk) * round_up(self.target.nbytes(piece, ()))
            else:
                sizes = boxes.sizes() * itemsize
                total += int((-(-sizes // round_up(1)) * round_up(1)).sum())
        return total


@dataclass(frozen=True, slots=True, eq=False)
class Filled:
    """A chunk of a target, whole."""

    target: ChunkTarget
    piece: Piece
    position: int
    """In the piece's grid."""
    start: tuple[int, ...]
    """Of its first element in the target."""
    shape: tuple[int, ...]
    """Of its elements, cut off at the edge."""
    raw: Bytes
    """Its bytes, laid out as the target has it."""


@dataclass(slots=True)
class Batch:
    """What is read at once, and the chunks that are whole then."""

    steps: list[PlannedStep]
    nbytes: int
    whole: list[Filled] = field(default_factory=list)
    first: list[tuple[Bytes, Bytes | int]] = field(default_factory=list)
    """Memory of chunks, and what it has to hold before they are read: what a step before has read of them, or zeros."""
    _room: Bytes = field(default_factory=lambda: _NOTHING)
    """Where its chunks lie."""
    _used: int = 0

    def begin(self, room: Bytes) -> None:
        """Give it the memory that it needs."""
        self._room = room

    def take(self, nbytes: int) -> Bytes:
        """Memory of a chunk."""
        begin = self._used
        self._used += round_up(nbytes)
        return self._room[begin : begin + nbytes]


def assembled(source: OpenSource, steps: Iterable[PlannedStep], at_once: int, memory: BatchMemory) -> Generator[Batch]:
    """Read everything; a batch of whole chunks at a time, which is good until the next is asked for.

    Whoever does not take all of it closes the iterator, which waits for what is being read.

    Args:
        source: what is read.
        steps: what to read; those of one target follow each other.
        at_once: bytes to which small steps are joined. One that is larger takes what it takes, in each of the two halves of the
            memory, which else has twice `PARTS` times as much.
        memory: kept by the caller.

    Raises:
        CorruptionError, ReplacedError, StorageError: the source could not be read.
    """
    reading, coming = _Reading(source), deque[tuple[_Place, Future[Batch]]]()

    def until_free(place: _Place) -> Iterator[Batch]:
        """Batches that are read, until none has anything of a place, and there may be one more."""
        while len(coming) == _AHEAD or any(place.meets(other) for other, _ in coming):
            yield coming[0][1].result()
            coming.popleft()

    with ThreadPoolExecutor(1, "shardckpt-ahead") as ahead, source.reading():
        try:
            for batches in _together(_batches(steps, at_once), at_once):
                places = [memory.next(batch.nbytes, at_once) for batch in batches]
                if batches[0].nbytes > at_once:  # for which this memory may be replaced
                    yield from until_free(places[0])
                for batch, place in zip(batches, places, strict=True):
                    batch.begin(memory.at(place, batch.nbytes, at_once))
                for batch, place, read in zip(batches, places, reading.plan(batches), strict=True):
                    yield from until_free(place)
                    coming.append((place, ahead.submit(reading.read, batch, read)))
            while coming:
                yield coming[0][1].result()
                coming.popleft()
        finally:
            ahead.shutdown(cancel_futures=True)


def _together(batches: Iterable[Batch], at_once: int) -> Iterator[list[Batch]]:
    """All batches, as many at a time as are planned together; a large one alone."""
    some: list[Batch] = []
    for batch in batches:
        if some and (
            batch.nbytes > at_once
            or sum(one.nbytes for one in some) + batch.nbytes > _PLANNED
            or sum(len(one.steps) for one in some) + len(batch.steps) > _PLANNED_STEPS
        ):
            yield some
            some = []
        some.append(batch)
        if batch.nbytes > at_once:
            yield some
            some = []
    if some:
        yield some


def _batches(steps: Iterable[PlannedStep], at_once: int) -> Iterator[Batch]:
    """All steps, as many at a time as are to be joined."""
    batch = Batch([], 0)
    for planned in steps:
        nbytes = planned.nbytes
        if batch.steps and (batch.nbytes + nbytes > at_once or len(batch.steps) == _PLANNED_STEPS):
            yield batch
            batch = Batch([], 0)
        batch.steps.append(planned)
        batch.nbytes += nbytes
    if batch.steps:
        yield batch


class _Wanted:
    """Boxes of one tensor, and where their elements go."""

    def __init__(self) -> None:
        self.boxes: list[BoxArray] = []
        self.buffers: list[NDArray[Any]] = []

    def request(self, tensor: TensorRecord, *, converts: bool) -> Request:
        wanted = BoxArray(np.concatenate([b.start for b in self.boxes]), np.concatenate([b.stop for b in self.boxes]))
        meaning = tensor.dtype.numpy if converts else None
        return Request(tensor.name, tensor.dtype.storage, tensor.pieces, wanted, self.buffers, convert_from=meaning)


class _Reading:
    """Reads batch after batch; for one thread at a time."""

    def __init__(self, source: OpenSource) -> None:
        self._source = source
        self._open: dict[tuple[str, int], tuple[Batch, Bytes]] = {}
        """Chunks, by array and position, that the last step has begun and not finished; and in which batch."""

    def plan(self, batches: Sequence[Batch]) -> Sequence[Callable[[], None]]:
        """For each batch a call that reads it; nothing is written to its memory before."""
        return self._source.reader.reads([self._requests(batch) for batch in batches])

    def read(self, batch: Batch, read: Callable[[], None]) -> Batch:
        """Read a batch."""
        for raw, first in batch.first:
            raw[:] = first
        read()
        return batch

    def _requests(self, batch: Batch) -> list[Request]:
        wanted: defaultdict[tuple[str, bool], _Wanted] = defaultdict(_Wanted)
        tensors = {tensor.name: tensor for planned in batch.steps for tensor, _ in planned.target.sources}
        for planned in batch.steps:
            if planned.target.is_one_chunk:
                _plan_one(planned.target, batch, wanted)
            else:
                self._plan(planned, batch, wanted)
        return [some.request(tensors[name], converts=converts) for (name, converts), some in wanted.items()]

    def _plan(self, planned: PlannedStep, batch: Batch, wanted: defaultdict[tuple[str, bool], _Wanted]) -> None:
        """What a step reads: of each chunk that it reaches into, the part that lies in it, to where that is in the chunk."""
        begun, self._open = self._open, {}
        for piece, pairs, boxes in planned.pairs:
            parts = BoxArray(boxes.start + pairs.in_chunk.start, boxes.start + pairs.in_chunk.stop)
            raws = self._room(planned, piece, pairs, boxes, begun, batch)
            for tensor, view in planned.target.sources:
                self._aim(planned.target, tensor, view, piece, boxes, parts, raws, wanted)

    def _room(
        self,
        planned: PlannedStep,
        piece: Piece,
        pairs: Overlaps,
        boxes: BoxArray,
        begun: dict[tuple[str, int], tuple[Batch, Bytes]],
        batch: Batch,
    ) -> list[Bytes]:
        """Memory of each chunk that a step reaches into, with what earlier steps have read of it."""
        target, raws = planned.target, []
        shapes = (boxes.stop - boxes.start).tolist()
        later = planned.unfinished(boxes).tolist()
        rows = zip(pairs.chunk.tolist(), boxes.start.tolist(), shapes, later, strict=True)
        for position, start, shape, unfinished in rows:
            key = piece.path, position
            before, raw = begun.get(key, (None, _NOTHING))
            if before is not batch:
                former, raw = raw, batch.take(target.nbytes(piece, shape))
                if before is not None:
                    batch.first.append((raw, former))
                elif target.as_stored and tuple(shape) != piece.chunks:
                    batch.first.append((raw, 0))
            if unfinished:
                self._open[key] = batch, raw
            else:
                batch.whole.append(Filled(target, piece, position, tuple(start), tuple(shape), raw))
            raws.append(raw)
        return raws

    def _aim(
        self,
        target: ChunkTarget,
        tensor: TensorRecord,
        view: View,
        piece: Piece,
        boxes: BoxArray,
        parts: BoxArray,
        raws: list[Bytes],
        wanted: defaultdict[tuple[str, bool], _Wanted],
    ) -> None:
        """Say what of one source goes into the chunks of an array."""
        inside = view.inside
        first, last = np.maximum(parts.start, inside.start), np.minimum(parts.stop, inside.stop)
        which = np.flatnonzero((first < last).all(axis=1))
        if not len(which):
            return
        into = wanted[tensor.name, target.dtype != tensor.dtype]
        into.boxes.append(view.back(BoxArray(first[which], last[which])))
        low, high = (first[which] - boxes.start[which]).tolist(), (last[which] - boxes.start[which]).tolist()
        shapes = (boxes.stop - boxes.start)[which].tolist()
        for i, start, stop, shape in zip(which.tolist(), low, high, shapes, strict=True):
            index: Any = (*map(slice, start, stop), ...)
            into.buffers.append(view.part(target.elements(raws[i], piece, shape, tensor)[index]))


def _plan_one(target: ChunkTarget, batch: Batch, wanted: defaultdict[tuple[str, bool], _Wanted]) -> None:
    """As `_Reading._plan`, of a target that is one chunk."""
    (piece,) = target.pieces
    raw = batch.take(target.nbytes(piece, piece.shape))
    if target.as_stored and piece.shape != piece.chunks:
        batch.first.append((raw, 0))
    batch.whole.append(Filled(target, piece, 0, piece.start, piece.shape, raw))
    for tensor, view in target.sources:
        into = wanted[tensor.name, target.dtype != tensor.dtype]
        into.boxes.append(BoxArray.of([view.box], view.box.ndim))
        index: Any = (*view.inside.slices, ...)
        into.buffers.append(view.part(target.elements(raw, piece, piece.shape, tensor)[index]))
