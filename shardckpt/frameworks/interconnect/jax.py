"""Interconnect of JAX: bytes pass through the processes' devices.

A program that only moves the bytes reshards them.

1. Parts are padded to one length, and cut into as many rows as every member has devices.
2. The rows of all members form one array of bytes, sharded over all those devices: nothing has
   moved yet.
3. A jitted identity changes the sharding so that each device has its row of every member. This is
   an all-gather over the devices' interconnect, along all links of a host at once.
4. The rows are copied to the host and joined.

Lengths are rounded up to few values, so that few programs are compiled, for any shapes and dtypes
of the tensors.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardckpt.errors import CoordinationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shardckpt.frameworks.coordination import Coordinator

_STEPS = 8
"""Number of padded lengths between two consecutive powers of two."""


class JaxInterconnect:
    """The interconnect between the JAX devices of all processes."""

    def __init__(self, devices: dict[int, list[Any]]) -> None:
        """Set the devices of each process, by the coordinator's process numbers."""
        self._devices = devices
        self.bandwidth = 1.25e9 if devices[0][0].platform == "cpu" else 10e9

    def all_gather(
        self, members: Sequence[int], process: int, parts: Sequence[NDArray[np.uint8]]
    ) -> None:
        """See `Interconnect`."""
        rows = min(len(self._devices[member]) for member in members)
        own = self._devices[process][:rows]
        length = _round_up(-(-max(part.size for part in parts) // rows))
        mesh = Mesh(
            np.array([self._devices[member][:rows] for member in members]), ("member", "row")
        )
        cut = NamedSharding(mesh, PartitionSpec("member", "row"))
        mine = np.zeros((1, rows, length), np.uint8)
        part = parts[members.index(process)]
        mine.reshape(-1)[: part.size] = part
        try:
            shards = [
                jax.device_put(mine[:, row : row + 1], device) for row, device in enumerate(own)
            ]
            array = jax.make_array_from_single_device_arrays(
                (len(members), rows, length), cut, shards
            )
            replicated = _identity(NamedSharding(mesh, PartitionSpec(None, "row")))(array)
            jax.block_until_ready(replicated)
        except jax.errors.JaxRuntimeError as e:
            raise CoordinationError(
                f"process {process} lost the connection to another of the processes "
                f"{list(members)!r:.200} in a cooperative restore "
                f"({str(e).partition(chr(10))[0]:.200}); see why that one ended, and start the "
                "job again."
            ) from e
        for shard in replicated.addressable_shards:  # one after another: each is a copy on the host
            row, held = own.index(shard.device), jax.device_get(shard.data)
            for m, (member, part) in enumerate(zip(members, parts, strict=True)):
                if member != process:
                    into = part[row * length : (row + 1) * length]
                    into[...] = held[m, 0, : into.size]


@lru_cache(maxsize=64)
def _identity(sharding: Any) -> Any:
    """A program that changes only the sharding."""
    return jax.jit(lambda array: array, out_shardings=sharding)


def _round_up(length: int) -> int:
    """The length, rounded up so that there are few different lengths.

    >>> [_round_up(n) for n in (1, 1000, 1025, 1_000_000)]
    [256, 1024, 1280, 1048576]
    """
    step = max(256, (1 << max(length - 1, 1).bit_length()) // (2 * _STEPS))
    return -(-length // step) * step


def connect(coordinator: Coordinator) -> JaxInterconnect | str:
    """The interconnect of all JAX devices, or the reason why there is none."""
    owners = coordinator.world.devices.get("jax")
    if owners is None:
        return (
            "it is not known which process owns which JAX devices; call "
            "jax.distributed.initialize before the first save or restore"
        )
    devices = sorted(jax.devices(), key=lambda device: device.id)
    held: dict[int, list[Any]] = {process: [] for process in range(coordinator.world.processes)}
    for device, process in zip(
        devices, owners.of_devices([device.id for device in devices]).tolist(), strict=True
    ):
        held[process].append(device)
    if any(not own or len({device.process_index for device in own}) != 1 for own in held.values()):
        return "some process of the job has no JAX device of its own"
    return JaxInterconnect(held)
