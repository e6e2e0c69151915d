"""Random layouts and elements that several processes have to agree on. numpy only."""

import random

import numpy as np

from shardckpt.layout.dtypes import by_name

NAMES = ("x", "y", "z")
MESHES = [(8,), (4, 2), (2, 4), (2, 2, 2), (1, 8), (8, 1)]
SMALLER = [(4,), (2, 2), (3,), (2, 3), (1,)]
"""Only JAX has arrays over some of the devices."""
SIDES = [1, 2, 3, 6, 7, 8, 10, 12, 16, 24, 33]


def elements(seed, shape, dtype, *, normal=False):
    """Random bits, not-a-numbers among them; `normal`: numbers with exponents of medium size
    only."""
    kind = by_name(dtype)
    size = int(np.prod(shape, dtype=int)) * kind.itemsize
    bits = {
        "bool": 1,
        "int1": 1,
        "uint1": 1,
        "int2": 2,
        "uint2": 2,
        "int4": 4,
        "uint4": 4,
        "float4_e2m1fn": 4,
    }.get(dtype, 8)
    raw = np.random.default_rng(seed).integers(0, 1 << bits, size, np.uint8)
    return (raw & 0xBF | 0x20 if normal and bits == 8 else raw).view(kind.numpy).reshape(shape)


def same_bits(a, b):
    a, b = np.asarray(a), np.asarray(b)
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()
    )


def parts(case):
    sizes = dict(zip(NAMES, case["mesh"], strict=False))
    return [
        int(np.prod([sizes[a] for a in ([p] if isinstance(p, str) else p or [])], dtype=int))
        for p in case["spec"]
    ]


def layout(rng: random.Random, shape, *, even, smaller=False):
    """A random mesh over devices in a random order, and a spec; `even`: one that cuts the shape
    evenly."""
    while True:
        mesh = rng.choice(MESHES + SMALLER if smaller else MESHES)
        spec = [[] for _ in shape]
        for axis in rng.sample(NAMES[: len(mesh)], len(mesh)):
            place = rng.randrange(-1, len(shape))
            if place >= 0:
                spec[place].append(axis)
        case = {
            "mesh": list(mesh),
            "devices": rng.sample(range(8), int(np.prod(mesh))),
            "spec": [part if len(part) > 1 else part[0] if part else None for part in spec],
        }
        if not even or all(n % part == 0 for n, part in zip(shape, parts(case), strict=True)):
            return case


def draw_tensors(count, dtypes, seed):
    """Tensors: shape, dtype and seed of each."""
    rng = random.Random(seed)
    for i in range(count):
        shape = [rng.choice(SIDES) for _ in range(rng.choice([0, 1, 2, 2, 3]))]
        if i % 11 == 5 and shape:
            shape[0] = 0
        yield {
            "name": f"t{i}",
            "shape": shape,
            "dtype": dtypes[i % len(dtypes)],
            "seed": 1000 * seed + i,
        }
