"""The blocks in which an output is written.

A reader of a format that consists of blocks has its own layout, most often the one that the tensor was saved in. So a block is a shard of
the recorded layout (`choose_block_shape`), or several adjacent shards if they are small, or some rows or planes of a shard if it is too
large.

In a file that holds the output row by row, blocks are chosen so that each stored byte is read once (`cut_into_blocks`). A block is
written when all its elements are read. So all source chunks that overlap it are in memory together, including their other elements: a
slab.

1. The output is cut along its first dimension where separately stored parts meet (shards of different lengths, tensors that are
   joined). Each part has its own grid of chunks.
2. *Rows*: as many complete rows, or planes, as make `BLOCK_BYTES`; one run of bytes in the file. If the source is cut in the dimension
   in which rows are counted, their number divides the source's side or is a multiple of it, so that slabs do not overlap.
3. If the slab of rows does not fit the room (chunks that are tall columns of a large matrix), and the file may be written in any
   order, *blocks*: as tall as the source's chunks, and as long as the room allows. Each row of a block is a run of bytes of at least
   `LEAST_RUN`, since every run is a system call.
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
from shardckpt.plan.pieces import Piece
from shardckpt.reshard.cells import unbroken, walk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shardckpt.format.structure import StoredLayout, TensorRecord
    from shardckpt.layout.box import Box
    from shardckpt.reading.naming.outputs import OutputTensor

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


def cut_regularly(output: OutputTensor, chunks: Sequence[int]) -> list[Piece]:
    """One regular grid of blocks of that shape, clipped at the output's edges."""
    return [Piece(output.name, (0,) * len(output.shape), output.shape, tuple(chunks))]


