"""The processes that hold the boxes of a JAX array.

What follows from the layout and from whose each device is (`plan.writers`). Where JAX itself knows of several
processes, two things are checked before, for processes that disagree would write a chunk twice or not at all:

1. Of an array with shards in other processes, somebody has said whose the devices are.
2. What was said is what JAX says: the devices of one JAX process are one process's, and this one's are this one's.
   Numbers may differ, as the processes may be counted by another framework.
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

__all__ = ["holders_of", "sharers_of"]


def holders_of(name: str, array: Any, layout: Layout | None, shards: JaxShards, world: World) -> list[tuple[int, ...]] | None:
    """The processes that hold each of an array's boxes, ascending.

    Args:
        name: of the leaf, for messages.
        array: the array.
        layout: its layout; None where it is uncommitted, which every process has for itself.
        shards: what this process's devices hold of it.
        world: this process and the others.

    Returns:
        None where nobody else is known to hold anything: the devices, or the array, are each process's own.

    Raises:
        ShardingError: a device is nobody's, nobody has said whose it is, or JAX says something else; by name.
    """
    owners = world.devices.get("jax")
    if owners is None:
        if not array.is_fully_addressable:
            raise ShardingError(
                f"{shown(name)}: {jax.process_count()} JAX processes hold parts of it, and nobody has said which devices are whose; "
                f"call jax.distributed.initialize before the first save or restore, and save with shardckpt.Coordinator.current()."
            )
        return None
    if layout is None:
        return None
    try:
        _check(owners, world.process, jax.devices()[0].client)
        return box_holders(layout, array.ndim, shards.holders, owners)
    except ShardingError as e:
        raise ShardingError(f"{shown(name)}: {e}") from e


def sharers_of(layout: Layout | None, ndim: int, shards: JaxShards, world: World) -> tuple[int, ...] | None:
    """The processes whose devices want the same boxes as this one's, ascending, where all boxes have the same.

    Args:
        layout: of the array to be; None where it is uncommitted, so that every process has the whole of one for itself.
        ndim: of the array.
        shards: what this process's devices hold of it.
        world: this process and the others.

    Returns:
        None where that is not known, and where several sets of processes share different boxes.
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
        return None  # saving would say what is wrong; reading by itself is right with any devices
    return sharers.pop() if len(sharers) == 1 else None


@lru_cache(maxsize=16)
def _check(owners: DeviceOwners, process: int, client: Any) -> None:
    """Compare what was said with what JAX knows, once per world; a client may be replaced, and has devices of its own.

    Raises:
        ShardingError: they contradict each other.
    """
    if jax.process_count() == 1:
        return  # JAX takes every device for its only process's, whoever else uses it
    said = set(owners.device_ids.tolist())
    devices = [device for device in client.devices() if device.id in said]
    here = client.process_index()
    by_jax, by_owner = {here: process}, {process: here}
    for device, owner in zip(devices, owners.of_devices(np.array([d.id for d in devices], np.int64)).tolist(), strict=True):
        index = device.process_index
        if by_jax.setdefault(index, owner) != owner or by_owner.setdefault(owner, index) != index:
            raise ShardingError(
                f"device {device.id} belongs to process {owner}, by what the processes said when the job started, and JAX, of whose "
                f"process {index} it is, has not drawn the line between processes there; let each process name its own jax.local_devices()."
            )
