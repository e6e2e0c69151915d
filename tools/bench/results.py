"""Results of a run, in a file that is whole at any time.

A run that is cut keeps what it has, and another run goes on with it.
"""

from __future__ import annotations

import json
import os
import platform
import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from tools.bench.plan import Task

__all__ = ["OtherRunError", "Results", "machine", "read"]

PACKAGES = (
    "shardckpt",
    "torch",
    "torch_xla",
    "jax",
    "orbax-checkpoint",
    "safetensors",
    "tensorstore",
    "numpy",
)


class OtherRunError(ValueError):
    """A file has no results, or they were measured under other conditions.

    The run was on another machine, with other versions, or with another part of the bytes.
    """


def read(path: Path) -> dict[str, Any]:
    """Results of an earlier run.

    Raises:
        OtherRunError: there is no such file, or it is not a run's.
    """
    try:
        figures = json.loads(path.read_text("utf-8"))
    except OSError as wrong:
        raise OtherRunError(
            f"{path} cannot be read: {wrong.strerror}; name a file that --json wrote."
        ) from wrong
    except ValueError as wrong:
        raise OtherRunError(f"{path} is not a file that --json wrote: {wrong}.") from wrong
    if not isinstance(figures, dict) or not {"results", "failed", *machine()} <= figures.keys():
        raise OtherRunError(f"{path} is not a file that --json wrote: it has no results.")
    return figures


class Results:
    """A run's results, and the tasks that failed."""

    def __init__(self, path: Path, *, resumed: bool) -> None:
        """Begin anew, or with what the file has.

        Raises:
            OtherRunError: there is no such file, it is not a run's, or it was measured on another
                machine, or with other versions.
        """
        self.path = path
        self.figures: dict[str, Any] = machine() | {"results": [], "failed": []}
        if resumed:
            earlier = read(path)
            for key in set(self.figures) - {"date", "results", "failed"}:
                if earlier[key] != self.figures[key]:
                    raise OtherRunError(
                        f"{path}: {key} was {earlier[key]} and is {self.figures[key]}; begin a "
                        "file of its own."
                    )
            self.figures = earlier

    def has(self, task: Task) -> bool:
        """Whether it was measured; what failed was not.

        Raises:
            OtherRunError: it was, with another part of the bytes: figures of both would be compared
                with each other.
        """
        parts = {r["part"] for r in self.figures["results"] if task.gave(r)}
        if parts - {task.part}:
            of = f"{task.storage}, {task.state}, {task.group}, {task.operation}"
            raise OtherRunError(
                f"{self.path}: --part was {max(parts)} and is {task.part} ({of}); begin a file of "
                "its own."
            )
        return bool(parts)

    def add(self, task: Task, measured: list[dict[str, Any]]) -> None:
        """Take what it gave, in place of what it gave before."""
        self._forget(task)
        self.figures["results"] += [m | task.to_json() for m in measured]
        self._write()

    def add_failure(self, task: Task, message: str) -> None:
        """Take why it gave nothing now."""
        self._forget(task)
        self.figures["failed"].append(task.to_json() | {"message": message})
        self._write()

    def _forget(self, task: Task) -> None:
        for kind in ("results", "failed"):
            self.figures[kind] = [r for r in self.figures[kind] if not task.gave(r)]

    def _write(self) -> None:
        fresh = self.path.with_name(f"{self.path.name}.new")
        fresh.write_text(json.dumps(self.figures, indent=1) + "\n", "utf-8")
        fresh.replace(self.path)


def machine() -> dict[str, Any]:
    """The date, the machine, and the versions of the packages."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
    }
