"""Programs that leave a manager open, each ended in one way, many times over.

    python exits.py <directory> <way> <times>

Everything is imported once. Each program is a fork that trains in a root of its own and then comes
to the end of this script, so that its interpreter is ended as any is. JSON on stdout: the exit
statuses, and how often each came.
"""

import json
import os
import random
import signal
import sys
import threading
from collections import Counter

import numpy as np
import tensorstore  # noqa: F401

import shardckpt
import shardckpt.training.manager


def train(root):
    manager = shardckpt.CheckpointManager(root, every=1, keep=1)
    for step in range(4):
        manager.save(step, {"w": np.full((256, 256), step, np.float32), "b": np.zeros(10)})
    return manager


def returns(root):
    kept.append(train(root))


def exits(root):
    manager = train(root)
    sys.exit(7 if manager else 0)


def raises(root):
    manager = train(root)
    raise ValueError(f"the training failed: {manager}")


def exits_in_a_thread(root):
    thread = threading.Thread(target=exits, args=(root,))
    thread.start()
    thread.join()


def is_terminated(root):
    manager = train(root)
    os.kill(os.getpid(), signal.SIGTERM)
    manager.wait()


def exits_when_terminated(root):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    is_terminated(root)


def is_interrupted(root):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    manager = train(root)
    os.kill(os.getpid(), signal.SIGINT)
    manager.wait()


def is_interrupted_as_it_ends(root):
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    kept.append(train(root))
    signal.setitimer(signal.ITIMER_REAL, random.Random(os.getpid()).uniform(0.0005, 0.01))


place, way, times = sys.argv[1], sys.argv[2], int(sys.argv[3])
kept, statuses = [], []
while len(statuses) < times:
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        break
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
else:
    sys.stdout.write(json.dumps(Counter(statuses)))
    sys.stdout.flush()
    os._exit(0)
globals()[way](f"{place}/{len(statuses)}")
