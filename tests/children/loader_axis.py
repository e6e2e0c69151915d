"""A rank of a gloo job whose loaders read by the data axis of a mesh. Prints JSON.

python loader_axis.py <port> <rank> <ranks> <place> save|restore <size of the data axis>
given|mesh|unknown
"""

import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchdata.stateful_dataloader import StatefulDataLoader

import shardckpt

port, rank, ranks, place, act, size, known = (int(a) if a.isdecimal() else a for a in sys.argv[1:])
store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
mesh = init_device_mesh("cpu", (size, ranks // size), mesh_dim_names=("dp", "tp"))
position = mesh.get_local_rank("dp")


class Stream(torch.utils.data.IterableDataset):
    """Numbers that say at which position they are read."""

    at = 0

    def __iter__(self):
        while True:
            self.at += 1
            yield 100 * position + self.at

    def state_dict(self):
        return {"at": self.at + 10 * position}

    def load_state_dict(self, state):
        self.at = state["at"]


torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
if known == "mesh":
    fully_shard(model, mesh=mesh["dp"])
loader = StatefulDataLoader(Stream(), batch_size=1)
given = shardckpt.PerProcess(loader, axis=(position, size)) if known == "given" else loader
state = shardckpt.train_state(model=model, loader=given, rng=False)
answer = {}
if act == "save":
    next(iter(loader))
    shardckpt.save(place, state)
    answer["versions"] = [
        json.loads(path.read_bytes())["version"]
        for path in sorted(shardckpt.io.url.parse(place).local_path.glob("*/hosts/*/values.json"))
    ]
else:
    try:
        shardckpt.restore(place, state)
        answer["next"] = next(iter(loader)).item() % 100
    except shardckpt.errors.MismatchError as e:
        answer["refused"] = str(e)
dist.barrier()
print(json.dumps(answer | {"position": position}))
dist.destroy_process_group()
