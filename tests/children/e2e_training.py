"""A small transformer, trained by AdamW under FSDP2 and tensor parallelism or under DDP; saved,
killed, resumed.

Everything about a step follows from its number and the global batch, so that runs on any number of
ranks are one run.
"""

import hashlib
import json
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from e2e_torch import join, leave
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

import shardckpt
from shardckpt import PerProcess

VOCABULARY, LENGTH, BATCH = 61, 8, 12
"""The batch is for all ranks together."""
WIDTH, HEADS, HIDDEN = 24, 4, 50
"""Hidden units over 2 tensor-parallel ranks are 25, over 3 data-parallel ones 9, 9 and 7."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        normed = self.before(x)
        heads = (
            part(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        x = x + self.out(
            scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.down(torch.relu(self.up(self.between(x))))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


PLAN = {name: ColwiseParallel() for name in ("q", "k", "v", "up")} | {
    name: RowwiseParallel() for name in ("out", "down")
}
"""Of a block. Norms have none: under a (dp, tp) mesh each tensor-parallel rank has them sharded
over a mesh of its own."""


def build(shape):
    """The model over a mesh: `(dp, tp)` or `(dp,)` by FSDP2, or `()` by DDP. And the data-parallel
    mesh."""
    torch.manual_seed(0)
    model = Transformer()
    if not shape:
        return DistributedDataParallel(model), init_device_mesh("cpu", (dist.get_world_size(),))
    mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=("dp", "tp")[: len(shape)])
    if len(shape) == 2:
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], PLAN)
        plan = {
            "embed": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(model, mesh["tp"], plan)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["dp"])
    return model, mesh["dp"]


class Run:
    """A training: model, optimizer, the step reached, and a generator of this rank's own."""

    def __init__(self, shape):
        self.model, self.dp = build(shape)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.step = 0
        self.own = torch.Generator().manual_seed(dist.get_rank())

    def train(self):
        """A step: the loss over the global batch, and a number of this rank's own."""
        generator = torch.Generator().manual_seed(1000 + self.step)
        first, stride = torch.randint(1, VOCABULARY, (2, BATCH, 1), generator=generator)
        tokens = (first + stride % 3 * torch.arange(LENGTH + 1)) % VOCABULARY
        mine = tokens.chunk(self.dp.size())[self.dp.get_local_rank()]
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.step += 1
        loss = loss.detach() / self.dp.size()
        dist.all_reduce(loss, group=self.dp.get_group())
        return [loss.item(), torch.rand((), generator=self.own).item()]

    def state(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        own = PerProcess(self.own.get_state(), choose=lambda states: states[0])
        return {"model": model, "optimizer": optimizer, "step": self.step, "own": own}

    def restore(self, url, *, only=None):
        restored = shardckpt.restore(url, self.state(), only=only, strict=only is None)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=restored["model"],
            optim_state_dict=restored["optimizer"],
        )
        self.step = restored["step"]
        self.own.set_state(restored["own"].value)

    def digests(self):
        """Of all elements of every tensor of model and optimizer, as training sees them."""
        state = self.state()
        leaves = {f"model/{name}": leaf for name, leaf in state["model"].items()}
        leaves |= {
            f"{name}/{key}": leaf
            for name, moments in state["optimizer"]["state"].items()
            for key, leaf in moments.items()
        }
        return {
            name: hashlib.sha256(whole(leaf).contiguous().numpy().tobytes()).hexdigest()
            for name, leaf in leaves.items()
        }


def whole(leaf):
    """A tensor put together as FSDP2 and then tensor parallelism do.

    `full_tensor` of torch 2.9 gives other rows where tensor-parallel shards are not of a length
    that FSDP2's parts divide.
    """
    if not isinstance(leaf, DTensor):
        return leaf.detach()
    held = [None] * dist.get_world_size()
    dist.all_gather_object(held, leaf.to_local().detach())
    columns = leaf.device_mesh.mesh.reshape(leaf.device_mesh.size(0), -1).T.tolist()
    columns = [
        torch.cat([held[rank] for rank in column], leaf.placements[0].dim) for column in columns
    ]
    return (
        torch.cat(columns, leaf.placements[-1].dim)
        if leaf.placements[-1].is_shard() and len(columns) > 1
        else columns[0]
    )


def train(coordinator, shape, steps, options):
    """Train up to a step.

    Args:
        coordinator: over files.
        shape: of the mesh; see `build`.
        steps: to end after.
        options: `save`: step after which to save, and where to: the checkpoint, and beside it the
            digests of what it must hold; `restore`: where to resume from; `only`: what to resume,
            if not everything; `kill`: in the middle of which step to be killed.
    """
    save, restore, kill = map(options.get, ("save", "restore", "kill"))
    join(coordinator)
    run = Run(shape)
    digests = None
    if restore is not None:
        run.restore(restore, only=options.get("only"))
        digests = run.digests()
    seen = []
    while run.step < steps:
        if run.step + 1 == kill:
            run.optimizer.register_step_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        seen.append(run.train())
        if save is not None and run.step == save[0]:
            truth = run.digests()
            if dist.get_rank() == 0:
                Path(f"{save[1]}.json").write_text(json.dumps(truth))
            shardckpt.save(save[1], run.state())
    kinds = sorted({type(leaf).__name__ for leaf in run.state()["model"].values()})
    leave(coordinator)
    losses, own = zip(*seen, strict=True)
    return {"losses": losses, "own": own, "digests": digests, "kinds": kinds}
