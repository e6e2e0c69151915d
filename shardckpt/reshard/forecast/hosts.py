"""Groups of devices that form hosts.

A layout knows devices, but hosts read storage. No checkpoint records which devices belonged to one
host. So ids are assigned to hosts in ascending order, a fixed number to each, which is how runtimes
number them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.errors import OptionError, ShardingError
from shardckpt.layout.placements import Placements
from shardckpt.layout.sharding import Sharding
from shardckpt.layout.world import DeviceOwners

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from shardckpt.format.structure import StoredLayout

    Ints = NDArray[np.int64]

DEVICES_PER_HOST = 8
"""Default number of devices per host."""
MOST_BINS = 64
"""Rows and columns of a heat map that remain distinguishable."""


@dataclass(frozen=True, slots=True, eq=False)
class Hosts:
    """A number of hosts, and the host of each device."""

    number: int
    owners: DeviceOwners

    @classmethod
    def of(
        cls,
        layouts: Iterable[tuple[StoredLayout | None, int]],
        *,
        devices_per_host: int | None = None,
        number: int | None = None,
    ) -> Hosts:
        """The hosts of all devices of some layouts.

        Args:
            layouts: layouts of tensors, each with the tensor's rank; None entries are ignored.
            devices_per_host: devices of each host; the last host may have fewer.
            number: number of hosts, instead of `devices_per_host`; hosts may have no devices.

        Raises:
            OptionError: `devices_per_host` is not positive.
        """
        # Tensors share a mesh, or at least a layout.
        distinct = {
            layout.mesh if isinstance(layout, Sharding | Placements) else (layout, ndim): (
                layout,
                ndim,
            )
            for layout, ndim in layouts
            if layout is not None
        }
        ids = [
            layout.mesh.device_ids
            if isinstance(layout, Sharding | Placements)
            else layout.tiling(ndim).device_ids
            for layout, ndim in distinct.values()
        ]
        devices = np.unique(np.concatenate(ids)) if ids else np.zeros(1, np.int64)
        each = devices_per_host if number is None else max(1, -(-len(devices) // max(number, 1)))
        if each is None or each < 1:
            raise OptionError(
                f"devices_per_host={devices_per_host}: every host has at least one device."
            )
        hosts = -(-len(devices) // each) if number is None else number
        return cls(
            hosts, DeviceOwners(devices, np.minimum(np.arange(len(devices)) // each, hosts - 1))
        )


@dataclass(frozen=True, slots=True)
class Bins:
    """Consecutive groups of hosts, few enough to draw."""

    hosts: int

    @property
    def number(self) -> int:
        """Number of bins."""
        return min(max(self.hosts, 1), MOST_BINS)

    def of(self, host: Ints) -> Ints:
        """The bin of each host."""
        return host * self.number // max(self.hosts, 1)

    def ranges(self) -> list[tuple[int, int]]:
        """First host and end (exclusive) of each bin."""
        borders = [-(-i * self.hosts // self.number) for i in range(self.number + 1)]
        return list(pairwise(borders))


def joined(
    nbytes: Ints, spans: Sequence[Sequence[int]], most: int
) -> tuple[Ints, list[tuple[int, int]]]:
    """Sum neighbouring rows of a matrix if it has more rows than `most`.

    Args:
        nbytes: (rows, columns).
        spans: the range of hosts of each row.
        most: maximum rows of the result.

    >>> joined(np.array([[1], [2], [4]]), [(0, 2), (2, 4), (4, 5)], 2)
    (array([[3],
           [4]]), [(0, 4), (4, 5)])
    """
    step = -(-len(spans) // most)
    starts = list(range(0, len(spans), step))
    together = np.add.reduceat(nbytes, starts, axis=0)
    return together, [(spans[a][0], spans[b - 1][1]) for a, b in pairwise([*starts, len(spans)])]


def placed(layout: StoredLayout | None, ndim: int) -> StoredLayout | None:
    """The layout of tensors of that rank, if it names the devices of each part; else None.

    None means that any host may hold any part.

    An OpSharding may be replicated over unspecified devices.
    """
    try:
        if layout is not None and not isinstance(layout, Placements):
            layout.tiling(ndim)
    except ShardingError:
        return None
    return layout
