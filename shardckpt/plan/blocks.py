"""What is copied or read at a time: boxes of chunks (*blocks*), cut where they are too large and batched where they are small.

What a process writes of a shard is a run of its chunks. Copied at once, the chunks should make a box: then the copy is one, and
where the box is whole rows of the shard it is one of contiguous memory. So a run is cut into boxes (`run_boxes`), its *blocks*.
Cutting them further can wait until they are written (`parts_of`). `batches` joins items that are handled together. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from operator import add, gt
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from shardckpt.layout.box import Box
from shardckpt.plan.chunks import padded_size
from shardckpt.plan.plan import count_chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import EllipsisType

    from shardckpt.plan.plan import Piece

Index: TypeAlias = "tuple[slice | EllipsisType, ...]"


@dataclass(frozen=True, slots=True)
class Block:
    """Chunks of one piece that make a box, which lies in one box that this process holds."""

    held: int
    """Which of the source's boxes."""
    corner: tuple[int, ...]
    """Where that box begins, in the tensor's indices."""
    piece: Piece
    box: Box
    """In the tensor's indices."""
    itemsize: int
    """Bytes of an element as it is stored."""

    @property
    def nbytes(self) -> int:
        """Of its elements."""
        return self.box.size * self.itemsize

    @property
    def padded_bytes(self) -> int:
        """Of its chunks as they are stored: those at the piece's edges are filled up."""
        return padded_size(self.box.shape, self.piece.chunks) * self.itemsize

    @property
    def chunk_bytes(self) -> int:
        """Of its largest chunk."""
        return min(self.nbytes, prod(self.piece.chunks) * self.itemsize)

    @property
    def inside(self) -> Index:
        """Where it is in the array of the held box."""
        return _index(self.box.start, self.box.stop, self.corner)


def blocks_of(
    held: int, corner: tuple[int, ...], piece: Piece, part: Box, run: range, itemsize: int, most: int | None = None
) -> Iterator[Block]:
    """The blocks of a run of chunks, in their order.

    Args:
        held: as in `Block`.
        corner: as in `Block`.
        piece: as in `Block`.
        part: of the tensor, a box of whole chunks.
        run: which of the chunks in it, counted in grid order.
        itemsize: as in `Block`.
        most: bytes of a block, where one chunk does not take more.
    """
    first = [(a - start) // side for a, start, side in zip(part.start, piece.start, piece.chunks, strict=True)]
    grid = tuple(-(-(b - start) // side) - a for a, b, start, side in zip(first, part.stop, piece.start, piece.chunks, strict=True))
    cells = len(run) if most is None else most // (prod(piece.chunks) * itemsize)
    for found in run_boxes(grid, run, max(1, cells)):
        start = [o + (f + a) * side for o, f, a, side in zip(piece.start, first, found.start, piece.chunks, strict=True)]
        stop = [o + (f + b) * side for o, f, b, side in zip(piece.start, first, found.stop, piece.chunks, strict=True)]
        # The last chunk of a dimension may reach beyond the piece.
        yield Block(held, corner, piece, Box(tuple(start), tuple(map(min, stop, part.stop))), itemsize)


def smaller(block: Block, most: int) -> Iterator[Block]:
    """The block, cut where it takes more than so many bytes."""
    if block.nbytes <= most:
        yield block
    else:
        yield from _cut(block, most)


def _cut(block: Block, most: int) -> Iterator[Block]:
    run = range(count_chunks(block.piece, block.box))
    return blocks_of(block.held, block.corner, block.piece, block.box, run, block.itemsize, most)


def parts_of(block: Block, most: int) -> Iterator[tuple[Box, Index]]:
    """The block, cut where its chunks take more than so many bytes, those at edges filled up.

    Boxes in the tensor's indices, and where each is in the block's array.
    """
    for part in _cut(block, most) if block.padded_bytes > most else (block,):
        yield part.box, _index(part.box.start, part.box.stop, block.box.start)


def _index(start: list[int] | tuple[int, ...], stop: list[int] | tuple[int, ...], corner: tuple[int, ...]) -> Index:
    """A box in an array that begins at the corner. The ellipsis keeps a 0-d array an array."""
    return (*(slice(a - o, b - o) for a, b, o in zip(start, stop, corner, strict=True)), ...)


def run_boxes(grid: tuple[int, ...], run: range, most: int) -> Iterator[Box]:
    """Boxes of cells that, one after another, are the run of cells.

    Where the run stands, take the largest box of whole rows (of cells, of rows of cells, …) that begins there, fits in what
    is left, and is not too large; go on after it. At most two boxes per dimension are not as large as they may be.

    Args:
        grid: cells per dimension.
        run: cells, counted in row-major order.
        most: cells of a box, at least 1.

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


T = TypeVar("T")


def batches(items: Iterable[T], costs: Callable[[T], tuple[int, ...]], limits: tuple[int, ...]) -> Iterator[list[T]]:
    """Consecutive items whose costs stay within all limits together, or a single item that does not.

    Args:
        items: In order; taken one by one, as batches are asked for.
        costs: What an item costs, one number per limit (bytes, say).
        limits: The most that a batch may cost.

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
