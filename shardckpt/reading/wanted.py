"""Which stored chunks do some boxes of some tensors need, and where does each part of them go?

Everything is in columns, a row per chunk, because a restore of small tensors reads tens of thousands of chunks and is slower by
whatever Python does for each:

1. The boxes of all requests are put together, each with the array that it is to be read from, and `plan.overlaps_of` pairs the
   chunks of all arrays with the boxes that they touch.
2. Rows of pairs that belong to the same chunk become its *targets*: for each box that wants a part, which part and where to.
3. Rows are taken, sorted and cut as a whole; what a message names is made of a row when there is one to be named.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from types import EllipsisType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shardckpt.layout.box import BoxArray
from shardckpt.plan.overlaps import overlaps_of, touching
from shardckpt.plan.pieces import chunk_boxes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.layout.box import Box
    from shardckpt.plan.pieces import Piece

__all__ = ["Index", "Part", "Request", "Target", "Targets", "Wanted"]

Array = NDArray[np.generic]
Ints = NDArray[np.int64]
Index = tuple[slice | EllipsisType, ...]
Target = tuple[Array, Index, Index]
"""Where a part of a chunk goes: the buffer, where in the buffer, where in the chunk."""


@dataclass(frozen=True, slots=True)
class Request:
    """One tensor's boxes to be read."""

    name: str
    """The tensor, for messages."""
    dtype: np.dtype[np.generic]
    """dtype of what is stored."""
    pieces: Sequence[Piece]
    boxes: BoxArray
    """The boxes wanted, in the tensor's indices."""
    buffers: Sequence[Array]
    """Per box an array with the box at its start (it may be larger): of `dtype`, or of any other if it is converted."""
    convert_from: np.dtype[np.generic] | None = None
    """What the stored elements mean, where buffers are of another dtype than they; None: all are of `dtype`."""


@dataclass(frozen=True, slots=True)
class Part:
    """What a request wants of one array."""

    request: Request
    piece: Piece

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk's elements, as they lie in memory."""
        return prod(self.piece.chunks) * self.request.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Targets:
    """Where the elements of chunks go: for each chunk the rows of its (chunk, box) pairs, side by side."""

    buffers: Sequence[Array]
    """Of all boxes of all requests."""
    first: Ints
    """(n,) the row of each chunk's first pair."""
    count: Ints
    """(n,) how many pairs a chunk has."""
    box: Ints
    """(p,) which box, and so which buffer. This and what follows has a row per pair."""
    in_chunk: BoxArray
    """Common part, in the chunk. Tensors of fewer dimensions than others have some before theirs: 0 to 1."""
    in_box: BoxArray
    """Common part, in the box and so in the buffer; as `in_chunk`."""

    @classmethod
    def none(cls, n: int) -> Targets:
        """Of n chunks, none of which goes anywhere."""
        empty, nothing = np.empty(0, np.int64), BoxArray.of([], 0)
        return cls([], np.zeros(n, np.int64), np.zeros(n, np.int64), empty, nothing, nothing)

    def take(self, rows: Ints) -> Targets:
        """Of those chunks, with their pairs in the same order."""
        count = self.count[rows]
        first = np.cumsum(count) - count
        pairs = np.repeat(self.first[rows] - first, count) + np.arange(int(count.sum()))
        in_chunk, in_box = (BoxArray(boxes.start[pairs], boxes.stop[pairs]) for boxes in (self.in_chunk, self.in_box))
        return Targets(self.buffers, first, count, self.box[pairs], in_chunk, in_box)

    def target(self, pair: int, ndim: int) -> Target:
        """Of a pair, that belongs to a tensor of so many dimensions."""
        own = slice(self.in_box.start.shape[1] - ndim, None)

        def index(boxes: BoxArray) -> Index:
            return (*map(slice, boxes.start[pair, own].tolist(), boxes.stop[pair, own].tolist()), ...)

        return self.buffers[int(self.box[pair])], index(self.in_box), index(self.in_chunk)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Chunks that are wanted; one row each."""

    parts: Sequence[Part]
    part: Ints
    """(n,) what each belongs to."""
    position: Ints
    """(n,) in the array's grid."""
    targets: Targets

    @classmethod
    def of_boxes(cls, requests: Sequence[Request]) -> Wanted:
        """The chunks that the requests' boxes touch, each once however many boxes share it, in the requests' order."""
        parts: list[Part] = []
        buffers: list[Array] = []
        owner, box = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for request in requests:
            which, boxes = touching(request.pieces, request.boxes)
            held, nth = np.unique(which, return_inverse=True) if len(request.pieces) > 1 else (np.zeros(1, np.int64), which)
            owner.append(nth + len(parts))
            box.append(boxes + len(buffers))
            parts += [Part(request, request.pieces[k]) for k in held.tolist()]
            buffers += request.buffers
        of_part, of_box = np.concatenate(owner), np.concatenate(box)
        together = _together([request.boxes for request in requests])
        pairs = overlaps_of([part.piece for part in parts], BoxArray(together.start[of_box], together.stop[of_box]), of_part)
        part = of_part[pairs.box]
        first = np.flatnonzero(np.diff(part, prepend=-1) | np.diff(pairs.chunk, prepend=-1))
        targets = Targets(buffers, first, np.diff(first, append=len(part)), of_box[pairs.box], pairs.in_chunk, pairs.in_box)
        return cls(parts, part[first], pairs.chunk[first], targets)

    @classmethod
    def of_positions(cls, wanted: Sequence[tuple[Request, Piece, Ints]]) -> Wanted:
        """Chunks by their positions in arrays, in that order, whose elements go nowhere."""
        part = np.repeat(np.arange(len(wanted)), [len(positions) for _, _, positions in wanted])
        position = np.concatenate([*(positions for _, _, positions in wanted), np.empty(0, np.int64)])
        return cls([Part(request, piece) for request, piece, _ in wanted], part, position, Targets.none(len(part)))

    def __len__(self) -> int:
        """Number of chunks."""
        return len(self.position)

    def take(self, rows: Ints) -> Wanted:
        """Some of them, in that order."""
        return Wanted(self.parts, self.part[rows], self.position[rows], self.targets.take(rows))

    def part_of(self, row: int) -> Part:
        """What a chunk belongs to."""
        return self.parts[int(self.part[row])]

    def box(self, row: int) -> Box:
        """A chunk's elements, in the tensor's indices."""
        return chunk_boxes(self.part_of(row).piece, self.position[row : row + 1])[0]

    def where(self, row: int) -> str:
        """For messages: tensor, index range."""
        return f"{self.part_of(row).request.name}{self.box(row)}"

    def targets_of(self, row: int) -> list[Target]:
        """Where a chunk's elements go."""
        first, ndim = int(self.targets.first[row]), len(self.part_of(row).piece.shape)
        return [self.targets.target(pair, ndim) for pair in range(first, first + int(self.targets.count[row]))]


def _together(boxes: Sequence[BoxArray]) -> BoxArray:
    """All of them, with dimensions of one element before those of tensors that have fewer than others."""
    ndim = max((some.start.shape[1] for some in boxes), default=0)
    start, stop = (np.full((sum(map(len, boxes)), ndim), fill, np.int64) for fill in (0, 1))
    row = 0
    for some in boxes:
        at = slice(row, row := row + len(some)), slice(ndim - some.start.shape[1], None)
        start[at], stop[at] = some.start, some.stop
    return BoxArray(start, stop)
