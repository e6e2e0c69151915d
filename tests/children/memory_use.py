"""Saves and restores in a process of its own, and tells what memory that took. A case as JSON on
stdin, numbers on stdout."""

import json
import sys
import threading
import time
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

import shardckpt
from shardckpt import Mesh, PartitionSpec, SaveOptions, Sharding
from shardckpt.frameworks.base import PlainSink
from shardckpt.io.buffers import BufferPool
from shardckpt.layout.box import BoxArray, distinct_boxes
from shardckpt.layout.dtypes import DType
from shardckpt.reading import restore as restoring
from shardckpt.reading.landing import Landing, RestoreJob, read_and_place

SHAPES = {"large": (8192, 8192), **{f"small{i}": (4096, 4096) for i in range(4)}}
"""uint32, so 256 MiB and 64 MiB. Every element is its own flat index."""


class Peak:
    """Growth of resident memory inside a block, at its peak."""

    def __enter__(self):
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM is VmRSS again, see proc(5)
        self.before = status("VmRSS")
        return self

    def __exit__(self, *_):
        self.growth = status("VmHWM") - self.before


def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def flat_indices(shape, box):
    """The rows of a box, one after another, as they must be."""
    columns = np.arange(box.start[1], box.stop[1], dtype=np.uint32)
    for row in range(box.start[0], box.stop[0]):
        yield np.uint32(row * shape[1]) + columns


def check(array, shape, box):
    for actual, expected in zip(array, flat_indices(shape, box), strict=True):
        assert np.array_equal(actual, expected)


@dataclass(frozen=True)
class DeviceSink(PlainSink):
    """The shards of one host's devices, which have memory of their own: what is placed leaves this
    process."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    boxes: BoxArray
    tile: tuple[int, ...]
    destinations: None = None
    placing_bytes: int = 0
    adopts: bool = False

    @property
    def buffer_shapes(self):
        return [self.tile] * len(self.boxes)

    @property
    def tie_key(self):
        return self.name

    def place(self, buffers):
        for i, buffer in enumerate(buffers):
            box = self.boxes[i]
            check(buffer[tuple(map(slice, box.shape))], self.shape, box)
        return len(buffers)


def mesh(case):
    return Mesh(case["mesh"], tuple("xy"[: len(case["mesh"])]))


def save(case):
    elements = np.arange(prod(SHAPES["large"]), dtype=np.uint32)
    state = {
        name: elements[: prod(shape)].reshape(shape)
        for name, shape in SHAPES.items()
        if name in case["names"]
    }
    sharding = Sharding(mesh(case), PartitionSpec(*case["spec"]))
    options = SaveOptions(
        layout=case["layout"], memory_limit=case["limit"], shardings={"*": sharding}
    )
    with Peak() as peak:
        shardckpt.save(case["url"], state, options=options)
    return {"growth": peak.growth}


def restore_host(case):
    """As `restore` does it for torch_xla or JAX, for one host of a larger job."""
    checkpoint = shardckpt.open(case["url"])
    sharding = Sharding(mesh(case), PartitionSpec(*case["spec"]))
    jobs = []
    for name in checkpoint.names():
        tensor = checkpoint.tensor(name)
        tiles = sharding.device_boxes(tensor.shape, case["devices"])
        boxes, _ = distinct_boxes(tiles.boxes)
        landing = Landing(tensor, DeviceSink(name, tensor.shape, tensor.dtype, boxes, tiles.tile))
        landing.names.append(name)
        jobs.append(RestoreJob(tensor, [landing]))
    assert checkpoint.reader.stats.bytes_read == 0  # opens it: tables are not staging
    pool = BufferPool(case["limit"])

    def fetch(batch):
        checkpoint.reader.read([request for job in batch for request in job.requests()])

    with Peak() as peak:
        limits = {
            "largest": restoring.LARGEST_BATCH,
            "staged": restoring.STAGED_BATCH,
            "ahead": restoring.READ_AHEAD,
        }
        restored = read_and_place(jobs, fetch, pool=pool, placed=lambda _nbytes: None, **limits)
    assert restored == {name: len(set(case["devices"])) for name in checkpoint.names()}
    stats = checkpoint.reader.stats
    return {
        "growth": peak.growth,
        "high_water": pool.high_water,
        "read": stats.bytes_read,
        "needed": stats.bytes_needed,
    }


def restore_in_place(case):
    pools = []

    class RecordedPool(BufferPool):
        def __init__(self, limit):
            super().__init__(limit)
            pools.append(self)

    restoring.BufferPool = RecordedPool
    like = {name: np.ones(shape, np.uint32) for name, shape in SHAPES.items()}
    if case["framework"] == "torch":
        import torch

        like = {name: torch.from_numpy(array) for name, array in like.items()}
    checkpoint = shardckpt.open(case["url"])
    assert checkpoint.reader.stats.bytes_read == 0
    with Peak() as peak:
        restored = shardckpt.restore(checkpoint, like, memory_limit=case["limit"])
    for name, shape in SHAPES.items():
        assert restored[name] is like[name]
        check(np.asarray(like[name]), shape, shardckpt.Box((0, 0), shape))
    return {"growth": peak.growth, "high_water": sum(pool.high_water for pool in pools)}


def main():
    case = json.load(sys.stdin)
    verb = {"save": save, "restore_host": restore_host, "restore_in_place": restore_in_place}[
        case["verb"]
    ]
    answer = verb(case)
    assert "jax" not in sys.modules
    assert "torch_xla" not in sys.modules
    deadline = time.monotonic() + 60
    # A reader's threads end with it.
    while threading.active_count() > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == 1, threading.enumerate()
    sys.stdout.write(json.dumps(answer))


main()
