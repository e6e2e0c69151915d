"""Cells: boxes of a tensor that are read and written together, so that each stored byte is read once.

A chunk of the target is written whole, by one writer, and a chunk of the source is read whole. Where a box ends at
borders of both, nothing of it is read again for its neighbour.

1. `cut`: per dimension, the borders that no chunk straddles, neither of the target nor of the source, whatever arrays they are
   in. Cells lie between them. Many small ones are joined, along the last dimensions first, which is how chunks lie in files.
   Where grids have hardly a border in common, and a cell would be too large for one task, it is cut between chunks of the
   target all the same, and chunks of the source that straddle that border are read on both sides.
2. Cells are numbered in row-major order; a task does a run of them (`plan`).
3. `steps`: what is read at once, so that the chunks being filled fit the room that there is. Most cells fit whole. One that
   does not is walked through along one dimension, from border to border between chunks of the source: a target chunk that a
   step reaches into and does not finish stays open until the next one, so still nothing is read twice. Where the cross-section
   is too large for that, the cell is halved, as often as it must be.

Pure: shapes in, integers out. Cost is in proportion to the borders per dimension and to the cells asked for, never to chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.layout.box import Box, BoxArray
from shardckpt.plan.overlaps import touched
from shardckpt.plan.pieces import count_chunks, run_boxes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from shardckpt.plan.pieces import Piece

    Ints = NDArray[np.int64]

__all__ = ["CELL_BYTES", "LARGEST_CELL", "Cells", "Step", "cut", "read_bytes", "steps", "steps_in_order", "unbroken", "walk"]

CELL_BYTES = 8 << 20
"""Bytes to which small cells are joined."""
LARGEST_CELL = 4 << 30
"""Bytes above which a cell is cut where a chunk of the source is in the way. Of a cell of this size, with chunks of a few MiB, few
are."""


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """The cells of one tensor: a grid of boxes that may differ in size."""

    borders: tuple[Ints, ...]
    """Per dimension where cells end, ascending, from 0 to the tensor's length."""

    @property
    def grid(self) -> tuple[int, ...]:
        """Cells per dimension."""
        return tuple(len(b) - 1 for b in self.borders)

    @property
    def count(self) -> int:
        """How many there are."""
        return prod(self.grid)

    def sizes(self) -> Ints:
        """(n,) elements of each cell, in row-major order."""
        sizes = np.ones(1, np.int64)
        for borders in self.borders:
            sizes = np.multiply.outer(sizes, np.diff(borders)).reshape(-1)
        return sizes

    def largest(self) -> int:
        """Elements of the largest cell."""
        return _largest(self.borders)

    def boxes(self, run: range, most: int) -> Iterator[Box]:
        """A run of cells as boxes, in the tensor's indices; each is one cell, or several of at most `most` elements together."""
        if self.count == 1:
            yield Box((0,) * len(self.borders), tuple(int(b[-1]) for b in self.borders))
            return
        for found in run_boxes(self.grid, run, max(1, most // self.largest())):
            start = tuple(int(b[i]) for b, i in zip(self.borders, found.start, strict=True))
            yield Box(start, tuple(int(b[i]) for b, i in zip(self.borders, found.stop, strict=True)))


def cut(targets: Sequence[Piece], sources: Sequence[Piece], itemsize: int, joined: int = CELL_BYTES) -> Cells:
    """Cut a tensor into cells.

    Args:
        targets: the arrays that will hold it; it has elements.
        sources: the arrays that hold it.
        itemsize: bytes of an element.
        joined: bytes to which small cells are joined, `CELL_BYTES` at most.
    """
    shape = tuple(map(max, *(piece.box.stop for piece in targets))) if len(targets) > 1 else targets[0].shape
    if prod(shape) * itemsize <= min(joined, CELL_BYTES):  # as most are, by number: all cells would be joined
        return Cells(tuple(np.array([0, n], np.int64) for n in shape))
    every = [unbroken(targets, d) for d in range(len(targets[0].shape))]
    free = [_free(borders, d, sources) for d, borders in enumerate(every)]
    while _largest(free) * itemsize > LARGEST_CELL:
        halves = [_halved(e, f) for e, f in zip(every, free, strict=True)]
        able = [d for d in range(len(free)) if len(halves[d]) > len(free[d])]
        if not able:
            break
        # A border costs what straddles it, which is the least part where cells are longest, measured in chunks of the source.
        d = max(able, key=lambda d: int(np.diff(free[d]).max()) / _side(sources, d))
        free[d] = halves[d]
    for d in reversed(range(len(free))):
        others = _largest([*free[:d], *free[d + 1 :]]) * itemsize
        free[d] = _thinned(free[d], -(-min(joined, CELL_BYTES) // others))
    return Cells(tuple(free))


def _largest(borders: Sequence[Ints]) -> int:
    """Elements of the largest of the boxes between borders."""
    return prod(int(np.diff(b).max()) for b in borders)


def unbroken(pieces: Sequence[Piece], d: int) -> Ints:
    """Where chunks of some arrays end along dimension d, and none of theirs is straddled."""
    axes = {(p.start[d], p.shape[d], p.chunks[d]) for p in pieces}
    borders = [np.append(np.arange(start, start + length, side, dtype=np.int64), start + length) for start, length, side in axes]
    return _free(borders[0] if len(borders) == 1 else np.unique(np.concatenate(borders)), d, pieces)


def _free(borders: Ints, d: int, pieces: Sequence[Piece]) -> Ints:
    """Those borders that no chunk of some arrays straddles in dimension d; the first and the last always."""
    straddled = np.zeros(len(borders), bool)
    for start, length, side in {(p.start[d], p.shape[d], p.chunks[d]) for p in pieces}:
        straddled |= (borders > start) & (borders < start + length) & ((borders - start) % side != 0)
    straddled[[0, -1]] = False
    return borders[~straddled]


def _halved(every: Ints, borders: Ints) -> Ints:
    """With one more border, the middle one of all that there may be, in each of the intervals with most of them."""
    at = np.searchsorted(every, borders)
    inside = np.diff(at)
    middle = (at[:-1] + inside // 2)[(inside > 1) & (2 * inside > inside.max())]
    halves: Ints = every[np.union1d(at, middle)]
    return halves


def _thinned(borders: Ints, least: int) -> Ints:
    """Some of the borders, so far apart that intervals have `least` elements where they can; the first and the last among them."""
    if len(borders) <= 2 or int(np.diff(borders).min()) >= least:
        return borders
    following = np.searchsorted(borders, borders[:-1] + least)
    kept, at = [0], 0
    while at < len(borders) - 1:
        at = min(int(following[at]), len(borders) - 1)
        kept.append(at)
    return borders[kept]


@dataclass(frozen=True, slots=True)
class Step:
    """What is read at once of one tensor."""

    box: Box
    """In the tensor's indices."""
    along: int
    """The dimension that is walked along: target chunks in the box that end beyond it there are finished by a later step. In all
    other dimensions the box consists of whole ones. 0 for a box of whole chunks, where it makes no difference."""


def steps(box: Box, targets: Sequence[Piece], sources: Sequence[Piece], itemsize: int, room: int) -> Iterator[Step]:
    """Read a box of whole target chunks in steps.

    Args:
        box: in the tensor's indices.
        targets: the arrays that will hold the tensor.
        sources: the arrays that hold it.
        itemsize: bytes of an element in the target.
        room: bytes that the target chunks of one step may take, those left open by the one before among them. Only a step of a
            single chunk may take more.
    """
    into = _touched(targets, box)
    nbytes = itemsize * sum(count_chunks(p, box) * prod(p.chunks) for p in into)
    if nbytes <= room:
        yield Step(box, 0)
        return
    of = _touched(sources, box)
    # Elements that a step may advance: of what fits, up to a chunk at either end is reached into only.
    reaches = [room // -(-nbytes // n) - 2 * _side(into, d) for d, n in enumerate(box.shape)]
    along = max(range(box.ndim), key=lambda d: reaches[d] / _side(of, d))
    if reaches[along] >= _side(of, along):
        for first, last in pairwise(walk(_within(unbroken(of, along), box, along), reaches[along])):
            yield Step(_part(box, along, first, last), along)
        return
    borders = [_within(unbroken(into, d), box, d) for d in range(box.ndim)]
    able = [d for d in range(box.ndim) if len(borders[d]) > 2]
    if not able:
        yield Step(box, 0)
        return
    longest = max(able, key=lambda d: box.shape[d] / _side(of, d))
    for first, last in pairwise((box.start[longest], int(borders[longest][len(borders[longest]) // 2]), box.stop[longest])):
        yield from steps(_part(box, longest, first, last), into, of, itemsize, room)


def steps_in_order(box: Box, target: Piece, sources: Sequence[Piece], itemsize: int, most: int, room: int) -> Iterator[Step]:
    """Read a box of whole target chunks in steps of whole chunks, so that chunks come in row-major order.

    Nothing is left open between steps: a step ends, within the room that there is, where no source chunk is cut; where that cannot be,
    source chunks are read on both sides.

    Args:
        box: in the tensor's indices; its chunks follow each other in row-major order.
        target: the array that will hold the tensor.
        sources: the arrays that hold it.
        itemsize: bytes of an element in the target.
        most: bytes to which chunks are joined.
        room: bytes of a step, unless a single chunk takes more.
    """
    nbytes = box.size * itemsize
    along = next((d for d in range(box.ndim) if box.shape[d] > target.chunks[d]), None)
    if nbytes <= most or along is None:
        yield Step(box, 0)
        return
    per_index = nbytes // box.shape[along]
    borders = _within(unbroken([target], along), box, along)
    free = _within(_free(borders, along, _touched(sources, box)), box, along)
    at, end = box.start[along], box.stop[along]
    while at < end:
        near, far = (int(np.searchsorted(free, at + n // per_index, side="right")) - 1 for n in (most, room))
        if free[near] > at:
            stop = int(free[near])
        elif free[far] > at:
            stop = int(free[near + 1])
        else:
            stop = int(borders[np.searchsorted(borders, at + room // per_index, side="right") - 1])
        if stop > at:
            yield Step(_part(box, along, at, stop), 0)
        else:  # not even one chunk and all beside it
            stop = int(borders[np.searchsorted(borders, at, side="right")])
            yield from steps_in_order(_part(box, along, at, stop), target, sources, itemsize, most, room)
        at = stop


def _touched(pieces: Sequence[Piece], box: Box) -> Sequence[Piece]:
    """Those arrays that hold elements of a box."""
    return pieces if len(pieces) == 1 else touched(pieces, BoxArray.of([box], box.ndim))


def _side(pieces: Sequence[Piece], d: int) -> int:
    """The longest side of any chunk of some arrays along dimension d."""
    return max(p.chunks[d] for p in pieces)


def walk(borders: Ints, reach: int) -> Iterator[int]:
    """Where steps begin and end that are at most so long: at borders, where there are some within reach."""
    at, end = int(borders[0]), int(borders[-1])
    while at < end:
        yield at
        farthest = int(borders[np.searchsorted(borders, at + reach, side="right") - 1])
        at = farthest if farthest > at else at + reach
    yield end


def _within(borders: Ints, box: Box, d: int) -> Ints:
    """Those borders that lie in a box, and its own ends."""
    first, last = box.start[d], box.stop[d]
    return np.concatenate(([first], borders[(borders > first) & (borders < last)], [last]))


def _part(box: Box, d: int, first: int, last: int) -> Box:
    """The part of a box from one index to another of dimension d."""
    return Box((*box.start[:d], first, *box.start[d + 1 :]), (*box.stop[:d], last, *box.stop[d + 1 :]))


def read_bytes(box: Box, sources: Sequence[Piece], itemsize: int, checksum: int) -> int:
    """Bytes of the chunks of the source that a box needs: uncompressed ones with their checksums."""
    near = _touched(sources, box)
    return sum(count_chunks(piece, box) * (prod(piece.chunks) * itemsize + checksum) for piece in near)
