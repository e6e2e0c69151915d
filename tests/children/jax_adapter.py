"""Does with real JAX arrays on 8 virtual devices what test_jax.py asks. JSON on stdin, answers on
stdout."""

import json
import signal
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lib import xla_client
from jax._src.sharding_impls import GSPMDSharding
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jax_arrays import assembled, compiles, error, filled, on_devices, placed
from jax_cases import NAMES, elements, same_bits

import shardckpt
from shardckpt import frameworks
from shardckpt.frameworks.base import Target
from shardckpt.layout.dtypes import by_name
from shardckpt.layout.op_sharding import OpSharding
from shardckpt.layout.sharding import Sharding
from shardckpt.layout.world import DeviceOwners, World

F32 = by_name("float32")


def devices(ids):
    return np.array([jax.devices()[i] for i in ids])


def spec_of(case):
    return PartitionSpec(
        *(tuple(part) if isinstance(part, list) else part for part in case["spec"])
    )


def sharding_of(case):
    if "text" in case:
        return GSPMDSharding(
            devices(case["devices"]).tolist(), xla_client.HloSharding.from_string(case["text"])
        )
    if "device" in case:
        return SingleDeviceSharding(jax.devices()[case["device"]])
    mesh = Mesh(devices(case["devices"]).reshape(case["mesh"]), NAMES[: len(case["mesh"])])
    return NamedSharding(mesh, spec_of(case), memory_kind=case.get("memory"))


def sharded(case, seed=0):
    """Elements, and an array of them that JAX itself has sharded."""
    array = elements(seed, case["shape"], case["dtype"])
    return array, jax.device_put(array, sharding_of(case))


def round_trip(case):
    array, leaf = sharded(case)
    before = compiles()
    source = frameworks.source("w", leaf)
    with mock.patch(
        "jax.make_array_from_single_device_arrays", wraps=jax.make_array_from_single_device_arrays
    ) as made:
        (arrays,) = frameworks.fetch([source])
    whole, covered = assembled(source, arrays)
    sink = frameworks.target("w", leaf, (), F32)
    restored = placed(sink, array)
    boxes = {str(s.index) for s in leaf.addressable_shards if s.data.size}
    kept = [
        a for a in [leaf, *(s.data for s in leaf.addressable_shards)] if a._npy_value is not None
    ]
    pointers = {s.data.unsafe_buffer_pointer() for s in leaf.addressable_shards}
    return {
        "fetched": same_bits(whole, array),
        "covered once": bool((covered == 1).all()),
        "boxes": [len(source.boxes), len(boxes)],
        "kept on the host": len(kept),
        "copied": sum(a.nbytes for a in arrays if a.ctypes.data not in pointers),
        "staged": source.staged_bytes,
        "made by jax": made.call_count,
        "devices": on_devices(restored) == on_devices(leaf),
        "sharding": restored.sharding == leaf.sharding and restored.committed == leaf.committed,
        "dtype": str(restored.dtype),
        "shape": list(restored.shape),
        "compiles": compiles() - before,
    }


def ordered(case):
    """An array that JAX holds in an order of its own in memory."""
    array, leaf = sharded(case)
    stored = Format(Layout(major_to_minor=tuple(case["order"])), leaf.sharding)
    source = frameworks.source("w", jax.jit(lambda a: a, out_shardings=stored)(leaf))
    (arrays,) = frameworks.fetch([source])
    whole, covered = assembled(source, arrays)
    return same_bits(whole, array) and bool((covered == 1).all())


def targets(case):
    array, leaf = sharded(case)
    ours = shardckpt.frameworks.jax_layout.layout_of(leaf.sharding, leaf.ndim)
    shardings = {"jax": leaf.sharding, "layout": ours}
    if isinstance(ours, Sharding):
        shardings["op_sharding"] = ours.op_sharding(leaf.ndim)
        shardings["tiled"] = OpSharding.parse(
            str(leaf.sharding._to_xla_hlo_sharding(leaf.ndim))
        ).relabel(case["devices"])
    before = compiles()
    outcomes = {}
    for way, sharding in shardings.items():
        restored = placed(
            frameworks.target("w", Target(sharding), tuple(case["shape"]), by_name(case["dtype"])),
            array,
        )
        same_order = isinstance(sharding, OpSharding) or restored.sharding.is_equivalent_to(
            leaf.sharding, leaf.ndim
        )
        outcomes[way] = on_devices(restored) == on_devices(leaf) and same_order
    restored = placed(
        frameworks.target(
            "w", jax.ShapeDtypeStruct(case["shape"], case["dtype"], sharding=leaf.sharding), (), F32
        ),
        array,
    )
    outcomes["struct"] = (
        on_devices(restored) == on_devices(leaf) and restored.sharding == leaf.sharding
    )
    return outcomes | {"compiles": compiles() - before}


