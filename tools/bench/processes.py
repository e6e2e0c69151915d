"""Who measures? Each task has processes and files of its own: what one leaves in memory slows the next, or does not fit beside it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tools.bench.plan import Task

__all__ = ["TaskError", "measured"]

ROOT = Path(__file__).parents[2]
TIMEOUT = 600
"""Seconds that a task may take."""
PROCESSES = {"dtensor": 2}


class TaskError(Exception):
    """A process of the task died, or was too slow."""


def measured(task: Task, place: Path) -> list[dict[str, Any]]:
    """What a task gives.

    Args:
        task: what to measure.
        place: an existing directory; a fresh one in it is the task's, and is removed.

    Raises:
        TaskError: with the end of what the process that died first said.
    """
    directory = Path(tempfile.mkdtemp(prefix="bench-", dir=place))
    request = json.dumps(
        {"group": task.group, "state": task.state, "part": task.part, "operation": task.operation, "rounds": task.rounds}
        | {"directory": str(directory / "files")}
    )
    (directory / "files").mkdir()
    (directory / "request").write_text(request)
    children: list[subprocess.Popen[bytes]] = []
    try:
        for environment in _environments(PROCESSES.get(task.group, 1)):
            rank = len(children)
            with (
                (directory / "request").open() as asked,
                (directory / f"{rank}.out").open("w") as out,
                (directory / f"{rank}.err").open("w") as err,
            ):
                command = [sys.executable, "-W", "ignore", "-m", "tools.bench.group"]
                children.append(subprocess.Popen(command, stdin=asked, stdout=out, stderr=err, cwd=ROOT, env=environment))
        _wait(children, directory)
        found: list[dict[str, Any]] = json.loads((directory / "0.out").read_text())
        return found
    finally:
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
    return [alone | dict(zip(names, (str(rank), str(count), "127.0.0.1", str(port)), strict=True)) for rank in range(count)]


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
                said = (directory / f"{rank}.err").read_text(errors="replace")
                raise TaskError(f"a process ended with {status}: {said[-3000:].strip()}")
        if time.monotonic() > deadline:
            raise TaskError(f"it took more than {TIMEOUT} s")
        time.sleep(0.05)
