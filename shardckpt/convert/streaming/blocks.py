"""In blocks of which shape is a tensor stored where blocks are read whole, one by one?

Who loads it again has his own layout, most often the one that the tensor was saved in. So a block is a shard of that; where shards
are small several, side by side, and where one is too large some of its rows, or planes.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.layout.placements import Placements

if TYPE_CHECKING:
    from shardckpt.format.structure import StoredLayout, TensorRecord

__all__ = ["block_shape"]

SMALLEST = 4 << 20
"""Bytes to which shards are joined: below, a block costs more than its bytes."""
LARGEST = 32 << 20
"""Bytes above which a shard is cut."""


def block_shape(tensor: TensorRecord, room: int) -> tuple[int, ...]:
    """The shape of a block; those at the end of a dimension may be cut off.

    Args:
        tensor: its shape and layout, and the dtype in which it is written.
        room: bytes in which several blocks have to fit.

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
    """The shape of the largest shard of a tensor; the tensor's own where it was not cut."""
    if layout is None or prod(shape) == 0:
        return shape
    if isinstance(layout, Placements):
        return tuple(int(np.diff(cuts).max()) for cuts in layout.cuts(shape))
    return layout.tile(shape)


def _part(side: int, most: int) -> int:
    """A side of at most that many elements that divides another one, unless it would be much smaller."""
    return next((part for part in range(most, most // 2, -1) if side % part == 0), most)
