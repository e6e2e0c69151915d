"""Which chunk shape serves the reader that nobody knows yet?

A tensor is stored as one regular grid of chunks. A chunk never crosses a border between shards (so it has
one writer), hence where a dimension is split its chunk side divides the tile; where it is not, any side will do.

A later reader splits the tensor its own way, and reads whole chunks. What it reads beyond what it needs is
its amplification. Along one dimension of length D with chunk side c, a split into q parts reads

    sum over the parts of (chunks touched × c, cut off at D) / D

times what it needs, which is 1 exactly where every part's border is a chunk border. So, per tensor:

1. Start with the tile as the chunk.
2. Make 2-, 4- and 8-way splits of every dimension of the *tensor* cost as little as possible: refine the
   dimension whose worst split costs most, and go on down to 64 KiB per chunk (16 KiB for tensors under 4 MiB,
   which cannot have 64 chunks otherwise).
3. Likewise for 2-, 4- and 8-way splits of the *tile*, down to 256 KiB: layouts that become finer still.
4. Where the chunk is still larger than 2 MiB, cut it from the outermost dimension inwards, at no cost in
   alignment if possible, and never below the floor: a tile of prime length stays whole in that dimension.

A checkpoint of very many bytes gets larger chunks (`smallest_chunk`), so that it has at most about 4 million, or as
many as there are shards.
"""

from __future__ import annotations

from functools import lru_cache
from math import isqrt, prod
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["LARGEST_CHUNK", "MOST_CHUNKS", "chunk_shape", "grid_shape", "smallest_chunk"]

LARGEST_CHUNK = 2 << 20
"""Bytes above which a chunk is cut further where that costs no alignment."""
SMALLEST_CHUNK = 64 << 10
"""Bytes below which alignment no longer cuts a chunk."""
SMALLEST_FOR_TILE_SPLITS = 256 << 10
"""The same for splits of a tile, which fewer readers ask for."""
SMALL_TENSOR_CHUNK = 16 << 10
"""The same for tensors too small to have 64 chunks of `SMALLEST_CHUNK`."""
MOST_CHUNKS = 4_000_000
"""About how many chunks a checkpoint has at most."""
SPLITS = (2, 4, 8)
"""The layout changes that chunks are made for, per dimension."""
GOOD_ENOUGH = 1.05
"""Amplification of one dimension that is not worth smaller chunks."""


