"""Counters of a process's requests to others, where they happen: in gloo itself, at the stores'
clients, in the compilers.

A counter is a function without arguments: name → how often so far. Those that end in `…` are about
waiting for others.
"""

import time
from collections import Counter
from datetime import timedelta
from itertools import cycle
from pathlib import Path

import shardckpt
from shardckpt import SaveOptions

SAVES = 10
OPTIONS = [{}, {"layout": "zarr"}, {"compression": "zstd"}, {"overwrite": True}]
"""One after the other; what may overwrite is saved where its predecessor was."""


def torch_counter():
    """The operations of all gloo groups, messages between two ranks included, and those on stores
    from Python."""
    import torch.distributed as dist

    asked, check = Counter(), dist.Store.check
    waiting = {
        "get": lambda store, key: not check(store, [key]),
        "multi_get": lambda store, keys: not check(store, keys),
    }
    waiting |= dict.fromkeys(("wait", "queue_pop"), lambda *_: True)
    for name in ("set", "multi_set", "add", "append", "compare_set", "check", *waiting):
        _count_calls(asked, dist.Store, name, waiting.get(name))

    def counted():
        groups = dist.distributed_c10d._world.pg_map
        return {
            "gloo operations": sum(g._get_sequence_number_for_group() for g in groups),
            "gloo groups": len(groups),
            **asked,
        }

    return counted


def xla_counter():
    """Programs of torch_xla."""
    import torch_xla.debug.metrics as met

    def counted():
        names = [name for name in met.metric_names() if "Compile" in name or "Execute" in name]
        return {"programs": sum(met.metric_data(name)[0] for name in names)}

    return counted


def jax_counter():
    """Programs compiled (all of those that run: nothing compiled is left from before), sockets,
    operations on JAX's store."""
    import jax
    from jax._src.lib import _jax

    asked, compiled = Counter(), []
    client = _jax.DistributedRuntimeClient
    for name in dir(client):
        if name.startswith(("key_value", "blocking", "wait", "get_live", "connect", "shutdown")):
            _count_calls(
                asked,
                client,
                name,
                (lambda *_, **__: True) if not name.startswith("key_value") else None,
            )
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _seconds, **_: compiled.append("compile" in event)
    )
    jax.clear_caches()
    return lambda: {"programs": sum(compiled), "sockets": _sockets(), **asked}


def _count_calls(asked, kind, name, waits):
    original = getattr(kind, name)

    def counted(self, *arguments, **keywords):
        waiting = waits is not None and waits(self, *arguments, **keywords)
        asked[f"{name}…" if waiting else name] += 1
        return original(self, *arguments, **keywords)

    setattr(kind, name, counted)


def _sockets():
    """Open in this process: gloo has some for every peer, from the first collective on."""
    count = 0
    for file in Path("/proc/self/fd").iterdir():
        try:
            count += str(file.readlink()).startswith("socket:")
        except FileNotFoundError:  # the listing's own
            continue
    return count


def account(ours, root, states, counter, controls):
    """Save ten times, some of them in the background; words; save in turn; then what other programs
    do. What was counted meanwhile.

    Args:
        ours: the coordinator, found before.
        root: where to save.
        states: what to save, in turn.
        counter: see above.
        controls: name → what another program would do.
    """
    counts = {}

    def count(name, act):
        before = counter()
        answer = act()
        counts[name] = {
            key: n - before.get(key, 0) for key, n in counter().items() if n != before.get(key, 0)
        }
        return answer

    count("saves", lambda: _saves(root, states))
    heard = count("words", lambda: _words(ours))
    in_turn = count("in turn", lambda: _in_turn(ours, f"{root}/in turn", states[0]))
    for name, act in controls.items():
        count(name, act)
    return {"counted": counts, "heard": heard, "in turn": in_turn}


