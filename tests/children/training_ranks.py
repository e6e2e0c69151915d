"""A training of everything that `train_state` knows, in ranks of a gloo job: trained, saved,
killed, resumed.

The ranks draw random numbers of their own, for the order of their data and for dropout, so that a
loss is the same only if every generator, every loader's place, every moment and every setting is.
"""

import hashlib
import os
import random
import signal

import e2e_training
import numpy as np
import torch
import torch.distributed as dist
from e2e_torch import join, leave
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torchdata.stateful_dataloader import StatefulDataLoader

import shardckpt
from shardckpt import PerProcess

ROWS, BATCH, WIDTH = 20, 4, 6
"""Five batches are an epoch."""


class Model(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 10), nn.Linear(10, 1, bias=False)
        self.norm = nn.BatchNorm1d(10) if norm == "batch" else nn.LayerNorm(10)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return self.out(self.drop(torch.relu(self.norm(self.into(x)))))


class Run:
    """A training, and its state."""

    def __init__(self, kind, *, choose=None, reversed_groups=False):
        rank = dist.get_rank() if dist.is_initialized() else 0
        torch.manual_seed(0)
        self.model = Model("batch" if kind == "DDP" else "layer")
        if kind == "DDP":
            self.model = DistributedDataParallel(self.model)
        elif kind == "FSDP2":
            fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() == 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.02}]
        self.optimizer = torch.optim.AdamW(groups[::-1] if reversed_groups else groups, lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
        self.ema = AveragedModel(self.model.module, use_buffers=False) if kind == "DDP" else None
        rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 + rank))
        self.loader = StatefulDataLoader(list(rows), BATCH, shuffle=True)
        loader = self.loader if choose is None else PerProcess(self.loader, choose)
        self.state = shardckpt.train_state(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            ema=self.ema,
            loader=loader,
            step=0,
            metadata={"kind": kind},
        )
        torch.manual_seed(rank)
        random.seed(rank)
        np.random.seed(rank)  # noqa: NPY002  (what programs draw from all the same)

    def steps(self, last):
        """Train up to a step; each gives the numbers that would show a difference."""
        while self.state.step < last:
            for rows in self.loader:
                self.optimizer.zero_grad()
                noise = random.random() + np.random.rand()  # noqa: NPY002
                loss = self.model(rows).square().mean() + 0.01 * noise
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.scheduler.step()
                if self.ema is not None:
                    self.ema.update_parameters(self.model.module)
                self.state.step += 1
                yield (
                    loss.item(),
                    self.scheduler.get_last_lr(),
                    self.scaler.get_scale(),
                    rows.sum().item(),
                )
                if self.state.step == last:
                    break


def train(coordinator, kind, last, options):
    """Train up to a step.

    Args:
        coordinator: over files.
        kind: "FSDP2" or "DDP".
        last: step to end after.
        options: `save`: after which step, and where to; `kill`: in the middle of which step to be
            killed; `restore`: where to resume from; `reversed_groups`: whether the optimizer has
            its groups in the other order.
    """
    join(coordinator)
    run = Run(kind, reversed_groups=options.get("reversed_groups", False))
    if "restore" in options:
        assert shardckpt.restore(options["restore"], run.state) is run.state
    seen = []
    for step in run.steps(last):
        seen.append(step)
        if options.get("save", [None])[0] == run.state.step:
            shardckpt.save(options["save"][1], run.state)
        if options.get("kill") == run.state.step + 1:
            run.optimizer.register_step_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    kinds = sorted({type(leaf).__name__ for leaf in run.model.state_dict().values()})
    moments = {
        name: type(value).__name__
        for of_one in run.optimizer.state.values()
        for name, value in of_one.items()
    }
    leave(coordinator)
    return {"seen": seen, "kinds": kinds, "moments": moments, "metadata": run.state.metadata}


def managed(coordinator, kind, root, last, kill):
    """Train up to a step with a manager that saves every third one, resuming from what is there;
    perhaps to be killed before a step."""
    join(coordinator)
    run = Run(kind)
    with shardckpt.CheckpointManager(root, every=3, keep=2) as manager:
        restored = manager.restore(run.state)
        seen = []
        for step in run.steps(last):
            seen.append(step)
            manager.save(run.state.step, run.state)
            if run.state.step == kill - 1:
                manager.wait()
                os.kill(os.getpid(), signal.SIGKILL)
    leave(coordinator)
    return {
        "from": None if restored is None else restored.step,
        "same": restored is not None and restored.state is run.state,
        "seen": seen,
    }


class Normed(nn.Module):
    """With statistics of all kinds."""

    def __init__(self):
        super().__init__()
        self.into, self.norm, self.out = nn.Linear(WIDTH, 10), nn.BatchNorm1d(10), nn.Linear(10, 1)
        self.register_buffer("positions", torch.arange(20_000.0))

    def forward(self, x):
        return self.out(self.norm(self.into(x)))


