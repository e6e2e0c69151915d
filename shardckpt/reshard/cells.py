"""Cells: boxes of a tensor that are read and written together, so that each stored byte is read once.

One writer writes each complete target chunk, and source chunks are read completely. Where the end of a box is a chunk border of
both source and target, its neighbour does not read any source chunk again.

1. `cut`: per dimension, finds the borders that no chunk of the target or the source straddles, in any array. Cells lie between
   these borders. Small cells are joined, along the last dimensions first, which is the order of chunks in files.
   Where grids share few borders and a cell would be too large for one task, the cell is cut between target chunks anyway, and
   source chunks that straddle that border are read on both sides.
2. Cells are numbered in row-major order; a task handles a run of them (`plan`).
3. `steps`: divides a cell so that the target chunks being filled fit the available memory. Most cells fit completely. A larger cell
   is traversed along one dimension, from border to border between source chunks. A target chunk that a step overlaps and does not
   finish stays open until the next step, so nothing is read twice. Where the cross-section is too large for that, the cell is
   halved, as often as necessary.

Pure: shapes in, integers out. Cost is proportional to the borders per dimension and to the requested cells, never to chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.layout.box import Box, BoxArray
from shardckpt.plan.blocks import run_boxes
from shardckpt.plan.pieces import count_chunks, touched

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from shardckpt.plan.pieces import Piece

    Ints = NDArray[np.int64]

CELL_BYTES = 8 << 20
"""Bytes to which small cells are joined."""
LARGEST_CELL = 4 << 30
"""Bytes above which a cell is cut even through source chunks. With chunks of a few MiB, few chunks of a cell of this size are cut."""


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """The cells of one tensor: a grid of boxes that may differ in size."""

    borders: tuple[Ints, ...]
    """Ends of the cells per dimension, ascending, from 0 to the tensor's length."""

    @property
    def grid(self) -> tuple[int, ...]:
        """Cells per dimension."""
        return tuple(len(b) - 1 for b in self.borders)

    @property
    def count(self) -> int:
        """Number of cells."""
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
        """Yield a run of cells as boxes in the tensor's indices; a box is one cell, or several with at most `most` elements together."""
        if self.count == 1:
            yield Box((0,) * len(self.borders), tuple(int(b[-1]) for b in self.borders))
            return
        for found in run_boxes(self.grid, run, max(1, most // self.largest())):
            start = tuple(int(b[i]) for b, i in zip(self.borders, found.start, strict=True))
            yield Box(start, tuple(int(b[i]) for b, i in zip(self.borders, found.stop, strict=True)))


def cut(targets: Sequence[Piece], sources: Sequence[Piece], itemsize: int, joined: int = CELL_BYTES) -> Cells:
    """Cut a tensor into cells.

    Args:
        targets: the arrays that will hold the tensor, which must have elements.
        sources: the arrays that hold the tensor.
        itemsize: bytes of an element.
        joined: bytes to which small cells are joined, `CELL_BYTES` at most.
    """
    shape = tuple(map(max, *(piece.box.stop for piece in targets))) if len(targets) > 1 else targets[0].shape
    if prod(shape) * itemsize <= min(joined, CELL_BYTES):  # true of most tensors: all cells would be joined
        return Cells(tuple(np.array([0, n], np.int64) for n in shape))
    every = [unbroken(targets, d) for d in range(len(targets[0].shape))]
    free = [_free(borders, d, sources) for d, borders in enumerate(every)]
    while _largest(free) * itemsize > LARGEST_CELL:
        halves = [_halved(e, f) for e, f in zip(every, free, strict=True)]
        able = [d for d in range(len(free)) if len(halves[d]) > len(free[d])]
        if not able:
            break
        # A border costs the chunks that straddle it; that is the smallest share where cells, in units of source chunks, are longest.
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
    """The borders along dimension d at which chunks end and that no chunk straddles."""
    axes = {(p.start[d], p.shape[d], p.chunks[d]) for p in pieces}
    borders = [np.append(np.arange(start, start + length, side, dtype=np.int64), start + length) for start, length, side in axes]
    return _free(borders[0] if len(borders) == 1 else np.unique(np.concatenate(borders)), d, pieces)


def _free(borders: Ints, d: int, pieces: Sequence[Piece]) -> Ints:
    """The borders that no chunk of some arrays straddles in dimension d; the first and the last are always included."""
    straddled = np.zeros(len(borders), bool)
    for start, length, side in {(p.start[d], p.shape[d], p.chunks[d]) for p in pieces}:
        straddled |= (borders > start) & (borders < start + length) & ((borders - start) % side != 0)
    straddled[[0, -1]] = False
    return borders[~straddled]


def _halved(every: Ints, borders: Ints) -> Ints:
    """The borders plus one more in each interval with the most candidates: the middle candidate."""
    at = np.searchsorted(every, borders)
    inside = np.diff(at)
    middle = (at[:-1] + inside // 2)[(inside > 1) & (2 * inside > inside.max())]
    halves: Ints = every[np.union1d(at, middle)]
    return halves


def _thinned(borders: Ints, least: int) -> Ints:
    """A subset of the borders with intervals of at least `least` elements where possible; the first and the last stay."""
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
    """A box of one tensor that is read in one go."""

    box: Box
    """The box, in the tensor's indices."""
    along: int
    """The dimension of the traversal: a later step finishes the target chunks that extend beyond the box along it. In all other
    dimensions the box consists of complete chunks. 0 for a box of complete chunks, where it makes no difference."""


def steps(box: Box, targets: Sequence[Piece], sources: Sequence[Piece], itemsize: int, room: int) -> Iterator[Step]:
    """Divide the read of a box of complete target chunks into steps.

    Args:
        box: in the tensor's indices.
        targets: the arrays that will hold the tensor.
        sources: the arrays that hold it.
        itemsize: bytes of an element in the target.
        room: maximum bytes of the target chunks of one step, including chunks that the previous step left open. Only a step of a
            single chunk may exceed it.
    """
    into = _touched(targets, box)
    nbytes = itemsize * sum(count_chunks(p, box) * prod(p.chunks) for p in into)
    if nbytes <= room:
        yield Step(box, 0)
        return
    of = _touched(sources, box)
    # Elements that a step may advance: up to one chunk at each end of the step is overlapped only partly.
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
    """Divide the read of a box into steps of complete target chunks, so that chunks come in row-major order.

    No chunk stays open between steps. Within the given memory, a step ends where no source chunk is cut; where that is impossible,
    source chunks are read on both sides.

    Args:
        box: in the tensor's indices; its chunks are consecutive in row-major order.
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
        else:  # not even one chunk and all chunks beside it fit
            stop = int(borders[np.searchsorted(borders, at, side="right")])
            yield from steps_in_order(_part(box, along, at, stop), target, sources, itemsize, most, room)
        at = stop


def _touched(pieces: Sequence[Piece], box: Box) -> Sequence[Piece]:
    """The arrays that hold elements of a box."""
    return pieces if len(pieces) == 1 else touched(pieces, BoxArray.of([box], box.ndim))


def _side(pieces: Sequence[Piece], d: int) -> int:
    """The longest side of any chunk of some arrays along dimension d."""
    return max(p.chunks[d] for p in pieces)


def walk(borders: Ints, reach: int) -> Iterator[int]:
    """Yield the ends of steps of at most `reach` elements, at borders where any are within reach."""
    at, end = int(borders[0]), int(borders[-1])
    while at < end:
        yield at
        farthest = int(borders[np.searchsorted(borders, at + reach, side="right") - 1])
        at = farthest if farthest > at else at + reach
    yield end


def _within(borders: Ints, box: Box, d: int) -> Ints:
    """The borders that lie in a box, and the box's own ends."""
    first, last = box.start[d], box.stop[d]
    return np.concatenate(([first], borders[(borders > first) & (borders < last)], [last]))


def _part(box: Box, d: int, first: int, last: int) -> Box:
    """The part of a box from one index to another of dimension d."""
    return Box((*box.start[:d], first, *box.start[d + 1 :]), (*box.stop[:d], last, *box.stop[d + 1 :]))


def read_bytes(box: Box, sources: Sequence[Piece], itemsize: int, checksum: int) -> int:
    """Bytes of the source chunks that a box needs: uncompressed chunks with their checksums."""
    near = _touched(sources, box)
    return sum(count_chunks(piece, box) * (prod(piece.chunks) * itemsize + checksum) for piece in near)
