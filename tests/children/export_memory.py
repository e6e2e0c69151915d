"""Exports in a process of its own: its memory before and at its most, and the bytes that it read."""

import sys
from importlib import import_module
from pathlib import Path

from shardckpt.checkpoint import Checkpoint
from shardckpt.convert.whole_state import FORMATS, write_state
from shardckpt.io.url import parse


def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


source, place, to, limit = sys.argv[1:]
module = import_module(f"shardckpt.convert.{FORMATS[to][0]}")
if to != "orbax":
    import torch.distributed.checkpoint
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        torch.empty(1)  # what that imports is no memory of the export's
before = status("VmRSS")
written = write_state(Checkpoint(source), parse(place), to, limit=int(limit))
print(before, status("VmHWM"), written.read_bytes)
