"""Export to an object store, in parts of a MiB, and be killed when so many bytes have been given
away.

python export_to_bucket.py <checkpoint> <url> <max_shard_size or ""> <bytes>
"""

import os
import signal
import sys

import shardckpt
from shardckpt.convert.files import object_target
from shardckpt.io.buckets import uploading
from shardckpt.streaming import stream as streaming

MiB = 1 << 20
LIMIT = 24 * MiB


def small():
    """Parts, batches and notes of a MiB, so that a small export has all that a large one has."""
    uploading.SMALLEST = object_target.SAVE_EVERY = streaming._BATCH = MiB


if __name__ == "__main__":
    source, url, size, until = sys.argv[1:]
    small()

    def progress(done, _total):
        """Die."""
        if done >= int(until):
            os.kill(os.getpid(), signal.SIGKILL)

    shardckpt.export_safetensors(
        source, url, max_shard_size=size or None, memory_limit=LIMIT, progress=progress
    )