def layouts(case):
    return (
        repr(frameworks.source("w", sharded(case)[1]).layout)
        if "text" not in case
        else str(frameworks.source("w", sharded(case)[1]).layout)
    )


def control(_):
    before = compiles()
    jax.jit(lambda a: a * 3 + 1)(np.float32(2))
    return compiles() - before


def uncommitted(_):
    """Arrays that JAX may still move stay so, and go on being arguments beside sharded ones."""
    with jax.default_device(jax.devices()[5]):
        count = jnp.full((2, 3), 7)
    state = {
        "count": count,
        "w": sharded(
            {"mesh": [8], "devices": range(8), "shape": [8, 3], "spec": ["x"], "dtype": "float32"}
        )[1],
    }
    abstract = jax.eval_shape(lambda: jnp.zeros((2, 3), jnp.int32))
    before = compiles()
    sources = frameworks.sources(state)
    restored = {
        "count": placed(frameworks.target("count", count, (), F32), np.asarray(count)),
        "w": placed(frameworks.target("w", state["w"], (), F32), np.asarray(state["w"])),
    }
    struct = placed(frameworks.target("count", abstract, (), F32), np.asarray(count))
    compiled_before_use = compiles() - before
    together = jax.jit(lambda s: s["w"] + s["count"][0])(restored)
    return {
        "layout": str(sources["count"].layout),
        "boxes": len(sources["count"].boxes),
        "committed": [restored["count"].committed, struct.committed, restored["w"].committed],
        "devices": [[d.id for d in a.devices()] for a in (restored["count"], struct)],
        "elements": [restored["count"].tolist(), struct.tolist()],
        "together": len(together.devices()),
        "compiles": compiled_before_use,
    }


def op_shardings(case):
    """Arrays restored by OpShardings of several kinds, in one program."""
    state = {}
    for text in case["texts"]:
        target = Target(OpSharding.parse(text, len(case["devices"])).relabel(case["devices"]))
        state[text] = placed(
            frameworks.target("w", target, tuple(case["shape"]), F32),
            np.ones(case["shape"], np.float32),
        )
    orders = [[d.id for d in a.sharding._device_assignment] for a in state.values()]
    return {
        "sum": float(jax.jit(lambda s: sum(a.sum() for a in s.values()))(state)),
        "orders": [order == sorted(order) for order in orders],
    }


def adoption(_):
    """A restored array is the memory that was read into, which replicas share; donated, that memory
    stays as it was."""
    outcomes = []
    for case in (
        {"mesh": [8], "devices": range(8), "spec": ["x"]},
        {"mesh": [4, 2], "devices": range(8), "spec": [None]},
        {"device": 3},
    ):
        _, leaf = sharded(case | {"shape": [1 << 16], "dtype": "float32"})
        array = np.arange(1 << 16, dtype=np.float32)
        sink = frameworks.target("w", leaf, (), F32)
        buffers = filled(sink, array)
        restored = sink.place(buffers)
        pointers = {s.data.unsafe_buffer_pointer() for s in restored.addressable_shards}
        after = jax.jit(lambda a: a + 1, donate_argnums=0)(restored)
        as_it_was = all(
            np.array_equal(b, array[sink.boxes[i].slices]) for i, b in enumerate(buffers)
        )
        outcomes.append(
            [
                pointers == {b.ctypes.data for b in buffers},
                restored.is_deleted(),
                as_it_was,
                same_bits(after, array + 1),
            ]
        )
    return outcomes


def memory_kinds(_):
    case = {
        "mesh": [4, 2],
        "devices": range(8),
        "shape": [8, 4],
        "spec": ["y", None],
        "dtype": "float32",
    }
    outcomes = {}
    for kind in ("device", "pinned_host", "unpinned_host"):
        array, leaf = sharded(case | {"memory": kind})
        (arrays,) = frameworks.fetch([source := frameworks.source("w", leaf)])
        like = (
            leaf,
            Target(leaf.sharding),
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
        )
        restored = [placed(frameworks.target("w", way, leaf.shape, F32), array) for way in like]
        single = jax.device_put(array, SingleDeviceSharding(jax.devices()[2], memory_kind=kind))
        restored.append(placed(frameworks.target("w", single, (), F32), array))
        outcomes[kind] = {
            "kinds": sorted(
                {r.sharding.memory_kind for r in restored}
                | {s.data.sharding.memory_kind for r in restored for s in r.addressable_shards}
            ),
            "bits": all(same_bits(r, array) for r in restored)
            and same_bits(assembled(source, arrays)[0], array),
        }
    return outcomes


