"""Processes of a jax.distributed job that restore together: what each has read, and whether it has
the right elements."""

import jax
import numpy as np
from e2e_jax import join, leave, named
from e2e_state import TENSORS, expected

import shardckpt
from shardckpt import Target


def flat(name):
    return name.replace("/", ".")


def _leaf(name, devices, number):
    """Replicated; cut among each process's devices, so that the others have replicas; and what each
    process has for itself."""
    whole = expected(name)
    inside = [d for d, n in enumerate(whole.shape) if n and n % (devices // 2) == 0]
    cut = {"mesh": [2, devices // 2], "devices": list(range(devices)), "spec": []}
    if number % 3 == 1 and inside:
        cut["spec"] = [None] * inside[0] + ["y"]
    if number % 3 == 2:
        return (
            jax.ShapeDtypeStruct(whole.shape, whole.dtype) if number % 2 else np.zeros_like(whole)
        )
    return Target(named(cut))


def restored(coordinator, url, options):
    join(coordinator)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _seconds, **_: compiled.append(event) if "backend_compile" in event else None
    )
    like = {flat(name): _leaf(name, len(jax.devices()), i) for i, name in enumerate(TENSORS)}
    checkpoint = shardckpt.open(url)
    state = shardckpt.restore(checkpoint, like, **options)
    programs, wrong = len(compiled), []
    for name in TENSORS:
        leaf, whole = state[flat(name)], expected(name)
        held = (
            [(..., leaf)]
            if isinstance(leaf, np.ndarray)
            else [(s.index, s.data) for s in leaf.addressable_shards]
        )
        if any(np.asarray(data).tobytes() != whole[index].tobytes() for index, data in held):
            wrong.append(name)
        if isinstance(like[flat(name)], Target) and leaf.sharding != like[flat(name)].sharding:
            wrong.append(f"{name}: {leaf.sharding}")
    leave()
    return {"read": checkpoint.stats.bytes_read, "wrong": wrong, "programs": programs}
