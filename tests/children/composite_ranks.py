"""Composite tensors in DTensors, and values that each rank has for itself, in ranks of a gloo
job."""

from dataclasses import replace

import torch
import torch.distributed as dist
from composites import Code, CodedSGD, Scaled, register_code, scaled, train
from e2e_torch import join, leave
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardckpt
from shardckpt import frameworks
from shardckpt.frameworks.composites import _place_part


def mesh(ranks):
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))


def sharded(seed, block):
    """Rows of a quantized tensor, of which each rank has some."""
    whole, ranks, rank = scaled(seed), dist.get_world_size(), dist.get_rank()
    rows = (of.chunk(ranks)[rank].clone() for of in (whole.data_, whole.scale))
    local = Scaled(*rows, tuple(block))
    return DTensor.from_local(
        local, mesh(ranks), [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def attempt(act):
    try:
        act()
    except shardckpt.ShardckptError as e:
        return [type(e).__name__, str(e)]
    return None


def save_sharded(coordinator, url, block=(1, 4)):
    join(coordinator)
    shardckpt.save(url, {"w": sharded(3, block)})
    leave(coordinator)


def restore_sharded(coordinator, url, block=(1, 4)):
    join(coordinator)
    like, saved = sharded(4, block), sharded(3, block)
    back = shardckpt.restore(url, {"w": like})["w"]
    equal = back is like and torch.equal(like._local_tensor.data_, saved._local_tensor.data_)
    equal = equal and torch.equal(like._local_tensor.scale, saved._local_tensor.scale)
    leave(coordinator)
    return bool(equal)


def uneven(coordinator, url):
    join(coordinator)
    local = Code.zeros((3 - dist.get_rank(), 4))
    code = DTensor.from_local(
        local, mesh(2), [Shard(0)], run_check=False, shape=torch.Size([5, 4]), stride=(4, 1)
    )
    error = attempt(
        lambda: shardckpt.save(url, {"w": code}, options=shardckpt.SaveOptions(commit_timeout=60))
    )
    leave(coordinator)
    return error


def one_scale_each(coordinator, url):
    """A scale without dimensions on each rank."""
    join(coordinator)

    def made(fill):
        rank = dist.get_rank()
        local = Scaled(
            torch.full((2, 4), int(fill) + rank, dtype=torch.int8), torch.tensor(fill + rank)
        )
        return DTensor.from_local(
            local, mesh(2), [Shard(0)], run_check=False, shape=torch.Size([4, 4]), stride=(4, 1)
        )

    shardckpt.save(
        url,
        {
            "w": made(5.0),
            "r": DTensor.from_local(scaled(1), mesh(2), [Replicate()], run_check=False),
        },
    )
    like = {
        "w": made(0.0),
        "r": DTensor.from_local(scaled(2), mesh(2), [Replicate()], run_check=False),
    }
    shardckpt.restore(url, like)
    local = like["w"]._local_tensor
    refused = attempt(lambda: _place_part("w", "scale", torch.empty(()), like["w"], shared=False))
    leave(coordinator)
    return [
        refused,
        local.scale.item(),
        local.data_.float().mean().item(),
        torch.equal(like["r"]._local_tensor.data_, scaled(1).data_),
    ]


def other_shards(coordinator, url):
    """One scale on each rank, of other elements than in the checkpoint, or of the same ones."""
    join(coordinator)
    rank, names = dist.get_rank(), ("a", "b")

    def made(placements, shape, pairs, fill):
        local = Scaled(torch.full(shape, fill + rank, dtype=torch.int8), torch.tensor(fill + 0.5))
        on = init_device_mesh("cpu", (2, 2), mesh_dim_names=names) if pairs else mesh(4)
        return DTensor.from_local(
            local, on, placements, run_check=False, shape=torch.Size([8, 8]), stride=(8, 1)
        )

    rows = [Shard(0)], (2, 8), False
    shardckpt.save(url, {"w": made(*rows, rank)})
    earlier = replace(frameworks.composite(made(*rows, rank), "w"), shards=None)
    shardckpt.save(f"{url}-earlier", {"w": earlier})
    refused = [
        attempt(lambda case=case: shardckpt.restore(url, {"w": made(*case, 9)}))
        for case in (
            ([Shard(1)], (8, 2), False),
            ([Shard(0), Shard(1)], (4, 4), True),
            ([Replicate(), Shard(0)], (4, 8), True),
        )
    ]
    scales = [
        shardckpt.restore(of, {"w": made(*case, 9)})["w"]._local_tensor.scale.item()
        for of, case in (
            (url, rows),
            (url, ([Shard(0), Shard(0)], (2, 8), True)),
            (f"{url}-earlier", rows),
        )
    ]
    leave(coordinator)
    return [refused, scales]


def empty_shards(coordinator, url):
    """Two rows over four ranks, and codes whose number a rank without rows does not know."""
    join(coordinator)
    rank, shape = dist.get_rank(), torch.Size([2, 4])

    def over_ranks(local):
        return DTensor.from_local(
            local, mesh(4), [Shard(0)], run_check=False, shape=shape, stride=(4, 1)
        )

    def made(seed):
        whole = scaled(seed, shape)
        rows = slice(rank, rank + 1)
        return over_ranks(Scaled(whole.data_[rows].clone(), whole.scale[rows].clone()))

    shardckpt.save(url, {"w": made(3)})
    like = made(4)
    shardckpt.restore(url, {"w": like})
    code = Code.zeros((int(rank < 2), 4))
    options = shardckpt.SaveOptions(commit_timeout=60)
    refused = attempt(
        lambda: shardckpt.save(f"{url}-codes", {"w": over_ranks(code)}, options=options)
    )
    equal = torch.equal(like._local_tensor.dequantize(), made(3)._local_tensor.dequantize())
    leave(coordinator)
    return [equal, refused]


def net():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 8, bias=False))
    for part in model:
        if isinstance(part, nn.Linear):
            fully_shard(part, mesh=mesh(dist.get_world_size()))
    return fully_shard(model, mesh=mesh(dist.get_world_size()))


