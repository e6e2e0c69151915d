"""Processes that measure.

Each task has its own processes and files: what one leaves in memory slows the next, or does not fit
beside.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.bench.bucket import DELAYS, serve

if TYPE_CHECKING:
    from tools.bench.plan import Task

__all__ = ["TaskError", "measured"]

ROOT = Path(__file__).parents[2]
TIMEOUT = 600
"""Seconds that a task may take."""
PROCESSES = {"dtensor": 2}


class TaskError(Exception):
    """A process of the task died, or was too slow."""


def measured(task: Task, place: Path, streams: list[int]) -> list[dict[str, Any]]:
    """Results of a task, one for each subject.

    Args:
        task: what to measure.
        place: an existing directory; a fresh one in it is the task's, and is removed.
        streams: requests at a time of the floors in a bucket; empty: those of the storage.

    Raises:
        TaskError: with the end of what the process that died first said, or why there is no server.
    """
    directory = Path(tempfile.mkdtemp(prefix="bench-", dir=place))
    (directory / "files").mkdir()
    children: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        stack.callback(_end, children, directory)
        variables: dict[str, str] = {}
        request = {
            "group": task.group,
            "state": task.state,
            "part": task.part,
            "operation": task.operation,
            "rounds": task.rounds,
        }
        request |= {"directory": str(directory / "files"), "server": None}
        if task.storage in DELAYS:
            try:
                server, variables = stack.enter_context(serve(task.storage, directory, streams))
            except (OSError, RuntimeError, subprocess.CalledProcessError) as wrong:
                raise TaskError(f"no server for {task.storage}: {wrong}") from wrong
            request["server"] = server.to_json()
        (directory / "request").write_text(json.dumps(request))
        for environment in _environments(PROCESSES.get(task.group, 1)):
            rank = len(children)
            with (
                (directory / "request").open() as asked,
                (directory / f"{rank}.out").open("w") as out,
                (directory / f"{rank}.err").open("w") as err,
            ):
                command = [sys.executable, "-W", "ignore", "-m", "tools.bench.group"]
                process = subprocess.Popen(
                    command,
                    stdin=asked,
                    stdout=out,
                    stderr=err,
                    cwd=ROOT,
                    env=environment | variables,
                )
                children.append(process)
        _wait(children, directory)
        results: list[dict[str, Any]] = json.loads((directory / "0.out").read_text())
        return results


def _end(children: list[subprocess.Popen[bytes]], directory: Path) -> None:
    for child in children:
        child.kill()
        child.wait()
    shutil.rmtree(directory, ignore_errors=True)


def _environments(count: int) -> list[dict[str, str]]:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    alone = {name: value for name, value in os.environ.items() if name not in names}
    if count == 1:
        return [alone]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [
        alone | dict(zip(names, (str(rank), str(count), "127.0.0.1", str(port)), strict=True))
        for rank in range(count)
    ]


def _wait(children: list[subprocess.Popen[bytes]], directory: Path) -> None:
    """Until all have ended well, or one has not: the others would wait for it."""
    deadline = time.monotonic() + TIMEOUT
    running = set(range(len(children)))
    while running:
        for rank in sorted(running):
            status = children[rank].poll()
            if status is None:
                continue
            running.discard(rank)
            if status != 0:
                errors = (directory / f"{rank}.err").read_text(errors="replace")
                raise TaskError(f"a process ended with {status}: {errors[-3000:].strip()}")
        if time.monotonic() > deadline:
            raise TaskError(f"it took more than {TIMEOUT} s")
        time.sleep(0.05)
