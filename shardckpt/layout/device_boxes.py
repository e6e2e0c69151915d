"""The box of a tensor that every device holds, and the number of its replica.

1. A `Tiling` holds everything that does not depend on the tensor's size: every device's tile
   coordinate. It is computed once per layout and rank, and cached by the layouts.
2. A tile is ceil(dim / parts) long in every dimension, as in XLA. Every shard has that (padded)
   size on its device; the box is the part of it that lies inside the tensor. A shard outside the
   tensor is the empty box at the end: 10 rows over 8 are 2, 2, 2, 2, 2, 0, 0, 0.
3. Replicas are the devices with the same tile, numbered by ascending device id. This is torch_xla's
   rule in one sentence: 0 for tiled; the position in the last tile dimension for partial (XLA keeps
   it sorted by id); the global ordinal for replicated. For ids that are not 0…N-1, the ordinal is
   the rank among them.

Devices are always in ascending order of their ids, so that `np.searchsorted` finds one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardckpt.errors import ShardingError
from shardckpt.layout.box import BoxArray
from shardckpt.layout.mesh import MAX_AXES, checked_sizes

if TYPE_CHECKING:
    from collections.abc import Sequence

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DeviceBoxes:
    """The box of every device, for one tensor shape and one layout."""

    device_ids: Index
    """(n,) int64, ascending."""
    boxes: BoxArray
    """(n, ndim), clamped to the tensor; a shard outside the tensor is empty: `start == stop ==
    dim`."""
    tile: tuple[int, ...]
    """The padded shape of every shard, ceil(dim / parts)."""
    replica_id: Index
    """(n,) int64: 0 for exactly one device of every tile."""
    parts: tuple[int, ...]
    """Tiles per dimension."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """The tile of every device, for tensors of one rank and any size."""

    device_ids: Index
    """(n,) int64, ascending."""
    parts: tuple[int, ...]
    """Tiles per dimension."""
    tile_ids: Index
    """(n,) int64 row-major number of the tile."""
    replica_id: Index
    """(n,) int64: rank by device id among the devices with the same tile."""

    @classmethod
    def of(cls, device_ids: Index, tile_ids: Index, parts: tuple[int, ...]) -> Tiling:
        """Build from the row-major number of every device's tile.

        Args:
            device_ids: (n,) ids in any order.
            tile_ids: (n,) row-major tile numbers below prod(parts), in the order of `device_ids`.
            parts: Tiles per dimension.
        """
        if not (device_ids[1:] > device_ids[:-1]).all():
            order = np.argsort(device_ids)
            device_ids, tile_ids = device_ids[order], tile_ids[order]
        tiling = cls(device_ids, parts, tile_ids, _ranks(tile_ids, prod(parts)))
        for array in (tiling.device_ids, tiling.tile_ids, tiling.replica_id):
            array.setflags(write=False)  # shared through a cache
        return tiling

    def device_boxes(
        self, shape: Sequence[int], device_ids: ArrayLike | None = None
    ) -> DeviceBoxes:
        """The boxes of all devices, or of some, in a tensor of that shape.

        Args:
            shape: Shape of the tensor in elements; its rank must be the tiling's.
            device_ids: Restrict to these devices, in any order (the result is ascending); the cost
                depends on their number alone.

        Raises:
            ShardingError: The rank differs, or a device is not in the layout.
        """
        shape = checked_tensor_shape(shape)
        tile = tile_shape(shape, self.parts)
        ids, tiles, replicas = self.device_ids, self.tile_ids, self.replica_id
        if device_ids is not None:
            rows = self._rows(np.unique(integer_ids(device_ids)).astype(np.int64, copy=False))
            ids, tiles, replicas = ids[rows], tiles[rows], replicas[rows]
        end = np.array(shape, np.int64)
        start = tile_coords(tiles, self.parts) * np.array(tile, np.int64)
        stop = np.minimum(start + np.array(tile, np.int64), end)
        return DeviceBoxes(ids, BoxArray(np.minimum(start, end), stop), tile, replicas, self.parts)

    def _rows(self, ids: Index) -> Index:
        rows = np.minimum(np.searchsorted(self.device_ids, ids), len(self.device_ids) - 1)
        strangers = ids[self.device_ids[rows] != ids]
        if len(strangers):
            raise ShardingError(
                f"Device {strangers[0]} is not among the {len(self.device_ids)} devices of this "
                "layout; ask for those only."
            )
        return rows.astype(np.int64)


def integer_ids(device_ids: object) -> NDArray[np.integer]:
    """Device ids as an array of integers of any kind and shape.

    Raises:
        ShardingError: The ids are not integers.
    """
    try:
        ids = np.asarray(device_ids)
    except ValueError as error:
        raise ShardingError(f"Device ids must be integers, found {error}.") from error
    if ids.size and not np.issubdtype(ids.dtype, np.integer):
        raise ShardingError(f"Device ids must be integers, found an array of {ids.dtype}.")
    return ids


def tile_coords(tile_ids: Index, parts: tuple[int, ...]) -> Index:
    """(n, ndim) coordinates of tiles with some row-major numbers; 0 <= coords[i, d] < parts[d].

    >>> tile_coords(np.array([0, 5]), (3, 2)).tolist()
    [[0, 0], [2, 1]]
    """
    coords = np.zeros((len(tile_ids), len(parts)), np.int64)
    rest = tile_ids
    for d in reversed(range(len(parts))):
        if parts[d] > 1:
            rest, coords[:, d] = np.divmod(rest, parts[d])
    return coords


def tile_shape(shape: tuple[int, ...], parts: tuple[int, ...]) -> tuple[int, ...]:
    """The padded shape of every shard: ceil(dim / parts), XLA's rule.

    Raises:
        ShardingError: The ranks differ.

    >>> tile_shape((10, 7), (4, 2))
    (3, 4)
    """
    if len(shape) != len(parts):
        raise ShardingError(
            f"A tensor of shape {shape} has {len(shape)} dimensions and the layout cuts "
            f"{len(parts)}: {parts}."
        )
    return tuple(-(-dim // part) for dim, part in zip(shape, parts, strict=True))


def checked_tensor_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """A tensor's shape as a tuple of ints.

    Raises:
        ShardingError: A dimension is negative, not an integer, or too long for int64, or there are
            more than 32 dimensions.
    """
    checked = checked_sizes(shape, "Tensor shape", least=0)
    if len(checked) > MAX_AXES:
        raise ShardingError(
            f"Tensor shape: {len(checked)} dimensions; at most {MAX_AXES} can be stored."
        )
    return checked


def _ranks(tile_ids: Index, num_tiles: int) -> Index:
    """The rank of every entry among the equal ones, in order of appearance."""
    n = len(tile_ids)
    if num_tiles == 1:
        return np.arange(n, dtype=np.int64)
    if num_tiles == n:  # every layout gives all tiles equally many devices
        return np.zeros(n, np.int64)
    ranks = np.empty(n, np.int64)
    ranks[np.argsort(tile_ids, kind="stable")] = np.tile(np.arange(n // num_tiles), num_tiles)
    return ranks
