"""Cores and memory that this process may use.

They are what the operating system allows it, shared among the job's processes on this host.

The operating system allows a process the least of its affinity and the quotas of its control groups
(`cpu.max`, or `cpu.cfs_quota_us` in version 1), each of which also holds for all groups below. The
processes of a job tell each other when they agree (`World.sharing`). Until then a launcher's
variable counts. `SHARDCKPT_THREADS` replaces all of this.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from shardckpt.errors import OptionError
from shardckpt.text import shorten

if TYPE_CHECKING:
    from collections.abc import Iterator

_VARIABLE = "SHARDCKPT_THREADS"
_LOCAL_PROCESSES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")
"""Variables of torchrun, Open MPI and Slurm: the number of the job's processes on this host."""
_MOST = 1024
"""Most threads that a user can ask for."""

_known_processes: int | None = None


def cores() -> int:
    """Threads that this process may keep busy at a time, at least one.

    Raises:
        OptionError: `SHARDCKPT_THREADS` is not a whole number from 1.
    """
    given = os.environ.get(_VARIABLE)
    if given:
        if not given.strip().isdecimal() or not 0 < int(given) <= _MOST:
            raise OptionError(
                f"{_VARIABLE}={shorten(given)}: give a number of threads from 1 to {_MOST}, or "
                "remove the variable."
            )
        return int(given)
    return max(1, _allowed_cores() // _local_processes())


def note_local_processes(processes: int) -> None:
    """Note how many processes of the job may use the cores of this one, itself included.

    From then on no variable counts.

    One process says nothing, because it may be one that saves by itself among others.
    """
    global _known_processes  # noqa: PLW0603  (one number for the process)
    if processes > 1:
        _known_processes = processes


def _local_processes() -> int:
    if _known_processes is not None:
        return _known_processes
    for variable in _LOCAL_PROCESSES:
        text = os.environ.get(variable, "")
        if text.isdecimal() and int(text):
            return int(text)
    return 1


def _allowed_cores() -> int:
    """Cores of the affinity, or of the least quota, rounded up."""
    allowed = len(os.sched_getaffinity(0))
    quota = quota_of_groups()
    return allowed if quota is None else max(1, min(allowed, -int(-quota // 1)))


@cache
def quota_of_groups(root: Path = Path("/")) -> float | None:
    """The least quota of the control groups of this process, in cores; None: there is none.

    Read once.

    A container often sees its own group as the root of the file system, but is told the path that
    it has on the host. Then the groups that can be found are those along the path that exist, the
    root among them.
    """
    return min(
        (quota for quota in map(_quota, _groups(root, "cpu")) if quota is not None), default=None
    )


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of the control groups of this process that have a controller."""
    first = [
        root / "sys/fs/cgroup" / name
        for name in (controller, *(["cpu,cpuacct"] if controller == "cpu" else []))
    ]
    second = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number != "0" and controller not in controllers.split(","):
            continue
        for mount in second if number == "0" else first:
            group = mount.joinpath(path.lstrip("/"))
            for folder in (group, *group.parents):
                if not folder.is_relative_to(mount):
                    break
                yield folder


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes of memory that this process may still use; None if unknown.

    The result does not include what the job's other processes on this host may use.

    This is the least of what the host has available, and what its control groups leave. Files that
    are cached there count as free.
    """
    available = re.search(r"^MemAvailable:\s+(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    left = [] if available is None else [int(available[1]) << 10]
    for folder in _groups(root, "memory"):
        most = _text(folder / "memory.max") or _text(folder / "memory.limit_in_bytes")
        used = _text(folder / "memory.current") or _text(folder / "memory.usage_in_bytes")
        if most.strip().isdecimal() and used.strip().isdecimal():
            cached = re.search(
                r"^(?:total_)?inactive_file (\d+)", _text(folder / "memory.stat"), re.MULTILINE
            )
            left.append(int(most) - int(used) + (0 if cached is None else int(cached[1])))
    return max(0, min(left)) // _local_processes() if left else None


def _quota(folder: Path) -> float | None:
    """The quota of one group, in cores; None: it has none."""
    match (
        _text(folder / "cpu.max")
        or f"{_text(folder / 'cpu.cfs_quota_us')} {_text(folder / 'cpu.cfs_period_us')}"
    ).split():
        case [quota, period] if quota.isdecimal() and period.isdecimal() and int(period):
            return int(quota) / int(period)
    return None


def _text(file: Path) -> str:
    """A short file of the kernel; empty if it cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""
