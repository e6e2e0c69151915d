"""Saves `value` to url after url, each time stopping before it publishes until it is told to go on.

    python kill_race.py <value> <overwrite: 0 or 1> <url> …

Writes a line before it publishes, waits for a line, and writes what became of it: `saved` or the
error's class.
"""

import sys

import numpy as np

import shardckpt
from shardckpt.writing import attempt


def publish_when_told(*arguments):
    print("ready", flush=True)
    sys.stdin.readline()
    return publish(*arguments)


publish, attempt.publish = attempt.publish, publish_when_told
for url in sys.argv[3:]:
    try:
        options = shardckpt.SaveOptions(overwrite=sys.argv[2] == "1")
        shardckpt.save(url, {"w": np.full(100, int(sys.argv[1]))}, options=options)
        print("saved", flush=True)
    except shardckpt.ShardckptError as e:
        print(type(e).__name__, flush=True)
