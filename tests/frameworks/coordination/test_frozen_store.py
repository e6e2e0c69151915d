"""Process 0, which holds the job's store, is stopped: the others hear of it by errors, and go on
when it does."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from paths import CHILDREN

PARTS = {
    "torch": "torch.distributed's store has not answered",
    "jax": "jax.distributed's coordination service has not answered",
}


@pytest.fixture
def job(tmp_path):
    """A function that starts both processes."""
    started = []

    def start(framework):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for process in range(2):
            command = [
                sys.executable,
                "-W",
                "ignore",
                CHILDREN / "frozen_store.py",
                framework,
                str(process),
                str(port),
                tmp_path,
            ]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            started.append(
                subprocess.Popen(
                    command, **pipes, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}
                )
            )
        return started

    yield start
    for process in started:
        process.kill()
        process.communicate()


def next_answer(process):
    """The next line that is JSON: gloo writes to stdout, too."""
    for line in process.stdout:
        if line.startswith("{"):
            return json.loads(line)
    raise AssertionError(process.stderr.read()[-3000:])


def stop(process):
    """Stop all of its threads: until the last of them is stopped, one may still answer."""
    os.kill(process.pid, signal.SIGSTOP)
    while any(
        task.read_text().rpartition(") ")[2][0] != "T"
        for task in Path(f"/proc/{process.pid}/task").glob("*/stat")
    ):
        time.sleep(0.01)


def go_on(process):
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.slow
@pytest.mark.parametrize("framework", PARTS)
def test_while_process_0_is_stopped_every_wait_for_it_ends_with_an_error_that_names_it(
    job, framework
):
    leader, other = job(framework)
    next_answer(leader), next_answer(other)
    stop(leader)
    go_on(other)
    answer = next_answer(other)
    silent = PARTS[framework]
    for question in ("peek", "announce", "agree"):
        assert answer[question].startswith(f"SilentStoreError: {silent}")
        assert (
            "process 0 (or the launcher), which holds it, is stopped or cannot be reached"
            in answer[question]
        )
    missing = (
        f"this process has written its share, and process 0 has not committed within 6 s ({silent}"
    )
    assert answer["begun"]
    assert answer["begun_again"]
    for save in ("save", "waited", "next", "close"):
        assert answer[save].startswith("CommitError: ")
        assert missing in answer[save]
    assert answer["decision"].startswith(
        "CoordinationError: step 500: process 0 has not decided within 6 s whether it is saved"
    )

    os.kill(leader.pid, signal.SIGCONT)
    go_on(leader), go_on(other)
    assert next_answer(other) == {"heard": [None, None]}
    assert (other.wait(60), leader.wait(60)) == (0, 0)
