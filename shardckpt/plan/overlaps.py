"""The chunks that some boxes need, and the position of each overlap in chunk and box.

For a set of boxes that one process needs, `overlaps` lists each (chunk, box) pair that has elements in common, in closed form on
the grid of a piece:

1. per box and dimension, the first and one past the last chunk that it touches;
2. all combinations of those, enumerated for all boxes at once (mixed radix over the ranges);
3. per pair, the common part, as positions inside the chunk and inside the box.

Cost and result are O(pairs); chunks are never compared with boxes one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shardckpt.layout.box import BoxArray
from shardckpt.plan.pieces import Piece, chunk_boxes, coordinates, whole_chunks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.layout.box import Box

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Overlaps:
    """The (chunk, box) pairs of one piece; every array has one row per pair, ordered by chunk."""

    chunk: Ints
    """(n,) the chunk's position in grid order (row-major)."""
    box: Ints
    """(n,) index of the box."""
    in_chunk: BoxArray
    """Common part, relative to the chunk's first element."""
    in_box: BoxArray
    """Common part, relative to the box's first element."""


def overlaps(piece: Piece, boxes: BoxArray) -> Overlaps:
    """All pairs of a chunk of `piece` and one of `boxes` (in the tensor's indices) that share elements."""
    return overlaps_of([piece], boxes, np.zeros(len(boxes), np.int64))


def overlaps_of(pieces: Sequence[Piece], boxes: BoxArray, owner: Ints) -> Overlaps:
    """`overlaps` for many pieces at once; each box belongs to one piece.

    Args:
        pieces: pieces of any tensors.
        boxes: boxes in the indices of their tensors. A box with fewer dimensions than others is extended by leading dimensions
            from 0 to 1.
        owner: (n,) the piece of each box.

    Returns:
        The pairs, ordered by piece and chunk; a pair's piece is the `owner` of its box.
    """
    ndim = boxes.start.shape[1]
    start, shape, chunks, grid = (
        np.array([(fill,) * (ndim - len(row)) + row for row in rows], np.int64).reshape(len(pieces), ndim)
        for rows, fill in (
            ([p.start for p in pieces], 0),
            ([p.shape for p in pieces], 1),
            ([p.chunks for p in pieces], 1),
            ([p.grid for p in pieces], 1),
        )
    )
    first = np.maximum(boxes.start - start[owner], 0)
    last = np.minimum(boxes.stop - start[owner], shape[owner])
    touching = np.flatnonzero((first < last).all(axis=1))
    sides = chunks[owner[touching]]
    low = first[touching] // sides
    coords, nth = _enumerate(low, -(-last[touching] // sides) - low)
    coords += low[nth]
    box = touching[nth]
    piece = owner[box]
    chunk = _linear(coords, grid[piece])
    order = np.lexsort((chunk, piece))
    coords, box, chunk, piece = coords[order], box[order], chunk[order], piece[order]

    sides = chunks[piece]
    origin = coords * sides
    common_start = np.maximum(first[box], origin)
    common_stop = np.minimum(last[box], origin + sides)
    box_origin = boxes.start[box] - start[piece]
    return Overlaps(
        chunk,
        box,
        BoxArray(common_start - origin, common_stop - origin),
        BoxArray(common_start - box_origin, common_stop - box_origin),
    )


def chunk_runs(piece: Piece, boxes: BoxArray) -> tuple[Ints, Ints]:
    """Runs of consecutive chunks in grid order that together are the chunks of `overlaps`; O(runs), however long they are.

    Returns:
        (n,) first chunk and end (exclusive) of each run, by box; runs of different boxes may share chunks.
    """
    start, shape, chunks, grid = (np.array(v, np.int64) for v in (piece.start, piece.shape, piece.chunks, piece.grid))
    first = np.maximum(boxes.start - start, 0)
    last = np.minimum(boxes.stop - start, shape)
    touching = (first < last).all(axis=1)
    low, high = first[touching] // chunks, -(-last[touching] // chunks)
    if not piece.grid:
        return np.zeros(len(low), np.int64), np.ones(len(low), np.int64)
    # Runs go along one dimension: all boxes cover the later dimensions completely.
    along = int(np.flatnonzero(((low > 0) | (high < grid)).any(axis=0)).max(initial=0))
    coords, owner = _enumerate(low[:, :along], (high - low)[:, :along])
    row = _linear(coords + low[owner, :along], piece.grid[:along]) * piece.grid[along]
    inner = prod(piece.grid[along + 1 :])
    return (row + low[owner, along]) * inner, (row + high[owner, along]) * inner


def touched(pieces: Sequence[Piece], boxes: BoxArray) -> list[Piece]:
    """The pieces that hold elements of any of the boxes, in their order.

    A tensor may have thousands of pieces, and `overlaps` of each would take longer than reading the few relevant ones.
    """
    return list(pieces) if len(pieces) == 1 else [pieces[k] for k in np.unique(touching(pieces, boxes)[0]).tolist()]


def touching(pieces: Sequence[Piece], boxes: BoxArray) -> tuple[Ints, Ints]:
    """(n,) pieces and (n,) boxes that may overlap; a single piece is paired with every box."""
    if len(pieces) == 1:
        return np.zeros(len(boxes), np.int64), np.arange(len(boxes))
    held = BoxArray.of([piece.box for piece in pieces], boxes.start.shape[1])
    found = [held.overlapping(boxes[i]) for i in range(len(boxes))]
    return np.concatenate([*found, np.empty(0, np.int64)]), np.repeat(np.arange(len(boxes)), [len(some) for some in found])


def chunks_inside(piece: Piece, box: Box, which: range | None = None) -> tuple[Ints, BoxArray]:
    """The chunks of `piece` that lie in `box`; the part of the box that lies in the piece must be a union of them.

    Args:
        piece: an array.
        box: in the tensor's indices.
        which: a run of the `count_chunks(piece, box)` chunks, counted in grid order; the other chunks cost nothing.
            None: all.

    Returns:
        (n,) their positions in the piece's grid, ascending, and the elements of each (in the tensor's indices, cut off at
        the piece's edge).

    Raises:
        FormatError: a chunk crosses the border of the box, so it would have two writers.
    """
    spans = whole_chunks(piece, box)
    within = np.arange(*(0, prod(map(len, spans))) if which is None else (which.start, which.stop), dtype=np.int64)
    coords = coordinates(within, tuple(map(len, spans))) + np.array([span.start for span in spans], np.int64)
    chunk = _linear(coords, piece.grid)
    return chunk, chunk_boxes(piece, chunk)


def _enumerate(low: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """All coordinates of n grids of `counts` (n, ndim), concatenated, and the grid of each row."""
    ndim = low.shape[1]
    sizes = np.prod(counts, axis=1, dtype=np.int64)
    owner = np.repeat(np.arange(len(low), dtype=np.int64), sizes)
    within = np.arange(int(sizes.sum()), dtype=np.int64) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    coords = np.empty((len(owner), ndim), np.int64)
    for d in reversed(range(ndim)):
        radix = counts[owner, d]
        coords[:, d] = within % radix
        within //= radix
    return coords, owner


def _linear(coords: Ints, grid: Ints | tuple[int, ...]) -> Ints:
    """Row-major positions of coordinates in one grid, or each in its own: (n, ndim)."""
    position = np.zeros(len(coords), np.int64)
    for d, n in enumerate(np.asarray(grid, np.int64).T):
        position = position * n + coords[:, d]
    return position
