"""Reshards, or calls `call`, in a process of its own, and tells what memory that took. Arguments as
JSON, numbers as JSON."""

import json
import sys
from pathlib import Path

import shardckpt
from shardckpt.reshard.rules import parse_mesh


def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


arguments = json.loads(sys.argv[1])
call = getattr(shardckpt, arguments.pop("call", "reshard"))
report = call(**{**arguments, "mesh": parse_mesh(arguments["mesh"])}, workers=1)
print(json.dumps({"peak": status("VmHWM"), "read": report.read_bytes, "bytes": report.nbytes}))
