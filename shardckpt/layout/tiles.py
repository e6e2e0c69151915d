"""A tensor as the grid of tiles that a layout cuts it into, for drawings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.layout.device_boxes import tile_shape
from shardckpt.text import index_range

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardckpt.layout.sharding import Layout

Bins = list[tuple[int, int]]
"""Half-open ranges of tiles along one dimension; each range is drawn as one cell."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """A tensor's tiles and the devices that hold them."""

    shape: tuple[int, ...]
    tile: tuple[int, ...]
    """Shape of a complete tile."""
    used: tuple[int, ...]
    """Number of tiles with elements, per dimension."""
    devices: NDArray[np.int64]
    """(*parts, replicas) device ids, ascending within a tile."""

    @property
    def cut(self) -> list[int]:
        """The dimensions with more than one tile."""
        return [d for d, parts in enumerate(self.devices.shape[:-1]) if parts > 1]

    def extent(self, d: int, tiles: tuple[int, int]) -> str:
        """The index range of some tiles of a dimension."""
        return index_range(tiles[0] * self.tile[d], min(tiles[1] * self.tile[d], self.shape[d]))


def tiles_of(layout: Layout, shape: tuple[int, ...]) -> Tiles:
    """The tiles of a tensor with a given shape.

    Raises:
        ShardingError: the layout does not fit the shape, or does not determine where data is.
    """
    tiling = layout.tiling(len(shape))
    tile = tile_shape(shape, tiling.parts)
    order = np.argsort(tiling.tile_ids, kind="stable")
    devices = tiling.device_ids[order].reshape(*tiling.parts, -1)
    used = tuple(-(-n // max(side, 1)) for n, side in zip(shape, tile, strict=True))
    return Tiles(shape, tile, used, devices)


def bins(extent: int, most: int) -> Bins:
    """Ranges of one tile each if they are few enough; else the middle tiles share one range.

    >>> bins(3, 4), bins(9, 4)
    ([(0, 1), (1, 2), (2, 3)], [(0, 1), (1, 2), (2, 8), (8, 9)])
    """
    if extent <= most:
        return [(i, i + 1) for i in range(extent)]
    after = (most - 1) // 2
    before = most - 1 - after
    return [
        *((i, i + 1) for i in range(before)),
        (before, extent - after),
        *((i, i + 1) for i in range(extent - after, extent)),
    ]
