"""Real clusters on this machine, on free ports of the loopback interface: Ray's and Dask's, of two
workers each.

All their processes are in process groups of their own, which are killed at the end, whatever has
happened.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from emulators import _DIE_WITH_PARENT
from paths import CHILDREN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Cluster", "children", "dask_cluster", "ray_cluster", "wait_for"]

PATIENCE = 180
"""Seconds that a cluster may take to start on a machine that is busy."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running cluster."""

    url: str
    """For `reshard(engine=…)`."""
    nodes: list[int]
    """The process that stands for a machine: Ray's raylets, Dask's nannies."""
    head: list[int]
    """The processes without which it is none: Dask's scheduler, those of Ray's head node."""
    auto: dict[str, str]
    """Environment variables with which `ray://auto` or `dask://auto` means this cluster."""

    def workers(self) -> list[int]:
        """Processes that do tasks."""
        name = b"ray::" if self.url.startswith("ray") else b"python"
        return [
            child
            for node in self.nodes
            for child in children(node)
            if name in _command(child) and b"Agent" not in _command(child)
        ]


@contextmanager
def ray_cluster(**more: str) -> Iterator[Cluster]:
    """A head that does no tasks, and two nodes with a CPU each; with some environment variables."""
    with tempfile.TemporaryDirectory(
        prefix="ray-", dir="/tmp", ignore_cleanup_errors=True
    ) as place:
        port = _free_port()
        # gRPC's handlers of forks may end the process that Ray's client server starts for the first
        # client.
        # Where Ray keeps to the loopback interface.
        loopback = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
        env = {
            **loopback,
            "RAY_TMPDIR": place,
            "RAY_USAGE_STATS_ENABLED": "0",
            "GRPC_ENABLE_FORK_SUPPORT": "0",
            **more,
        }
        with _group(
            [sys.executable, "-W", "ignore", CHILDREN / "ray_cluster.py", port, 2], env
        ) as child:
            assert child.stdout is not None
            answer = json.loads(child.stdout.readline() or "{}")
            assert answer, "Ray does not start"
            yield Cluster(
                f"ray://127.0.0.1:{port}",
                answer["raylets"],
                answer["head"],
                {**loopback, "RAY_ADDRESS": answer["address"]},
            )


@contextmanager
def dask_cluster(**more: str) -> Iterator[Cluster]:
    """A scheduler, and two nannies with a worker of one thread each, and with some environment
    variables."""
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        address = f"127.0.0.1:{_free_port()}"

        def start(command: str, *arguments: str, **env: str) -> int:
            whole = [
                sys.executable,
                "-m",
                f"distributed.cli.{command}",
                "--host",
                "127.0.0.1",
                "--no-dashboard",
                *arguments,
            ]
            return stack.enter_context(_group(whole, env)).pid

        scheduler = start("dask_scheduler", "--port", address.partition(":")[2])
        options = [
            "--nthreads",
            "1",
            "--memory-limit",
            "2GiB",
            "--death-timeout",
            str(PATIENCE),
            "--local-directory",
        ]
        nannies = [
            start("dask_worker", f"tcp://{address}", *options, str(place / name), **more)
            for name in "ab"
        ]
        yield Cluster(
            f"dask://{address}",
            nannies,
            [scheduler],
            {"DASK_SCHEDULER_ADDRESS": f"tcp://{address}"},
        )


def children(pid: int) -> list[int]:
    """Of a process; none where it is gone."""
    pids: list[int] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread may end meanwhile
            pids += map(int, listed.read_text().split())
    return pids


def wait_for(condition: Callable[[], object]) -> None:
    """Return when a condition holds, within our patience."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@contextmanager
def _group(command: list[object], env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process with a group of its own; it is asked to end, and at last the whole group is
    killed."""
    child = subprocess.Popen(
        [sys.executable, "-c", _DIE_WITH_PARENT, *map(str, command)],
        env={**os.environ, **env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        yield child
    finally:
        os.killpg(child.pid, signal.SIGKILL)  # its number is its own until somebody waits for it
        child.communicate()
        wait_for(lambda: not _group_members(child.pid))


def _group_members(group: int) -> list[int]:
    """Processes of a group that are alive."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(pgrp) == group and state != "Z":
            pids.append(int(stat.parent.name))
    return pids


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
