"""Grouping devices into hosts.

A layout knows devices, storage is read by hosts. No checkpoint says which devices were one host's: ids are taken in ascending
order, so many to each, which is how runtimes number them.
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

__all__ = ["DEVICES_PER_HOST", "Bins", "Hosts", "joined", "placed"]

DEVICES_PER_HOST = 8
"""Unless told otherwise."""
MOST_BINS = 64
"""Rows and columns of a heat map that can be told apart."""


@dataclass(frozen=True, slots=True, eq=False)
class Hosts:
    """So many hosts, and whose each device is."""

    number: int
    owners: DeviceOwners

    @classmethod
    def of(
        cls, layouts: Iterable[tuple[StoredLayout | None, int]], *, devices_per_host: int | None = None, number: int | None = None
    ) -> Hosts:
        """The hosts of all devices of some layouts.

        Args:
            layouts: of tensors, each with the tensor's rank; those that are None say nothing of devices.
            devices_per_host: so many to each, fewer to the last.
            number: instead of that, so many hosts.

        Raises:
            OptionError: a host without devices.
        """
        # Tensors share a mesh, or at least a layout.
        distinct = {
            layout.mesh if isinstance(layout, Sharding | Placements) else (layout, ndim): (layout, ndim)
            for layout, ndim in layouts
            if layout is not None
        }
        found = [
            layout.mesh.device_ids if isinstance(layout, Sharding | Placements) else layout.tiling(ndim).device_ids
            for layout, ndim in distinct.values()
        ]
        devices = np.unique(np.concatenate(found)) if found else np.zeros(1, np.int64)
        each = devices_per_host if number is None else max(1, -(-len(devices) // max(number, 1)))
        if each is None or each < 1:
            raise OptionError(f"devices_per_host={devices_per_host}: every host has at least one device.")
        hosts = -(-len(devices) // each) if number is None else number
        return cls(hosts, DeviceOwners(devices, np.minimum(np.arange(len(devices)) // each, hosts - 1)))


@dataclass(frozen=True, slots=True)
class Bins:
    """Hosts in consecutive groups, of which there are few enough to be drawn."""

    hosts: int

    @property
    def number(self) -> int:
        """How many bins."""
        return min(max(self.hosts, 1), MOST_BINS)

    def of(self, host: Ints) -> Ints:
        """The bin of each host."""
        return host * self.number // max(self.hosts, 1)

    def ranges(self) -> list[tuple[int, int]]:
        """First host, and one past the last, of each bin."""
        borders = [-(-i * self.hosts // self.number) for i in range(self.number + 1)]
        return list(pairwise(borders))


def joined(nbytes: Ints, spans: Sequence[Sequence[int]], most: int) -> tuple[Ints, list[tuple[int, int]]]:
    """Rows of a matrix together with their neighbours, where there are more of them than `most`.

    Args:
        nbytes: (rows, columns).
        spans: the range of hosts that each row is of.
        most: rows of the result.

    >>> joined(np.array([[1], [2], [4]]), [(0, 2), (2, 4), (4, 5)], 2)
    (array([[3],
           [4]]), [(0, 4), (4, 5)])
    """
    step = -(-len(spans) // most)
    starts = list(range(0, len(spans), step))
    together = np.add.reduceat(nbytes, starts, axis=0)
    return together, [(spans[a][0], spans[b - 1][1]) for a, b in pairwise([*starts, len(spans)])]


def placed(layout: StoredLayout | None, ndim: int) -> StoredLayout | None:
    """The layout of tensors of that rank, where it says which device holds what; else None: any host may hold any of it.

    An OpSharding may be replicated over nobody says which devices.
    """
    try:
        if layout is not None and not isinstance(layout, Placements):
            layout.tiling(ndim)
    except ShardingError:
        return None
    return layout
