"""Commits what is at url after url, each time stopping before it publishes until it is told to go
on.

    python committing_race.py <url> …

Writes a line before it publishes, waits for a line, and writes the state of the one outcome and
whether the record is its own.
"""

import sys

import shardckpt
from shardckpt.runs import committing


def publish_when_told(*arguments):
    print("ready", flush=True)
    sys.stdin.readline()
    wrote.append(publish(*arguments))
    return wrote[-1]


publish, committing.publish = committing.publish, publish_when_told
for url in sys.argv[1:]:
    wrote = []
    (outcome,) = shardckpt.commit(url)
    print(outcome.state, *wrote, flush=True)
