"""FSDP2: killed on four processes, resumed on two, and the losses go on as if nothing had happened.

Kill the first command while it trains (`pkill -9 -f examples/fsdp2.py` in another terminal):

    torchrun --standalone --nproc-per-node 4 examples/fsdp2.py
    torchrun --standalone --nproc-per-node 2 examples/fsdp2.py

Needs `pip install 'shardckpt[torch] @ git+https://github.com/shardckpt/shardckpt'`.
To begin anew, remove runs/fsdp2. On GPUs, replace "cpu" by "cuda" and "gloo" by
"nccl", and call `torch.cuda.set_device`.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardckpt

# All processes need the same place: a shared file system, gs://bucket/run or s3://bucket/run.
RUN = "runs/fsdp2"
STEPS, BATCH = 100, 64

dist.init_process_group("gloo")
rank, processes = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (processes,), mesh_dim_names=("data",))

torch.manual_seed(0)  # all processes begin with the same weights
model = nn.Sequential(
    *(nn.Sequential(nn.Linear(64, 250), nn.ReLU(), nn.Linear(250, 64)) for _ in range(3))
)
for block in model:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def train_step(step: int) -> torch.Tensor:
    """Train on this process's rows of a batch that depends on the step alone.

    The batch does not depend on the number of processes.
    """
    x = torch.randn(BATCH, 64, generator=torch.Generator().manual_seed(step))[rank::processes]
    loss = nn.functional.mse_loss(model(x), x.roll(1, dims=1).sin())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach()
    dist.all_reduce(mean)
    return mean / processes


# `rng=False`: nothing in this training draws from the global generators.
state = shardckpt.train_state(model=model, optimizer=optimizer, step=0, rng=False)

with shardckpt.CheckpointManager(RUN, every=10, keep=2) as manager:
    # Each process reads the parts that its own shards need.
    if manager.restore(state) and rank == 0:
        print(f"resumed from step {state.step} on {processes} processes", flush=True)
    for step in range(state.step + 1, STEPS + 1):
        loss = train_step(step)
        if rank == 0:
            print(f"step {step} loss {loss:.6f}", flush=True)
        state.step = step
        # Each process saves the parts that it holds; no collective, no barrier.
        manager.save(step, state)
dist.destroy_process_group()
