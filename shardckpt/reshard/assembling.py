"""Reading tensors of a checkpoint into the chunks of what is made of them, while what was read before is written.

1. Work comes in steps (`cells`): a box of one target, which holds whole chunks of it, but for those that later steps finish.
2. Steps are taken together until their chunks fill one of two buffers. A second thread reads them: source chunks go, or are
   scattered, straight to where they lie in the chunks of the target, converted on the way where dtypes differ. A target may be
   made of parts of several tensors, transposed (`planning.views`); a source chunk that several parts of a batch need is read once.
3. Meanwhile the chunks of the other buffer are the caller's.
"""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt.box import BoxArray
from shardckpt.io.budget import round_up
from shardckpt.io.codec import CHECKSUM_BYTES, room_for
from shardckpt.io.reader import Request
from shardckpt.planning.plan import chunk_boxes, overlaps, touched

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from shardckpt.dtypes import DType
    from shardckpt.planning.plan import Overlaps, Piece
    from shardckpt.planning.views import View
    from shardckpt.reshard.cells import Step
    from shardckpt.reshard.source import Source
    from shardckpt.structure import TensorRecord

    Bytes = NDArray[np.uint8]

__all__ = ["Buffer", "Filled", "PlannedStep", "Target", "assembled"]

_NOTHING: Bytes = np.empty(0, np.uint8)


class Buffer:
    """Memory that is used from front to back, and then again."""

    def __init__(self) -> None:
        self._bytes: Bytes = _NOTHING
        self._used = 0

    def begin(self, nbytes: int) -> None:
        """Forget what is in it, and have room for so many bytes."""
        if self._bytes.nbytes < nbytes:
            self._bytes = _NOTHING
            self._bytes = np.empty(nbytes, np.uint8)
        self._used = 0

    def take(self, nbytes: int) -> Bytes:
        """The next bytes of it."""
        begin = self._used
        self._used += round_up(nbytes)
        return self._bytes[begin : begin + nbytes]


@dataclass(frozen=True, slots=True, eq=False)
class Target:
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

    def nbytes(self, piece: Piece, shape: Sequence[int]) -> int:
        """Of a chunk in a buffer that has so many elements."""
        return room_for(piece.chunks if self.as_stored else tuple(shape), self.dtype.itemsize) - CHECKSUM_BYTES * (not self.as_stored)


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """A step, and the chunks of the target that it reaches into, array by array."""

    target: Target
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
        return sum(int((~self.unfinished(boxes)).sum()) for _, _, boxes in self.pairs)

    @property
    def leaves_open(self) -> bool:
        """Whether a chunk is begun and not finished."""
        return any(bool(self.unfinished(boxes).any()) for _, _, boxes in self.pairs)

    @property
    def nbytes(self) -> int:
        """Of those chunks, in a buffer."""
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

    target: Target
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
class _Batch:
    """What is read at once, and the chunks that are whole then."""

    steps: list[PlannedStep]
    nbytes: int
    whole: list[Filled] = field(default_factory=list)


def assembled(source: Source, steps: Iterable[PlannedStep], at_once: int, buffers: tuple[Buffer, Buffer]) -> Generator[list[Filled]]:
    """Read everything; a batch of whole chunks at a time, which is good until the next is asked for.

    Whoever does not take all of it closes the iterator, which waits for what is being read.

    Args:
        source: what is read.
        steps: what to read; those of one target follow each other.
        at_once: bytes to which small steps are joined. One that is larger takes what it takes, in each of the two buffers.
        buffers: memory, kept by the caller.

    Raises:
        CorruptionError, ReplacedError, StorageError: the source could not be read.
    """
    reading, (buffer, other) = _Reading(source), buffers
    batches = _batches(steps, at_once)
    with ThreadPoolExecutor(1, "shardckpt-ahead") as ahead, source.reading():
        coming = ahead.submit(reading.read, batches, buffer)
        while (batch := coming.result()) is not None:
            buffer, other = other, buffer
            coming = ahead.submit(reading.read, batches, buffer)
            yield batch.whole


def _batches(steps: Iterable[PlannedStep], at_once: int) -> Iterator[_Batch]:
    """All steps, as many at a time as there is room for."""
    batch = _Batch([], 0)
    for planned in steps:
        nbytes = planned.nbytes
        if batch.steps and batch.nbytes + nbytes > at_once:
            yield batch
            batch = _Batch([], 0)
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

    def __init__(self, source: Source) -> None:
        self._source = source
        self._open: dict[tuple[str, int], tuple[_Batch, Bytes]] = {}
        """Chunks, by array and position, that the last step has begun and not finished; and in which batch."""

    def read(self, batches: Iterator[_Batch], buffer: Buffer) -> _Batch | None:
        """Read the next batch into a buffer; None where there is none."""
        batch = next(batches, None)
        if batch is not None:
            buffer.begin(batch.nbytes)
            wanted: defaultdict[tuple[str, bool], _Wanted] = defaultdict(_Wanted)
            tensors = {tensor.name: tensor for planned in batch.steps for tensor, _ in planned.target.sources}
            for planned in batch.steps:
                self._plan(planned, batch, buffer, wanted)
            requests = [some.request(tensors[name], converts=converts) for (name, converts), some in wanted.items()]
            self._source.reader.read(requests)
        return batch

    def _plan(self, planned: PlannedStep, batch: _Batch, buffer: Buffer, wanted: defaultdict[tuple[str, bool], _Wanted]) -> None:
        """What a step reads: of each chunk that it reaches into, the part that lies in it, to where that is in the chunk."""
        begun, self._open = self._open, {}
        for piece, pairs, boxes in planned.pairs:
            parts = BoxArray(boxes.start + pairs.in_chunk.start, boxes.start + pairs.in_chunk.stop)
            raws = self._room(planned, piece, pairs, boxes, begun, batch, buffer)
            for tensor, view in planned.target.sources:
                self._aim(planned.target, tensor, view, piece, boxes, parts, raws, wanted)

    def _room(
        self,
        planned: PlannedStep,
        piece: Piece,
        pairs: Overlaps,
        boxes: BoxArray,
        begun: dict[tuple[str, int], tuple[_Batch, Bytes]],
        batch: _Batch,
        buffer: Buffer,
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
                former, raw = raw, buffer.take(target.nbytes(piece, shape))
                if before is not None:
                    raw[:] = former
                elif target.as_stored and tuple(shape) != piece.chunks:
                    raw[:] = 0
            if unfinished:
                self._open[key] = batch, raw
            else:
                batch.whole.append(Filled(target, piece, position, tuple(start), tuple(shape), raw))
            raws.append(raw)
        return raws

    def _aim(
        self,
        target: Target,
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
        converts = target.dtype != tensor.dtype
        kind = target.dtype.numpy if converts else target.dtype.storage
        into = wanted[tensor.name, converts]
        into.boxes.append(view.back(BoxArray(first[which], last[which])))
        low, high = (first[which] - boxes.start[which]).tolist(), (last[which] - boxes.start[which]).tolist()
        shapes = (boxes.stop - boxes.start)[which].tolist()
        for i, start, stop, shape in zip(which.tolist(), low, high, shapes, strict=True):
            raw = raws[i][:-CHECKSUM_BYTES].view(kind).reshape(piece.chunks) if target.as_stored else raws[i].view(kind).reshape(shape)
            index: Any = (*map(slice, start, stop), ...)
            into.buffers.append(view.part(raw[index]))
