"""Regular grids of blocks, in which an output is written.

A reader of a format that consists of blocks has its own layout, most often the one that the tensor
was saved in. So a block is a shard of the recorded layout (`block_shape`), or several adjacent
shards if they are small, or some rows or planes of a shard if it is too large.

In a file that holds the output row by row, blocks are chosen so that each stored byte is read once
(`cut_into_grids`). A block is written when all its elements are read. So all source chunks that
overlap it are in memory together, including their other elements: a slab.

1. The output is cut along its first dimension where separately stored parts meet (shards of
   different lengths, tensors that are joined). Each part has its own grid of blocks.
2. *Rows*: as many complete rows, or planes, as make `BLOCK_BYTES`; one run of bytes in the file. If
   the source is cut in the dimension in which rows are counted, their number divides the source's
   side or is a multiple of it, so that slabs do not overlap.
3. If the slab of rows does not fit the room (chunks that are tall columns of a large matrix), and
   the file may be written in any order, *blocks*: as tall as the source's chunks, and as long as
   the room allows. Each row of a block is a run of bytes of at least `LEAST_RUN`, since every run
   is a system call.
4. Otherwise rows are used in spite of this, and source chunks are read again for each slab.

Pure.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.layout.placements import Placements
from shardckpt.plan.chunks import divisors
from shardckpt.plan.cut import Order, longest_side, unbroken, walk
from shardckpt.plan.pieces import Piece

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardckpt.layout.sharding import Layout

BLOCK_BYTES = 4 << 20
"""Bytes to which rows are joined for one write."""
LEAST_RUN = 4 << 10
"""Fewest contiguous bytes in the file, for blocks that are not complete rows."""
_LEAST_PART = 1 << 20
"""Fewest bytes of the parts into which an output is cut."""
SMALLEST = 4 << 20
"""Bytes to which shards are joined: a smaller block costs more than its bytes."""
LARGEST = 32 << 20
"""Bytes above which a shard is cut."""


def one_grid(path: str, shape: Sequence[int], chunks: Sequence[int]) -> list[Piece]:
    """One grid of blocks of that shape, clipped at the output's edges."""
    return [Piece(path, (0,) * len(shape), tuple(shape), tuple(chunks))]


