"""Modules whose `state_dict` hooks change tensors, as DTensors in ranks of a gloo job: saved, and restored into fresh ones."""

import torch
from e2e_torch import join, leave
from hooked import KINDS, hooked
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardckpt


def sharded(kind, loads, layout, ranks, seed):
    """A module over all ranks; with "meta" its tensors have no memory yet."""
    if layout == "meta":
        with torch.device("meta"):
            model = hooked(kind, loads, seed)
    else:
        model = hooked(kind, loads, seed)
    if layout == "TP":
        parallelize_module(model, init_device_mesh("cpu", (ranks,)), {"0.q": ColwiseParallel(), "0.k": RowwiseParallel()})
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    return model


def whole(model):
    return [p.full_tensor().tolist() for p in model.parameters()]


def restored(coordinator, layout, url):
    """For every kind: whether a fresh module holds what was saved, or the error."""
    join(coordinator)
    ranks, found = coordinator.world.processes, {}
    for kind in KINDS:
        for loads in (True, False):
            place = f"{url}/{kind}-{loads}"
            saved = sharded(kind, loads, "FSDP2" if layout == "meta" else layout, ranks, 0)
            fresh = sharded(kind, loads, layout, ranks, 1)
            shardckpt.save(place, shardckpt.train_state(model=saved, rng=False))
            coordinator.share(place, None)
            try:
                shardckpt.restore(place, shardckpt.train_state(model=fresh, rng=False))
                found[f"{kind} {loads}"] = whole(fresh) == whole(saved)
            except shardckpt.ShardckptError as e:
                found[f"{kind} {loads}"] = [type(e).__name__, str(e)]
    leave(coordinator)
    return found
