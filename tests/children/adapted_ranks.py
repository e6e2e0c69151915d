"""A training that goes on in another model, sharded by FSDP2 over the ranks of a gloo job."""

import torch
from adapted import Run
from e2e_torch import join, leave
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardckpt


def resume(coordinator, url, options, given, count):
    join(coordinator)
    run = Run(
        2,
        shard=lambda model: fully_shard(
            model, mesh=init_device_mesh("cpu", (distributed.get_world_size(),))
        ),
        **options,
    )
    shardckpt.restore(url, run.state(step=0), **given)
    kinds = {
        type(value).__name__
        for one in run.optimizer.state.values()
        for value in one.values()
        if value.dim()
    }
    losses = run.steps(count)
    leave(coordinator)
    return {"kinds": sorted(kinds), "losses": losses}


def together(coordinator, url):
    """A replica on each rank: renamed, padded, and read by both together."""
    join(coordinator)
    like = torch.ones(1100, 300)
    checkpoint = shardckpt.open(url)
    shardckpt.restore(checkpoint, {"v": like}, rename="s/w/v/", fit={"v": "pad"}, cooperative=True)
    expected = torch.zeros(1100, 300)
    expected[:1024, :256] = torch.arange(1 << 18).reshape(-1, 256)
    right = torch.equal(like, expected)
    leave(coordinator)
    return {"right": right, "read": checkpoint.stats.bytes_read}


def shards(coordinator, url, cases):
    """DTensors of several sizes, cut along each dimension or not at all; those that are wrong."""
    join(coordinator)
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    wrong = []
    for shape, mode in cases:
        for placement in (Shard(0), Shard(1), Replicate()):
            like = distribute_tensor(torch.full(shape, -1.0), mesh, [placement])
            shardckpt.restore(url, {"w": like}, fit={"w": mode})
            expected = torch.zeros(shape)
            rows, columns = min(4, shape[0]), min(3, shape[1])
            expected[:rows, :columns] = torch.arange(1.0, 13).reshape(4, 3)[:rows, :columns]
            if not torch.equal(like.full_tensor(), expected):
                wrong.append([shape, mode, str(placement)])
    leave(coordinator)
    return wrong
