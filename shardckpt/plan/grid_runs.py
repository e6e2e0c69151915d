"""A run of cells of a grid, in row-major order, as boxes.

What one process writes of a shard is a run of its chunks. Copied at once, the chunks should make a box: then the copy
is one, and where the box is whole rows of the shard it is one of contiguous memory.

Where the run stands, take the largest box of whole rows (of cells, of rows of cells, …) that begins there, fits in what
is left, and is not too large; go on after it. At most two boxes per dimension are not as large as they may be.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from shardckpt.layout.box import Box

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["run_boxes"]


def run_boxes(grid: tuple[int, ...], run: range, most: int) -> Iterator[Box]:
    """Boxes of cells that, one after another, are the run.

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
