"""The choice of a chunk shape, for readers whose layout nobody knows yet.

A tensor is stored as regular grids of chunks. A chunk never crosses a border between shards (so it has one writer),
hence where a dimension is split its chunk side divides the tile; where it is not, any side will do.

A later reader splits the tensor its own way, and reads whole chunks. What it reads beyond what it needs is
its amplification: along one dimension, a part of n elements that touches k chunks of side c reads k × c / n of what it
needs. Over several dimensions that multiplies. So, per tensor:

1. Per dimension, list the sides that a chunk may have, and for each side the amplification of the worst part, when the
   *tensor* is later split 2, 4 or 8 ways; when it is split 3, 5, 6 or 7 ways; and when each *tile* is split 2, 4 or 8
   ways, for layouts that become finer still.
2. Every combination of sides has a score: the product of all of these, each to the power of how much it counts, and
   of what a chunk costs beside its bytes, 1 + OVERHEAD / size. Splits of the tensor by 2, 4 and 8 count most: they
   fall on chunk borders wherever that is possible with chunks of 64 KiB. The others decide what is left open.
3. Combinations below 64 KiB are left out (16 KiB for tensors under 4 MiB, which cannot have 64 chunks otherwise), and
   those above 2 MiB pay for it. The smallest score wins.
4. A tile of prime length, or nearly so, has no useful side: 32003 rows over 8 devices make tiles of 4001. Where it
   pays, such a dimension is stored in *pieces*, one array per tile, in which any side will do.
5. A dimension that is not cut into equal tiles, as nested splits of DTensor's may cut it, is taken run by run of those
   that are equal (`even_runs`), and each run is stored by itself.

A checkpoint of very many bytes gets larger chunks (`smallest_chunk`), so that it has at most about 4 million, or as
many as there are shards. Where each chunk is a file, none is cut below 1 MiB.

Every host chooses by itself and all must agree. Scores are therefore made of IEEE additions, multiplications and
divisions alone, in one order: the same on every machine, as logarithms and powers are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

LARGEST_CHUNK = 2 << 20
"""Bytes above which a chunk is cut further where that costs little."""
SMALLEST_CHUNK = 64 << 10
"""Bytes below which no chunk is cut."""
SMALL_TENSOR_CHUNK = 16 << 10
"""The same for tensors too small to have 64 chunks of `SMALLEST_CHUNK`."""
SMALLEST_FILE = 1 << 20
"""The same, of any tensor, where each chunk is a file or an object."""
MOST_CHUNKS = 4_000_000
"""About how many chunks a checkpoint has at most."""
OVERHEAD = 64 << 10
"""Bytes that could be read or written in the time that a chunk takes by itself, rather on the high side."""
LARGEST_COMMON_CHUNK = 16 << 20
"""Bytes; a tensor whose chunks would be larger is stored in pieces, however many."""
MOST_PIECES = 64
"""Arrays that any other tensor is stored as at most."""
SMALLEST_PIECE = 1 << 20
"""Bytes that pieces have at least on average."""

_TENSOR_SPLITS, _ODD_SPLITS, _TILE_SPLITS = (2, 4, 8), (3, 5, 6, 7), (2, 4, 8)
_TENSOR_WEIGHT, _OVERHEAD_WEIGHT, _EXCESS_WEIGHT = 16, 10, 3
"""How much each counts beside splits by 3, 5, 6 or 7, and splits of tiles. Found by trying: tools/amplification.py."""
_EXCESS_COST = 2.0
"""The factor for a chunk above the largest size, by however little."""
_PIECES_COST = 4.0
"""The factor by which a score must improve for each dimension that is stored in pieces: one array is simpler."""
_MOST_COMBINATIONS = 1 << 18
_MOST_SIDES = 2048
"""Sides of one dimension that are compared at most; numbers below 2^32 have at most 1,536 divisors."""


class Floor(NamedTuple):
    """Bytes below which no chunk is cut."""

    nbytes: int = SMALLEST_CHUNK
    in_small_tensors: int = SMALL_TENSOR_CHUNK
    """In those that cannot have 64 chunks of `nbytes`."""


_FLOOR = Floor()


@dataclass(frozen=True, slots=True)
class Chunking:
    """How a tensor is cut for storage."""

    piece: tuple[int, ...]
    """Shape of the arrays that it is stored as: the tensor's own, but for dimensions that are stored in pieces the
    tile's. The last piece of a dimension ends where the tensor does."""
    chunks: tuple[int, ...]
    """Shape of their chunks: one side per dimension, at least 1."""


