"""Exports in a process of its own, and tells what memory that took. Arguments as JSON, numbers as
JSON."""

import json
import sys
from pathlib import Path

import shardckpt


def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


report = shardckpt.export(**json.loads(sys.argv[1]))
print(json.dumps({"peak": status("VmHWM"), "read": report.read_bytes, "bytes": report.nbytes}))
