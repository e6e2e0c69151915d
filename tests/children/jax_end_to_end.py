"""Run by test_jax.py on 8 virtual devices: save under one layout, restore under another, through
real storage.

Then, when stdin says so and CROSS is not 0, restore what torch_xla has saved and save the same for
torch_xla. One line of JSON on stdout.
"""

import json
import random
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax_cases import NAMES, draw_tensors, elements, layout, same_bits

import shardckpt
from shardckpt import SaveOptions, Sharding, Target

ROOT, PAIRS, CROSS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
DTYPES = [
    "float32",
    "bfloat16",
    "int32",
    "bool",
    "float8_e4m3fn",
    "int4",
    "uint4",
    "complex64",
    "uint16",
    "float16",
]
XLA_DTYPES = ["float32", "bfloat16", "int32", "bool", "uint8", "float8_e5m2", "complex64"]
compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, _seconds, **_: compiled.append(event)
)


def compiles():
    return sum("compile" in event for event in compiled)


def named(case):
    devices = np.array([jax.devices()[i] for i in case["devices"]]).reshape(case["mesh"])
    spec = PartitionSpec(
        *(tuple(part) if isinstance(part, list) else part for part in case["spec"])
    )
    return NamedSharding(Mesh(devices, NAMES[: len(case["mesh"])]), spec)


def ours(case):
    mesh = shardckpt.Mesh(case["mesh"], NAMES[: len(case["mesh"])], case["devices"])
    return Sharding(
        mesh,
        shardckpt.PartitionSpec(*(tuple(p) if isinstance(p, list) else p for p in case["spec"])),
    )


def draw_target(rng, tensor, array):
    """A layout in one of the ways to say it, and the sharding that must come out."""
    case = layout(rng, tensor["shape"], even=True, smaller=True)
    sharding = named(case)
    ways = [
        Target(ours(case)),
        Target(ours(case).op_sharding(array.ndim)),
        Target(sharding),
        jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding),
    ]
    return rng.choice(ways), sharding


def differs(actual, array, sharding):
    # The order of devices is not part of an OpSharding: only what each of them holds.
    held, meant = (s.devices_indices_map(array.shape) for s in (actual.sharding, sharding))
    return not (same_bits(actual, array) and held == meant and actual.committed)


def pairs():
    """Many arrays, each with a layout of its own to save and another to restore, in a few
    checkpoints."""
    rng = random.Random(0)
    tensors = list(draw_tensors(PAIRS, DTYPES, 1))
    wrong, compiled_by_us = [], 0
    for batch, storage in enumerate(["packed", "zarr", "packed", "zarr"]):
        mine = tensors[batch::4]
        arrays = {t["name"]: elements(t["seed"], t["shape"], t["dtype"]) for t in mine}
        state = {
            t["name"]: jax.device_put(
                arrays[t["name"]], named(layout(rng, t["shape"], even=True, smaller=True))
            )
            for t in mine
        }
        targets = {t["name"]: draw_target(rng, t, arrays[t["name"]]) for t in mine}
        url = f"{ROOT}/pairs{batch}"
        before = compiles()
        shardckpt.save(url, state, options=SaveOptions(layout=storage))
        plain = shardckpt.restore(url)
        restored = shardckpt.restore(url, {name: way for name, (way, _) in targets.items()})
        compiled_by_us += compiles() - before
        for name, array in arrays.items():
            if not isinstance(plain[name], np.ndarray) or not same_bits(plain[name], array):
                wrong.append([batch, name, "numpy"])
            if differs(restored[name], array, targets[name][1]):
                wrong.append([batch, name, str(restored[name].sharding), str(targets[name][1])])
    return {"pairs": len(tensors), "wrong": wrong, "compiles": compiled_by_us}


def training():
    """Train, save, restore onto the same and onto another mesh, train on."""
    one = NamedSharding(
        Mesh(np.array(jax.devices()).reshape(4, 2), NAMES[:2]), PartitionSpec("x", "y")
    )
    other = NamedSharding(
        Mesh(np.array(jax.devices())[[5, 1, 4, 0, 7, 3, 6, 2]].reshape(2, 4), NAMES[:2]),
        PartitionSpec("y", "x"),
    )

    def loss(w, x):
        return jnp.mean((x @ w - 1) ** 2)

    @jax.jit
    def step(state):
        gradient = jax.grad(loss)(state["w"], state["x"])
        momentum = 0.9 * state["momentum"] + gradient
        return {
            **state,
            "w": state["w"] - 0.1 * momentum,
            "momentum": momentum,
            "count": state["count"] + 1,
        }

    random_w, x = (
        jax.random.normal(jax.random.key(1), (16, 8)),
        jax.random.normal(jax.random.key(2), (32, 16)),
    )
    state = {
        "w": jax.device_put(random_w, one),
        "momentum": jax.device_put(jnp.zeros((16, 8)), one),
        "x": x,
        "count": jnp.int32(0),
    }
    state = step(step(state))
    shardckpt.save(f"{ROOT}/training", state)
    expected = step(state)
    before = compiles()
    same = shardckpt.restore(f"{ROOT}/training", like=state)
    like = {
        name: jax.ShapeDtypeStruct(
            a.shape, a.dtype, sharding=other if a.ndim and name != "x" else None
        )
        for name, a in state.items()
    }
    moved = shardckpt.restore(f"{ROOT}/training", like)
    restoring = compiles() - before
    again = step(same)
    going_on = compiles() - before - restoring
    elsewhere = step(moved)
    return {
        "restoring": restoring,
        "going on": going_on,
        "same": all(same_bits(again[name], expected[name]) for name in expected),
        "close": bool(np.allclose(elsewhere["w"], expected["w"], rtol=1e-5))
        and int(elsewhere["count"]) == 3,
        "layouts": {
            name: str(shardckpt.open(f"{ROOT}/training").info(name).layout)
            for name in ("w", "count")
        },
    }


def from_torch_xla():
    """Restore what torch_xla saved."""
    rng = random.Random(2)
    tensors = list(draw_tensors(CROSS, XLA_DTYPES, 2))
    targets = {
        t["name"]: draw_target(rng, t, elements(t["seed"], t["shape"], t["dtype"])) for t in tensors
    }
    restored = shardckpt.restore(
        f"{ROOT}/torch_xla", {name: way for name, (way, _) in targets.items()}
    )
    return [
        t
        for t in tensors
        if differs(
            restored[t["name"]], elements(t["seed"], t["shape"], t["dtype"]), targets[t["name"]][1]
        )
    ]


def for_torch_xla():
    rng = random.Random(3)
    state = {}
    for t in draw_tensors(CROSS, XLA_DTYPES, 3):
        sharding = named(layout(rng, t["shape"], even=True, smaller=True))
        state[t["name"]] = jax.device_put(
            elements(t["seed"], t["shape"], t["dtype"], normal=True), sharding
        )
    shardckpt.save(f"{ROOT}/jax", state)
    return len(state)


seen = {"pairs": pairs(), "training": training()}
sys.stdin.readline()
if CROSS:
    seen |= {"wrong from torch_xla": from_torch_xla(), "for torch_xla": for_torch_xla()}
seen["torch"] = sorted(name for name in ("torch", "torch_xla") if name in sys.modules)
sys.stdout.write(json.dumps(seen) + "\n")
