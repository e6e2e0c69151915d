"""The state that every framework saves and restores in the end-to-end matrix. Imports no framework.

The bits of a tensor follow from its name alone, so that every process can tell what each of its
shards must hold. How it is laid out follows from a text that names who saves or restores it, so
that all processes of a job draw the same.
"""

import ctypes
import faulthandler
import os
import random
import signal
from functools import cache
from zlib import crc32

from jax_cases import NAMES, elements, parts, same_bits

import shardckpt
from shardckpt import PerProcess

__all__ = [
    "NAMES",
    "TENSORS",
    "begin",
    "compare",
    "differing",
    "expected",
    "layout",
    "placements",
    "rng_of",
    "sharding",
    "state",
]

SECONDS = 230
"""After which a process of a job ends itself, saying where it was."""

_SHAPES = {
    ("model", "embed"): ((48, 24), "bfloat16"),
    ("model", "layers", 0, "q"): ((32, 24), "float32"),
    ("model", "layers", 0, "uneven"): ((10, 7), "float32"),
    ("model", "layers", 0, "norm"): ((24,), "bfloat16"),
    ("model", "layers", 1, "wide"): ((384, 640), "float32"),
    ("model", "layers", 1, "odd"): ((33, 5), "bfloat16"),
    ("model", "layers", 1, "bias"): ((13,), "float32"),
    ("model", "layers", 1, "fp8"): ((16, 24), "float8_e4m3fn"),
    ("model", "layers", 1, "fp8 uneven"): ((3, 9), "float8_e5m2"),
    ("model", "layers", 1, "half"): ((24, 20), "float16"),
    ("model", "layers", 1, "half uneven"): ((5, 7), "float16"),
    ("model", "conv"): ((6, 4, 9), "float32"),
    ("model", "mask"): ((24, 6), "bool"),
    ("model", "mask uneven"): ((7,), "bool"),
    ("model", "table"): ((64, 3), "int32"),
    ("model", "table uneven"): ((9, 11), "int32"),
    ("model", "scale"): ((), "float32"),
    ("model", "flag"): ((), "bool"),
    ("model", "one row"): ((1, 40), "int32"),
    ("model", "no rows"): ((0, 8), "float32"),
    ("model", "no columns"): ((8, 0), "bfloat16"),
    ("optimizer", "state", 0, "exp_avg"): ((48, 24), "float32"),
    ("optimizer", "state", 0, "exp_avg_sq"): ((48, 24), "float32"),
    ("optimizer", "state", 1, "exp_avg"): ((33, 5), "float32"),
    ("optimizer", "state", 1, "exp_avg_sq"): ((33, 5), "float32"),
}
_TIED = {("model", "head"): ("model", "embed")}
_HOST = {
    ("optimizer", "state", 0, "step"): ((), "float32"),
    ("optimizer", "state", 1, "step"): ((), "float32"),
    ("host", "small"): ((5, 3), "int32"),
    ("host", "large"): ((150, 200), "float32"),
}
"""Plain host tensors in every framework; the last is large enough to be dealt out."""
_REST = {
    ("optimizer", "param_groups"): [
        {"lr": 0.1, "betas": (0.9, 0.95), "fused": None, "params": [0, 1]}
    ],
    ("step",): 12345678901234567890123,
    ("best",): float("-inf"),
    ("phase",): 1.5 - 2j,
    ("name",): "Übung",
    ("digest",): b"\0\xff",
    ("done",): False,
    ("empty",): {"dict": {}, "list": [], "tuple": ()},
    (7,): "an int key",
    (None,): "a key that is None",
}
"""Everything that is not a tensor."""
TENSORS = {"/".join(map(str, path)): case for path, case in (_SHAPES | _HOST).items()}
"""Name → shape, dtype."""


