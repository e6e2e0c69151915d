"""Versions published and followed by the ranks of gloo jobs."""

import hashlib
import time

import torch
import torch.distributed as dist
from e2e_torch import join, leave
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardckpt
from shardckpt.versions import device

SHAPES = {"w": (64, 48), "v": (48, 64), "b": (5,)}
PLACEMENTS = {"rows": [Shard(0)], "columns": [Shard(1)], "replicated": [Replicate()]}


def weights(step):
    """The weights of a step: some of the elements change from step to step."""
    generator = torch.Generator().manual_seed(1)
    model = {name: torch.randn(*shape, generator=generator) for name, shape in SHAPES.items()}
    for s in range(step):
        generator.manual_seed(100 + s)
        for name in ("w", "v"):
            chosen = torch.randperm(model[name].numel(), generator=generator)[:60]
            model[name].view(-1)[chosen] += torch.randn(60, generator=generator)
    return model


def laid_out(model, placement):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: t if t.ndim == 1 else distribute_tensor(t, mesh, PLACEMENTS[placement])
        for name, t in model.items()
    }


def full(leaf):
    return leaf.full_tensor() if isinstance(leaf, DTensor) else leaf


def publish(
    coordinator, url, placement, steps, fail=None, process=1, anchor_every=5, snapshot="host"
):
    """Publish steps; a process fails at one of them. With `snapshot="device"` all but the smallest
    tensor are compared there."""
    join(coordinator)
    device.LEAST_BYTES = 1000
    publisher = shardckpt.Publisher(
        url, anchor_every=anchor_every, commit_timeout=60, dtype="bfloat16", snapshot=snapshot
    )
    errors = []
    for step in steps:
        state = laid_out(weights(step), placement)
        if step == fail and dist.get_rank() == process:
            state["odd"] = object()
        try:
            publisher.publish(step, state)
            publisher.wait()
        except shardckpt.ShardckptError as e:
            errors.append([step, type(e).__name__])
    publisher.close()
    leave(coordinator)
    return errors


def changing(step):
    """Weights, and other tensors from step to step, so that the processes share the writing of the
    weights in other ways."""
    model = weights(step)
    more = torch.arange(48 * 64 * (step * 7 % 5), dtype=torch.float32).reshape(-1, 64)
    return {**model, **({"x": more} if step % 2 else {"a": more, "z": more + 1})}


def publish_changing(coordinator, url, steps):
    join(coordinator)
    with shardckpt.Publisher(url) as publisher, shardckpt.Publisher(f"{url}-other") as other:
        for step in range(steps):
            publisher.publish(step, laid_out(changing(step), "replicated"))
            other.publish(step, laid_out(weights(step), "rows"))
            publisher.wait()
            other.wait()
    leave(coordinator)


def publish_at_once(coordinator, url, steps):
    """Publish without waiting; the last version is published in any case."""
    join(coordinator)
    publisher = shardckpt.Publisher(url, commit_timeout=60)
    for step in range(steps):
        publisher.publish(step, laid_out(weights(step), "rows"))
    publisher.close()
    leave(coordinator)
    return sorted(publisher.skipped)


def follow(coordinator, url, placement, until):
    """Follow to a step; the digest of all elements of each version, and what `prove` says."""
    join(coordinator)
    like = laid_out(
        {name: torch.zeros_like(t, dtype=torch.bfloat16) for name, t in weights(0).items()},
        placement,
    )
    versions, began = [], time.monotonic()
    for version in shardckpt.follow(url, like, mode="each"):
        version.prepare()
        version.apply()
        proved = version.prove()
        digest = hashlib.sha256(
            b"".join(full(like[name]).view(torch.int16).numpy().tobytes() for name in like)
        ).hexdigest()
        versions.append([version.step, proved, digest])
        if version.step >= until or time.monotonic() - began > 200:
            break
    leave(coordinator)
    return versions