def train_8_bit(coordinator, url, save):
    """Train with 8-bit moments in DTensors; save, or restore into an optimizer that has made no
    step, and go on."""
    join(coordinator)
    register_code()
    model = net()
    optimizer = CodedSGD(model.parameters())
    state = shardckpt.train_state(model=model, optimizer=optimizer, rng=False)
    if save:
        train(model, optimizer, 0, 3)
        shardckpt.save(url, state)
    else:
        shardckpt.restore(url, state)
    kinds = sorted(
        {
            f"{type(of['momentum']).__name__}/{type(of['momentum']._local_tensor).__name__}"
            for of in optimizer.state.values()
        }
    )
    answer = [kinds, train(model, optimizer, 3, 6)]
    leave(coordinator)
    return answer


class Local(torch.optim.Optimizer):
    """Quantized moments of this rank's shards, in plain tensors, as 8-bit optimizers of other
    libraries keep them."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            grad, state = p.grad.to_local(), self.state[p]
            q = (
                state.get("q", torch.zeros(grad.shape, dtype=torch.int8)).float()
                * state.get("scale", torch.zeros(1))
                * 0.9
                + grad
            )
            state["scale"] = q.abs().amax().reshape(1).clamp(min=1e-9) / 100
            state["q"] = (q / state["scale"]).round().to(torch.int8)
            state["step"] = state.get("step", torch.tensor(0.0)) + 1
            p.to_local().sub_(state["q"].float() * state["scale"], alpha=0.1)
        return None if closure is None else closure()


class Statistics(nn.Module):
    """Values that a data-parallel model has on each rank: an extra state, a small buffer, a large
    one."""

    def __init__(self, fill):
        super().__init__()
        self.inner, self.fill = nn.Linear(2, 2), fill
        self.register_buffer("amax", torch.full((4,), float(fill)))
        self.register_buffer("cache", torch.full((40_000,), float(fill)))

    def forward(self, x):
        return self.inner(x)

    def get_extra_state(self):
        return {
            "history": torch.full((5 + self.fill,), self.fill, dtype=torch.uint8),
            "n": self.fill,
        }

    def set_extra_state(self, state):
        self.fill = state["n"]
        self.history = state["history"]


def local_optimizer(coordinator, url, size, save, local):
    join(coordinator)
    torch.manual_seed(0)
    model = nn.Linear(size, size, bias=False)
    if dist.is_initialized():
        fully_shard(model, mesh=mesh(dist.get_world_size()))
    optimizer = Local(model.parameters())

    def steps(start, stop):
        for i in range(start, stop):
            model(
                torch.randn(4, size, generator=torch.Generator().manual_seed(i))
            ).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.weight.to_local().double().sum().item()

    state = shardckpt.train_state(model=model, optimizer=optimizer, rng=False, local=local)
    error = None
    if save:
        steps(0, 3)
        error = attempt(
            lambda: shardckpt.save(url, state, options=shardckpt.SaveOptions(commit_timeout=60))
        )
    else:
        error = attempt(lambda: shardckpt.restore(url, state))
    answer = error or steps(3, 6)
    leave(coordinator)
    return answer


def local_module(coordinator, url, wrapping):
    join(coordinator)
    rank = dist.get_rank()

    def made(fill):
        model = Statistics(fill)
        if wrapping == "DDP":
            return nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
        return fully_shard(model, mesh=mesh(2))

    local = ["model/amax", "model/cache", "model/_extra_state"]
    shardckpt.save(url, shardckpt.train_state(model=made(rank + 3), rng=False, local=local))
    fresh = made(0)
    shardckpt.restore(url, shardckpt.train_state(model=fresh, rng=False, local=local))
    inner = fresh.module if wrapping == "DDP" else fresh
    answer = [
        inner.fill,
        inner.history.tolist(),
        inner.amax.tolist(),
        inner.cache[::39_999].tolist(),
    ]
    unnamed = attempt(
        lambda: shardckpt.save(
            f"{url}-unnamed",
            shardckpt.train_state(model=made(rank)),
            options=shardckpt.SaveOptions(commit_timeout=60),
        )
    )
    leave(coordinator)
    return [answer, unnamed]


def local_patterns(coordinator, url, local):
    """A save with patterns for values that only process 1 has, and others."""
    join(coordinator)
    model = Statistics(coordinator.world.process + 3)
    mine = (
        {"of the last": ForOne(coordinator.world.process)} if coordinator.world.process == 1 else {}
    )
    state = shardckpt.train_state(
        model=model,
        rng=False,
        local=["model/amax", "model/cache", "model/_extra_state", *local],
        **mine,
    )
    options = shardckpt.SaveOptions(commit_timeout=60, host_tensors="local")
    error = attempt(lambda: shardckpt.save(url, state, options=options))
    leave(coordinator)
    return error


class ForOne:
    """An object that one process has."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]
