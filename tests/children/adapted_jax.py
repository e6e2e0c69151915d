"""Run by tests/reading/test_adapted_devices.py on 8 virtual devices: fitted and joined tensors in
JAX arrays, against numpy.

Prints the number of examples, as one line of JSON.
"""

import json
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardckpt
from shardckpt import SaveOptions, errors

ROOT = Path(sys.argv[1])
MESHES = [(8,), (4, 2), (2, 2, 2), (2,), (3, 2)]
SIZES = st.lists(st.integers(0, 24), min_size=2, max_size=2)
seen = []


def fitted(array, shape):
    whole = np.zeros(shape, array.dtype)
    common = tuple(slice(0, min(a, b)) for a, b in zip(array.shape, shape, strict=True))
    whole[common] = array[common]
    return whole


def sharding(mesh, order):
    """A sharding of two dimensions over the axes of a mesh, and how often it cuts each."""
    devices = np.array(jax.devices()[: int(np.prod(mesh))]).reshape(mesh)
    names = tuple("xyz"[: len(mesh)])
    parts = [
        tuple(names[i] for i, side in enumerate(order[: len(mesh)]) if side == d) for d in range(2)
    ]
    cuts = [int(np.prod([mesh["xyz".index(name)] for name in part], dtype=int)) for part in parts]
    return NamedSharding(
        Mesh(devices, names), PartitionSpec(*(part or None for part in parts))
    ), cuts


@settings(
    max_examples=60,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(
    sizes=st.tuples(SIZES, SIZES),
    mode=st.sampled_from(["pad", "slice"]),
    mesh=st.sampled_from(MESHES),
    order=st.lists(st.integers(0, 2), min_size=3, max_size=3),
    before=st.sampled_from([None, (2, 2), (4, 2)]),
    joined=st.booleans(),
    real=st.booleans(),
)
def fits(sizes, mode, mesh, order, before, joined, real):
    place, cuts = sharding(mesh, order)
    small, large = ([f(a, b) for a, b in zip(*sizes, strict=True)] for f in (min, max))
    stored, own = (small, large) if mode == "pad" else (large, small)
    own = [
        -(-n // cut) * cut if mode == "pad" else n // cut * cut
        for n, cut in zip(own, cuts, strict=True)
    ]
    array = (np.arange(stored[0] * stored[1]) + 1).astype(np.float32).reshape(stored)
    url = tempfile.mkdtemp(dir=ROOT)
    options = SaveOptions(overwrite=True)
    if before is not None:
        ours = shardckpt.Sharding(
            shardckpt.Mesh(before, ("a", "b")), shardckpt.PartitionSpec("a", "b")
        )
        options = SaveOptions(overwrite=True, shardings={"**": ours})
    rules = Path(url, "m.toml")
    rules.write_text(
        '[[map]]\nfrom = "w/{i}"\nto = "w"\n' + ("" if not joined else "axis = 0\nstack = 0\n")
    )
    if joined:
        state = {"w": {str(i): array + 100 * i for i in range(2)}}
        place = NamedSharding(place.mesh, PartitionSpec(None, *place.spec))
        expected = np.stack([fitted(array + 100 * i, own) for i in range(2)])
    else:
        state, expected = {"w": array}, fitted(array, own)
    shardckpt.save(f"{url}/c", state, options=options)
    like = jax.ShapeDtypeStruct(expected.shape, np.float32, sharding=place)
    like = jax.device_put(np.ones(expected.shape, np.float32), place) if real else like
    given = {"mapping": rules} if joined else {}
    back = shardckpt.restore(
        f"{url}/c", {"v": like}, rename="s/^w/v/", **renamed(given, rules), fit={"v": mode}
    )["v"]
    assert back.sharding == place
    assert np.array_equal(np.asarray(back), expected), (stored, own)
    seen.append(1)


def renamed(options, rules):
    rules.write_text(rules.read_text().replace("w", "v"))
    return options


fits()
keys = jax.random.split(jax.random.key(3), 4)
shardckpt.save(f"{ROOT}/keys", {"k": keys})
try:
    shardckpt.restore(
        f"{ROOT}/keys", {"k": jax.random.split(jax.random.key(0), 6)}, fit={"k": "pad"}
    )
    refused = ""
except errors.ShapeMismatchError as e:
    refused = str(e)
print(json.dumps({"examples": len(seen), "keys": refused}))
