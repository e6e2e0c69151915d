"""Does with JAX on CPU, taken for an accelerator with pinned memory, what test_jax_pinned.py asks.
Answers as JSON on stdout."""

import gc
import json
import random
import sys
import weakref
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import shardckpt
from shardckpt import SaveOptions, errors
from shardckpt.frameworks import jax as adapter
from shardckpt.frameworks import jax_layout, jax_transfers
from shardckpt.io import buffers
from shardckpt.writing.background import Saver

ROOT = sys.argv[1]
MiB = 1 << 20
jax_transfers.ACCELERATORS.add("cpu")
DEVICE_PUT, TRANSFERRED = jax.device_put, jax_transfers._transfer
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))


def sharded(array, *spec, kind=None):
    return DEVICE_PUT(array, NamedSharding(mesh, PartitionSpec(*spec), memory_kind=kind))


def numbers(mebibytes, seed=0):
    return np.random.default_rng(seed).integers(0, 1 << 31, (mebibytes * 4, MiB // 16), np.int32)


def of_all_kinds():
    """Arrays, and the plain arrays that must be stored."""
    plain = {
        dtype: np.random.default_rng(7).integers(0, 2, (16, 512)).astype(dtype)
        for dtype in ("float32", "bool", "uint16")
    }
    plain |= {
        dtype: np.random.default_rng(8).normal(size=(16, 512)).astype(jnp.dtype(dtype))
        for dtype in ("bfloat16", "float8_e4m3fn")
    }
    plain |= {"int4": np.random.default_rng(9).integers(-8, 8, (16, 512)).astype(jnp.int4)}
    state = {
        f"{dtype} {spec}": (array, sharded(array, *spec))
        for dtype, array in plain.items()
        for spec in (("x", "y"), ("y",), ())
    }
    array = plain["float32"]
    state["on the host"] = array, sharded(array, "x", kind="pinned_host")
    state["on one device"] = array, DEVICE_PUT(array, jax.devices()[3])
    state["may move"] = array, jnp.asarray(array)
    state["scalar"] = np.float32(3), DEVICE_PUT(np.float32(3), jax.devices()[1])
    state["empty"] = array[:0], sharded(array[:0])
    stored = Format(Layout(major_to_minor=(1, 0)), state["float32 ('x', 'y')"][1].sharding)
    state["columns first"] = (
        array,
        jax.jit(lambda a: a, out_shardings=stored)(state["float32 ('x', 'y')"][1]),
    )
    return {name: both[0] for name, both in state.items()}, {
        name: both[1] for name, both in state.items()
    }


def same(actual, plain):
    return (
        actual.dtype == plain.dtype
        and actual.shape == plain.shape
        and np.asarray(actual).tobytes() == np.asarray(plain).tobytes()
    )


def wrong(url, plain):
    arrays = shardckpt.restore(url)
    return [name for name, array in plain.items() if not same(arrays[name], array)]


class Transfers:
    """The transfers to pinned memory: the bytes of the shards of each call, and whether memory of
    an earlier save still existed."""

    def __init__(self):
        self.calls, self.left, self._memory = [], [], []

    def __call__(self, shards):
        assert all(len(shard.devices()) == 1 for shard in shards)
        self.left.append(sum(reference() is not None for reference in self._memory))
        arrays = TRANSFERRED(shards)
        self.calls.append([array.nbytes for array in arrays])
        self._memory += map(weakref.ref, arrays)
        return arrays

    @property
    def kept(self):
        return sum(reference() is not None for reference in self._memory)


def values():
    plain, state = of_all_kinds()
    shardckpt.save(f"{ROOT}/saved", state)
    with jax.transfer_guard("disallow"):
        shardckpt.save_async(f"{ROOT}/async", state).wait()
    return {name: wrong(f"{ROOT}/{name}", plain) for name in ("saved", "async")}


def distinct():
    """One shard per distinct box, all of them in one call."""
    array = numbers(4)
    state = {
        "cut": sharded(array, "x", "y"),
        "halves": sharded(array, "y"),
        "replicated": sharded(array),
    }
    with mock.patch.object(jax_transfers, "_transfer", Transfers()) as transfers:
        shardckpt.save_async(f"{ROOT}/distinct", state).wait()
        return {
            "calls": [sorted(call) for call in transfers.calls],
            "wrong": wrong(f"{ROOT}/distinct", dict.fromkeys(state, array)),
        }


def donation():
    """Arrays that the program donates, and so changes, as soon as the call has returned."""
    change = jax.jit(lambda state: jax.tree.map(lambda a: a * 3 + 1, state), donate_argnums=0)
    arrays = {"w": numbers(8), "v": numbers(2, 1)}
    state, saver, handles, differences = (
        {name: sharded(array, "x", "y") for name, array in arrays.items()},
        Saver(),
        [],
        [],
    )
    for step in range(6):
        handles.append(saver.begin(f"{ROOT}/donated{step}", state, SaveOptions()))
        state = change(state)
    for step, handle in enumerate(handles):
        handle.wait()
        differences += wrong(f"{ROOT}/donated{step}", arrays)
        arrays = {name: array * 3 + 1 for name, array in arrays.items()}
    return differences


def memory():
    """Whether each save streams, its pool's most bytes, the calls, and what is left of the memory
    of the saves before."""
    outcomes = {}
    for limit in ("52MiB", "24MiB"):
        saver, transfers = Saver(memory_limit=limit), Transfers()
        plain = {f"w{i}": numbers(6, i) for i in range(8)}
        state = {name: sharded(array, "x") for name, array in plain.items()}
        with mock.patch.object(jax_transfers, "_transfer", transfers):
            reports = [
                saver.begin(f"{ROOT}/memory{limit}{i}", state, SaveOptions()).wait()
                for i in range(3)
            ]
        outcomes[limit] = {
            "streamed": [report.streamed for report in reports],
            "within": saver.pool.high_water <= saver.pool.limit,
            "calls": len(transfers.calls),
            "most": max(map(sum, transfers.calls)) / MiB,
            "left": max(transfers.left[:1] + transfers.left[1:])
            if len(transfers.calls) == 3
            else 0,
            "kept": transfers.kept,
            "wrong": wrong(f"{ROOT}/memory{limit}2", plain),
        }
    return outcomes


def published(url):
    try:
        shardckpt.open(url)
    except errors.NotFoundError:
        return False
    return True


def warmed():
    """Shapes of what XLA's pool is asked for before the first save, and in it; and whether all of
    it is given back meanwhile, and the state of the step before is free."""
    plain = {f"w{i}": numbers(2, i) for i in range(4)}

    def next_state():
        return {name: sharded(array, "x") for name, array in plain.items()} | {"other": numbers(1)}

    state = next_state()
    step_before = [weakref.ref(state[name]) for name in plain]
    asked, memory = [], []

    def put(shards, places):
        pairs = zip(shards, places, strict=True)
        asked.append(
            sorted(
                (shard.shape, next(iter(place.device_set)).id, place.memory_kind)
                for shard, place in pairs
            )
        )
        arrays = DEVICE_PUT(shards, places)
        memory.extend(map(weakref.ref, arrays))
        return arrays

    with (
        mock.patch.object(jax_transfers.jax, "device_put", put),
        shardckpt.CheckpointManager(f"{ROOT}/warmed", every=2, keep=9) as manager,
    ):
        manager.save(1, state)  # is not due
        manager._background._saver._warming.join()
        left = sum(reference() is not None for reference in memory)
        state = next_state()
        gc.collect()
        held = sum(reference() is not None for reference in step_before)
        manager.save(2, state)
    return {
        "asked": len(asked),
        "alike": asked[0] == asked[1],
        "left": left,
        "held": held,
        "wrong": wrong(f"{ROOT}/warmed/2", plain),
    }


def refused():
    """XLA has memory for so much at a time, or none, or fails otherwise."""
    plain = {f"w{i}": numbers(10, i) for i in range(8)}
    state = {name: sharded(array, "x") for name, array in plain.items()}
    outcomes = {}
    for cap in (64, 40, 0, -1):
        asked = []

        def put(shards, places, cap=cap, asked=asked):
            asked.append(sum(shard.nbytes for shard in shards) / MiB)
            if asked[-1] > cap:
                raise jax.errors.JaxRuntimeError(
                    "INTERNAL: broken"
                    if cap < 0
                    else "RESOURCE_EXHAUSTED: Out of memory allocating …"
                )
            return DEVICE_PUT(shards, places)

        with mock.patch.object(jax_transfers.jax, "device_put", put):
            try:
                handle = shardckpt.save_async(
                    f"{ROOT}/refused{cap}", state, options=SaveOptions(memory_limit="256MiB")
                )
                streamed = handle.wait().streamed
            except jax.errors.JaxRuntimeError as e:
                outcomes[cap] = [asked, str(e), published(f"{ROOT}/refused{cap}")]
                continue
        outcomes[cap] = [asked, streamed, wrong(f"{ROOT}/refused{cap}", plain)]
    return outcomes


def kinds_without():
    """A platform that has no pinned memory: all copies are begun before one is awaited."""
    plain = {f"w{i}": numbers(1, i) for i in range(8)}
    state = {name: sharded(array, "x") for name, array in plain.items()}
    jax_layout.local_shards.cache_clear()
    with (
        mock.patch.object(jax_layout, "pinned", return_value=None),
        mock.patch.object(jax_transfers, "_transfer") as transferred,
        mock.patch("jax.device_get", wraps=jax.device_get) as fetched,
    ):
        shardckpt.save_async(f"{ROOT}/without", state).wait()
    jax_layout.local_shards.cache_clear()
    return {
        "transferred": transferred.call_count,
        "calls": fetched.call_count,
        "wrong": wrong(f"{ROOT}/without", plain),
    }


def restored():
    """Restores onto accelerators, whose copies read the buffers late: a misaligned buffer never
    becomes an array's own memory."""
    aligned = buffers._align
    plain = {f"w{i}": numbers(1, i) for i in range(40)}
    shardckpt.save(f"{ROOT}/restored", plain)
    like = {
        name: jax.ShapeDtypeStruct(
            a.shape, a.dtype, sharding=NamedSharding(mesh, PartitionSpec("x"))
        )
        for name, a in plain.items()
    }
    waits = mock.Mock(wraps=jax.block_until_ready)
    with (
        mock.patch.object(
            buffers, "_align", lambda nbytes, alignment=64: aligned(nbytes + 8, alignment)[8:]
        ),
        mock.patch.object(jax_transfers.jax, "block_until_ready", waits),
    ):
        arrays = shardckpt.restore(f"{ROOT}/restored", like, memory_limit="24MiB")
    return {
        "wrong": [name for name, a in plain.items() if not same(arrays[name], a)],
        "waits": waits.call_count,
    }


class Late:
    """Copies to accelerators that are made when something waits for them, or earlier, in an order
    that is drawn."""

    def __init__(self, seed):
        self.random, self.pending, self.most = random.Random(seed), [], 0

    def array(self, _sink, filled):
        self.most = max(self.most, len(self.pending) + 1)
        target = np.empty_like(filled[0])
        self.pending.append((target, filled[0]))
        if self.random.random() < 0.3:
            self.copy(self.random.choice(self.pending))
        return target

    def copy(self, pair):
        pair[0][...] = pair[1]
        self.pending = [other for other in self.pending if other is not pair]

    def wait(self, arrays):
        ids = [id(array) for array in (arrays if isinstance(arrays, list) else [arrays])]
        due = [pair for pair in self.pending if id(pair[0]) in ids]
        self.random.shuffle(due)
        for pair in due:
            self.copy(pair)
        return arrays


def ring():
    """The schedules in which a restore has wrong elements, as it is and with a wait taken out; and
    the most copies under way."""
    plain = {f"w{i}": np.full((64, 1024), i, np.float32) for i in range(60)}
    shardckpt.save(f"{ROOT}/ring", plain)
    like = {
        name: jax.ShapeDtypeStruct(
            a.shape, a.dtype, sharding=SingleDeviceSharding(jax.devices()[0])
        )
        for name, a in plain.items()
    }
    outcomes = {}
    for broken in (False, True):
        bad, most = 0, 0
        for seed in range(8):
            late = Late(seed)
            with (
                mock.patch.object(
                    adapter._AcceleratorSink,
                    "array",
                    lambda sink, filled, late=late: late.array(sink, filled),
                ),
                mock.patch.object(jax_transfers.jax, "block_until_ready", late.wait),
                mock.patch.object(
                    jax_transfers.JaxArrival,
                    "wait",
                    (lambda _: None) if broken else jax_transfers.JaxArrival.wait,
                ),
            ):
                arrays = shardckpt.restore(f"{ROOT}/ring", like, memory_limit="6MiB")
            bad += any(not same(arrays[name], a) for name, a in plain.items())
            most = max(most, late.most)
        outcomes["broken" if broken else "whole"] = [bad, most]
    return outcomes


def failed():
    """A restore amid which reading fails: all copies that had begun are waited for."""
    plain = {f"w{i}": numbers(1, i) for i in range(40)}
    shardckpt.save(f"{ROOT}/failed", plain, options=SaveOptions(layout="zarr"))
    like = {
        name: jax.ShapeDtypeStruct(
            a.shape, a.dtype, sharding=SingleDeviceSharding(jax.devices()[0])
        )
        for name, a in plain.items()
    }
    late = Late(0)
    (chunk,) = Path(f"{ROOT}/failed").rglob("w9/c/0/0")
    damaged = bytearray(chunk.read_bytes())
    damaged[100] ^= 1
    chunk.write_bytes(damaged)
    with (
        mock.patch.object(adapter._AcceleratorSink, "array", lambda *pair: late.array(*pair)),  # noqa: PLW0108  (a method of the sink)
        mock.patch.object(jax_transfers.jax, "block_until_ready", late.wait),
    ):
        try:
            shardckpt.restore(f"{ROOT}/failed", like, memory_limit="6MiB")
        except errors.CorruptionError as e:
            return {"pending": len(late.pending), "most": late.most, "names": "w9" in str(e)}
    return None


answers = {
    question.__name__: question()
    for question in (
        values,
        distinct,
        donation,
        memory,
        warmed,
        refused,
        kinds_without,
        restored,
        ring,
        failed,
    )
}
print("\n" + json.dumps(answers))
