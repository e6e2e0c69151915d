"""JAX's part in the end-to-end matrix: 4 CPU devices a process, in one process or in a
jax.distributed job over gloo."""

import socket

import jax
import numpy as np
from e2e_counts import account, jax_controls, jax_counter
from e2e_state import (
    NAMES,
    TENSORS,
    begin,
    compare,
    differing,
    expected,
    layout,
    rng_of,
    sharding,
    state,
)
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardckpt
from shardckpt import Coordinator, SaveOptions, Target

jax.config.update("jax_num_cpu_devices", 4)


def join(coordinator):
    """Become a process of a job; the coordinator that shardckpt finds there."""
    begin()
    if coordinator.world.processes > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = coordinator.agree("port", lambda: probe.getsockname()[1])
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        process, processes = coordinator.world.process, coordinator.world.processes
        jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=processes, process_id=process)
        assert len(jax.devices()) == 4 * processes
    return Coordinator.current(timeout=60)


def leave():
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


def named(case):
    devices = sorted(jax.devices(), key=lambda device: device.id)
    devices = np.array([devices[i] for i in case["devices"]]).reshape(case["mesh"])
    spec = PartitionSpec(
        *(tuple(part) if isinstance(part, list) else part for part in case["spec"])
    )
    return NamedSharding(Mesh(devices, NAMES[: len(case["mesh"])]), spec)


def array(name, case):
    whole = expected(name)
    return jax.make_array_from_callback(
        whole.shape, named(case), lambda index: whole[index], dtype=whole.dtype
    )


def drawn(*text):
    """A layout for every tensor."""
    return {
        n: layout(rng_of(*text, n), shape, len(jax.devices()), even=True, smaller=True)
        for n, (shape, _) in TENSORS.items()
    }


def save(coordinator, places, seed):
    ours = join(coordinator)
    layouts = {}
    for kind, (url, options) in places.items():
        layouts[kind] = cases = drawn("JAX saves", ours.world.processes, kind, seed)
        whole = state(
            lambda name, cases=cases: array(name, cases[name]), expected, ours.world.process
        )
        shardckpt.save(url, whole, options=SaveOptions(**options))
    leave()
    return layouts


def restore(coordinator, places, seed):
    """Into every kind of leaf that asks for an array: by ShapeDtypeStruct, by JAX's sharding, by
    ours."""
    ours = join(coordinator)
    outcomes = {}
    for saver, (url, processes) in places.items():
        cases = drawn("JAX restores", ours.world.processes, saver, seed)

        def target_of(name, cases=cases):
            case, whole = cases[name], expected(name)
            ways = [
                Target(named(case)),
                jax.ShapeDtypeStruct(whole.shape, whole.dtype, sharding=named(case)),
            ]
            # Ids of devices are what is said by numbers; they are positions in one process only.
            ways += [Target(sharding(case))] if jax.process_count() == 1 else []
            return ways[len(name) % len(ways)]

        def shards(name, leaf, cases=cases):
            whole = expected(name)
            if isinstance(leaf, np.ndarray):
                return [(whole, leaf)]
            assert leaf.sharding.is_equivalent_to(named(cases[name]), leaf.ndim), name
            return [(whole[shard.index], shard.data) for shard in leaf.addressable_shards]

        restored = shardckpt.restore(
            url, state(target_of, lambda name: np.ones_like(expected(name)), 0, rest=False)
        )
        unlike = differing(url, restored)
        outcomes[saver] = compare(restored, processes, shards) | {"layouts": cases}
        outcomes[saver]["wrong"] += unlike
    leave()
    return outcomes


def count(coordinator, root):
    """Count the requests to the other processes and to the compiler in ten saves and the rest of
    `account`."""
    ours = join(coordinator)
    cases = [drawn("JAX counts", i) for i in range(2)]
    states = [
        state(lambda n, c=case: array(n, c[n]), expected, ours.world.process) for case in cases
    ]
    counts = account(ours, root, states, jax_counter(), jax_controls())
    leave()
    return counts
