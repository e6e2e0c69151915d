"""Shapes of blocks in files that are read block by block.

A reader has its own layout, most often the one that the tensor was saved in. So a block is a shard of the recorded layout, or several
adjacent shards if they are small, or some rows or planes of a shard if it is too large.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.layout.placements import Placements

if TYPE_CHECKING:
    from shardckpt.format.structure import StoredLayout, TensorRecord

SMALLEST = 4 << 20
"""Bytes to which shards are joined: a smaller block costs more than its bytes."""
LARGEST = 32 << 20
"""Bytes above which a shard is cut."""


def block_shape(tensor: TensorRecord, room: int) -> tuple[int, ...]:
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
            sides[d] = _part(sides[d], max(1, largest // others))
    return tuple(sides)


def _shard(layout: StoredLayout | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the largest shard of a tensor; the tensor's own shape without a layout."""
    if layout is None or prod(shape) == 0:
        return shape
    if isinstance(layout, Placements):
        return tuple(int(np.diff(cuts).max()) for cuts in layout.cuts(shape))
    return layout.tile(shape)


def _part(side: int, most: int) -> int:
    """The largest divisor of a side up to `most`; `most` itself if the divisor would be at most half of it."""
    return next((part for part in range(most, most // 2, -1) if side % part == 0), most)