def dtypes(case):
    """Each dtype that a checkpoint can hold: a target's answer before anything is read."""
    sharding = NamedSharding(Mesh(devices(range(2)), ("x",)), PartitionSpec())
    with jax.enable_x64(case["x64"]):
        return error(frameworks.target, "w", Target(sharding), (2,), by_name(case["dtype"]))


def x64(_):
    """An array of 64 bits survives being saved without x64, and cannot be restored without."""
    with jax.enable_x64(True):
        leaf = jnp.arange(3, dtype=jnp.int64) << 40
    (arrays,) = frameworks.fetch([frameworks.source("w", leaf)])
    refused = error(frameworks.target, "w", leaf, (), F32)
    with jax.enable_x64(True):
        restored = placed(frameworks.target("w", leaf, (), F32), arrays[0].copy())
    return {
        "fetched": [str(arrays[0].dtype), arrays[0].tolist()],
        "refused": refused,
        "restored": [str(restored.dtype), restored.tolist()],
    }


def identities(_):
    a, b = jnp.arange(3), jnp.arange(3)

    def tie(leaf):
        return frameworks.target("w", leaf, (3,), F32).tie_key

    struct = Target(SingleDeviceSharding(jax.devices()[1]), dtype="float32")
    return {
        "itself": frameworks.identity(a) == frameworks.identity(a),
        "equal elements": frameworks.identity(a) == frameworks.identity(b),
        "struct": frameworks.identity(jax.ShapeDtypeStruct((3,), jnp.int32)),
        "ties": [tie(a) == tie(a), tie(a) == tie(b), tie(struct) == tie(struct)],
        "is_tensor": [
            frameworks.is_tensor(x)
            for x in (
                a,
                jax.ShapeDtypeStruct((), jnp.int32),
                jax.random.key(0),
                jnp.float32(3),
                np.float32(1),
                jnp.float32,
            )
        ],
    }


def guarded(_):
    """Nothing that JAX calls an implicit transfer."""
    array, leaf = sharded(
        {"mesh": [8], "devices": range(8), "shape": [8], "spec": ["x"], "dtype": "float32"}
    )
    with jax.transfer_guard("disallow"):
        (arrays,) = frameworks.fetch([source := frameworks.source("w", leaf)])
        restored = placed(frameworks.target("w", leaf, (), F32), array)
    return same_bits(assembled(source, arrays)[0], array) and same_bits(restored, array)


def memory_of_boxes(case):
    """Copies of packed elements are host memory of Python's: how much of it do wanted boxes
    take?"""
    array, leaf = sharded(case | {"shape": [8, 1 << 18], "dtype": "int4"})
    source = frameworks.source("w", leaf)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    ((*arrays,),) = frameworks.fetch([source], [case["wanted"]])
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    return {
        "boxes": len(source.boxes),
        "bits": [
            same_bits(fetched, array[source.boxes[k].slices])
            for k, fetched in zip(case["wanted"], arrays, strict=True)
        ],
        "taken": peak / sum(a.nbytes for a in arrays) if arrays else peak,
    }


def named_owners(case):
    """Holders of boxes where a world names the owner of each device, and JAX takes all devices for
    its only process's."""
    owners = {int(device): owner for device, owner in case["owners"].items()}
    world = World(0, 2, {"jax": DeviceOwners.of(owners)})
    sources = frameworks.sources({"w": sharded(case)[1], "free": jnp.ones(3)}, world)
    stranger = error(
        frameworks.source, "w", sharded(case)[1], World(0, 2, {"jax": DeviceOwners.of({0: 1})})
    )
    return {
        "holders": sources["w"].holders,
        "uncommitted": sources["free"].holders,
        "stranger": stranger,
    }


def pmapped(_):
    array = np.arange(24, dtype=np.float32).reshape(8, 3)
    leaf = jax.pmap(lambda a: a, devices=devices([3, 1, 2, 0, 7, 6, 5, 4]).tolist())(array)
    before = compiles()
    (arrays,) = frameworks.fetch([source := frameworks.source("w", leaf)])
    restored = placed(frameworks.target("w", leaf, (), F32), array)
    return {
        "boxes": len(source.boxes),
        "bits": same_bits(assembled(source, arrays)[0], array),
        "devices": on_devices(restored) == on_devices(leaf) and restored.sharding == leaf.sharding,
        "compiles": compiles() - before,
    }


