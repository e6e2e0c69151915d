"""The pieces of a stored tensor, their chunks, and the boxes of chunks that are copied at a time.

A tensor is stored in pieces: usually one that covers it, and several where no common grid suits its shards. Every piece has a
regular grid of chunks.

A process writes a run of a shard's chunks. The chunks that are copied at once should form a box: then one copy is enough, and if
the box is complete rows of the shard, the copy is contiguous in memory. So a run is cut into boxes (`run_boxes`), its *blocks*.
Blocks can be cut further when they are written (`parts_of`). `batches` groups items that are handled together. Pure.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from functools import cache
from math import prod
from operator import add, gt
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardckpt.errors import FormatError
from shardckpt.layout.box import Box, BoxArray

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import EllipsisType

T = TypeVar("T")
Ints = NDArray[np.int64]
Index: TypeAlias = "tuple[slice | EllipsisType, ...]"


@dataclass(frozen=True, slots=True)
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
            raise FormatError(f"{self.path}: start {self.start}, shape {self.shape} and chunks {self.chunks} differ in rank.")
        if self.shape and min(*self.start, *self.shape, min(self.chunks) - 1) < 0:
            raise FormatError(f"{self.path}: start {self.start} and shape {self.shape} must be >= 0, chunks {self.chunks} >= 1.")

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
        return prod(self.grid)


# --- chunks of pieces


def grid_shape(shape: tuple[int, ...], chunks: tuple[int, ...]) -> tuple[int, ...]:
    """Number of chunks per dimension.

    >>> grid_shape((10, 8), (3, 4))
    (4, 2)
    """
    return tuple(-(-n // c) for n, c in zip(shape, chunks, strict=True))


def padded_size(shape: tuple[int, ...], chunks: tuple[int, ...]) -> int:
    """Number of elements of an array's chunks, including the padding at its edges.

    >>> padded_size((10, 8), (3, 4))
    96
    """
    return prod([-(-n // c) * c for n, c in zip(shape, chunks, strict=True)])


def whole_chunks(piece: Piece, box: Box) -> list[range]:
    """`chunk_spans` of a box whose overlap with the piece must be a union of its chunks.

    Raises:
        FormatError: as for `chunks_inside`.
    """
    spans = chunk_spans(piece, box)
    if all(spans):
        for span, start, n, side, a, b in zip(spans, piece.start, piece.shape, piece.chunks, box.start, box.stop, strict=True):
            if start + span.start * side < a or start + min(span.stop * side, n) > b:
                raise FormatError(
                    f"{piece.path}: chunks of {piece.chunks} cross the border of the shard {box}; a chunk must have one writer."
                )
    return spans


def count_chunks(piece: Piece, box: Box) -> int:
    """Number of chunks of `piece` that share elements with a box."""
    return prod(map(len, chunk_spans(piece, box)))


def chunk_spans(piece: Piece, box: Box) -> list[range]:
    """Per dimension, the grid positions of chunks that overlap a box; empty if there are none."""
    spans = []
    for start, n, chunk, a, b in zip(piece.start, piece.shape, piece.chunks, box.start, box.stop, strict=True):
        first, last = max(a - start, 0), min(b - start, n)
        spans.append(range(first // chunk, -(-last // chunk)) if first < last else range(0))
    return spans


def chunk_boxes(piece: Piece, chunk: Ints) -> BoxArray:
    """The boxes of chunks, in the tensor's indices, cut off at the piece's edge."""
    start, shape, chunks = (np.array(v, np.int64) for v in (piece.start, piece.shape, piece.chunks))
    coords = coordinates(chunk, piece.grid)
    return BoxArray(start + coords * chunks, start + np.minimum((coords + 1) * chunks, shape))


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
    """Whether `parts` hold each element of `whole` exactly once, and no others; linear in the number of parts.

    Let the element i stand for the monomial x0^i0 · x1^i1 · … and a box for the sum of its elements, which is the
    product over d of (xd^start - xd^stop) / (1 - xd). Two collections of boxes hold the same elements equally often
    if and only if these polynomials are equal. They are compared at a random point modulo a prime, where different polynomials
    of degree below 2^63 agree with a probability of at most 2^-64 (Schwartz and Zippel). Comparing boxes with
    each other would take minutes for a malicious record of a few megabytes.
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


def coordinates(chunk: Ints, grid: tuple[int, ...]) -> Ints:
    """Grid coordinates of row-major positions."""
    coords = np.empty((len(chunk), len(grid)), np.int64)
    for d in reversed(range(len(grid))):
        coords[:, d] = chunk % max(grid[d], 1)
        chunk = chunk // max(grid[d], 1)
    return coords


# --- blocks of chunks


@dataclass(frozen=True, slots=True)
class Block:
    """Chunks of one piece that form a box inside one box held by this process."""

    held: int
    """Index of the held box among the source's boxes."""
    corner: tuple[int, ...]
    """First index of the held box, in the tensor's indices."""
    piece: Piece
    box: Box
    """The chunks' box, in the tensor's indices."""
    itemsize: int
    """Stored bytes of an element."""

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.box.size * self.itemsize

    @property
    def padded_bytes(self) -> int:
        """Stored bytes of its chunks, including the padding at the piece's edges."""
        return padded_size(self.box.shape, self.piece.chunks) * self.itemsize

    @property
    def chunk_bytes(self) -> int:
        """Bytes of its largest chunk."""
        return min(self.nbytes, prod(self.piece.chunks) * self.itemsize)

    @property
    def inside(self) -> Index:
        """Index of the block in the array of the held box."""
        return _index(self.box.start, self.box.stop, self.corner)