def grid_shape(shape: tuple[int, ...], chunks: tuple[int, ...]) -> tuple[int, ...]:
    """Number of chunks per dimension.

    >>> grid_shape((10, 8), (3, 4))
    (4, 2)
    """
    return tuple(-(-n // c) for n, c in zip(shape, chunks, strict=True))


def smallest_chunk(total_bytes: int) -> int:
    """Bytes a chunk should not go below in a checkpoint of that many bytes (a power of two ≥ 64 KiB).

    >>> smallest_chunk(10**9), smallest_chunk(2 * 10**12)
    (65536, 524288)
    """
    needed = -(-total_bytes // MOST_CHUNKS)
    return max(SMALLEST_CHUNK, 1 << max(0, needed - 1).bit_length())


def chunk_shape(shape: tuple[int, ...], itemsize: int, parts: tuple[int, ...], *, smallest: int = SMALLEST_CHUNK) -> tuple[int, ...]:
    """The chunk shape of a tensor split into `parts` tiles per dimension.

    Args:
        shape: the tensor's shape, elements.
        itemsize: stored bytes per element.
        parts: tiles per dimension; each tile is ceil(n / parts) long (XLA's and torch.chunk's rule).
        smallest: bytes below which alignment does not cut, see `smallest_chunk`.

    Returns:
        One side per dimension, at least 1. Where `parts[d] > 1` it divides the tile of dimension d.

    >>> chunk_shape((4096, 4096), 4, (8, 1))
    (512, 512)
    """
    if prod(shape) == 0 or not shape:
        return tuple(max(1, n) for n in shape)
    axes = [_Axis(n, p) for n, p in zip(shape, parts, strict=True)]
    total = prod(shape) * itemsize
    for_tensor = smallest if total >= 64 * smallest else min(SMALL_TENSOR_CHUNK, smallest)
    _align(axes, itemsize, floor=for_tensor, splits_of="tensor")
    _align(axes, itemsize, floor=max(smallest, SMALLEST_FOR_TILE_SPLITS), splits_of="tile")
    _cut(axes, itemsize, floor=smallest, ceiling=max(LARGEST_CHUNK, 2 * smallest))
    return tuple(axis.side for axis in axes)


class _Axis:
    """One dimension while its chunk side is being chosen."""

    def __init__(self, length: int, parts: int) -> None:
        self.length = length
        self.parts = parts
        self.sides = _sides(length, parts)
        """Possible sides, descending."""
        self.costs = {"tensor": _costs(length, 1, self.sides), "tile": _costs(length, parts, self.sides)}
        self.at = 0

    @property
    def side(self) -> int:
        """The side chosen so far."""
        return self.sides[self.at]

    def cost(self, splits_of: str) -> float:
        """Amplification of the worst of the splits, with the present side."""
        return float(self.costs[splits_of][self.at])

    def better(self, splits_of: str, least_side: float) -> int | None:
        """Position of the largest smaller side that costs less and is at least `least_side`, if there is one.

        The tensor's own splits never get dearer for the sake of the tile's.
        """
        costs, first = self.costs[splits_of], self.costs["tensor"]
        for i in range(self.at + 1, len(self.sides)):
            if self.sides[i] < least_side:
                return None
            if costs[i] < costs[self.at] - 1e-9 and first[i] <= max(first[self.at], GOOD_ENOUGH):
                return i
        return None


def _align(axes: list[_Axis], itemsize: int, *, floor: int, splits_of: str) -> None:
    """Refine the dimension whose splits cost most, until all are cheap or the chunk is at its floor."""
    while True:
        size = prod(axis.side for axis in axes) * itemsize
        steps = []
        for d, axis in enumerate(axes):
            if axis.cost(splits_of) <= GOOD_ENOUGH:
                continue
            step = axis.better(splits_of, floor * axis.side / size)
            if step is not None:
                steps.append((-axis.cost(splits_of), d, step))
        if not steps:
            return
        _, d, step = min(steps)
        axes[d].at = step


def _cut(axes: list[_Axis], itemsize: int, *, floor: int, ceiling: int) -> None:
    """Cut the chunk to `ceiling` bytes, outermost dimension first: inner ones keep long contiguous runs."""
    for no_dearer in (True, False):
        for axis in axes:
            size = prod(a.side for a in axes) * itemsize
            if size <= ceiling:
                return
            steps = [
                i
                for i in range(axis.at + 1, len(axis.sides))
                if axis.sides[i] * size >= floor * axis.side
                and (not no_dearer or all(axis.costs[k][i] <= max(axis.costs[k][axis.at], GOOD_ENOUGH) for k in axis.costs))
            ]
            if steps:
                axis.at = next((i for i in steps if axis.sides[i] * size <= ceiling * axis.side), steps[-1])


@lru_cache(maxsize=4096)
def _sides(length: int, parts: int) -> tuple[int, ...]:
    """Chunk sides that a dimension may have, descending; each divides the tile where the dimension is split."""
    if parts > 1:
        return _divisors(-(-length // parts))
    sides = {-(-length // (1 << k)) for k in range(length.bit_length() + 1)}
    sides.update(n for n in _divisors(length) if n * 4096 >= length)
    return tuple(sorted(sides, reverse=True))


@lru_cache(maxsize=4096)
def _divisors(n: int) -> tuple[int, ...]:
    """All divisors of n, descending."""
    small = np.arange(1, isqrt(n) + 1, dtype=np.int64)
    small = small[n % small == 0]
    return tuple(sorted({*small.tolist(), *(n // small).tolist()}, reverse=True))


@lru_cache(maxsize=4096)
def _costs(length: int, parts: int, sides: tuple[int, ...]) -> NDArray[np.float64]:
    """Per side, the amplification of the worst of the 2-, 4- and 8-way splits of `parts` tiles."""
    c = np.array(sides, np.int64)[:, None]
    worst = np.ones(len(sides))
    for split in SPLITS:
        n = split * parts
        if n > length:
            continue
        part = -(-length // n)
        # Beyond 64 parts the pattern of borders has repeated often enough to know its mean.
        start = np.minimum(np.arange(min(n, 64), dtype=np.int64) * part, length)[None, :]
        stop = np.minimum(start + part, length)
        read = np.minimum(-(-stop // c) * c, length) - start // c * c
        needed = (stop - start).sum(axis=1)
        worst = np.maximum(worst, np.where(stop > start, read, 0).sum(axis=1) / needed)
    return worst