def _saves(root, states):
    for i, state, options in zip(range(SAVES), cycle(states), cycle(OPTIONS), strict=False):
        place = i - 1 if "overwrite" in options else i
        if i % 3:
            shardckpt.save(f"{root}/{place}", state, options=SaveOptions(**options))
        else:
            shardckpt.save_async(f"{root}/{place}", state, options=SaveOptions(**options)).wait()


def _words(ours):
    """Of all processes, and of nobody."""
    for step in range(100):
        ours.announce(f"mine/{ours.world.process}", step)
    return [ours.peek(f"mine/{ours.world.process}"), ours.peek("nobody's")]


def _in_turn(ours, url, state):
    """Save, but not before the processes of lower numbers have written all that they write; which
    records there were then."""
    while (
        len(seen := sorted(path.name for path in Path(url).glob("*/records/*.json")))
        < ours.world.process
    ):
        time.sleep(0.01)
    shardckpt.save(url, state)
    return seen


def torch_controls(store):
    """Everything by which ranks of torch.distributed meet, and by which one waits at the store."""
    import torch
    import torch.distributed as dist
    from torch.distributed import _functional_collectives as functional

    rank, ranks, one = dist.get_rank(), dist.get_world_size(), torch.ones(dist.get_world_size())
    impatient = store.clone()
    impatient.set_timeout(timedelta(milliseconds=10))

    def per_rank():
        return [torch.zeros_like(one) for _ in range(ranks)]

    def in_vain(act, *arguments):
        try:
            act(*arguments)
        except RuntimeError:
            return
        raise AssertionError("there was something to be had")

    return {
        "all_reduce": lambda: dist.all_reduce(one),
        "all_reduce, functional": lambda: functional.all_reduce(
            one, "sum", dist.group.WORLD
        ).wait(),
        "all_gather": lambda: dist.all_gather(per_rank(), one),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(
            torch.zeros(ranks * ranks), one
        ),
        "all_gather_object": lambda: dist.all_gather_object([None] * ranks, rank),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.zeros_like(one), one),
        # dist.barrier asks for an accelerator, which torch_xla may break.
        "barrier": lambda: dist.group.WORLD.barrier().wait(),
        "monitored_barrier": dist.monitored_barrier,
        "broadcast": lambda: dist.broadcast(one, 0),
        "broadcast_object_list": lambda: dist.broadcast_object_list([rank], 0),
        "gather": lambda: dist.gather(one, per_rank() if rank == 0 else None),
        "reduce": lambda: dist.reduce(one, 0),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.zeros(1), one),
        "scatter": lambda: dist.scatter(torch.zeros_like(one), per_rank() if rank == 0 else None),
        "send and receive": lambda: (
            dist.send(one, rank ^ 1) if rank % 2 else dist.recv(one, rank ^ 1)
        ),
        "a new group": dist.new_group,
        "get": lambda: in_vain(impatient.get, "nobody's"),
        "wait": lambda: in_vain(impatient.wait, ["nobody's"]),
    }


def jax_controls():
    """The ways in which processes of JAX meet, and in which one waits at the store."""
    import jax
    import jax.numpy as jnp
    from jax._src.distributed import global_state
    from jax.experimental import multihost_utils

    def add():
        spec = jax.sharding.PartitionSpec("x")
        sharding = jax.sharding.NamedSharding(jax.sharding.Mesh(jax.devices(), ("x",)), spec)
        ones = jax.make_array_from_callback((64,), sharding, lambda index: jnp.ones(64)[index])
        jax.jit(jnp.sum)(ones).block_until_ready()

    def get():
        try:
            global_state.client.blocking_key_value_get("nobody's", 10)
        except jax.errors.JaxRuntimeError:
            return
        raise AssertionError("there was something to be had")

    return {
        "sum": add,
        "sync_global_devices": lambda: multihost_utils.sync_global_devices("here"),
        "wait_at_barrier": lambda: global_state.client.wait_at_barrier("there", 60_000),
        "get": get,
    }
