"""The processes that hold the boxes of a JAX array.

They follow from the layout and the owner of each device (`plan.writers`). Where JAX itself has
several processes, two things are checked first, because processes that disagree would write a chunk
twice or not at all:

1. The owners of the devices are known for an array with shards in other processes.
2. The owners agree with JAX: all devices of one JAX process have one owner, and this JAX process's
   devices belong to this process. Numbers may differ, because another framework may number the
   processes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from shardckpt.errors import ShardingError
from shardckpt.plan.writers import box_holders
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from shardckpt.frameworks.jax_layout import JaxShards
    from shardckpt.layout.sharding import Layout
    from shardckpt.layout.world import DeviceOwners, World


def holders_of(
    name: str, array: Any, layout: Layout | None, shards: JaxShards, world: World
) -> list[tuple[int, ...]] | None:
    """The processes that hold each of an array's boxes, ascending.

    Args:
        name: the leaf's name, for messages.
        array: the array.
        layout: its layout; None for an uncommitted array, which every process has for itself.
        shards: this process's shards of it.
        world: this process and the others.

    Returns:
        None if no other process is known to hold a part: each process has its own devices, or its
        own array.

    Raises:
        ShardingError: a device has no owner, no owners are known, or JAX contradicts them; by name.
    """
    owners = world.devices.get("jax")
    if owners is None:
        if not array.is_fully_addressable:
            raise ShardingError(
                f"{shown(name)}: {jax.process_count()} JAX processes hold parts of it, and it is "
                "not known which process owns which device; call jax.distributed.initialize "
                "before the first save or restore, and save with shardckpt.Coordinator.current()."
            )
        return None
    if layout is None:
        return None
    try:
        _check(owners, world.process, jax.devices()[0].client)
        return box_holders(layout, array.ndim, shards.holders, owners)
    except ShardingError as e:
        raise ShardingError(f"{shown(name)}: {e}") from e


def sharers_of(
    layout: Layout | None, ndim: int, shards: JaxShards, world: World
) -> tuple[int, ...] | None:
    """The processes whose devices need the same boxes as this process's, ascending.

    There is a result only if all boxes have the same processes.

    Args:
        layout: layout of the new array; None if it is uncommitted, so that every process has a
            complete one.
        ndim: number of dimensions of the array.
        shards: this process's shards of it.
        world: this process and the others.

    Returns:
        None if that is not known, or if different boxes have different processes.
    """
    owners = world.devices.get("jax")
    if owners is None:
        return None
    if layout is None:
        return tuple(range(world.processes))
    try:
        _check(owners, world.process, jax.devices()[0].client)
        sharers = set(box_holders(layout, ndim, shards.holders, owners))
    except ShardingError:
        # A save would report the error; without sharing, reads are correct for any devices.
        return None
    return sharers.pop() if len(sharers) == 1 else None


@lru_cache(maxsize=16)
def _check(owners: DeviceOwners, process: int, client: Any) -> None:
    """Compare the owners with JAX's processes, once per world and client.

    A client may be replaced, and has its own devices.

    Raises:
        ShardingError: they contradict each other.
    """
    if jax.process_count() == 1:
        return  # JAX assigns every device to its only process, even if other processes use it
    ids = set(owners.device_ids.tolist())
    devices = [device for device in client.devices() if device.id in ids]
    here = client.process_index()
    by_jax, by_owner = {here: process}, {process: here}
    for device, owner in zip(
        devices,
        owners.of_devices(np.array([d.id for d in devices], np.int64)).tolist(),
        strict=True,
    ):
        index = device.process_index
        if by_jax.setdefault(index, owner) != owner or by_owner.setdefault(owner, index) != index:
            raise ShardingError(
                f"device {device.id} belongs to process {owner} according to the devices that the "
                f"processes named at the start, but to process {index} according to JAX; let each "
                "process name its own jax.local_devices() in devices=."
            )
