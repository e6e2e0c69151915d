"""A rank of a gloo job that saves to one place again and again; one rank misses a save. Prints
JSON.

python out_of_step.py <port> <rank> <ranks> <place> <rank that misses a save> <how: skips, raises,
lags, or skips while another raises>
"""

import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import shardckpt
from shardckpt.writing import committer

port, rank, ranks, place, misses, how = (
    int(sys.argv[1]),
    int(sys.argv[2]),
    int(sys.argv[3]),
    sys.argv[4],
    int(sys.argv[5]),
    sys.argv[6],
)
committer._COMMITTING = 1
store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
options = shardckpt.SaveOptions(overwrite=True, commit_timeout=8)


def saved(i, leaf=None):
    try:
        state = {"w": torch.full((10,), float(i)), "leaf": leaf, "own": shardckpt.PerProcess(i)}
        report = shardckpt.save(place, state, options=options)
    except shardckpt.ShardckptError as e:
        return f"{type(e).__name__}: {e}"
    return report.attempt


came, names = [], []
for i in range(7):
    missed = i == 2 and rank == misses
    fails_beside = i == 2 and rank == 1 and how == "skips while another raises"
    if missed and how.startswith("skips"):
        came.append("")
    elif fails_beside or (missed and how == "raises"):
        came.append(saved(i, leaf=object()))
    else:
        if missed:
            store.wait(["given up"], timedelta(seconds=60))
        came.append(saved(i))
        if i == 2:
            store.set("given up", "")
    dist.barrier()
    if came[-1] and "Error" not in came[-1]:
        names.append(came[-1])
        own = shardckpt.PerProcess(None, choose=list)
        restored = shardckpt.restore(
            place,
            like={"w": torch.zeros(10), "own": own},
            strict=False,
            coordinator=shardckpt.SingleProcess(),
        )
        assert float(restored["w"][0]) == i
        assert restored["own"].value == [i] * ranks, restored["own"]
    dist.barrier()
print(json.dumps({"came": ["saved" if c in names else c for c in came], "names": names}))
dist.destroy_process_group()
