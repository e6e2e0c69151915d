"""One of several JAX processes; does what stdin says, a word a line, and answers each with a line
of JSON on stdout.

Between two lines it does nothing at all, so whoever tests can keep the others idle while one of
them works. What others print goes to stderr, such as gloo's word when the first collective makes it
connect.
"""

import faulthandler
import json
import os
import random
import sys
import traceback

import jax

ADDRESS, PROCESS, PROCESSES, COUNT = sys.argv[1], *map(int, sys.argv[2:])
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
# A call that waits for the others must not outlive the test.
faulthandler.dump_traceback_later(250, exit=True)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(ADDRESS, num_processes=PROCESSES, process_id=PROCESS)

import jax.numpy as jnp
import numpy as np
from jax._src.sharding_impls import GSPMDSharding
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jax_arrays import compiles, error, on_devices, placed
from jax_cases import NAMES, draw_tensors, elements, layout, same_bits

from shardckpt import frameworks
from shardckpt.frameworks.base import Target
from shardckpt.frameworks.jax_layout import layout_of
from shardckpt.layout.dtypes import by_name
from shardckpt.layout.sharding import Sharding
from shardckpt.layout.world import DeviceOwners, World

DEVICES = sorted(jax.devices(), key=lambda device: device.id)
OWNERS = {device.id: device.process_index for device in DEVICES}
WORLD = World(PROCESS, PROCESSES, {"jax": DeviceOwners.of(OWNERS)})
DTYPES = ["float32", "bfloat16", "int32", "bool", "int4", "complex64"]
KEYS = {"threefry2x32": 2, "rbg": 4, "unsafe_rbg": 4}
F32 = by_name("float32")


def named(case):
    devices = np.array([DEVICES[i] for i in case["devices"]]).reshape(case["mesh"])
    spec = PartitionSpec(
        *(tuple(part) if isinstance(part, list) else part for part in case["spec"])
    )
    return NamedSharding(Mesh(devices, NAMES[: len(case["mesh"])]), spec)


def some_sharding(rng, shape):
    """Of any kind, over devices in any order: all of them, some, or none of this process's."""
    kind = rng.choice(["named"] * 4 + ["gspmd", "single"])
    if kind == "single":
        return SingleDeviceSharding(rng.choice(DEVICES))
    sharding = named(layout(rng, shape, even=True, smaller=True))
    if kind == "gspmd":
        return GSPMDSharding(
            list(sharding._device_assignment), sharding._to_xla_hlo_sharding(len(shape))
        )
    return sharding


def box(index, shape, behind):
    """An index of JAX's as start and stop, whole in the dimensions that only the words of keys
    have.

    Those of keys' shards have these dimensions already, those of their sharding have not.
    """
    ends = [slice_.indices(n)[:2] for slice_, n in zip(index, shape, strict=False)] + [
        (0, n) for n in behind
    ]
    return tuple(start for start, _ in ends), tuple(stop for _, stop in ends)


def case(rng, tensor, generator):
    """An array that JAX has made, saved from and restored into this process: is all of it as JAX
    says?"""
    behind = () if generator is None else (KEYS[generator],)
    shape, dtype = tuple(tensor["shape"]), tensor["dtype"] if generator is None else "uint32"
    whole = elements(tensor["seed"], (*shape, *behind), dtype)
    sharding = some_sharding(rng, shape)
    if generator is None:
        leaf = jax.make_array_from_callback(
            shape, sharding, lambda index: whole[index], dtype=whole.dtype
        )
    else:
        words = [
            jax.device_put(whole[index], device)
            for device, index in sharding.addressable_devices_indices_map(shape).items()
        ]
        keys = [jax.random.wrap_key_data(part, impl=generator) for part in words]
        leaf = jax.make_array_from_single_device_arrays(
            shape, sharding, keys, dtype=jax.random.key(0, impl=generator).dtype
        )

    before = compiles()
    source = frameworks.source("w", leaf, WORLD)
    boxes = [source.boxes[i] for i in range(len(source.boxes))]
    # Elements that are the same in all processes come from the other one.
    here = random.Random(f"{tensor['seed']} {PROCESS}")
    positions = here.sample(range(len(boxes)), here.randrange(len(boxes) + 1))
    (arrays,) = frameworks.fetch([source], [positions])
    ways = [leaf, jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)]
    if generator is None:
        ours = layout_of(sharding, len(shape))
        ways += [Target(sharding), Target(ours)]
        ways += [Target(ours.op_sharding(len(shape)))] if isinstance(ours, Sharding) else []
    sinks = [frameworks.target("w", way, whole.shape, by_name(dtype)) for way in ways]
    restored = [placed(sink, whole) for sink in sinks]
    compiled = compiles() - before

    holders = {}
    for device, index in sharding.devices_indices_map(shape).items():
        holders.setdefault(box(index, shape, behind), set()).add(device.process_index)
    mine = (
        {box(shard.index, shape, behind) for shard in leaf.addressable_shards}
        if whole.size
        else set()
    )
    return {
        "boxes": {(b.start, b.stop) for b in boxes} == mine and len(boxes) == len(mine),
        "holders": source.holders == [sorted_tuple(holders[b.start, b.stop]) for b in boxes],
        "fetched": all(
            same_bits(array, whole[boxes[k].slices])
            for k, array in zip(positions, arrays, strict=True)
        ),
        "sinks": all(
            {(s.boxes[i].start, s.boxes[i].stop) for i in range(len(s.boxes))} == mine
            for s in sinks
        ),
        "restored": all(
            r.shape == leaf.shape and r.dtype == leaf.dtype and on_devices(r) == on_devices(leaf)
            for r in restored
        ),
        "shardings": all(
            r.sharding == way.sharding
            if way is leaf
            else r.sharding.is_equivalent_to(sharding, len(shape))
            for way, r in zip(ways, restored, strict=True)
            if not isinstance(way, Target) or way.sharding is sharding
        ),
        "compiles": compiled,
        # The input for dealing the boxes out:
        "sharding": str(sharding),
        "shape": source.shape,
        "itemsize": source.dtype.storage.itemsize,
        "held": [[b.start, b.stop, h] for b, h in zip(boxes, source.holders, strict=True)],
    }


