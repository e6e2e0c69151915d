"""Standard streams that are missing, closed or no files: programs without them save and restore as
others do."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import numpy as np
import pytest

import shardckpt
from shardckpt.io.streams import is_open, is_terminal

PROGRAM = """
import os, sys, numpy as np, shardckpt
class Writer:  # as log collectors put it into sys.stderr
    def write(self, text): return len(text)
    def flush(self): pass
{how}
try:
    for progress in (None, True):
        with shardckpt.CheckpointManager(sys.argv[1], progress=progress) as manager:
            manager.save((progress is True) + 1, {{"w": np.ones(3)}})
            manager.wait()
            manager.restore({{"w": np.zeros(3)}})
    shardckpt.export(sys.argv[1] + "/1", sys.argv[1] + "/o.safetensors")
except BaseException as e:
    open(sys.argv[1] + "/error", "w").write(repr(e))
os._exit(0)
"""
HOWS = {
    "none": "sys.stderr = sys.stdout = sys.stdin = None",
    "closed": "sys.stderr.close(); sys.stdout.close(); sys.stdin.close()",
    "closed, with a handler": "import logging; logging.basicConfig(); sys.stderr.close()",
    "another object": "sys.stderr = sys.stdout = Writer()",
    "closed file descriptors": "os.close(1); os.close(2)",
}


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
def test_a_program_without_standard_streams_saves_and_restores(tmp_path, how):
    command = [sys.executable, "-c", PROGRAM.format(how=how), tmp_path]
    subprocess.run(command, capture_output=True, check=True, timeout=200)
    assert not (tmp_path / "error").exists(), (tmp_path / "error").read_text()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name[0].isdigit()) == ["1", "2"]
    assert (tmp_path / "o.safetensors").exists()


RETRIED = """
import sys
from shardckpt.io.buckets.retry import PassingError, Retry, note_answer
note_answer("service")
errors, call = [PassingError("503")] * 8, Retry()
call.pause = lambda seconds: None  # they take no time
def once():
    if errors:
        raise errors.pop()
sys.stderr.close()
call.call(once, lambda error: True, "service")
"""


def test_a_request_is_repeated_though_standard_error_is_closed():
    command = [sys.executable, "-c", RETRIED]
    subprocess.run(command, capture_output=True, check=True, timeout=200)


STATUSES = {
    "ls .": 0,
    "info c": 0,
    "info c --json": 0,
    "verify c": 0,
    "info nothing": 3,
    "rm c": 2,
    "--help": 0,
    "info": 2,
}
"""Commands, and the statuses that they end with."""
COMMANDS = """
import json, os, sys
from shardckpt.cli import main
from shardckpt.io.streams import replace_missing_streams
replace_missing_streams()  # as `main` does before it imports anything
import shardckpt.cli.app, shardckpt.convert.opening, shardckpt.reading.checkpoint
statuses = {}
for command in sys.argv[1:]:
    if not os.fork():
        sys.argv = ["shardckpt", *command.split()]
        sys.exit(main())
    statuses[command] = os.waitstatus_to_exitcode(os.wait()[1])
open("statuses.json", "w").write(json.dumps(statuses))
"""
"""A program that runs each command in a fork, because importing takes longest."""


@pytest.mark.long
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_commands_without_standard_streams_end_with_their_usual_statuses(tmp_path, closed):
    shardckpt.save(tmp_path / "c", {"w": np.ones(3)})
    ended = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", COMMANDS, *STATUSES],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert "Traceback" not in ended.stderr
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "statuses.json").read_text()) == STATUSES, ended.stderr
    assert (tmp_path / "c" / "checkpoint.json").exists()


def test_streams_that_are_there_and_terminals():
    closed = io.StringIO()
    closed.close()
    assert [is_open(one) for one in (None, closed, io.StringIO(), object())] == [
        False,
        False,
        True,
        True,
    ]
    assert [is_terminal(one) for one in (None, closed, io.StringIO(), object())] == [
        False,
        False,
        False,
        False,
    ]
