"""Hosts of a job that is not running: what each would save, from layouts alone."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from shardckpt.frameworks import base
from shardckpt.frameworks.base import whole
from shardckpt.layout.box import BoxArray, distinct_boxes
from shardckpt.layout.dtypes import by_name
from shardckpt.layout.world import DeviceOwners, World
from shardckpt.plan.writers import box_holders


@dataclass(frozen=True)
class HostSource(base.HostSource):
    """Part of a tensor that one host holds."""

    name: str
    shape: tuple
    dtype: object
    layout: object
    boxes: BoxArray
    holders: list | None
    own_pieces: bool = False
    private: bool = False
    staged_bytes: int = 0


class Hosts:
    """So many hosts with so many devices each, of ascending ids or of those given."""

    def __init__(self, hosts: int, devices_per_host: int, device_ids=None) -> None:
        self.number = hosts
        ids = np.arange(hosts * devices_per_host) if device_ids is None else np.asarray(device_ids)
        self.devices = ids.reshape(hosts, devices_per_host)
        self.owners = DeviceOwners.of(
            {int(d): h for h, row in enumerate(self.devices) for d in row}
        )

    def world(self, host: int) -> World:
        return World(host, self.number, {"simulated": self.owners})

    def source(self, host: int, name: str, shape, layout, dtype="float32") -> HostSource | None:
        """Part of a tensor that a host holds; None where none of its devices has a part."""
        if layout is None:
            return HostSource(name, shape, by_name(dtype), None, whole(shape), None)
        known = np.intersect1d(self.devices[host], layout.tiling(len(shape)).device_ids)
        if not len(known):
            return None
        held = layout.device_boxes(shape, known)
        boxes, where = distinct_boxes(held.boxes)
        first = [int(held.device_ids[np.flatnonzero(where == i)[0]]) for i in range(len(boxes))]
        return HostSource(
            name,
            shape,
            by_name(dtype),
            layout,
            boxes,
            box_holders(layout, len(shape), first, self.owners),
        )

    def sources(self, host: int, tensors) -> dict[str, HostSource]:
        """`tensors`: name → (shape, layout) or (shape, layout, dtype)."""
        sources = {name: self.source(host, name, *described) for name, described in tensors.items()}
        return {name: source for name, source in sources.items() if source is not None}


def nbytes(shape, dtype="float32") -> int:
    return prod(shape) * by_name(dtype).itemsize
