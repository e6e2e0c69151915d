"""The choice of a chunk shape, for readers with unknown layouts.

A tensor is stored as regular grids of chunks. A chunk never crosses a border between shards (so it
has one writer). Hence, in a dimension that is split, the chunk side divides the tile; in other
dimensions any side is allowed.

A later reader splits the tensor differently and reads complete chunks. The amplification is the
ratio of bytes read to bytes needed: along one dimension, a part of n elements that overlaps k
chunks of side c has an amplification of k × c / n. Over several dimensions the factors multiply.
So, per tensor:

1. Per dimension, list the possible sides of a chunk, and for each side the amplification of the
   worst part, when the *tensor* is later split 2, 4 or 8 ways; when it is split 3, 5, 6 or 7 ways;
   and when each *tile* is split 2, 4 or 8 ways, for layouts that become finer still.
2. Every combination of sides has a score: the product of all of these amplifications, each raised
   to its weight, and of a chunk's fixed cost relative to its size, 1 + OVERHEAD / size. Splits of
   the tensor by 2, 4 and 8 weigh most: they fall on chunk borders wherever that is possible with
   chunks of 64 KiB. The other splits break ties.
3. Combinations below 64 KiB are excluded (16 KiB for tensors under 4 MiB, which cannot have 64
   chunks otherwise), and combinations above 2 MiB get a penalty. The lowest score wins.
4. A tile of prime length, or nearly so, has no useful side: 32003 rows over 8 devices make tiles of
   4001. Where the score improves enough, such a dimension is stored in *pieces*, one array per
   tile, in which any side is allowed.
5. A dimension that is cut into unequal tiles, for example by nested DTensor splits, is divided into
   runs of equal tiles (`even_runs`), and each run is stored separately.

A very large checkpoint gets larger chunks (`smallest_chunk`), so that it has at most about 4
million chunks, or as many as there are shards. If each chunk is a file, no chunk is cut below 1
MiB; if chunks may be differences, none below 128 KiB.

Every host computes the choice alone, and all hosts must agree. So scores use only IEEE additions,
multiplications and divisions in a fixed order, which give the same result on every machine;
logarithms and powers do not.
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
"""Bytes above which a chunk is cut further if that costs little."""
SMALLEST_CHUNK = 64 << 10
"""Bytes below which no chunk is cut."""
SMALL_TENSOR_CHUNK = 16 << 10
"""Bytes below which no chunk is cut, in tensors too small for 64 chunks of `SMALLEST_CHUNK`."""
SMALLEST_DIFFERENCE = 128 << 10
"""Bytes below which no chunk is cut, in any tensor, if chunks are stored as differences: each is
compressed by itself."""
SMALLEST_FILE = 1 << 20
"""Bytes below which no chunk is cut, in any tensor, if each chunk is a file or an object."""
MOST_CHUNKS = 4_000_000
"""Approximate maximum number of chunks of a checkpoint."""
OVERHEAD = 64 << 10
"""Bytes that could be read or written during the fixed cost of one chunk; a high estimate."""
LARGEST_COMMON_CHUNK = 16 << 20
"""Bytes of a chunk above which a tensor is stored in pieces, whatever their number."""
MOST_PIECES = 64
"""Maximum number of pieces of any other tensor."""
SMALLEST_PIECE = 1 << 20
"""Minimum average bytes of a piece."""

_TENSOR_SPLITS, _ODD_SPLITS, _TILE_SPLITS = (2, 4, 8), (3, 5, 6, 7), (2, 4, 8)
_TENSOR_WEIGHT, _OVERHEAD_WEIGHT, _EXCESS_WEIGHT = 16, 10, 3
"""Weights relative to splits by 3, 5, 6 or 7, and splits of tiles. Found by experiment:
tools/amplification.py."""
_EXCESS_COST = 2.0
"""Penalty factor for a chunk above the largest size, by however little."""
_PIECES_COST = 4.0
"""Factor by which a score must improve for each dimension that is stored in pieces: one array is
simpler."""
_MOST_COMBINATIONS = 1 << 18
_MOST_SIDES = 2048
"""Maximum number of compared sides of one dimension; numbers below 2^32 have at most 1,536
divisors."""


class Floor(NamedTuple):
    """Bytes below which no chunk is cut."""

    nbytes: int = SMALLEST_CHUNK
    in_small_tensors: int = SMALL_TENSOR_CHUNK
    """Bytes below which no chunk is cut, in tensors that cannot have 64 chunks of `nbytes`."""


_FLOOR = Floor()


@dataclass(frozen=True, slots=True)
class Chunking:
    """The pieces and chunks of a stored tensor."""

    piece: tuple[int, ...]
    """Shape of the arrays: the tensor's side in each dimension, or the tile's side in a dimension
    that is stored in pieces. The last piece of a dimension ends where the tensor ends."""
    chunks: tuple[int, ...]
    """Shape of the arrays' chunks: one side per dimension, at least 1."""


