"""Checkpoints to convert, for tests: elements of any bits, recorded as if laid out over meshes."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

import shardckpt
from shardckpt import Mesh, PartitionSpec, SaveOptions, Sharding
from shardckpt.layout import dtypes

MiB = 1 << 20


def random(shape, dtype="float32", seed=0):
    """Elements of any bits."""
    kind = dtypes.by_name(dtype)
    bits = np.random.default_rng(seed).integers(
        0, 256, int(np.prod(shape)) * kind.itemsize, np.uint8
    )
    if dtype == "bool":
        bits &= 1
    return bits.view(kind.numpy).reshape(shape)


def sharded(*axes):
    """A sharding over the mesh a=3 × b=2, by the axes that cut each dimension: "a", "b", "ab" or ""
    for none."""
    parts = [tuple(axis) if len(axis) > 1 else axis or None for axis in axes]
    return Sharding(Mesh((3, 2), ("a", "b")), PartitionSpec(*parts))


def layouts(ndim):
    """Shardings of a tensor of that many dimensions."""
    meshes = st.tuples(st.integers(1, 5), st.integers(1, 5)).map(
        lambda shape: Mesh(shape, ("x", "y"))
    )
    axes = st.permutations(["x", "y", None, None, None, None]).map(lambda p: p[:ndim])
    return st.builds(lambda mesh, spec: Sharding(mesh, PartitionSpec(*spec)), meshes, axes)


def saved(place, state, shardings=None, **options):
    """Save a state and open it."""
    shardckpt.save(place, state, options=SaveOptions(shardings=shardings or {}, **options))
    return shardckpt.open(place)


def arrays_of(value, path=()):
    """The tensors below, with the keys on the way to each."""
    if isinstance(value, np.ndarray):
        yield path, value
    elif isinstance(value, (dict, list, tuple)):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from arrays_of(child, (*path, str(key)))


def joined(state):
    """Tensors alone, by their keys joined, each memory once."""
    arrays, seen = {}, set()
    for path, array in arrays_of(state):
        if id(array) not in seen:
            seen.add(id(array))
            arrays[".".join(path)] = array
    return arrays
