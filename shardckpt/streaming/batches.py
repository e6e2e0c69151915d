"""Batches of steps that are read together into target chunks, and the memory that batches share.

A step is a box of one target (`plan.cells`). Small steps are joined until a batch reaches its limit
of bytes or steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt.format.zarr_arrays import CHECKSUM_BYTES, room_for
from shardckpt.io.buffers import round_up
from shardckpt.layout.box import BoxArray
from shardckpt.plan.pieces import batches, chunk_boxes, count_chunks, overlaps, touched
from shardckpt.streaming.memory import PARTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from shardckpt.format.structure import TensorRecord
    from shardckpt.layout.dtypes import DType
    from shardckpt.plan.cut import Step
    from shardckpt.plan.pieces import Overlaps, Piece
    from shardckpt.plan.views import View

    Bytes = NDArray[np.uint8]

_PLANNED = 64 << 20
"""Bytes of the batches that are planned together; planning many costs little more than planning a
few."""
_PLANNED_STEPS = 4096
"""Steps that are planned together, and steps of one batch; each step needs a few objects."""
_NOTHING: Bytes = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class BatchPlace:
    """The part of the memory that a batch uses."""

    half: int
    parts: range

    def meets(self, other: BatchPlace) -> bool:
        """Whether the two places overlap."""
        return (
            self.half == other.half
            and self.parts.start < other.parts.stop
            and other.parts.start < self.parts.stop
        )


class BatchMemory:
    """Reusable memory of batches: two halves, used in turn.

    Each half is for one large batch or a few small ones.
    """

    def __init__(self) -> None:
        self._halves: list[Bytes] = [_NOTHING, _NOTHING]
        self._last = BatchPlace(1, range(PARTS))

    def next(self, nbytes: int, small: int) -> BatchPlace:
        """Choose the place of the next batch.

        It never overlaps the previous one, whose unfinished chunks may still be copied.

        Args:
            nbytes: bytes that the batch needs.
            small: bytes of a part; a larger batch gets a half.
        """
        half, parts = self._last.half, self._last.parts
        if nbytes > small or parts.stop == PARTS:
            half, parts = 1 - half, range(0)
        self._last = BatchPlace(
            half, range(PARTS) if nbytes > small else range(parts.stop, parts.stop + 1)
        )
        return self._last

    def at(self, place: BatchPlace, nbytes: int, small: int) -> Bytes:
        """The bytes of a place; if the half must grow, no other batch may be using it."""
        if self._halves[place.half].nbytes < (least := max(nbytes, PARTS * small)):
            self._halves[place.half] = _NOTHING
            self._halves[place.half] = np.empty(least, np.uint8)
        return self._halves[place.half][place.parts.start * small :]


@dataclass(frozen=True, eq=False)
class ChunkTarget:
    """A tensor or file whose chunks are produced."""

    name: str
    dtype: DType
    pieces: Sequence[Piece]
    """The arrays of the target."""
    sources: Sequence[tuple[TensorRecord, View]]
    """The source tensors, and the position of their elements in the target."""
    as_stored: bool
    """Whether chunks are laid out as in a checkpoint: padded with zeros at edges, with room for a
    checksum at the end. Otherwise chunks are cut off at edges and have no checksum."""

    @cached_property
    def is_one_chunk(self) -> bool:
        """Whether the target is a single chunk, as most are; no grid lookup is needed then."""
        return len(self.pieces) == 1 and self.pieces[0].num_chunks == 1

    @cached_property
    def insides(self) -> BoxArray:
        """The boxes that the views of the sources fill."""
        boxes = [view.inside for _, view in self.sources]
        return BoxArray.of(boxes, len(self.pieces[0].shape))

    def nbytes(self, piece: Piece, shape: Sequence[int]) -> int:
        """Bytes in memory of a chunk with this shape of elements."""
        return room_for(
            piece.chunks if self.as_stored else tuple(shape), self.dtype.itemsize
        ) - CHECKSUM_BYTES * (not self.as_stored)

    def elements(
        self, raw: Bytes, piece: Piece, shape: Sequence[int], tensor: TensorRecord
    ) -> NDArray[Any]:
        """A view of a chunk's bytes as an array, to copy the tensor's elements into."""
        kind = self.dtype.storage if self.dtype == tensor.dtype else self.dtype.numpy
        return (
            raw[:-CHECKSUM_BYTES].view(kind).reshape(piece.chunks)
            if self.as_stored
            else raw.view(kind).reshape(shape)
        )


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """A step, and the target chunks that it overlaps, array by array."""

    target: ChunkTarget
    step: Step

    @cached_property
    def pairs(self) -> list[tuple[Piece, Overlaps, BoxArray]]:
        """Per array: the chunks that the step overlaps, and their boxes in target indices."""
        box = BoxArray.of([self.step.box], self.step.box.ndim)
        arrays = []
        for piece in touched(self.target.pieces, box):
            pairs = overlaps(piece, box)
            arrays.append((piece, pairs, chunk_boxes(piece, pairs.chunk)))
        return arrays

    def unfinished(self, boxes: BoxArray) -> NDArray[np.bool_]:
        """Mask of the chunks that a later step finishes."""
        along = self.step.along
        if not self.step.box.ndim:
            return np.zeros(len(boxes), bool)
        return boxes.stop[:, along] > self.step.box.stop[along]

    @property
    def finished(self) -> int:
        """Number of chunks that are complete after this step."""
        if self.target.is_one_chunk:
            return 1
        return sum(int((~self.unfinished(boxes)).sum()) for _, _, boxes in self.pairs)

    @property
    def leaves_open(self) -> bool:
        """Whether this step leaves a chunk unfinished."""
        return not self.target.is_one_chunk and any(
            bool(self.unfinished(boxes).any()) for _, _, boxes in self.pairs
        )

    @cached_property
    def nbytes(self) -> int:
        """Bytes in memory of the chunks that the step overlaps."""
        if self.target.is_one_chunk:
            return round_up(self.target.nbytes(self.target.pieces[0], self.target.pieces[0].shape))
        if self.target.as_stored:
            box = self.step.box
            near = touched(self.target.pieces, BoxArray.of([box], box.ndim))
            return sum(
                count_chunks(piece, box) * round_up(self.target.nbytes(piece, ())) for piece in near
            )
        itemsize, page = self.target.dtype.itemsize, round_up(1)
        return sum(
            int((-(-boxes.sizes() * itemsize // page) * page).sum()) for _, _, boxes in self.pairs
        )


@dataclass(frozen=True, slots=True, eq=False)
class Filled:
    """A complete chunk of a target."""

    target: ChunkTarget
    piece: Piece
    position: int
    """Position in the piece's grid."""
    start: tuple[int, ...]
    """Index of its first element in the target."""
    shape: tuple[int, ...]
    """Shape of its elements, cut off at the edge."""
    raw: Bytes
    """Bytes of the chunk, in the layout that the target requires."""


