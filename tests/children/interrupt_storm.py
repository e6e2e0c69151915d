"""Calls that Ctrl-C interrupts at random moments.

    python interrupt_storm.py <directory> <call> <times>

JSON on stdout: how many calls were interrupted, the files that the process has open afterwards and
had not before, and what one more call raised.
"""

import gc
import json
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np

import shardckpt

STATE = {f"w{i}": np.full((64, 64), i, np.float32) for i in range(4)}
CALLS = {
    "save": lambda top: shardckpt.save(
        top / "new", STATE, options=shardckpt.SaveOptions(overwrite=True)
    ),
    "restore": lambda top: shardckpt.restore(top / "c"),
    "export": lambda top: shardckpt.export(top / "c", top / "o.safetensors", overwrite=True),
    "torch": lambda top: shardckpt.export(top / "c", top / "o.pt", to="torch", overwrite=True),
    "dcp": lambda top: shardckpt.export(top / "c", top / "o", to="dcp", overwrite=True),
    "import": lambda top: shardckpt.import_checkpoint(
        top / "m.safetensors", top / "imported", overwrite=True
    ),
}


def interrupt(_number, _frame):
    raise KeyboardInterrupt


def open_files():
    """The targets of this process's descriptors."""
    gc.collect()
    targets = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            targets.append(str(entry.readlink()))
        except FileNotFoundError:  # the directory's own
            continue
    return targets


def main():
    top, call, times = Path(sys.argv[1]), CALLS[sys.argv[2]], int(sys.argv[3])
    shardckpt.save(top / "c", STATE)
    shardckpt.export(top / "c", top / "m.safetensors")
    call(top)
    began = time.monotonic()
    call(top)
    seconds = time.monotonic() - began
    before, interrupted = open_files(), 0
    signal.signal(signal.SIGALRM, interrupt)
    draw = random.Random(7)
    for _ in range(times):
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, max(1e-5, draw.random() * seconds))
                call(top)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except (KeyboardInterrupt, shardckpt.ShardckptError):
            interrupted += 1
    after = open_files()
    for one in before:
        if one in after:
            after.remove(one)
    try:
        call(top)
        raised = None
    except Exception as e:
        raised = f"{type(e).__name__}: {e}"
    print(json.dumps([interrupted, [one for one in after if str(top) in one], raised]))


main()