@lru_cache(maxsize=4096)
def smallest_chunk(total_bytes: int, *, files: bool = False, differences: bool = False) -> Floor:
    """The floor in a checkpoint of `total_bytes`, a power of two.

    Args:
        total_bytes: bytes of all tensors.
        files: each chunk is a separate file.
        differences: chunks may be stored as differences.

    >>> smallest_chunk(10**9).nbytes, smallest_chunk(2 * 10**12).nbytes
    (65536, 524288)
    >>> smallest_chunk(10**9, files=True).nbytes
    1048576
    """
    needed = 1 << max(0, -(-total_bytes // MOST_CHUNKS) - 1).bit_length()
    least = SMALLEST_FILE if files else SMALLEST_DIFFERENCE if differences else SMALL_TENSOR_CHUNK
    return Floor(max(SMALLEST_CHUNK, least, needed), max(least, needed))


def chunk_shape(
    shape: tuple[int, ...], itemsize: int, parts: tuple[int, ...], *, smallest: Floor = _FLOOR
) -> tuple[int, ...]:
    """The chunk shape of a tensor stored as one array, split into `parts` tiles per dimension.

    Args:
        shape: the tensor's shape, elements.
        itemsize: stored bytes per element.
        parts: tiles per dimension; each tile is ceil(n / parts) long (XLA's and torch.chunk's
            rule).
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
def chunking(
    shape: tuple[int, ...], itemsize: int, parts: tuple[int, ...], *, smallest: Floor = _FLOOR
) -> Chunking:
    """Pieces and chunks of a tensor split into `parts` tiles per dimension.

    `chunk_shape` describes the arguments.

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
            piece = tuple(
                -(-n // p) if alone else n for n, p, alone in zip(shape, parts, apart, strict=True)
            )
    return Chunking(piece, chunks)


def even_runs(cuts: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """The runs of a dimension with tiles of one length; the last tile of a run may be shorter.

    Args:
        cuts: (tiles + 1,) ends of the tiles: ascending, from 0 to the dimension's length, which is
            not 0.

    Returns:
        First index, length n and number of tiles p of each run, whose tiles are ceil(n / p) long.

    >>> even_runs(np.array([0, 4, 8, 10]))
    [(0, 10, 3)]
    >>> even_runs(np.array([0, 2, 3, 5, 6, 8, 9, 10]))
    [(0, 3, 2), (3, 3, 2), (6, 3, 2), (9, 1, 1)]
    """
    tiles = np.diff(cuts)
    runs, first = [], 0
    for end in (*(np.flatnonzero(np.diff(tiles)) + 1).tolist(), len(tiles)):
        if first == end:  # the only tile of this length was the end of the previous run
            continue
        stop, tile = end, int(tiles[first])
        if end < len(tiles) and tiles[end] < tile == -(
            -int(cuts[end + 1] - cuts[first]) // (end + 1 - first)
        ):
            stop = end + 1
        runs.append((int(cuts[first]), int(cuts[stop] - cuts[first]), stop - first))
        first = stop
    return runs


@lru_cache(maxsize=4096)
def _best(
    shape: tuple[int, ...],
    itemsize: int,
    parts: tuple[int, ...],
    apart: tuple[bool, ...],
    smallest: Floor,
) -> tuple[float, tuple[int, ...]]:
    """The lowest score and its chunk shape.

    `apart` marks the dimensions that are stored in pieces.
    """
    axes = _thin([_Axis.of(*args) for args in zip(shape, parts, apart, strict=True)])
    sizes = np.full((1,) * len(shape), float(itemsize))
    scores = np.ones_like(sizes)
    for d, axis in enumerate(axes):
        along = [-1 if i == d else 1 for i in range(len(shape))]
        sizes = sizes * np.array(axis.sides, np.float64).reshape(along)
        scores = scores * axis.scores.reshape(along)
    scores = scores * _power(1.0 + OVERHEAD / sizes, _OVERHEAD_WEIGHT)
    excess = sizes / max(LARGEST_CHUNK, 2 * smallest.nbytes)
    scores = np.where(excess > 1.0, scores * _EXCESS_COST * _power(excess, _EXCESS_WEIGHT), scores)
    floor = (
        smallest.nbytes
        if prod(shape) * itemsize >= 64 * smallest.nbytes
        else smallest.in_small_tensors
    )
    scores[sizes < min(floor, float(sizes.max()))] = np.inf
    # Sides ascend, so equal scores select the longest rows, which are contiguous in memory.
    at = np.unravel_index(int(np.argmin(scores)), scores.shape)
    return float(scores[at]), tuple(axis.sides[i] for axis, i in zip(axes, at, strict=True))


@dataclass(frozen=True, slots=True)
class _Axis:
    """One dimension: the possible chunk sides, and the score of each."""

    sides: tuple[int, ...]
    """Ascending."""
    scores: NDArray[np.float64]
    """Per side, the dimension's factor of the score."""

    @classmethod
    def of(cls, length: int, parts: int, apart: bool) -> _Axis:
        """Score a dimension that is split into `parts` tiles.

        `apart`: each tile is a separate array.
        """
        tile = -(-length // parts)
        sides = divisors(tile) if parts > 1 and not apart else _free_sides(tile)
        array = tile if apart else length
        scores = _power(_worst(length, _TENSOR_SPLITS, sides, array), _TENSOR_WEIGHT)
        scores = scores * _worst(length, _ODD_SPLITS, sides, array)
        return cls(
            sides, scores * _worst(length, tuple(s * parts for s in _TILE_SPLITS), sides, array)
        )


def _thin(axes: list[_Axis]) -> list[_Axis]:
    """Drop possible sides until there are at most `_MOST_COMBINATIONS` combinations.

    Each step drops every other side of the dimension with the most sides.
    """
    while prod(len(axis.sides) for axis in axes) > _MOST_COMBINATIONS:
        d = max(range(len(axes)), key=lambda d: len(axes[d].sides))
        # From the end: the longest side is always kept.
        axes[d] = _Axis(axes[d].sides[::-1][::2][::-1], axes[d].scores[::-1][::2][::-1])
    return axes


@lru_cache(maxsize=4096)
def _free_sides(length: int) -> tuple[int, ...]:
    """Possible sides of a dimension that is not split.

    They are equal parts of the dimension, and the divisors of its halves, quarters and eighths.
    """
    sides = {-(-length // n) for n in range(1, min(length, 64) + 1)}
    sides.update(-(-length // (1 << k)) for k in range(length.bit_length() + 1))
    for split in (1, *_TENSOR_SPLITS):
        part = -(-length // split)
        sides.update(part // n for n in range(1, part * 256 // length + 1) if part % n == 0)
    return tuple(sorted(sides))


@lru_cache(maxsize=4096)
def divisors(n: int) -> tuple[int, ...]:
    """Divisors of n, ascending: all of them where n is below 2^32.

    For a larger number, prime factors above 2^16 stay together, and at most `_MOST_SIDES` divisors
    are kept, the largest among them.
    """
    primes, rest, numbers = _primes(), n, [1]
    for prime in primes[n % primes == 0].tolist():
        powers = [1]
        while rest % prime == 0:
            rest //= prime
            powers.append(powers[-1] * prime)
        numbers = _products(numbers, powers)
    return tuple(sorted(numbers if rest == 1 else _products(numbers, [1, rest])))


def _products(numbers: list[int], others: list[int]) -> list[int]:
    """All products, the largest first, thinned out to at most `_MOST_SIDES`.

    If there are more, only every second, fourth, … product is returned.
    """
    products = sorted((a * b for a in numbers for b in others), reverse=True)
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


def _worst(
    length: int, splits: Sequence[int], sides: tuple[int, ...], array: int
) -> NDArray[np.float64]:
    """Per side, the amplification of the worst part over all the splits.

    Args:
        length: length of the dimension.
        splits: numbers of parts; numbers above `length` are ignored.
        sides: sides of chunks.
        array: length of the consecutive arrays that store the dimension; a chunk at an array's end
            is padded.
    """
    side = np.array(sides, np.int64)[:, None]
    worst = np.ones(len(sides))
    for split in splits:
        if split > length:
            continue
        part = -(-length // split)
        # After 64 parts the pattern of borders repeats.
        start = np.arange(min(split, 64), dtype=np.int64) * part
        # A short last part has a high amplification that does not matter.
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
