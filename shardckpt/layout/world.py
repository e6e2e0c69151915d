"""The number of this process, the number of processes, and the process of each device.

The processes agree on these numbers once, when a job starts (`shardckpt.frameworks.coordination`).
The writer of each chunk follows from them and from the tensors alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.errors import OptionError, ShardingError
from shardckpt.text import shorten

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True, eq=False)
class DeviceOwners:
    """The process of every device of a framework.

    An object equals only itself, which makes it a cheap key of caches.

    >>> DeviceOwners.of({7: 1, 2048: 0}).of_devices([2048, 7])
    array([0, 1])
    """

    device_ids: NDArray[np.int64]
    """(n,) ascending."""
    processes: NDArray[np.int64]
    """(n,) the process of each device."""

    @classmethod
    def of(cls, owners: Mapping[int, int]) -> DeviceOwners:
        """Build from a mapping of device id → process."""
        ids = np.array(sorted(owners), np.int64)
        return cls(ids, np.array([owners[i] for i in ids.tolist()], np.int64))

    def of_devices(self, device_ids: ArrayLike) -> NDArray[np.int64]:
        """The process of each of some devices.

        Raises:
            ShardingError: a device has no known process.
        """
        ids = np.asarray(device_ids, np.int64)
        at = np.minimum(np.searchsorted(self.device_ids, ids), max(0, len(self.device_ids) - 1))
        known = self.device_ids[at] == ids if len(self.device_ids) else np.zeros(ids.shape, bool)
        if not known.all():
            raise ShardingError(
                f"device {ids[~known].flat[0]} belongs to no process of this job: its processes "
                f"named {len(self.device_ids)} devices at the start; make a mesh of these devices."
            )
        return self.processes[at]


@dataclass(frozen=True, slots=True)
class World:
    """The processes of a job, seen from one of them."""

    process: int = 0
    """Number of this process; also its number as a writer in a checkpoint."""
    processes: int = 1
    """Number of processes."""
    devices: Mapping[str, DeviceOwners] = field(default_factory=dict)
    """Owners by framework, `jax` or `torch_xla`. For a framework that is missing, every process has
    its own devices, and all processes use the same ids for them."""
    sharing: int = 1
    """Number of processes on this one's host that may run on a core of its own, itself included."""

    def __post_init__(self) -> None:
        """Check that the process number is an integer, and in range."""
        whole = all(isinstance(n, int | np.integer) for n in (self.process, self.processes))
        if not whole or not 0 <= self.process < self.processes:
            raise OptionError(
                f"process {shorten(self.process)} of {shorten(self.processes)}: give two integers; "
                "processes are numbered from 0."
            )