def normalized(coordinator, kind, url, save):
    """Train with statistics that differ from rank to rank, and save; or restore. What each rank's
    are, in the end and before."""
    join(coordinator)
    torch.manual_seed(0)
    model, mesh = Normed(), (dist.get_world_size(),) if dist.is_initialized() else None
    if kind == "DDP" and mesh:
        model = DistributedDataParallel(model)
    elif mesh:
        fully_shard(model.norm, mesh=init_device_mesh("cpu", mesh))
        fully_shard(model, mesh=init_device_mesh("cpu", mesh))
    state = shardckpt.train_state(model=model, rng=False)
    if save:
        torch.manual_seed(coordinator.world.process)
        for _ in range(3):
            model(torch.randn(BATCH, WIDTH)).sum().backward()
        shardckpt.save(url, state)
    else:
        shardckpt.restore(url, state)
    statistics = {
        name.removeprefix("module."): buffer.tolist()
        for name, buffer in model.named_buffers()
        if "norm" in name
    }
    leave(coordinator)
    return statistics


def meshed(coordinator, shape, options):
    """Of a transformer over a mesh of that shape: what it holds where it is saved or restored, and
    the losses after that."""
    join(coordinator)
    run = e2e_training.Run(shape)
    state = shardckpt.train_state(model=run.model, optimizer=run.optimizer, step=0)
    if "restore" in options:
        shardckpt.restore(options["restore"], state, only=["model/**", "optimizer/**", "step"])
        run.step = state.step
    else:
        state.step = len([run.train() for _ in range(3)])
        shardckpt.save(options["save"], state)
    digests = run.digests()
    losses = [run.train()[0] for _ in range(3)]
    leave(coordinator)
    return {"digests": digests, "losses": losses}


def staged(coordinator, url):
    """Each rank has a stage of its own of a pipeline; new objects of it, after restoring, and a
    step of both."""
    join(coordinator)
    rank = dist.get_rank()

    def made():
        torch.manual_seed(rank)
        stage = nn.ModuleDict({f"stage{rank}": nn.Linear(3 + rank, 4)})
        optimizer = torch.optim.AdamW([{"params": stage.parameters(), "lr": 0.1 / (rank + 1)}])
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return (
            stage,
            optimizer,
            scheduler,
            shardckpt.train_state(model=stage, optimizer=optimizer, scheduler=scheduler),
        )

    def step(stage, optimizer, scheduler, _):
        optimizer.zero_grad()
        stage[f"stage{rank}"](torch.rand(2, 3 + rank)).square().sum().backward()
        optimizer.step()
        scheduler.step()
        return [p.tolist() for p in stage.parameters()]

    ours, fresh = made(), made()
    step(*ours)
    shardckpt.save(url, ours[-1])
    expected = step(*ours)
    shardckpt.restore(url, fresh[-1], strict=False)
    parameters = step(*fresh)
    leave(coordinator)
    return {"equal": parameters == expected, "lr": fresh[1].param_groups[0]["lr"]}


def compiled(coordinator, url):
    """A compiled module under DDP, and a plain one that takes its place; what each holds after
    restoring."""
    join(coordinator)
    wrapped, plain = (
        DistributedDataParallel(torch.compile(Model("layer"), backend="eager")),
        Model("layer"),
    )
    shardckpt.save(url, shardckpt.train_state(model=wrapped))
    shardckpt.restore(url, shardckpt.train_state(model=plain))
    there = [
        torch.equal(a, b) for a, b in zip(wrapped.parameters(), plain.parameters(), strict=True)
    ]
    saved = plain.into.weight.tolist()
    with torch.no_grad():
        wrapped.module.into.weight.zero_()
    shardckpt.restore(url, shardckpt.train_state(model=wrapped))
    leave(coordinator)
    return [there, wrapped.module.into.weight.tolist() == saved]


def flat(coordinator):
    """The refusal of a model in FSDP's first version."""
    join(coordinator)
    model = FullyShardedDataParallel(Model("layer"), device_id=torch.device("cpu"))
    try:
        shardckpt.train_state(model=model).state_dict()
    except shardckpt.ShardckptError as e:
        return [type(e).__name__, str(e)]


def elastic(coordinator, url, rng):
    """Restore by another number of processes, each taking the loader of the first; then what each
    draws."""
    join(coordinator)
    run = Run("FSDP2" if dist.is_initialized() else "alone", choose=lambda states: states[0])
    if rng != "derive":
        run.state = shardckpt.train_state(model=run.model, optimizer=run.optimizer, rng=rng)
        try:
            shardckpt.restore(url, run.state, only=["model/**", "optimizer/**", "rng"])
        except shardckpt.ShardckptError as e:
            return [type(e).__name__, str(e)]
    shardckpt.restore(url, run.state)
    moments = [value for of_one in run.optimizer.state.values() for value in of_one.values()]
    whole = [
        leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
        for leaf in [*run.model.state_dict().values(), *moments]
    ]
    digest = hashlib.sha256(
        b"".join(leaf.contiguous().numpy().tobytes() for leaf in whole)
    ).hexdigest()
    drawn = [
        torch.rand(4).tolist(),
        np.random.rand(4).tolist(),  # noqa: NPY002
        [random.random() for _ in range(4)],
    ]
    leave(coordinator)
    return {"drawn": drawn, "digest": digest, "step": run.state.step}
