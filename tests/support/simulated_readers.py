"""Hosts that are not running, restoring: each reads the boxes of its devices, through the library's
own restore."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

import shardckpt
from shardckpt.frameworks.base import PlainSink
from shardckpt.plan.readers import host_boxes
from shardckpt.reading.restoring.filling import fill

if TYPE_CHECKING:
    from shardckpt.layout.dtypes import DType


@dataclass
class HostSink(PlainSink):
    """The boxes of one host, and memory for them."""

    shape: tuple[int, ...]
    dtype: DType
    boxes: object
    destinations: list = field(init=False)
    tie_key: object = None
    placing_bytes: int = 0
    adopts: bool = False

    def __post_init__(self) -> None:
        self.destinations = [
            np.empty(self.boxes[i].shape, self.dtype.numpy) for i in range(len(self.boxes))
        ]

    @property
    def buffer_shapes(self) -> list:
        return [array.shape for array in self.destinations]

    def place(self, buffers):
        return buffers


def read_by_host(url, layouts, hosts) -> list:
    """Restore on every host; what each one's reader has counted.

    Args:
        url: the checkpoint.
        layouts: tensor's name → the layout to restore onto.
        hosts: `shardckpt.reshard.forecast.hosts.Hosts`.
    """
    counted = []
    for host in range(hosts.number):
        checkpoint = shardckpt.open(url)
        places = {}
        for name, tensor in checkpoint.record.structure.tensors.items():
            held = host_boxes(layouts[name], tensor.shape, hosts.owners, hosts.number)
            group = held.group[host]
            mine = held.held[held.held_by == group] if group >= 0 else np.empty(0, np.int64)
            boxes = type(held.boxes)(held.boxes.start[mine], held.boxes.stop[mine])
            places[name] = [(name, HostSink(tensor.shape, tensor.dtype, boxes))]
        fill(checkpoint, places)
        counted.append(checkpoint.stats)
    return counted
