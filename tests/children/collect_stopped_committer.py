"""Saves to a url, or commits what is there, and stops (SIGSTOP) just before the conditional write
that publishes it.

    python collect_stopped_committer.py <url> save|overwrite <value>
    python collect_stopped_committer.py <url> commit

Continued, it goes on, and writes what became of it: `saved`, the error's class, or the state of the
one outcome.
"""

import signal
import sys
import threading

import numpy as np

import shardckpt
from shardckpt.commit.publish import RECORD
from shardckpt.io import files


def replace(path, data, *conditions):
    if path.name == RECORD and b'"tombstone"' not in bytes(data):
        # Of the process this thread might go on for a moment.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    return original(path, data, *conditions)


original, files.replace = files.replace, replace
url, action, *value = sys.argv[1:]
try:
    if action == "commit":
        (outcome,) = shardckpt.commit(url)
        print(outcome.state)
    else:
        shardckpt.save(
            url,
            {"w": np.full(100, int(value[0]))},
            options=shardckpt.SaveOptions(overwrite=action == "overwrite"),
        )
        print("saved")
except shardckpt.ShardckptError as e:
    print(type(e).__name__)
