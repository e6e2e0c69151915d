"""Batches of steps: what is read at once into the chunks of targets, and the memory that they share.

A step is a box of one target (`cells`); small steps are taken together, until a batch has as many bytes or steps as it may.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt.format.zarr_arrays import CHECKSUM_BYTES, room_for
from shardckpt.io.buffers import round_up
from shardckpt.layout.box import BoxArray
from shardckpt.plan.overlaps import overlaps, touched
from shardckpt.plan.pieces import chunk_boxes
from shardckpt.reshard.memory import PARTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from shardckpt.format.structure import TensorRecord
    from shardckpt.layout.dtypes import DType
    from shardckpt.plan.overlaps import Overlaps
    from shardckpt.plan.pieces import Piece
    from shardckpt.plan.views import View
    from shardckpt.reshard.cells import Step

    Bytes = NDArray[np.uint8]

_PLANNED = 64 << 20
"""Bytes of the batches that are planned together: planning costs about as much for few as for many."""
_PLANNED_STEPS = 4096
"""Steps of them, and of one batch; of each there are some objects."""
_NOTHING: Bytes = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class BatchPlace:
    """What a batch has of the memory."""

    half: int
    parts: range

    def meets(self, other: BatchPlace) -> bool:
        """Whether some of it is the other's, too."""
        return self.half == other.half and self.parts.start < other.parts.stop and other.parts.start < self.parts.stop


class BatchMemory:
    """Memory of batches, used again and again: two halves, each for one large batch or for a few small ones, in turn."""

    def __init__(self) -> None:
        self._halves: list[Bytes] = [_NOTHING, _NOTHING]
        self._last = BatchPlace(1, range(PARTS))

    def next(self, nbytes: int, small: int) -> BatchPlace:
        """Where the next batch lies; never where the one before it does, from which chunks may be copied that it has not finished.

        Args:
            nbytes: that it needs.
            small: bytes of a part; a batch that needs more has a half.
        """
        half, parts = self._last.half, self._last.parts
        if nbytes > small or parts.stop == PARTS:
            half, parts = 1 - half, range(0)
        self._last = BatchPlace(half, range(PARTS) if nbytes > small else range(parts.stop, parts.stop + 1))
        return self._last

    def at(self, place: BatchPlace, nbytes: int, small: int) -> Bytes:
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


def batches_together(batches: Iterable[Batch], at_once: int) -> Iterator[list[Batch]]:
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


def batches_of(steps: Iterable[PlannedStep], at_once: int) -> Iterator[Batch]:
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
