"""Jobs of real processes: each runs a script of tests/children and prints one JSON object."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from forks import Forked
from paths import CHILDREN

SECONDS = 250


@pytest.fixture
def run_job():
    """A function that runs one process per list of arguments, all at once, and returns what each
    printed."""
    started = []

    def run(script, arguments, **environment):
        job = [
            Forked(
                [sys.executable, "-W", "ignore", str(CHILDREN / script), *map(str, own)],
                env={**os.environ, **environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for own in arguments
        ]
        started.extend(job)
        answers = []
        for process in job:
            out, err = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, err[-4000:]
            answers.append(json.loads(out.splitlines()[-1]))
        return answers

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def port():
    """Of a TCPStore that outlives the ranks that use it, as torchelastic's does."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store
