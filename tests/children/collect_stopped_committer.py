"""Saves `value` to a url, and stops (SIGSTOP) just before the conditional write that publishes it.

    python collect_stopped_committer.py <url> <value> <overwrite: 0 or 1>

Continued, it goes on, and writes what became of it: `saved` or the error's class.
"""

import os
import signal
import sys

import numpy as np
import tensorstore as ts

import shardckpt
from shardckpt.io.commit import RECORD


def write(store, key, *arguments, **options):
    if key == RECORD:
        os.kill(os.getpid(), signal.SIGSTOP)
    return original(store, key, *arguments, **options)


original, ts.KvStore.write = ts.KvStore.write, write
try:
    shardckpt.save(sys.argv[1], {"w": np.full(100, int(sys.argv[2]))}, options=shardckpt.SaveOptions(overwrite=sys.argv[3] == "1"))
    print("saved")
except shardckpt.ShardckptError as e:
    print(type(e).__name__)
