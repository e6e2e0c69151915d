"""Trainings whose optimizers go between `train_state` and torch.distributed.checkpoint: FSDP2, and
stages of a pipeline."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from e2e_torch import join, leave
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardckpt


def made(kind, *, whole=False):
    """A model, its optimizer and a scheduler: sharded over both ranks, or a stage of this rank's
    own.

    Args:
        kind: "FSDP2" or "stages".
        whole: whether a stage has one group for each of its parameters, where it had fewer before.
    """
    rank = dist.get_rank()
    torch.manual_seed(rank if kind == "stages" else 0)
    if kind == "stages":
        model = nn.ModuleDict(
            {
                f"stage{rank}": nn.Sequential(
                    nn.Linear(3 + rank, 6), nn.LayerNorm(6), nn.Linear(6, 4)
                )
            }
        )
    else:
        model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 5))
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    if kind == "stages" and rank == 1:
        groups = [{"params": [*matrices, *rest], "weight_decay": 0.2}]
    if whole:
        groups = [
            {"params": [p], "weight_decay": g["weight_decay"]} for g in groups for p in g["params"]
        ]
    optimizer = torch.optim.AdamW(
        groups, lr=0.1 / (1 + rank if kind == "stages" else 1), betas=(0.8, 0.95)
    )
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def train(model, optimizer, scheduler, first, last):
    """The loss and rates of each step."""
    seen = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        inner = next(iter(model.values())) if isinstance(model, nn.ModuleDict) else model
        optimizer.zero_grad()
        loss = inner(torch.randn(2, inner[0].in_features, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        seen.append([loss.item(), sorted({float(group["lr"]) for group in optimizer.param_groups})])
    return seen


def state_of(model, optimizer, scheduler, step=0):
    return shardckpt.train_state(
        model=model, optimizer=optimizer, scheduler=scheduler, step=step, rng=False
    )


def torch_state(model, optimizer, scheduler, flat, step=0):
    model_state, of_optimizer = get_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat)
    )
    # Each stage's own; DCP has no place for values that differ from rank to rank.
    rank = f"scheduler{dist.get_rank()}"
    return {
        "model": model_state,
        "optimizer": of_optimizer,
        rank: scheduler.state_dict(),
        "step": step,
    }


def saves(coordinator, kind, ours, theirs, flat):
    """Train three steps and save in both ways; what the next three steps give."""
    join(coordinator)
    run = made(kind)
    train(*run, 0, 3)
    shardckpt.save(ours, state_of(*run, step=3))
    dcp.save(torch_state(*run, flat, step=3), checkpoint_id=theirs)
    seen = train(*run, 3, 6)
    leave(coordinator)
    return seen


def loads_export(coordinator, kind, place, flat, whole=False):
    """Load an export into new objects, as torch does; what the next three steps give."""
    join(coordinator)
    model, optimizer, scheduler = made(kind, whole=whole)
    state = torch_state(model, optimizer, scheduler, flat)
    del state[f"scheduler{dist.get_rank()}"]
    state["scheduler"] = {"last_epoch": 0}
    dcp.load(state, checkpoint_id=place)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=options,
    )
    scheduler.last_epoch = state["scheduler"]["last_epoch"]
    scheduler.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
    seen = train(model, optimizer, scheduler, state["step"], state["step"] + 3)
    leave(coordinator)
    return seen


def restores(coordinator, kind, place, whole=False):
    """Restore what was imported into new objects; what the next three steps give."""
    join(coordinator)
    model, optimizer, scheduler = made(kind, whole=whole)
    key = f"scheduler{dist.get_rank()}"
    state = shardckpt.train_state(
        model=model, optimizer=optimizer, step=0, rng=False, **{key: scheduler}
    )
    shardckpt.restore(place, state, strict=False)
    seen = train(model, optimizer, scheduler, state.step, state.step + 3)
    leave(coordinator)
    return seen
