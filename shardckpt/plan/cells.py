"""Cells: boxes of a tensor, read and written together so that each stored byte is read once.

One writer writes each complete target chunk, and source chunks are read completely. Where the end
of a box is a chunk border of both source and target, its neighbour does not read any source chunk
again.

1. `plan_cells`: per dimension, finds the borders that no chunk of the target or the source
   straddles, in any array. Cells lie between these borders. Small cells are joined, along the last
   dimensions first, which is the order of chunks in files. Where grids share few borders and a cell
   would be too large for one task, the cell is cut between target chunks anyway, and source chunks
   that straddle that border are read on both sides.
2. Cells are numbered in row-major order; a task handles a run of them (`plan`).
3. A cell is read in steps, such that the target chunks being filled fit the available memory
   (`cut.Order.OPEN`). Most cells fit completely.

Pure: shapes in, integers out. Cost is proportional to the borders per dimension and to the
requested cells, never to chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.layout.box import Box
from shardckpt.plan.cut import cut_run, longest_side, pieces_at, unbroken, undivided
from shardckpt.plan.pieces import count_chunks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from shardckpt.plan.pieces import Piece

    Ints = NDArray[np.int64]

CELL_BYTES = 8 << 20
"""Bytes to which small cells are joined."""
LARGEST_CELL = 4 << 30
"""Bytes above which a cell is cut even through source chunks. With chunks of a few MiB, few chunks
of a cell of this size are cut."""


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
        """Yield a run of cells as boxes in the tensor's indices.

        A box is one cell, or several with at most `most` elements together.
        """
        if self.count == 1:
            yield Box((0,) * len(self.borders), tuple(int(b[-1]) for b in self.borders))
            return
        yield from cut_run([b.tolist() for b in self.borders], run, most)


def plan_cells(
    targets: Sequence[Piece], sources: Sequence[Piece], itemsize: int, joined: int = CELL_BYTES
) -> Cells:
    """Cut a tensor into cells.

    Args:
        targets: the arrays that will hold the tensor, which must have elements.
        sources: the arrays that hold the tensor.
        itemsize: bytes of an element.
        joined: bytes to which small cells are joined, `CELL_BYTES` at most.
    """
    shape = (
        tuple(map(max, *(piece.box.stop for piece in targets)))
        if len(targets) > 1
        else targets[0].shape
    )
    # True of most tensors: all cells would be joined.
    if prod(shape) * itemsize <= min(joined, CELL_BYTES):
        return Cells(tuple(np.array([0, n], np.int64) for n in shape))
    every = [unbroken(targets, d) for d in range(len(targets[0].shape))]
    free = [undivided(borders, d, sources) for d, borders in enumerate(every)]
    while _largest(free) * itemsize > LARGEST_CELL:
        halves = [_halve(e, f) for e, f in zip(every, free, strict=True)]
        able = [d for d in range(len(free)) if len(halves[d]) > len(free[d])]
        if not able:
            break
        # A border costs the chunks that straddle it; that is the smallest share where cells, in
        # units of source chunks, are longest.
        d = max(able, key=lambda d: int(np.diff(free[d]).max()) / longest_side(sources, d))
        free[d] = halves[d]
    for d in reversed(range(len(free))):
        others = _largest([*free[:d], *free[d + 1 :]]) * itemsize
        free[d] = _thin(free[d], -(-min(joined, CELL_BYTES) // others))
    return Cells(tuple(free))


def _largest(borders: Sequence[Ints]) -> int:
    """Elements of the largest of the boxes between borders."""
    return prod(int(np.diff(b).max()) for b in borders)


def _halve(every: Ints, borders: Ints) -> Ints:
    """The borders plus one more in each interval with the most candidates: the middle candidate."""
    at = np.searchsorted(every, borders)
    inside = np.diff(at)
    middle = (at[:-1] + inside // 2)[(inside > 1) & (2 * inside > inside.max())]
    halves: Ints = every[np.union1d(at, middle)]
    return halves


def _thin(borders: Ints, least: int) -> Ints:
    """A subset of the borders with intervals of at least `least` elements where possible.

    The first and the last stay.
    """
    if len(borders) <= 2 or int(np.diff(borders).min()) >= least:
        return borders
    following = np.searchsorted(borders, borders[:-1] + least)
    kept, at = [0], 0
    while at < len(borders) - 1:
        at = min(int(following[at]), len(borders) - 1)
        kept.append(at)
    return borders[kept]


def read_bytes(box: Box, sources: Sequence[Piece], itemsize: int, checksum: int) -> int:
    """Bytes of the source chunks that a box needs: uncompressed chunks with their checksums."""
    near = pieces_at(sources, box)
    return sum(
        count_chunks(piece, box) * (prod(piece.chunks) * itemsize + checksum) for piece in near
    )
