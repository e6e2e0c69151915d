"""PyTorch/XLA SPMD: saved on one mesh, resumed on another; 8 virtual devices stand for 8 TPU chips.

Interrupt the first command with Ctrl-C, or kill it. The second one goes on from the latest saved
step, on another mesh:

    python examples/torch_xla_spmd.py 4x2
    python examples/torch_xla_spmd.py 2x4

Needs `pip install 'shardckpt[xla] @ git+https://github.com/shardckpt/shardckpt'`.
To begin anew, remove runs/torch_xla_spmd. On TPUs, remove the line with `os.environ`.
"""

import os
import sys

os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"}  # before torch_xla is imported

import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import nn

import shardckpt

RUN = "runs/torch_xla_spmd"  # or gs://bucket/run
STEPS = 100

xr.use_spmd()
shape = tuple(int(n) for n in (sys.argv[1] if len(sys.argv) > 1 else "4x2").split("x"))
mesh = xs.Mesh(range(8), shape, ("data", "model"))
xs.set_global_mesh(mesh)  # lets checkpoints record the names of the axes

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 64)).to("xla")
xs.mark_sharding(model[0].weight, mesh, ("model", "data"))
xs.mark_sharding(model[2].weight, mesh, ("data", "model"))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def train_step(step: int) -> float:
    """Train on a batch that depends on the step alone."""
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(step)).to("xla")
    xs.mark_sharding(x, mesh, ("data", None))
    loss = nn.functional.mse_loss(model(x), x.roll(1, dims=1).sin())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    torch_xla.sync()
    return loss.item()


state = shardckpt.train_state(model=model, optimizer=optimizer, step=0)

with shardckpt.CheckpointManager(RUN, every=10, keep=2) as manager:
    # Builds each tensor from the shards that this mesh needs; compiles nothing.
    if manager.restore(state):
        print(f"resumed from step {state.step} on a mesh of {mesh.shape()}")
    for step in range(state.step + 1, STEPS + 1):
        loss = train_step(step)
        print(f"step {step} loss {loss:.6f}")
        state.step = step
        manager.save(step, state)