def sorted_tuple(numbers):
    return tuple(sorted(numbers))


def cases():
    rng = random.Random(PROCESSES)  # the same cases in all processes
    generators = [None, None, None, *KEYS]
    return [
        case(rng, tensor, generators[i % len(generators)])
        for i, tensor in enumerate(draw_tensors(COUNT, DTYPES, PROCESSES))
    ]


def devices():
    return [[device.id, device.process_index] for device in jax.devices()]


def own():
    """Arrays of which every process has one of its own."""
    count, plain = jnp.asarray(np.int32(41)), jnp.asarray(np.eye(2, dtype=np.float32))
    before = compiles()
    put = jax.device_put(np.ones(3, np.float32), jax.local_devices()[-1])
    sources = frameworks.sources({"count": count, "put": put}, WORLD)
    abstract = jax.ShapeDtypeStruct((2, 2), np.float32)
    restored = placed(frameworks.target("w", abstract, (2, 2), F32), np.eye(2, dtype=np.float32))
    return {
        "uncommitted": [
            sources["count"].holders,
            sources["count"].layout,
            sources["count"].boxes.sizes().tolist(),
        ],
        "committed": sources["put"].holders,
        "as jnp.asarray": restored.sharding == plain.sharding
        and restored.committed == plain.committed
        and same_bits(restored, plain),
        "compiles": compiles() - before,
    }


def refusals():
    """Errors where the world names other owners of the devices than JAX does; and a world with
    other numbers that is accepted."""
    sharding = NamedSharding(Mesh(np.array(DEVICES), ("x",)), PartitionSpec("x"))
    leaf = jax.make_array_from_callback(
        (8,), sharding, lambda index: np.arange(8, dtype=np.float32)[index]
    )

    def world_of(owners, process=PROCESS, processes=PROCESSES):
        return World(process, processes, {"jax": DeviceOwners.of(owners)})

    def asked(world):
        return error(frameworks.source, "w", leaf, world)

    turned = {device: (owner + 1) % PROCESSES for device, owner in OWNERS.items()}
    backwards = {device: PROCESSES - 1 - owner for device, owner in OWNERS.items()}
    renumbered = frameworks.source("w", leaf, world_of(backwards, PROCESSES - 1 - PROCESS))
    return {
        "nothing said": asked(World()),
        "nobody's": asked(
            world_of(
                {device: owner for device, owner in OWNERS.items() if device != DEVICES[-1].id}
            )
        ),
        "another's": asked(world_of(turned)),
        "all one's": asked(world_of(dict.fromkeys(OWNERS, PROCESS))),
        "numbered otherwise": {holder for holders in renumbered.holders for holder in holders}
        == {PROCESSES - 1 - PROCESS},
    }


def together():
    """Go on, in a program of all processes, with what was restored."""
    sharding = NamedSharding(
        Mesh(np.array(DEVICES).reshape(2, -1), NAMES[:2]), PartitionSpec("y", "x")
    )
    w = np.arange(64, dtype=np.float32).reshape(8, 8)
    key = np.array(jax.random.key_data(jax.random.key(7)))
    everywhere = NamedSharding(sharding.mesh, PartitionSpec())
    state = {
        "w": placed(
            frameworks.target(
                "w", jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=sharding), w.shape, F32
            ),
            w,
        ),
        "step": placed(
            frameworks.target("step", jax.ShapeDtypeStruct((), np.int32), (), by_name("int32")),
            np.array(41, np.int32),
        ),
        "key": placed(
            frameworks.target(
                "key",
                jax.ShapeDtypeStruct((), jax.random.key(0).dtype, sharding=everywhere),
                key.shape,
                by_name("uint32"),
            ),
            key,
        ),
    }
    total = jax.jit(lambda s: s["w"].sum() + s["step"] + jax.random.uniform(s["key"]))(state)
    return [
        float(total),
        float(w.sum() + np.float32(41) + np.float32(jax.random.uniform(jax.random.key(7)))),
    ]


WORDS = {verb.__name__: verb for verb in (devices, cases, own, refusals, together)}
for line in iter(sys.stdin.readline, "end\n"):
    try:
        ANSWERS.write(json.dumps(WORDS[line.strip()]()) + "\n")
        ANSWERS.flush()
    except Exception:
        traceback.print_exc()
        os._exit(1)  # without JAX's farewell, which waits for the others
