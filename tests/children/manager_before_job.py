"""A rank of a gloo job whose managers were made before the job was. Prints JSON."""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import shardckpt

port, rank, place = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
options = shardckpt.SaveOptions(commit_timeout=30)
early, plain = (
    shardckpt.CheckpointManager(place / name, options=options) for name in ("early", "plain")
)
by_itself = shardckpt.CheckpointManager(place / f"own{rank}", options=options)
by_itself.should_save(1)
chosen = shardckpt.CheckpointManager(place / f"chosen{rank}", coordinator=shardckpt.SingleProcess())
store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)

model = torch.nn.Linear(4, 4)
fully_shard(model)
assert early.restore() is None
early.save(1, shardckpt.train_state(model=model, step=1))
early.wait()
plain.save(2, {"w": torch.ones(3)})
plain.wait()
try:
    by_itself.save(2, {"w": torch.ones(3)})
    refused = None
except shardckpt.errors.OptionError as e:
    refused = str(e)
chosen.save(3, {"w": torch.ones(3)})
chosen.close()
dist.barrier()
answer = {
    "early": early.all_steps(),
    "plain": plain.all_steps(),
    "chosen": chosen.all_steps(),
    "refused": refused,
}
hosts = [
    len(shardckpt.open(path).record.hosts)
    for path in (place / "early/1", place / "plain/2", place / f"chosen{rank}/3")
]
print(json.dumps(answer | {"hosts": hosts}))
dist.barrier()
dist.destroy_process_group()
