"""Exports over and over, each time in a fork that kills itself one operation later than the last,
and then goes on with what it left.

    python export_killed.py <directory> <every>

<directory>/checkpoint is exported. An operation is whatever changes the disk; writes are cut off in
the middle, too. With every > 1 only each so-many-th operation is died before. JSON on stdout: for
each death, the operation, whether a file was there then, and what the same call did in the next
process.
"""

import json
import os
import signal
import sys
from pathlib import Path

from dying import Killer, in_a_fork

import shardckpt
import shardckpt.convert.export  # imported once for all forks
import shardckpt.errors
from shardckpt.convert.files import local_files
from shardckpt.plan import grids
from shardckpt.streaming import stream as streaming

grids.BLOCK_BYTES = 8 << 10
streaming._BATCH = 32 << 10
local_files._NOTE_BYTES = 64 << 10
OPERATIONS = (
    "open",
    "write",
    "pwritev",
    "fsync",
    "fdatasync",
    "mkdir",
    "link",
    "replace",
    "unlink",
    "rmdir",
    "ftruncate",
)


def act(place, k, report, overwrite):
    Killer(OPERATIONS, {}, k, report).arm()
    shardckpt.export(place / "checkpoint", place / "out" / "model.safetensors", overwrite=overwrite)


def go_on(place, overwrite, answer):
    try:
        report = shardckpt.export(
            place / "checkpoint", place / "out" / "model.safetensors", overwrite=overwrite
        )
    except shardckpt.errors.AlreadyExistsError:
        os.pwrite(answer, json.dumps([-1, 0, 0]).encode(), 0)  # nothing was left to be done
        return
    os.pwrite(
        answer,
        json.dumps([report.resumed_bytes, report.written_bytes, report.read_bytes]).encode(),
        0,
    )


def main():
    place, every, before = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    rounds = []
    final = place / "out" / "model.safetensors"
    with (place / "report").open("wb+", buffering=0) as report:
        for k in range(0, 100_000, every):
            if before:
                final.parent.mkdir(exist_ok=True)
                final.write_bytes(before[0].encode())
            report.truncate(0)
            status = in_a_fork(lambda k=k: act(place, k, report.fileno(), bool(before)))
            if status == 0:
                break
            assert os.WTERMSIG(status) == signal.SIGKILL, status
            operation = (place / "report").read_text()
            there = (
                final.read_bytes().hex()
                if final.exists() and final.stat().st_size < 100
                else final.exists()
            )
            report.truncate(0)
            assert in_a_fork(lambda: go_on(place, bool(before), report.fileno())) == 0
            rounds.append([operation, there, *json.loads((place / "report").read_text())])
            names = sorted(path.name for path in final.parent.iterdir())
            assert names == ["model.safetensors"], names
            (place / f"{k}.result").write_bytes(final.read_bytes())
            final.unlink()
    print(json.dumps(rounds))


main()
