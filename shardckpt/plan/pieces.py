"""The pieces of a stored tensor, their chunks, and the chunks that a set of boxes needs. Pure.

A tensor is stored in pieces: usually one that covers it, and several where no common grid suits its
shards. Every piece has a regular grid of chunks.

For a set of boxes that one process needs, `overlaps` lists each (chunk, box) pair that has elements
in common, in closed form on the grid of a piece:

1. per box and dimension, the first and one past the last chunk that it touches;
2. all combinations of those, enumerated for all boxes at once (mixed radix over the ranges);
3. per pair, the common part, as positions inside the chunk and inside the box.

Cost and result are O(pairs); chunks are never compared with boxes one by one.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from operator import add, gt
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardckpt.errors import FormatError
from shardckpt.layout.box import Box, BoxArray
from shardckpt.layout.records import record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

T = TypeVar("T")
Ints = NDArray[np.int64]


@record
class Piece:
    """A box of a tensor that is stored as one zarr array."""

    path: str
    """Path of the array, relative to the attempt's arrays."""
    start: tuple[int, ...]
    """The tensor's index of the array's first element."""
    shape: tuple[int, ...]
    """The array's shape."""
    chunks: tuple[int, ...]
    """Shape of a chunk."""

    def __post_init__(self) -> None:
        """Refuse ranks that differ and sides that are not positive."""
        if not len(self.start) == len(self.shape) == len(self.chunks):
            raise FormatError(
                f"{self.path}: start {self.start}, shape {self.shape} and chunks {self.chunks} "
                "differ in rank."
            )
        if self.shape and min(*self.start, *self.shape, min(self.chunks) - 1) < 0:
            raise FormatError(
                f"{self.path}: start {self.start} and shape {self.shape} must be >= 0, chunks "
                f"{self.chunks} >= 1."
            )

    def with_path(self, path: str) -> Piece:
        """The same box as an array of another path."""
        other: Any = object.__new__(Piece)  # its numbers are checked already
        other.path = path
        other.start = self.start
        other.shape = self.shape
        other.chunks = self.chunks
        return other  # type: ignore[no-any-return]

    @property
    def box(self) -> Box:
        """The box of the tensor that the piece holds."""
        return Box(self.start, tuple(a + n for a, n in zip(self.start, self.shape, strict=True)))

    @property
    def grid(self) -> tuple[int, ...]:
        """Chunks per dimension."""
        return grid_shape(self.shape, self.chunks)

    @property
    def num_chunks(self) -> int:
        """Number of chunks: 1 for a scalar, 0 for an array of size zero."""
        return _grid_size(self.shape, self.chunks)


# --- chunks of pieces


_FORMS = 1 << 12
"""Most pairs of a shape and a chunk's shape whose grids are kept; a hundred thousand tensors have a
few dozen of them."""


