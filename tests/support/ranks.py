"""Jobs of several processes, whose answers are checked."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import contextmanager

from forks import Forked
from paths import CHILDREN
from processes import Processes


@contextmanager
def asked(program):
    """A function that runs a function of a program in `tests/children` in some ranks, and returns
    their answers; none is an error."""
    with Processes(program, env={"PYTHONWARNINGS": "ignore"}) as processes:

        def run(function, count, *arguments):
            answers = processes.run(function, count, *arguments, timeout=250)
            failed = [
                answer for answer in answers if isinstance(answer, dict) and "error" in answer
            ]
            assert not failed, failed
            return answers

        yield run


def run_ranks(child, server, count, *arguments):
    """Run a program of `tests/children` once for each rank of a job that meets at a `TCPStore`; the
    last lines that they print, as JSON."""
    started = []
    for rank in range(count):
        command = [
            sys.executable,
            "-W",
            "ignore",
            CHILDREN / child,
            server.port,
            rank,
            count,
            *arguments,
        ]
        started.append(
            Forked([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    answers = []
    for process in started:
        out, err = process.communicate(timeout=250)
        assert process.returncode == 0, err
        answers.append(json.loads(out.splitlines()[-1]))
    return answers