def block_shape(
    shape: Sequence[int], layout: Layout | Placements | None, itemsize: int, room: int
) -> tuple[int, ...]:
    """The shape of a block that is a shard, or several, or a part of one.

    Blocks at the end of a dimension may be clipped.

    Args:
        shape: shape of the output.
        layout: the recorded layout; None: the output is its only shard.
        itemsize: written bytes of an element.
        room: bytes that must suffice for several blocks.

    Returns:
        One side per dimension, at least 1.
    """
    largest = min(LARGEST, room // 4)
    smallest = min(SMALLEST, largest)
    sides = [max(1, side) for side in _shard(layout, tuple(shape))]
    lengths = [max(1, n) for n in shape]
    for d in reversed(range(len(sides))):
        sides[d] = min(lengths[d], sides[d] * -(-smallest // (prod(sides) * itemsize)))
    for d in range(len(sides)):
        others = prod(sides[d + 1 :]) * itemsize * prod(sides[:d])
        if others * sides[d] > largest:
            sides[d] = _divisor(sides[d], max(1, largest // others), 2)
    return tuple(sides)


def cut_into_grids(
    path: str,
    shape: tuple[int, ...],
    stored: Sequence[Piece],
    itemsize: int,
    room: int,
    order: Order,
) -> list[Piece]:
    """Grids of blocks that together are an output.

    Args:
        path: prefix of the grids' paths.
        shape: shape of the output, which has elements.
        stored: the arrays from which it is made, in the output's indices.
        itemsize: written bytes of an element.
        room: most bytes of a block.
        order: `ROWS`: blocks are complete rows, and the grids are in row-major order; otherwise
            blocks are parts of rows where only these read each stored byte once.
    """
    grids = []
    for whole, near in _parts(path, shape, stored, itemsize):
        rows = Piece(whole.path, whole.start, whole.shape, _rows(whole.shape, near, itemsize, room))
        if order is Order.ROWS or _slab(rows, near) * itemsize <= room:
            grids.append(rows)
        else:
            grids += _blocks(rows, near, itemsize, room)
    return grids


def _parts(
    path: str, shape: tuple[int, ...], stored: Sequence[Piece], itemsize: int
) -> Iterator[tuple[Piece, list[Piece]]]:
    """Yield each part of an output that is stored separately along its first dimension.

    Each part is one block, and comes with its source arrays.
    """
    if not shape:
        yield Piece(path, (), (), ()), list(stored)
        return
    n, spans = (
        shape[0],
        sorted({(piece.start[0], piece.start[0] + piece.shape[0]) for piece in stored}),
    )
    borders, reached, least = [0], 0, -(-_LEAST_PART * n // (prod(shape) * itemsize))
    for start, stop in spans:
        if reached <= start and borders[-1] + least <= start <= n - least:
            borders.append(start)
        reached = max(reached, stop)
    for i, (a, b) in enumerate(pairwise([*borders, n])):
        part = (b - a, *shape[1:])
        near = [piece for piece in stored if a <= piece.start[0] < b]
        yield Piece(f"{path}={i}", (a, *[0] * (len(shape) - 1)), part, part), near


def _rows(
    shape: tuple[int, ...], stored: Sequence[Piece], itemsize: int, room: int
) -> tuple[int, ...]:
    chunks, most = [1] * len(shape), max(1, min(BLOCK_BYTES, room // 4) // itemsize)
    for d in reversed(range(len(shape))):
        chunks[d] = _fit(min(shape[d], most), shape[d], {piece.chunks[d] for piece in stored})
        if chunks[d] < shape[d]:
            break
        most //= chunks[d]
    return tuple(chunks)


def _slab(rows: Piece, stored: Sequence[Piece]) -> int:
    """Elements that are in memory together for a block of complete rows."""
    shape, chunks = rows.shape, rows.chunks
    split = next((d for d, n in enumerate(shape) if chunks[d] < n), 0)
    return prod(
        max(chunks[d], min(n, longest_side(stored, d))) if d <= split else n
        for d, n in enumerate(shape)
    )


def _blocks(whole: Piece, stored: Sequence[Piece], itemsize: int, room: int) -> list[Piece]:
    """Arrays of blocks as tall as stored chunks, side by side along one dimension.

    If the blocks would be too narrow, the given array is returned instead.
    """
    tall = [min(n, longest_side(stored, d)) for d, n in enumerate(whole.shape)]
    along = len(tall) - 1
    while along and prod(tall[:along]) * prod(whole.shape[along:]) * itemsize <= room:
        along -= 1
    tall[along + 1 :] = whole.shape[along + 1 :]
    reach = room // (itemsize * prod(tall[:along]) * prod(tall[along + 1 :]))
    run = reach * prod(tall[along + 1 :]) * itemsize
    if reach < tall[along] or run < LEAST_RUN:
        return [whole]
    grids = []
    for i, (first, last) in enumerate(pairwise(walk(unbroken(stored, along), reach))):
        start, shape, chunks = list(whole.start), list(whole.shape), list(tall)
        start[along], shape[along], chunks[along] = first, last - first, last - first
        grids.append(Piece(f"{whole.path}.{i}", tuple(start), tuple(shape), tuple(chunks)))
    return grids


def _fit(most: int, length: int, sides: set[int]) -> int:
    """At most `most` of a dimension's `length` indices, aligned with source chunks if possible.

    Aligned indices end where chunks of the source end.
    """
    side = max(sides)
    if most == length or len(sides) > 1:
        return most
    return most // side * side if most >= side else _divisor(side, most, 8)


def _divisor(side: int, most: int, share: int) -> int:
    """The largest divisor of a side up to `most`.

    `most` itself unless the divisor is more than one in `share` of it.
    """
    largest = max((n for n in divisors(side) if n <= most), default=1)
    return largest if share * largest > most else most


def _shard(layout: Layout | Placements | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the largest shard of a tensor; the tensor's own shape without a layout."""
    if layout is None or prod(shape) == 0:
        return shape
    if isinstance(layout, Placements):
        return tuple(int(np.diff(cuts).max()) for cuts in layout.cuts(shape))
    return layout.tile(shape)
