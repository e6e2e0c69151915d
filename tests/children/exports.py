"""Exports and what torch.distributed.checkpoint loads of them, in processes that have imported
torch before."""

from pathlib import Path

import e2e_torch
import exported
import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardckpt
from shardckpt.convert.options import StateOptions
from shardckpt.convert.whole_state import write_state
from shardckpt.io.url import parse
from shardckpt.reading.checkpoint import Checkpoint


def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def memory(_coordinator, source, place, to, limit):
    """The most memory that an export took, and the bytes that it read."""
    before = status("VmRSS")
    written = write_state(Checkpoint(source), parse(place), to, StateOptions(memory_limit=limit))
    return {"memory": status("VmHWM") - before, "read": written.read_bytes}


LAYOUTS = {
    1: [(Shard(0),), (Shard(1),), (Replicate(),)],
    2: [(Shard(0), Shard(1)), (Shard(1), Shard(0)), (Shard(0), Shard(0)), (Replicate(), Shard(1))],
}


def load(coordinator, source, place, shape):
    """Load into DTensors over a mesh, and plain tensors, and name those that are not what was
    saved."""
    e2e_torch.join(coordinator)
    mesh, layouts = init_device_mesh("cpu", tuple(shape)), LAYOUTS[len(shape)]
    expected, kinds = shardckpt.restore(source), iter(range(1 << 20))

    def blank(value):
        if isinstance(value, dict):
            return {key: blank(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [blank(inner) for inner in value]
        if not isinstance(value, np.ndarray):
            return (
                type(value)() if value is not None and not isinstance(value, np.generic) else None
            )
        tensor = torch.zeros(value.shape, dtype=getattr(torch, value.dtype.name))
        if value.ndim < 2 or value.dtype.itemsize == 16 or value.size == 0:
            return tensor
        return distribute_tensor(
            tensor, mesh, layouts[next(kinds) % len(layouts)], src_data_rank=None
        )

    state = blank(expected)
    dcp.load(state, checkpoint_id=place)
    odd = []

    def compare(name, actual, expected):
        if isinstance(expected, dict):  # what is not a tensor DCP puts back under the key's text
            actual = {
                key: {**inner, **actual.pop(str(key))}
                if isinstance(key, int) and str(key) in actual
                else inner
                for key, inner in list(actual.items())
            }
        if isinstance(expected, dict | list):
            for key, inner in (
                expected.items() if isinstance(expected, dict) else enumerate(expected)
            ):
                compare(f"{name}/{key}", actual[key], inner)
        elif isinstance(expected, np.ndarray):
            whole = (
                torch.from_numpy(np.ascontiguousarray(expected).reshape(-1).view(np.uint8))
                .view(actual.dtype)
                .reshape(expected.shape)
            )
            if hasattr(actual, "to_local"):
                whole = distribute_tensor(
                    whole, mesh, actual.placements, src_data_rank=None
                ).to_local()
                actual = actual.to_local()
            if actual.shape != whole.shape or exported.raw(actual) != exported.raw(whole):
                odd.append(name)
        elif actual != expected or type(actual) is not type(expected):
            odd.append(name)

    compare("", state, expected)
    e2e_torch.leave(coordinator)
    return odd