@dataclass(slots=True)
class Batch:
    """Steps that are read together, and the chunks that are complete afterwards."""

    steps: list[PlannedStep]
    nbytes: int
    whole: list[Filled] = field(default_factory=list)
    first: list[tuple[Bytes, Bytes | int]] = field(default_factory=list)
    """Memory of chunks, and its contents before the read: the elements that an earlier step read,
    or zeros."""
    _room: Bytes = field(default_factory=lambda: _NOTHING)
    """Memory for the batch's chunks."""
    _used: int = 0

    def begin(self, room: Bytes) -> None:
        """Assign the memory of this batch."""
        self._room = room

    def take(self, nbytes: int) -> Bytes:
        """Allocate the memory of one chunk."""
        begin = self._used
        self._used += round_up(nbytes)
        return self._room[begin : begin + nbytes]


def batches_together(joined: Iterable[Batch], at_once: int) -> Iterator[list[Batch]]:
    """Group batches for joint planning; a large batch stands alone."""

    def costs(batch: Batch) -> tuple[int, int]:
        return batch.nbytes if batch.nbytes <= at_once else _PLANNED + 1, len(batch.steps)

    return batches(joined, costs, (_PLANNED, _PLANNED_STEPS))


def batches_of(steps: Iterable[PlannedStep], at_once: int) -> Iterator[Batch]:
    """Join steps into batches."""
    for group in batches(steps, lambda planned: (planned.nbytes, 1), (at_once, _PLANNED_STEPS)):
        yield Batch(group, sum(planned.nbytes for planned in group))
