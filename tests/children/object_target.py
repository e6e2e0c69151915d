"""Write a file to an object store, and be killed in the middle."""

import os
import signal
import sys

import numpy as np

from shardckpt.convert.files import object_target
from shardckpt.convert.files.object_target import ObjectTarget
from shardckpt.io.buckets import uploading
from shardckpt.io.url import parse

MiB = 1 << 20
SIZE = 7 * MiB + 4321
LIMIT = 4 * MiB
PIECE = 300_007


def content(seed=0):
    return np.random.default_rng(seed).integers(0, 256, SIZE, np.uint8)


def write(target, until=SIZE, at=None):
    """From there, or from where it begins, in pieces, until so much of it survives; how far it has
    come."""
    at = target.resume_at if at is None else at
    while at < SIZE and target.durable < until:
        piece = content()[at : at + PIECE]
        target.write_at(at, piece)
        at += len(piece)
    return at


if __name__ == "__main__":
    uploading.SMALLEST = object_target.SAVE_EVERY = MiB
    write(
        ObjectTarget.open(
            parse(sys.argv[1]), nbytes=SIZE, digest="a", overwrite=False, memory_limit=LIMIT
        ),
        int(sys.argv[2]),
    )
    os.kill(os.getpid(), signal.SIGKILL)