def choose_block_shape(tensor: TensorRecord, room: int) -> tuple[int, ...]:
    """The shape of a block; blocks at the end of a dimension may be clipped.

    Args:
        tensor: its shape and layout, and the dtype in which it is written.
        room: bytes that must suffice for several blocks.

    Returns:
        One side per dimension, at least 1.
    """
    itemsize, largest = tensor.dtype.itemsize, min(LARGEST, room // 4)
    smallest = min(SMALLEST, largest)
    sides = [max(1, side) for side in _shard(tensor.layout, tensor.shape)]
    lengths = [max(1, n) for n in tensor.shape]
    for d in reversed(range(len(sides))):
        wanted = -(-smallest // (prod(sides) * itemsize))
        sides[d] = min(lengths[d], sides[d] * wanted)
    for d in range(len(sides)):
        others = prod(sides[d + 1 :]) * itemsize * prod(sides[:d])
        if others * sides[d] > largest:
            sides[d] = _half_or_more(sides[d], max(1, largest // others))
    return tuple(sides)


def cut_into_rows(output: OutputTensor, stored: Sequence[Piece], room: int) -> list[Piece]:
    """Blocks of complete rows, in row-major order.

    Args:
        output: the output; it has elements.
        stored: the arrays from which it is made, in the output's indices.
        room: most bytes of a block.
    """
    itemsize = output.dtype.itemsize
    return [Piece(*part, _rows(part[2], near, itemsize, room)) for part, near in _parts(output, stored)]


def cut_into_blocks(output: OutputTensor, stored: Sequence[Piece], room: int) -> list[Piece]:
    """Blocks of complete rows, or of parts of rows where only these read each stored byte once; arguments as in `cut_into_rows`."""
    itemsize, found = output.dtype.itemsize, []
    for (path, start, shape), near in _parts(output, stored):
        chunks = _rows(shape, near, itemsize, room)
        if _slab(shape, chunks, near) * itemsize <= room:
            found.append(Piece(path, start, shape, chunks))
        else:
            found += _blocks(Piece(path, start, shape, chunks), near, itemsize, room)
    return found


def cut_into_slabs(output: OutputTensor, stored: Sequence[Piece], most: int) -> list[Piece]:
    """Blocks of complete rows, as tall as stored chunks, so that most chunks are needed for one block only; in row-major order.

    Args:
        output: the output; it has elements.
        stored: the arrays from which it is made, in the output's indices.
        most: most bytes of a block, unless a row has more.
    """
    itemsize, found = output.dtype.itemsize, []
    for (path, start, shape), near in _parts(output, stored):
        row = [prod(shape[d + 1 :]) * itemsize for d in range(len(shape))]
        along = next((d for d in range(len(shape)) if row[d] <= most), 0)
        tall = [min(_tallest(near, d, shape[d]), max(1, most // row[d])) for d in range(len(shape))]
        found.append(Piece(path, start, shape, (*[1] * along, *tall[along : along + 1], *shape[along + 1 :])))
    return found


def find_runs(shape: Sequence[int], box: Box, itemsize: int) -> tuple[NDArray[np.int64], int]:
    """The runs of bytes of a box in a tensor that is one run of bytes, row by row.

    Args:
        shape: shape of the tensor.
        box: one of its boxes, not empty.
        itemsize: bytes of an element.

    Returns:
        (n,) The first byte of each contiguous part, in row-major order, and the length of each part in bytes.
    """
    if box.shape == tuple(shape):  # true for most tensors
        return np.zeros(1, np.int64), prod(shape) * itemsize
    # A run consists of the last dimensions that the box covers completely, and one more.
    along = max((d for d, n in enumerate(shape) if box.shape[d] < n), default=0)
    strides = [itemsize * prod(shape[d + 1 :]) for d in range(len(shape))]
    offsets = np.array([sum(start * stride for start, stride in zip(box.start, strides, strict=True))], np.int64)
    for n, stride in zip(box.shape[:along], strides[:along], strict=True):
        offsets = np.add.outer(offsets, np.arange(n, dtype=np.int64) * stride).reshape(-1)
    return offsets, prod(box.shape[along:]) * itemsize


def _parts(output: OutputTensor, stored: Sequence[Piece]) -> list[tuple[tuple[str, tuple[int, ...], tuple[int, ...]], list[Piece]]]:
    """Path, start and shape of each part of an output that is stored separately along its first dimension, and its source arrays."""
    if not output.shape:
        return [((output.name, (), ()), list(stored))]
    n, spans = output.shape[0], sorted({(piece.start[0], piece.start[0] + piece.shape[0]) for piece in stored})
    borders, reached, least = [0], 0, -(-_LEAST_PART * n // output.nbytes)
    for start, stop in spans:
        if reached <= start and borders[-1] + least <= start <= n - least:
            borders.append(start)
        reached = max(reached, stop)
    found = []
    for i, (a, b) in enumerate(pairwise([*borders, n])):
        near = [piece for piece in stored if a <= piece.start[0] < b]
        found.append(((f"{output.name}={i}", (a, *[0] * (len(output.shape) - 1)), (b - a, *output.shape[1:])), near))
    return found


def _rows(shape: tuple[int, ...], stored: Sequence[Piece], itemsize: int, room: int) -> tuple[int, ...]:
    chunks, most = [1] * len(shape), max(1, min(BLOCK_BYTES, room // 4) // itemsize)
    for d in reversed(range(len(shape))):
        chunks[d] = _suited(min(shape[d], most), shape[d], {piece.chunks[d] for piece in stored})
        if chunks[d] < shape[d]:
            break
        most //= chunks[d]
    return tuple(chunks)


def _slab(shape: tuple[int, ...], chunks: tuple[int, ...], stored: Sequence[Piece]) -> int:
    """Elements that are in memory together for a block of complete rows."""
    split = next((d for d, n in enumerate(shape) if chunks[d] < n), 0)
    return prod(max(chunks[d], _tallest(stored, d, n)) if d <= split else n for d, n in enumerate(shape))


def _blocks(whole: Piece, stored: Sequence[Piece], itemsize: int, room: int) -> list[Piece]:
    """Arrays of blocks as tall as stored chunks, side by side along one dimension; or the given array, if they would be too narrow."""
    tall = [_tallest(stored, d, n) for d, n in enumerate(whole.shape)]
    along = len(tall) - 1
    while along and prod(tall[:along]) * prod(whole.shape[along:]) * itemsize <= room:
        along -= 1
    tall[along + 1 :] = whole.shape[along + 1 :]
    reach = room // (itemsize * prod(tall[:along]) * prod(tall[along + 1 :]))
    run = reach * prod(tall[along + 1 :]) * itemsize
    if reach < tall[along] or run < LEAST_RUN:
        return [whole]
    found = []
    for i, (first, last) in enumerate(pairwise(walk(unbroken(stored, along), reach))):
        start, shape, chunks = list(whole.start), list(whole.shape), list(tall)
        start[along], shape[along], chunks[along] = first, last - first, last - first
        found.append(Piece(f"{whole.path}.{i}", tuple(start), tuple(shape), tuple(chunks)))
    return found


def _tallest(stored: Sequence[Piece], d: int, n: int) -> int:
    """The longest side of any stored chunk along a dimension of length `n`."""
    return min(n, max(piece.chunks[d] for piece in stored))


def _suited(most: int, length: int, sides: set[int]) -> int:
    """At most `most` indices of a dimension of that length, aligned with the ends of the source's chunks if possible."""
    side = max(sides)
    if most == length or len(sides) > 1:
        return most
    return most // side * side if most >= side else _divisor(side, most)


def _divisor(side: int, most: int) -> int:
    """The largest divisor of a side up to `most`; `most` itself if the divisor would be a small part of it."""
    found = max((n for n in divisors(side) if n <= most), default=1)
    return found if 8 * found >= most else most


def _shard(layout: StoredLayout | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the largest shard of a tensor; the tensor's own shape without a layout."""
    if layout is None or prod(shape) == 0:
        return shape
    if isinstance(layout, Placements):
        return tuple(int(np.diff(cuts).max()) for cuts in layout.cuts(shape))
    return layout.tile(shape)


def _half_or_more(side: int, most: int) -> int:
    """The largest divisor of a side up to `most`; `most` itself if the divisor would be at most half of it."""
    return next((part for part in range(most, most // 2, -1) if side % part == 0), most)