def blocks_of(
    held: int, corner: tuple[int, ...], piece: Piece, part: Box, run: range, itemsize: int, most: int | None = None
) -> Iterator[Block]:
    """Yield the blocks of a run of chunks, in order.

    Args:
        held: as in `Block`.
        corner: as in `Block`.
        piece: as in `Block`.
        part: a part of the tensor, a box of complete chunks.
        run: range of the chunks in it, counted in grid order.
        itemsize: as in `Block`.
        most: maximum bytes of a block, unless a single chunk is larger.
    """
    first = [(a - start) // side for a, start, side in zip(part.start, piece.start, piece.chunks, strict=True)]
    grid = tuple(-(-(b - start) // side) - a for a, b, start, side in zip(first, part.stop, piece.start, piece.chunks, strict=True))
    cells = len(run) if most is None else most // (prod(piece.chunks) * itemsize)
    for found in run_boxes(grid, run, max(1, cells)):
        start = [o + (f + a) * side for o, f, a, side in zip(piece.start, first, found.start, piece.chunks, strict=True)]
        stop = [o + (f + b) * side for o, f, b, side in zip(piece.start, first, found.stop, piece.chunks, strict=True)]
        # The last chunk of a dimension may extend beyond the piece.
        yield Block(held, corner, piece, Box(tuple(start), tuple(map(min, stop, part.stop))), itemsize)


def smaller(block: Block, most: int) -> Iterator[Block]:
    """Yield the block, cut into blocks of at most `most` bytes."""
    if block.nbytes <= most:
        yield block
    else:
        yield from _cut(block, most)


def _cut(block: Block, most: int) -> Iterator[Block]:
    run = range(count_chunks(block.piece, block.box))
    return blocks_of(block.held, block.corner, block.piece, block.box, run, block.itemsize, most)


def parts_of(block: Block, most: int) -> Iterator[tuple[Box, Index]]:
    """Yield the parts of a block whose chunks, including padding at edges, have at most `most` bytes.

    Each item is a box in the tensor's indices and its index in the block's array.
    """
    for part in _cut(block, most) if block.padded_bytes > most else (block,):
        yield part.box, _index(part.box.start, part.box.stop, block.box.start)


def _index(start: list[int] | tuple[int, ...], stop: list[int] | tuple[int, ...], corner: tuple[int, ...]) -> Index:
    """The index of a box in an array that begins at `corner`. The ellipsis keeps a 0-d array an array."""
    return (*(slice(a - o, b - o) for a, b, o in zip(start, stop, corner, strict=True)), ...)


def run_boxes(grid: tuple[int, ...], run: range, most: int) -> Iterator[Box]:
    """Divide a run of cells into consecutive boxes of cells.

    From the current position, choose the largest box of complete rows (of cells, of rows of cells, …) that begins there, fits in
    the rest of the run, and is not too large; continue after it. At most two boxes per dimension are smaller than the limit allows.

    Args:
        grid: cells per dimension.
        run: cells, counted in row-major order.
        most: maximum cells of a box, at least 1.

    >>> [(box.start, box.stop) for box in run_boxes((3, 4), range(2, 12), 100)]
    [((0, 2), (1, 4)), ((1, 0), (3, 4))]
    """
    inner = [prod(grid[d + 1 :]) for d in range(len(grid))]
    at = run.start
    while at < run.stop:
        room = min(run.stop - at, most)
        corner, sides = [], [1] * len(grid)
        rest = at
        for size in inner:
            corner.append(rest // size)
            rest %= size
        for d, size in enumerate(inner):
            if at % size == 0 and size <= room:
                sides[d] = min(grid[d] - corner[d], room // size)
                sides[d + 1 :] = grid[d + 1 :]
                break
        yield Box(tuple(corner), tuple(a + n for a, n in zip(corner, sides, strict=True)))
        at += prod(sides)


def batches(items: Iterable[T], costs: Callable[[T], tuple[int, ...]], limits: tuple[int, ...]) -> Iterator[list[T]]:
    """Group consecutive items so that each group stays within all limits; a single item may exceed them.

    Args:
        items: Items in order; consumed one by one, as batches are requested.
        costs: Cost of an item, one number per limit (bytes, say).
        limits: Maximum costs of a batch.

    >>> list(batches([3, 4, 9, 1, 1, 1], lambda n: (n, 1), (8, 2)))
    [[3, 4], [9], [1, 1], [1]]
    """
    batch: list[T] = []
    spent: tuple[int, ...] = ()
    for item in items:
        cost = costs(item)
        total = tuple(map(add, spent, cost)) if batch else cost
        if batch and any(map(gt, total, limits)):
            yield batch
            batch, total = [], cost
        batch.append(item)
        spent = total
    if batch:
        yield batch
