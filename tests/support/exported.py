"""A state that tests export: laid out over meshes evenly, unevenly and as replicas, tied, nested,
of every dtype."""

from __future__ import annotations

import ml_dtypes
import numpy as np

import shardckpt
from shardckpt import Mesh, PartitionSpec, SaveOptions, Sharding

MESH = Mesh((4, 2), ("data", "model"), [7, 6, 5, 4, 3, 2, 1, 0])
TORCH_DTYPES = (
    *(
        "bool",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "float32",
        "float64",
    ),
    *(
        "complex64",
        "complex128",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    ),
)
SHARDINGS = {
    "model/w": ("data", "model"),
    "model/wide": (None, ("model", "data")),
    "model/uneven": ("data", "model"),
    "model/replicated": (),
    "model/rows": ("data",),
}


def bits(shape, dtype, seed):
    """Elements of which every bit pattern occurs that the dtype has."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    raw = np.random.default_rng(seed).integers(
        0, 2 if dtype == "bool" else 256, (*shape, kind.itemsize), np.uint8
    )
    return raw.reshape(-1).view(kind).reshape(shape)


def state():
    """Nested; names with dots, an optimizer's int keys, numbers, and tensors without elements or
    dimensions."""
    w = bits((64, 48), "float32", 0)
    return {
        "model": {
            "w": w,
            "tied": w,
            "wide": bits((6, 32), "bfloat16", 1),
            "uneven": bits((10, 7), "float32", 2),
            "replicated": bits((5, 3), "float64", 3),
            "rows": bits((8, 40000), "float32", 4),
            "layers.0.bias": bits((7,), "float16", 5),
            "empty": np.zeros((0, 4), np.float32),
            "scalar": np.array(2.5, np.float32),
        },
        "dtypes": {dtype: bits((3, 5), dtype, i) for i, dtype in enumerate(TORCH_DTYPES)},
        "optimizer": {
            "state": {
                0: {"step": 7, "m": bits((4,), "float32", 6)},
                1: {"step": 8, "m": bits((2, 2), "float32", 7)},
            },
            "lr": 1e-3,
        },
        "list": [bits((3,), "int32", 8), {"nested": [True, None, -1.5]}],
        "text": "naïve",
        "numpy number": np.float32(0.5),
        "none": None,
        "nothing": {},
    }


def save(place, whole=None):
    """Save a state, laid out over the mesh."""
    shardings = {name: Sharding(MESH, PartitionSpec(*spec)) for name, spec in SHARDINGS.items()}
    if whole is not None:
        shardings = {}
    shardckpt.save(
        place, state() if whole is None else whole, options=SaveOptions(shardings=shardings)
    )
    return place


def raw(array):
    """An array's bytes; of torch's or numpy's."""
    if hasattr(array, "untyped_storage"):
        import torch

        array = array.contiguous().reshape(-1).view(torch.uint8).numpy()
    return np.ascontiguousarray(array).tobytes()
