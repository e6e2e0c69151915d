"""A worker of a torchrun job that fails in its first round: what each worker sees goes into a file
of its own.

In torch 2.9 the agent's store keeps its keys when it starts the workers again, and gloo may then
take addresses of the first round's for the second's. A backend without connections leaves the store
to us.
"""

import os
import sys
from pathlib import Path

import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401

from shardckpt.frameworks.coordination import Coordinator

store, rank, world = next(dist.rendezvous("env://"))
restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
kept = store.check(["touched"])
store.set("touched", "1")
dist.init_process_group("fake", store=store, rank=rank, world_size=world)
ours = Coordinator.current(timeout=60)
seen = f"{ours.run_id} {ours.peek('step')} {ours.agree('resume', lambda: rank)} {kept}"
Path(sys.argv[1], f"round {restarts} rank {rank}").write_text(seen)
ours.share("peeked", None)
ours.announce("step", restarts)
ours.share("announced", None)
if restarts == 0 and rank == 1:
    sys.exit(1)
ours.share("ended", None)
