"""Modules with `state_dict` hooks and optimizers with nested state, over DTensors in ranks of a
gloo job: saved, and restored afresh."""

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
        parallelize_module(
            model,
            init_device_mesh("cpu", (ranks,)),
            {"0.q": ColwiseParallel(), "0.k": RowwiseParallel()},
        )
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    return model


def whole(model):
    return [p.full_tensor().tolist() for p in model.parameters()]


def restored(coordinator, layout, url):
    """For every kind: whether a fresh module holds what was saved, or the error."""
    join(coordinator)
    ranks, outcomes = coordinator.world.processes, {}
    for kind in KINDS:
        for loads in (True, False):
            place = f"{url}/{kind}-{loads}"
            saved = sharded(kind, loads, "FSDP2" if layout == "meta" else layout, ranks, 0)
            fresh = sharded(kind, loads, layout, ranks, 1)
            shardckpt.save(place, shardckpt.train_state(model=saved, rng=False))
            coordinator.share(place, None)
            try:
                shardckpt.restore(place, shardckpt.train_state(model=fresh, rng=False))
                outcomes[f"{kind} {loads}"] = whole(fresh) == whole(saved)
            except shardckpt.ShardckptError as e:
                outcomes[f"{kind} {loads}"] = [type(e).__name__, str(e)]
    leave(coordinator)
    return outcomes


class Preconditioned(torch.optim.Optimizer):
    """Keeps moments and factors in containers, in other dtypes than the parameter's."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self):
        for n, p in enumerate(self.param_groups[0]["params"]):
            moments = [(torch.zeros_like(p, dtype=torch.float32) + n / 3), (p + 1).float()]
            factor = torch.full((3, 3), n / 3, dtype=torch.float64)
            self.state[p] |= {
                "moments": moments,
                "GG": [factor, {"index": torch.tensor([70001, n])}],
            }


def nested(coordinator, url):
    """Whether nested state of bfloat16 parameters is the same in a fresh optimizer, with its dtypes
    and its kinds."""
    join(coordinator)

    def made(seed):
        model = sharded("Renamed", True, "FSDP2", coordinator.world.processes, seed).bfloat16()
        return model, Preconditioned(model.parameters())

    def seen(optimizer):
        moments = []
        for of_one in optimizer.state.values():
            first, second = of_one["moments"]
            factor, codes = of_one["GG"]
            tensors = (first, second, factor, codes["index"])
            moments += [
                (type(t).__name__, str(t.dtype), getattr(t, "_local_tensor", t).tolist())
                for t in tensors
            ]
        return moments

    model, optimizer = made(0)
    optimizer.step()
    shardckpt.save(url, shardckpt.train_state(model=model, optimizer=optimizer, rng=False))
    coordinator.share("saved", None)
    fresh, other = made(1)
    shardckpt.restore(url, shardckpt.train_state(model=fresh, optimizer=other, rng=False))
    same, kinds = seen(optimizer) == seen(other), sorted({kind[:2] for kind in seen(other)})
    leave(coordinator)
    return {"same": same, "kinds": kinds}
