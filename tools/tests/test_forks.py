"""Programs that are forked instead of started: what they see, and how they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import forks
import pytest
from forks import Forked

SEEN = """
import torch
import atexit, json, os, sys, warnings

def kind():
    try:
        warnings.warn("a warning")
    except UserWarning:
        return "error"
    return "shown"

if __name__ == "__main__":
    atexit.register(print, "the end")
    print(json.dumps({
        "argv": sys.argv[1:], "parent": os.getppid(), "group": os.getpgrp() == os.getpid(),
        "cwd": os.getcwd(), "variable": os.getenv("OWN"), "beside": sys.path[0],
        "main": sys.modules["__main__"].__file__, "warning": kind(), "stdin": sys.stdin.read(),
        "open": len(os.listdir("/proc/self/fd")),
        "imported": sorted({"jax", "shardckpt", "torch_xla"} & set(sys.modules)),
    }))
"""


@pytest.fixture
def program(tmp_path):
    """A function that makes a program that imports torch, and says its command."""

    def make(text, *arguments, options=()):
        path = tmp_path / "program.py"
        path.write_text(text)
        return [sys.executable, *options, path, *arguments]

    return make


def test_a_fork_sees_what_a_new_process_sees(program, tmp_path):
    command = program(SEEN, "a", "b c", options=("-W", "error"))
    options = {
        "input": "héllo",
        "capture_output": True,
        "text": True,
        "timeout": 250,
        "cwd": tmp_path,
        "env": {**os.environ, "OWN": "x"},
    }
    seen = []
    for run in (forks.run, subprocess.run):
        done = run(command, **options, start_new_session=True)
        assert (done.returncode, done.stderr) == (0, "")
        printed, end = done.stdout.splitlines()
        assert end == "the end"
        seen.append(json.loads(printed))
    assert seen[0] == seen[1]
    assert (seen[0]["parent"], seen[0]["group"], seen[0]["warning"], seen[0]["imported"]) == (
        os.getpid(),
        True,
        "error",
        [],
    )


@pytest.mark.parametrize(
    ("end", "status", "printed"),
    [
        ("raise ValueError('why')", 1, "ValueError: why"),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('no')", 1, "no"),
    ],
)
def test_the_exit_status_is_the_programs_own(program, end, status, printed):
    done = forks.run(program(f"import torch\n{end}\n"), capture_output=True, text=True, timeout=250)
    assert done.returncode == status
    assert printed in done.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_is_its_status(program, number):
    with Forked(
        program("import torch, signal\nprint(flush=True)\nsignal.pause()\n"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as one:
        one.stdout.readline()
        assert one.poll() is None
        one.send_signal(number)
        assert one.wait(60) == -number
        assert one.poll() == -number


@pytest.mark.long
def test_variables_read_as_libraries_load_and_programs_without_torch_start_a_new_interpreter(
    program,
):
    asks = "import {}, sys\nprint('torch._inductor.lowering' in sys.modules)\n"
    for library, variables, expected in (
        ("torch", {}, "True"),
        ("torch", {"OMP_NUM_THREADS": "3"}, "False"),
        ("json", {}, "False"),
    ):
        command = program(asks.format(library))
        forks._imports_torch.cache_clear()
        # Other tests may have changed that of this process.
        environment = forks.server().environment | variables
        done = forks.run(
            command, env=environment, capture_output=True, text=True, timeout=250, check=True
        )
        assert done.stdout.strip() == expected