def smallest_chunk(total_bytes: int, *, files: bool = False) -> Floor:
    """The floor in a checkpoint of that many bytes, a power of two; `files`: each chunk is a file of its own.

    >>> smallest_chunk(10**9).nbytes, smallest_chunk(2 * 10**12).nbytes, smallest_chunk(10**9, files=True).nbytes
    (65536, 524288, 1048576)
    """
    needed = 1 << max(0, -(-total_bytes // MOST_CHUNKS) - 1).bit_length()
    return Floor(max(SMALLEST_FILE, needed), SMALLEST_FILE) if files else Floor(max(SMALLEST_CHUNK, needed))


def chunk_shape(shape: tuple[int, ...], itemsize: int, parts: tuple[int, ...], *, smallest: Floor = _FLOOR) -> tuple[int, ...]:
    """The chunk shape of a tensor that is stored as one array, split into `parts` tiles per dimension.

    Args:
        shape: the tensor's shape, elements.
        itemsize: stored bytes per element.
        parts: tiles per dimension; each tile is ceil(n / parts) long (XLA's and torch.chunk's rule).
        smallest: see `smallest_chunk`.

    Returns:
        One side per dimension, at least 1. Where `parts[d] > 1` it divides the tile of dimension d.

    >>> chunk_shape((4096, 4096), 4, (8, 1))
    (256, 512)
    """
    if prod(shape) == 0 or not shape:
        return tuple(max(1, n) for n in shape)
    return _best(shape, itemsize, parts, (False,) * len(shape), smallest)[1]


@lru_cache(maxsize=4096)
def chunking(shape: tuple[int, ...], itemsize: int, parts: tuple[int, ...], *, smallest: Floor = _FLOOR) -> Chunking:
    """Pieces and chunks of a tensor split into `parts` tiles per dimension; for the arguments see `chunk_shape`.

    >>> chunking((32000, 4096), 4, (8, 1))
    Chunking(piece=(32000, 4096), chunks=(500, 512))
    >>> chunking((32003, 4096), 4, (8, 1)).piece
    (4001, 4096)
    """
    if prod(shape) == 0 or not shape:
        return Chunking(shape, tuple(max(1, n) for n in shape))
    best, chunks = _best(shape, itemsize, parts, (False,) * len(shape), smallest)
    most = min(MOST_PIECES, prod(shape) * itemsize // SMALLEST_PIECE)
    if prod(chunks) * itemsize > LARGEST_COMMON_CHUNK:
        best, most = float("inf"), prod(parts)
    piece = shape
    for apart in product(*((False, True) if p > 1 else (False,) for p in parts)):
        if not 1 < prod(p for p, alone in zip(parts, apart, strict=True) if alone) <= most:
            continue
        score, sides = _best(shape, itemsize, parts, apart, smallest)
        for _ in range(sum(apart)):
            score *= _PIECES_COST
        if score < best:
            best, chunks = score, sides
            piece = tuple(-(-n // p) if alone else n for n, p, alone in zip(shape, parts, apart, strict=True))
    return Chunking(piece, chunks)


def even_runs(cuts: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """The parts of a dimension that are cut into tiles of one length, the last of a part perhaps shorter.

    Args:
        cuts: (tiles + 1,) where the dimension is cut: ascending, from 0 to its length, which is not 0.

    Returns:
        First index, length n and number of tiles p of each part, whose tiles are ceil(n / p) long.

    >>> even_runs(np.array([0, 4, 8, 10]))
    [(0, 10, 3)]
    >>> even_runs(np.array([0, 2, 3, 5, 6, 8, 9, 10]))
    [(0, 3, 2), (3, 3, 2), (6, 3, 2), (9, 1, 1)]
    """
    tiles = np.diff(cuts)
    runs, first = [], 0
    for end in (*(np.flatnonzero(np.diff(tiles)) + 1).tolist(), len(tiles)):
        if first == end:  # the one tile of this length has ended the run before
            continue
        stop, tile = end, int(tiles[first])
        if end < len(tiles) and tiles[end] < tile == -(-int(cuts[end + 1] - cuts[first]) // (end + 1 - first)):
            stop = end + 1
        runs.append((int(cuts[first]), int(cuts[stop] - cuts[first]), stop - first))
        first = stop
    return runs


@lru_cache(maxsize=4096)
def _best(
    shape: tuple[int, ...], itemsize: int, parts: tuple[int, ...], apart: tuple[bool, ...], smallest: Floor
) -> tuple[float, tuple[int, ...]]:
    """The smallest score, and the chunk shape that has it; `apart` says which dimensions are stored in pieces."""
    axes = _thinned([_Axis.of(*args) for args in zip(shape, parts, apart, strict=True)])
    sizes = np.full((1,) * len(shape), float(itemsize))
    scores = np.ones_like(sizes)
    for d, axis in enumerate(axes):
        along = [-1 if i == d else 1 for i in range(len(shape))]
        sizes = sizes * np.array(axis.sides, np.float64).reshape(along)
        scores = scores * axis.scores.reshape(along)
    scores = scores * _power(1.0 + OVERHEAD / sizes, _OVERHEAD_WEIGHT)
    excess = sizes / max(LARGEST_CHUNK, 2 * smallest.nbytes)
    scores = np.where(excess > 1.0, scores * _EXCESS_COST * _power(excess, _EXCESS_WEIGHT), scores)
    floor = smallest.nbytes if prod(shape) * itemsize >= 64 * smallest.nbytes else smallest.in_small_tensors
    scores[sizes < min(floor, float(sizes.max()))] = np.inf
    # Sides ascend, so of equal scores the one with the longest rows is taken: they are contiguous in memory.
    at = np.unravel_index(int(np.argmin(scores)), scores.shape)
    return float(scores[at]), tuple(axis.sides[i] for axis, i in zip(axes, at, strict=True))


@dataclass(frozen=True, slots=True)
class _Axis:
    """One dimension: what its chunk side may be, and how bad each side is."""

    sides: tuple[int, ...]
    """Ascending."""
    scores: NDArray[np.float64]
    """Per side, the dimension's part of the score."""

    @classmethod
    def of(cls, length: int, parts: int, apart: bool) -> _Axis:
        """Of a dimension that is split into `parts` tiles, each an array by itself or not."""
        tile = -(-length // parts)
        sides = divisors(tile) if parts > 1 and not apart else _free_sides(tile)
        array = tile if apart else length
        scores = _power(_worst(length, _TENSOR_SPLITS, sides, array), _TENSOR_WEIGHT)
        scores = scores * _worst(length, _ODD_SPLITS, sides, array)
        return cls(sides, scores * _worst(length, tuple(s * parts for s in _TILE_SPLITS), sides, array))


def _thinned(axes: list[_Axis]) -> list[_Axis]:
    """Leave out every other side of the dimension with most of them, until there are not too many combinations."""
    while prod(len(axis.sides) for axis in axes) > _MOST_COMBINATIONS:
        d = max(range(len(axes)), key=lambda d: len(axes[d].sides))
        # From the end: the longest side is always kept.
        axes[d] = _Axis(axes[d].sides[::-1][::2][::-1], axes[d].scores[::-1][::2][::-1])
    return axes


@lru_cache(maxsize=4096)
def _free_sides(length: int) -> tuple[int, ...]:
    """Sides that a dimension may have which is not split: equal parts of it, and what divides its halves, quarters and eighths."""
    sides = {-(-length // n) for n in range(1, min(length, 64) + 1)}
    sides.update(-(-length // (1 << k)) for k in range(length.bit_length() + 1))
    for split in (1, *_TENSOR_SPLITS):
        part = -(-length // split)
        sides.update(part // n for n in range(1, part * 256 // length + 1) if part % n == 0)
    return tuple(sorted(sides))


@lru_cache(maxsize=4096)
def divisors(n: int) -> tuple[int, ...]:
    """Divisors of n, ascending: all of them where n is below 2^32.

    Of a larger number, prime factors above 2^16 stay together, and at most `_MOST_SIDES` divisors are kept, the largest among them.
    """
    primes, rest, found = _primes(), n, [1]
    for prime in primes[n % primes == 0].tolist():
        powers = [1]
        while rest % prime == 0:
            rest //= prime
            powers.append(powers[-1] * prime)
        found = _products(found, powers)
    return tuple(sorted(found if rest == 1 else _products(found, [1, rest])))


def _products(some: list[int], others: list[int]) -> list[int]:
    """All products, the largest first; of more than `_MOST_SIDES` every second, fourth, … one."""
    products = sorted((a * b for a in some for b in others), reverse=True)
    while len(products) > _MOST_SIDES:
        products = products[::2]
    return products


@lru_cache(maxsize=1)
def _primes() -> NDArray[np.int64]:
    """The primes below 2^16."""
    sieve = np.ones(1 << 16, bool)
    sieve[:2] = False
    for n in range(2, 1 << 8):
        if sieve[n]:
            sieve[n * n :: n] = False
    return np.flatnonzero(sieve)


def _worst(length: int, splits: Sequence[int], sides: tuple[int, ...], array: int) -> NDArray[np.float64]:
    """Per side, the amplification of the worst part of any of the splits.

    Args:
        length: of the dimension.
        splits: numbers of parts; those above `length` are left out.
        sides: of chunks.
        array: length of the arrays that it is stored as, one after another; a chunk at an array's end is padded.
    """
    side = np.array(sides, np.int64)[:, None]
    worst = np.ones(len(sides))
    for split in splits:
        if split > length:
            continue
        part = -(-length // split)
        # Beyond 64 parts the pattern of borders has repeated often enough.
        start = np.arange(min(split, 64), dtype=np.int64) * part
        # The last part may be a sliver, which is expensive and no matter.
        start = start[np.minimum(start + part, length) - start >= part // 2]
        stop = np.minimum(start + part, length)
        read = (_chunk_of(stop - 1, side, array) - _chunk_of(start, side, array) + 1) * side
        worst = np.maximum(worst, (read / (stop - start)).max(axis=1))
    return worst


def _chunk_of(index: NDArray[np.int64], side: NDArray[np.int64], array: int) -> NDArray[np.int64]:
    """Number of the chunk that holds an index, counted through all arrays."""
    chunk: NDArray[np.int64] = index // array * -(-array // side) + index % array // side
    return chunk


def _power(values: NDArray[np.float64], exponent: int) -> NDArray[np.float64]:
    """`values ** exponent`, by multiplication alone."""
    result = np.ones_like(values)
    for _ in range(exponent):
        result = result * values
    return result