def begin():
    """First in every process of a job: neither it nor what it says outlives or disturbs the
    rest."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    os.dup2(2, 1)  # frameworks print; stdout is for answers
    faulthandler.dump_traceback_later(SECONDS, exit=True)


@cache
def expected(name):
    """All elements of a tensor, random bits with not-a-numbers among them.

    Not in float16: torch_xla does not give the bits of those back from a sharded tensor as it got
    them.
    """
    shape, dtype = TENSORS[name]
    return elements(crc32(name.encode()), shape, dtype, normal=dtype == "float16")


def state(tensor, host, process, *, rest=True):
    """The state around tensors.

    Args:
        tensor: name → leaf, of those tensors that are sharded.
        host: name → leaf, of plain host tensors.
        process: its number, which is in what it owns by itself.
        rest: whether small leaves have their values, or None.
    """
    leaves = {path: tensor("/".join(map(str, path))) for path in _SHAPES}
    leaves |= {path: leaves[first] for path, first in _TIED.items()}
    leaves |= {path: host("/".join(map(str, path))) for path in _HOST}
    leaves |= _REST if rest else {path: _blank(value) for path, value in _REST.items()}
    leaves["loader",] = PerProcess({"seen": 100 + process} if rest else None, choose=list)
    whole = {}
    for path, leaf in leaves.items():
        place = whole
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = leaf
    return whole


def compare(restored, processes, shards):
    """Compare a restored state with the expected one: number of elements compared of each tensor,
    and everything that is wrong.

    Args:
        restored: the state, from a `like` without the values of small leaves.
        processes: that saved it.
        shards: name, leaf → for each shard that this process holds, by what its framework says, the
            elements that it must have and those that it has.
    """
    wrong = [str(path) for path, value in _REST.items() if repr(_at(restored, path)) != repr(value)]
    wrong += [
        f"{path} is untied"
        for path, first in _TIED.items()
        if _at(restored, path) is not _at(restored, first)
    ]
    owned = restored["loader"].value
    # As many processes as saved: each its own.
    owned = owned if isinstance(owned, list) else [owned]
    if len(owned) not in (1, processes) or not all(
        o["seen"] - 100 in range(processes) for o in owned
    ):
        wrong.append(f"loader: {owned}")
    compared = {}
    for path in (*_SHAPES, *_HOST):
        name = "/".join(map(str, path))
        pairs = list(shards(name, _at(restored, path)))
        wrong += [name for right, actual in pairs if not same_bits(right, actual)]
        compared[name] = sum(actual.size for _, actual in pairs)
    return {"wrong": wrong, "compared": compared}


def differing(url, restored, coordinator=None):
    """Names of tensors whose fingerprint, from all processes' shards, is not what the save recorded
    from its own."""
    digests = shardckpt.fingerprint(restored, coordinator=coordinator)
    return [
        f"fingerprint of {name}" for name in digests.differing(shardckpt.open(url).fingerprint())
    ]


def _at(whole, path):
    for key in path:
        whole = whole[key]
    return whole


def _blank(value):
    """The same containers around None."""
    if isinstance(value, dict):
        return {key: _blank(child) for key, child in value.items()}
    return type(value)(map(_blank, value)) if isinstance(value, list | tuple) else None


# Layouts


def rng_of(*text):
    return random.Random(" ".join(map(str, text)))


def layout(rng, shape, devices, *, even=False, smaller=False):
    """A random mesh over devices in a random order, and a spec.

    Args:
        rng: draws.
        shape: of the tensor.
        devices: how many there are.
        even: whether the spec must cut the shape evenly.
        smaller: whether the mesh may leave devices out.
    """
    count = (
        rng.choice([n for n in (devices, devices, devices // 2, 3) if 0 < n <= devices])
        if smaller
        else devices
    )
    meshes = (
        [(count,), (1, count)]
        + [(count // n, n) for n in (2, 4) if count % n == 0]
        + ([(2, 2, 2)] if count == 8 else [])
    )
    while True:
        mesh = rng.choice(meshes)
        spec = [[] for _ in shape]
        for axis in rng.sample(NAMES[: len(mesh)], len(mesh)):
            place = rng.randrange(-1, len(shape))
            if place >= 0:
                spec[place].append(axis)
        case = {
            "mesh": list(mesh),
            "devices": rng.sample(range(devices), count),
            "spec": [part if len(part) > 1 else part[0] if part else None for part in spec],
        }
        if not even or all(n % part == 0 for n, part in zip(shape, parts(case), strict=True)):
            return case


def placements(rng, shape, meshes):
    """One of some meshes (shape, ranks), and placements on it as DTensor writes them.

    Strided shards, as of parameters under FSDP2 and tensor parallelism, only of lengths that all
    their parts divide: there torch's ways to make them agree.
    """
    mesh, ranks = rng.choice(meshes)
    if (
        len(mesh) == 2
        and shape
        and shape[0]
        and shape[0] % (mesh[0] * mesh[1]) == 0
        and rng.random() < 0.4
    ):
        return {"mesh": mesh, "devices": ranks, "placements": [f"_S(0,{mesh[1]})", "S(0)"]}
    texts = [
        rng.choice(["R", *(f"S({d})" for d in range(len(shape))), *(["S(0)"] if shape else [])])
        for _ in mesh
    ]
    return {"mesh": mesh, "devices": ranks, "placements": texts}


def sharding(case):
    """A layout in shardckpt's words."""
    mesh = shardckpt.Mesh(case["mesh"], NAMES[: len(case["mesh"])], case["devices"])
    return shardckpt.Sharding(
        mesh,
        shardckpt.PartitionSpec(*(tuple(p) if isinstance(p, list) else p for p in case["spec"])),
    )
