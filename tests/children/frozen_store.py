"""One process of a job of two, whose process 0 holds the store and is stopped by the test. JSON on
stdout, a line for each part.

python frozen_store.py torch|jax <process> <port> <directory>
"""

import json
import os
import sys

import numpy as np

import shardckpt
from shardckpt.frameworks.coordination import Coordinator, calls
from shardckpt.training.policies import OnPreemption

framework, process, port, place = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
calls.ANSWER_SECONDS = 60.0
options = shardckpt.SaveOptions(commit_timeout=6)
state = {"w": np.ones(100)}


def tell(**fields):
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def failure_of(act):
    try:
        act()
    except shardckpt.ShardckptError as error:
        return f"{type(error).__name__}: {error}"
    return None


if framework == "torch":
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(process), WORLD_SIZE="2")
    dist.init_process_group("gloo")
else:
    import jax

    jax.distributed.initialize(f"127.0.0.1:{port}", 2, process, heartbeat_timeout_seconds=600)
job = Coordinator.current()
manager = shardckpt.CheckpointManager(f"{place}/run", every=1, options=options)
by_leader = shardckpt.CheckpointManager(
    f"{place}/led", preemption=OnPreemption(signals=(), when=lambda: False), options=options
)
manager.save(0, state)
manager.wait()
job.share("ready", None)
tell(pid=os.getpid())
sys.stdin.readline()
if process:
    calls.ANSWER_SECONDS = 1.0  # process 0 is stopped
    questions = {
        "peek": failure_of(lambda: job.peek("word")),
        "announce": failure_of(lambda: job.announce("word", 1)),
        "agree": failure_of(lambda: job.agree("step", lambda: 1, timeout=0.5)),
    }
    tell(
        **questions,
        save=failure_of(lambda: shardckpt.save(f"{place}/saved", state, options=options)),
        begun=manager.save(1, state),
        waited=failure_of(manager.wait),
        begun_again=manager.save(2, state),
        next=failure_of(lambda: manager.save(3, state)),
        close=failure_of(manager.close),
        decision=failure_of(lambda: by_leader.should_save(500)),
    )
    sys.stdin.readline()  # until process 0 goes on
    calls.ANSWER_SECONDS = 60.0
    tell(heard=job.share("goes on", None, timeout=60))
else:
    job.share("goes on", None, timeout=60)
    job.share("end", None, timeout=60)
if process:
    job.share("end", None, timeout=60)
if framework == "torch":
    dist.destroy_process_group()