@lru_cache(_FORMS)
def grid_shape(shape: tuple[int, ...], chunks: tuple[int, ...]) -> tuple[int, ...]:
    """Number of chunks per dimension.

    >>> grid_shape((10, 8), (3, 4))
    (4, 2)
    """
    return tuple(-(-n // c) for n, c in zip(shape, chunks, strict=True))


@lru_cache(_FORMS)
def _grid_size(shape: tuple[int, ...], chunks: tuple[int, ...]) -> int:
    return prod(grid_shape(shape, chunks))


def padded_size(shape: tuple[int, ...], chunks: tuple[int, ...]) -> int:
    """Number of elements of an array's chunks, including the padding at its edges.

    >>> padded_size((10, 8), (3, 4))
    96
    """
    return prod([-(-n // c) * c for n, c in zip(shape, chunks, strict=True)])


def whole_chunks(piece: Piece, box: Box) -> list[range]:
    """`chunk_spans` of a box whose overlap with the piece must be a union of its chunks.

    Raises:
        FormatError: a chunk crosses the border of the box, so it would have two writers.
    """
    spans = chunk_spans(piece, box)
    if all(spans):
        for span, start, n, side, a, b in zip(
            spans, piece.start, piece.shape, piece.chunks, box.start, box.stop, strict=True
        ):
            if start + span.start * side < a or start + min(span.stop * side, n) > b:
                raise FormatError(
                    f"{piece.path}: chunks of {piece.chunks} cross the border of the shard {box}; "
                    "a chunk must have one writer."
                )
    return spans


def count_chunks(piece: Piece, box: Box) -> int:
    """Number of chunks of `piece` that share elements with a box."""
    return prod(map(len, chunk_spans(piece, box)))


def chunk_spans(piece: Piece, box: Box) -> list[range]:
    """Per dimension, the grid positions of chunks that overlap a box; empty if there are none."""
    spans = []
    for start, n, chunk, a, b in zip(
        piece.start, piece.shape, piece.chunks, box.start, box.stop, strict=True
    ):
        first, last = max(a - start, 0), min(b - start, n)
        spans.append(range(first // chunk, -(-last // chunk)) if first < last else range(0))
    return spans


def chunk_boxes(piece: Piece, chunk: Ints) -> BoxArray:
    """The boxes of chunks, in the tensor's indices, cut off at the piece's edge."""
    start, shape, chunks = (np.array(v, np.int64) for v in (piece.start, piece.shape, piece.chunks))
    coords = coordinates(chunk, piece.grid)
    return BoxArray(start + coords * chunks, start + np.minimum((coords + 1) * chunks, shape))


def coordinates(chunk: Ints, grid: tuple[int, ...]) -> Ints:
    """Grid coordinates of row-major positions."""
    coords = np.empty((len(chunk), len(grid)), np.int64)
    for d in reversed(range(len(grid))):
        coords[:, d] = chunk % max(grid[d], 1)
        chunk = chunk // max(grid[d], 1)
    return coords


# --- chunks that boxes need


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
    """All pairs of a chunk of `piece` and a box of `boxes` that share elements.

    The boxes are in the tensor's indices.
    """
    return overlaps_of([piece], boxes, np.zeros(len(boxes), np.int64))


def overlaps_of(pieces: Sequence[Piece], boxes: BoxArray, owner: Ints) -> Overlaps:
    """`overlaps` for many pieces at once; each box belongs to one piece.

    Args:
        pieces: pieces of any tensors.
        boxes: boxes in the indices of their tensors. A box with fewer dimensions than others is
            extended by leading dimensions from 0 to 1.
        owner: (n,) the piece of each box.

    Returns:
        The pairs, ordered by piece and chunk; a pair's piece is the `owner` of its box.
    """
    ndim = boxes.start.shape[1]
    start, shape, chunks = (
        np.array(
            [row if len(row) == ndim else (fill,) * (ndim - len(row)) + row for row in rows],
            np.int64,
        ).reshape(len(pieces), ndim)
        for rows, fill in (
            ([p.start for p in pieces], 0),
            ([p.shape for p in pieces], 1),
            ([p.chunks for p in pieces], 1),
        )
    )
    grid = -(-shape // chunks)
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
    """Runs of consecutive chunks in grid order that together are the chunks of `overlaps`.

    O(runs), however long they are.

    Returns:
        (n,) first chunk and end (exclusive) of each run, by box; runs of different boxes may share
        chunks.
    """
    start, shape, chunks, grid = (
        np.array(v, np.int64) for v in (piece.start, piece.shape, piece.chunks, piece.grid)
    )
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

    A tensor may have thousands of pieces, and `overlaps` of each would take longer than reading the
    few relevant ones.
    """
    return (
        list(pieces)
        if len(pieces) == 1
        else [pieces[k] for k in np.unique(touching(pieces, boxes)[0]).tolist()]
    )


def touching(pieces: Sequence[Piece], boxes: BoxArray) -> tuple[Ints, Ints]:
    """(n,) pieces and (n,) boxes that may overlap; a single piece is paired with every box."""
    n, m, ndim = len(pieces), len(boxes), boxes.start.shape[1]
    if n == 1 or ndim == 0:
        return np.tile(np.arange(n), m), np.repeat(np.arange(m), n)
    held = BoxArray.of([piece.box for piece in pieces], ndim)
    # Each box is compared with the pieces near it in one dimension, where these are fewest.
    order = np.argsort(held.start, axis=0, kind="stable")
    starts = np.take_along_axis(held.start, order, axis=0)
    ends = np.maximum.accumulate(np.take_along_axis(held.stop, order, axis=0), axis=0)
    low, high = np.empty((2, ndim, m), np.int64)
    for d in range(ndim):
        low[d] = np.searchsorted(ends[:, d], boxes.start[:, d], "right")
        high[d] = np.searchsorted(starts[:, d], boxes.stop[:, d], "left")
    near = []
    for i, d in enumerate(np.argmin(high - low, axis=0).tolist()):
        which = np.sort(order[low[d, i] : high[d, i], d])
        candidates = BoxArray(held.start[which], held.stop[which])
        near.append(which[candidates.overlapping(boxes[i])])
    return np.concatenate([*near, np.empty(0, np.int64)]), np.repeat(
        np.arange(m), [len(of_box) for of_box in near]
    )


def _enumerate(low: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """All coordinates of n grids of `counts` (n, ndim), concatenated, and the grid of each row."""
    ndim = low.shape[1]
    sizes = np.prod(counts, axis=1, dtype=np.int64)
    owner = np.repeat(np.arange(len(low), dtype=np.int64), sizes)
    within = np.arange(int(sizes.sum()), dtype=np.int64) - np.repeat(
        np.cumsum(sizes) - sizes, sizes
    )
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


# --- pieces of a tensor


def coverage_gap(shape: tuple[int, ...], pieces: Sequence[Piece]) -> str | None:
    """The reason why `pieces` do not hold every element of a tensor exactly once; None if they do.

    Only the final test for overlaps between pieces is random; all other tests are exact.
    """
    if len(pieces) == 1 and pieces[0].shape == shape and not any(pieces[0].start):
        return None  # true of nearly all tensors
    whole = Box.full(shape)
    boxes = [p.box for p in pieces]
    outside = [p.path for p, box in zip(pieces, boxes, strict=True) if not whole.contains(box)]
    if outside:
        return f"piece {outside[0]} lies outside the shape {shape}"
    held = sum(box.size for box in boxes)
    if held != whole.size:
        return f"the pieces hold {held} elements of {whole.size}"
    if len(pieces) > 1 and not _same_elements(whole, boxes):
        return "two pieces hold the same elements"
    return None


_PRIME = (1 << 127) - 1


def _same_elements(whole: Box, parts: Sequence[Box]) -> bool:
    """Whether `parts` hold each element of `whole` exactly once, and no others.

    Linear in the number of parts.

    Let the element i stand for the monomial x0^i0 · x1^i1 · … and a box for the sum of its
    elements, which is the product over d of (xd^start - xd^stop) / (1 - xd). Two collections of
    boxes hold the same elements equally often if and only if these polynomials are equal. They are
    compared at a random point modulo a prime, where different polynomials of degree below 2^63
    agree with a probability of at most 2^-64 (Schwartz and Zippel). Comparing boxes with each other
    would take minutes for a malicious record of a few megabytes.
    """
    point = [2 + secrets.randbelow(_PRIME - 2) for _ in range(whole.ndim)]

    @cache
    def power(d: int, i: int) -> int:
        return pow(point[d], i, _PRIME)

    def value(box: Box) -> int:
        product = 1
        for d, (a, b) in enumerate(zip(box.start, box.stop, strict=True)):
            product = product * (power(d, a) - power(d, b)) % _PRIME
        return product

    return (sum(map(value, parts)) - value(whole)) % _PRIME == 0


# --- batches


def large_parts(shape: Sequence[int], nbytes: int, most: int) -> Iterator[tuple[slice, ...]]:
    """Cut an array of more than `most` bytes along its first dimension that is longer than one.

    Yield indices of the parts.

    A part has more than `most` bytes if one index along that dimension has.

    >>> [part[1].start for part in large_parts((1, 5, 8), 5 * 8, 16)]
    [0, 2, 4]
    """
    axis = next(d for d, side in enumerate(shape) if side > 1)
    side = max(1, shape[axis] * most // nbytes)
    for begin in range(0, shape[axis], side):
        yield (*(slice(None),) * axis, slice(begin, begin + side))


def batches(
    items: Iterable[T], costs: Callable[[T], tuple[int, ...]], limits: tuple[int, ...]
) -> Iterator[list[T]]:
    """Group consecutive items so that each group stays within all limits.

    A single item may exceed them.

    Args:
        items: Items in order; consumed one by one, as batches are requested.
        costs: Cost of an item, one number per limit (bytes, say).
        limits: Maximum costs of a batch.

    >>> list(batches([3, 4, 9, 1, 1, 1], lambda n: (n, 1), (8, 2)))
    [[3, 4], [9], [1, 1], [1]]
    """
    batch: list[T] = []
    if len(limits) == 1:  # the same with one number, in a third of the time
        (limit,), total = limits, 0
        for item in items:
            (only,) = costs(item)
            total += only
            if total > limit and batch:
                yield batch
                batch, total = [], only
            batch.append(item)
        if batch:
            yield batch
        return
    spent: tuple[int, ...] = (0,) * len(limits)
    for item in items:
        cost = costs(item)
        assert len(cost) == len(limits), "a cost is one number per limit"
        spent = tuple(map(add, spent, cost))
        if batch and any(map(gt, spent, limits)):
            yield batch
            batch, spent = [], cost
        batch.append(item)
    if batch:
        yield batch
