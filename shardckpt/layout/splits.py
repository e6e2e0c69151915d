"""Nested splits of one tensor dimension, and the resulting intervals and boxes.

Each split cuts its input as `torch.chunk` does, into parts of ceil(length / parts), the last ones
short or empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.layout.box import BoxArray

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DimSplit:
    """One split of a tensor dimension."""

    parts: int
    """Number of parts."""
    axis: int | None
    """The mesh dimension along which each rank holds one part; None: every rank holds all of
    them."""


def without_idle(splits: list[DimSplit]) -> tuple[DimSplit, ...]:
    """The splits except those whose parts all ranks hold completely and nothing splits further.

    The parts of such a split are adjacent.
    """
    last = max(
        (i for i, split in enumerate(splits) if split.axis is not None and split.parts > 1),
        default=-1,
    )
    return tuple(split for i, split in enumerate(splits) if split.axis is not None or i < last)


def cut(length: int, splits: Sequence[DimSplit], chosen: Sequence[Index]) -> tuple[Index, Index]:
    """Start and size of nested parts.

    Args:
        length: length of the dimension.
        splits: the splits, outermost first.
        chosen: per split, the number of the part; arrays that broadcast together.
    """
    start, size = np.zeros(1, np.int64), np.full(1, length, np.int64)
    for split, part in zip(splits, chosen, strict=True):
        chunk = -(-size // split.parts)
        offset = np.minimum(part * chunk, size)
        start, size = start + offset, np.minimum(chunk, size - offset)
    return start, size


def cuts(length: int, splits: Sequence[DimSplit]) -> Index:
    """The starts of the non-empty parts, and the end of the last."""
    start, size = cut(length, splits, np.ix_(*(np.arange(split.parts) for split in splits)))
    return np.append(start[size > 0], length)


def cuts_once(length: int, splits: Sequence[DimSplit]) -> bool:
    """Whether the nested splits give the same cuts as one split into all their parts."""
    parts = prod(split.parts for split in splits)
    if any(split.axis is None for split in splits):
        return False
    if length % parts == 0 or len(splits) == 1:
        return True
    _, size = cut(length, splits, np.ix_(*(np.arange(split.parts) for split in splits)))
    _, once = cut(length, [DimSplit(parts, None)], [np.arange(parts)])
    return bool(np.array_equal(size.reshape(-1), once))


def intervals(length: int, splits: Sequence[DimSplit], coordinates: Index) -> tuple[Index, Index]:
    """Start and size of the intervals of a dimension at some mesh positions.

    Args:
        length: length of the dimension.
        splits: splits of the dimension.
        coordinates: (n, axes of the mesh) the positions.

    Returns:
        Two arrays of shape (n, k): k intervals for each position, ascending.
    """
    all_parts = [split.parts for split in splits if split.axis is None]
    chosen, seen = [], 0
    for split in splits:
        if split.axis is None:
            seen += 1
            chosen.append(np.arange(split.parts).reshape(-1, *[1] * (len(all_parts) - seen)))
        else:
            chosen.append(coordinates[:, split.axis].reshape(-1, *[1] * len(all_parts)))
    n, k = len(coordinates), prod(all_parts)
    start, size = (
        np.broadcast_to(a, (n, *all_parts)).reshape(n, k) for a in cut(length, splits, chosen)
    )
    return start, size


def grid_boxes(n: int, starts: Sequence[Index], sizes: Sequence[Index]) -> BoxArray:
    """All combinations of intervals of n grids, one grid after the other, row-major.

    Args:
        n: number of grids.
        starts: per dimension (n, k), first indices of k intervals.
        sizes: per dimension (n, k), sizes of the k intervals.
    """
    counts = [start.shape[1] for start in starts]
    corners = np.empty((2, n, *counts, len(counts)), np.int64)
    for d, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        for corner, bound in zip(corners, (start, start + size), strict=True):
            corner[..., d] = bound.reshape(n, *[1] * d, counts[d], *[1] * (len(counts) - d - 1))
    return BoxArray(*corners.reshape(2, n * prod(counts), len(counts)))


def without_empty(boxes: BoxArray) -> BoxArray:
    """The boxes that have elements."""
    kept = boxes.sizes() > 0
    return BoxArray(boxes.start[kept], boxes.stop[kept])
