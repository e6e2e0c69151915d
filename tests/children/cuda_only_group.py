"""One rank of a job whose process group has a backend for CUDA tensors alone, as NCCL is, and runs
no collective. JSON on stdout.

python cuda_only_group.py <port of a TCPStore> <directory> <rank> <ranks>
"""

import json
import logging
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import shardckpt

port, place, rank, world = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
COLLECTIVES = (
    "allreduce",
    "allgather",
    "_allgather_base",
    "broadcast",
    "barrier",
    "gather",
    "scatter",
    "reduce",
    "alltoall",
    "send",
    "recv",
)
asked, logged = [], []


class OnlyCuda(dist.ProcessGroup):
    """A group of which every collective is an error."""

    group_name = "0"

    def getBackendName(self):
        return "only_cuda"


def refuse(name):
    def collective(*_):
        asked.append(name)
        raise RuntimeError(f"{name}: this group has no devices")

    return collective


for name in COLLECTIVES:
    setattr(OnlyCuda, name, refuse(name))
dist.Backend.register_backend(
    "only_cuda", lambda _store, rank, size, _timeout: OnlyCuda(rank, size), devices=["cuda"]
)
store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
dist.init_process_group("only_cuda", store=store, rank=rank, world_size=world)
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
logging.getLogger("shardckpt").addFilter(lambda record: logged.append(record.getMessage()) or True)

local = torch.full((3, 4), float(rank))
mesh = init_device_mesh("cpu", (world,))
model = {
    "w": DTensor.from_local(local, mesh, [Shard(0)], run_check=False),
    "norm": torch.arange(5.0),
}
with shardckpt.CheckpointManager(place, every=1) as manager:
    for step in range(3):
        manager.save(step, {"model": model, "rng": shardckpt.PerProcess(rank)})
        local += world
    manager.wait()
    local.zero_()
    restored = manager.restore(
        {"model": model, "rng": shardckpt.PerProcess(None)}, cooperative=True
    )
coordinator = shardckpt.Coordinator.current()
controls = [*asked]
try:
    dist.all_reduce(torch.ones(1))
except RuntimeError:
    controls.append("a collective of the program's own")
print(
    json.dumps(
        {
            "backends": dist.get_backend_config(),
            "coordinator": [
                type(coordinator).__name__,
                coordinator.world.process,
                coordinator.world.processes,
            ],
            "collectives": controls,
            "local": local.unique().tolist(),
            "step": restored.step,
            "own": restored.state["rng"].value
            if hasattr(restored.state["rng"], "value")
            else restored.state["rng"],
            "logged": [line for line in logged if "backend" in line],
        }
    )
)