def together(_):
    """Eight threads fetch one shard each of an array of which JAX has not listed the shards, over
    and over: what went wrong."""
    wrong, interval = [], sys.getswitchinterval()
    sharding = NamedSharding(Mesh(devices(range(8)), NAMES[:1]), PartitionSpec("x"))
    whole = np.arange(16, dtype=np.float32)

    def ask(leaf, barrier, k):
        barrier.wait()
        try:
            ((array,),) = frameworks.fetch([frameworks.source("w", leaf)], [[k]])
        except KeyError as e:
            return f"no shard of device {e}"
        return (
            None if same_bits(array, whole[2 * k : 2 * k + 2]) else f"other elements in shard {k}"
        )

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            for _ in range(50):
                leaf = jax.device_put(whole, sharding)
                wrong += filter(None, pool.map(partial(ask, leaf, Barrier(8)), range(8)))
                wrong += (
                    [] if len(leaf.addressable_shards) == 8 else ["JAX keeps a part of the list"]
                )
    finally:
        sys.setswitchinterval(interval)
    return wrong


def amid_another(_):
    """A signal handler saves while a save asks JAX for the shards of an array: what came, and what
    ended."""
    state, saved = {"w": jnp.ones(3)}, []

    def handler(*_):
        shardckpt.save("memory://amid-another/handler", {"w": jnp.ones(3)})
        saved.append("handler")

    def trace(frame, event, _):
        if (
            event == "call"
            and frame.f_code.co_name == "addressable_shards"
            and "signal" not in saved
        ):
            saved.append("signal")
            signal.raise_signal(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    sys.settrace(trace)
    try:
        shardckpt.save("memory://amid-another/outer", state)
        saved.append("outer")
    finally:
        sys.settrace(None)
        signal.signal(signal.SIGUSR1, before)
    return saved


class Sorted(jax.sharding.Sharding):
    """Somebody's own kind, of which XLA has never heard."""

    @property
    def device_set(self):
        return set(jax.devices())


def refusals(_):
    mesh = Mesh(devices(range(8)).reshape(4, 2), NAMES[:2])
    explicit = jax.make_mesh((4, 2), NAMES[:2])
    gone = jnp.ones(3)
    gone.delete()
    donated = jax.device_put(np.ones(8, np.float32), NamedSharding(mesh, PartitionSpec("x")))
    jax.jit(lambda a: a + 1, donate_argnums=0)(donated)
    ours = shardckpt.Mesh((8,), ("x",))

    def struct(spec, mesh=mesh, shape=(8, 2)):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    def to(leaf, shape=(8, 2), dtype="float32"):
        return error(frameworks.target, "w", leaf, shape, by_name(dtype))

    traced = []
    jax.jit(lambda a: traced.append([error(frameworks.source, "w", a), to(a)]) or a)(np.ones(2))
    return {
        "deleted": error(frameworks.source, "w", gone),
        "donated": error(frameworks.source, "w", donated),
        "deleted like": to(donated, (8,)),
        "traced": traced[0][0],
        "traced like": traced[0][1],
        "struct saved": error(frameworks.source, "w", struct(PartitionSpec("x"))),
        "kind": to(Target(Sorted())),
        "unconstrained": to(struct(PartitionSpec("x", PartitionSpec.UNCONSTRAINED))),
        "unreduced": to(Target(NamedSharding(explicit, PartitionSpec("x", unreduced={"y"})))),
        "abstract": to(struct(PartitionSpec("x"), mesh.abstract_mesh)),
        "uneven": to(struct(PartitionSpec("x"), shape=(10, 2)), (10, 2)),
        "uneven ours": to(Target(Sharding(ours, shardckpt.PartitionSpec("x"))), (10, 2)),
        "rank": to(Target(NamedSharding(mesh, PartitionSpec(None, None, "x")))),
        "rank ours": to(Target(Sharding(ours, shardckpt.PartitionSpec(None, None, "x")))),
        "rank hlo": to(Target(OpSharding.parse("{devices=[8]<=[8]}"))),
        "strangers": to(
            Target(Sharding(shardckpt.Mesh((2,), ("x",), [7, 100]), shardckpt.PartitionSpec("x")))
        ),
        "maximal": to(Target(OpSharding.maximal(8))),
        "manual": to(Target(OpSharding.parse("{manual}"))),
        "everywhere": to(Target(OpSharding.parse("{replicated}"))),
    }


def main():
    questions = json.load(sys.stdin)
    verbs = (
        *(
            round_trip,
            ordered,
            targets,
            layouts,
            control,
            uncommitted,
            op_shardings,
            adoption,
            memory_kinds,
            dtypes,
            x64,
            identities,
            guarded,
            memory_of_boxes,
            named_owners,
            pmapped,
            together,
            amid_another,
            refusals,
        ),
    )
    answers = {verb.__name__: [verb(case) for case in questions[verb.__name__]] for verb in verbs}
    answers["torch"] = sorted(name for name in ("torch", "torch_xla") if name in sys.modules)
    sys.stdout.write("\n" + json.dumps(answers) + "\n")


main()
