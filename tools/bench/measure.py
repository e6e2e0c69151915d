"""Measurements of a subject beside its peers.

1. A *subject* (`shardckpt`, `DCP`, `Orbax`, …, and the floors) can do some of the `OPERATIONS`.
   Each has `before`, what is timed, and `after`, which checks that it was done.
2. All subjects run in turn, once unmeasured and then `rounds` times; every other round goes
   backwards. So whatever else the machine does falls on all alike, and every buffer that a subject
   keeps is warm. No round begins when so many seconds are over, if three have been made: slow
   subjects get fewer, and a whole run has an end.
3. Told are the median, least and most seconds, the processor seconds of this process alone (user
   and system, all threads), the peak of resident memory above what it was before (the kernel's own
   high-water mark, reset before each run), bytes and files written, and bytes read from files (of
   this process: `/proc/self/io`).
"""

from __future__ import annotations

import gc
import os
import resource
import shutil
import statistics
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tools.bench.bucket import Folder

__all__ = [
    "LEAST_ROUNDS",
    "OPERATIONS",
    "SECONDS",
    "Measured",
    "Operation",
    "Run",
    "Subject",
    "in_turn",
    "of_directory",
]

LEAST_ROUNDS = 3
"""That many are made, however long they take."""
SECONDS = 30.0
"""Seconds after which no further round begins, if `LEAST_ROUNDS` have been made."""


@dataclass(frozen=True, slots=True)
class Operation:
    """Something that all can be asked to do."""

    key: str
    title: str
    what: str
    """In words."""


WRITE, READ, MEMCPY, PUTS, GETS, TENSORSTORE = (
    "write(2)",
    "readv(2)",
    "memcpy",
    "HTTP puts",
    "HTTP gets",
    "raw TensorStore",
)
"""Beginnings of the floors' names. A comma and the number of threads, processes or streams may
follow."""
OPERATIONS = {
    operation.key: operation
    for operation in (
        Operation("save", "Save", "everything, until it is committed"),
        Operation(
            "stall", "Stall of save_async", "until the call returns and the state may change"
        ),
        Operation(
            "restore",
            "Restore in place",
            "onto the layout that it was saved from, into memory that is there",
        ),
        Operation("other", "Restore onto another mesh", "rows become rows and columns"),
        Operation(
            "columns",
            "Read an eighth of the columns",
            "of every matrix, as one host of eight would",
        ),
        Operation("export", "Export to one file", "of safetensors, or torch.save"),
        Operation("verify", "Verify", "every stored byte"),
    )
}


@dataclass(frozen=True, slots=True)
class Run:
    """One operation of one subject."""

    do: Callable[[], Any]
    """The timed call."""
    nbytes: int
    """Of the elements that are moved."""
    before: Callable[[], Any] = lambda: None
    after: Callable[[Any], None] = lambda _result: None
    """Gets what `do` returned, waits for what is under way, checks it, and removes what was
    written."""
    writes: Path | Folder | None = None
    """The directory or file that it writes, to be counted and removed after each run."""


@dataclass(frozen=True, slots=True)
class Subject:
    """Somebody who can do some of the operations."""

    name: str
    runs: dict[str, Run]
    settings: str = "defaults"
    """Its settings, in words."""
    checksums: bool = False
    """Whether what it reads is compared with checksums."""
    floor: bool = False
    """Whether it only moves bytes."""


@dataclass(slots=True)
class Measured:
    """Measurements of one subject in one operation."""

    group: str
    operation: str
    subject: str
    nbytes: int
    settings: str
    checksums: bool
    floor: bool
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    """Processor time of this process, user and system."""
    peak_bytes: int = 0
    """Resident memory at the most, above what it was before."""
    read_bytes: int = 0
    """Read from files, in the last round."""
    written_bytes: int = 0
    """Of the files that it left."""
    files: int = 0

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)

    def to_json(self) -> dict[str, Any]:
        """All of it, and the rates that follow."""
        cpu = {"cpu_median": statistics.median(self.cpu_seconds)}
        return (
            asdict(self)
            | cpu
            | {"median": self.median, "least": min(self.seconds), "most": max(self.seconds)}
        )


def in_turn(
    group: str,
    subjects: Sequence[Subject],
    operation: str,
    rounds: int,
    *,
    meet: Callable[[], Any] = lambda: None,
    agree: Callable[[bool], bool] = bool,
) -> list[Measured]:
    """Measure an operation, by all subjects in turn.

    Args:
        group: what these subjects work with, in words.
        subjects: whoever can.
        operation: its key.
        rounds: at most that many count; one more comes first.
        meet: waits for the other processes that do the same.
        agree: the first process's answer, given to each its own.
    """
    able = [subject for subject in subjects if operation in subject.runs]
    if all(subject.floor for subject in able):
        raise ValueError(f"{group}: nobody but floors can be asked for {operation}.")
    results = {
        s.name: Measured(
            group, operation, s.name, s.runs[operation].nbytes, s.settings, s.checksums, s.floor
        )
        for s in able
    }
    began = time.monotonic()
    for number in range(rounds + 1):
        if number > LEAST_ROUNDS and agree(time.monotonic() - began > SECONDS):
            break
        for subject in able[:: 1 if number % 2 else -1]:
            once(subject.runs[operation], results[subject.name] if number else None, meet)
    return list(results.values())


def once(run: Run, measured: Measured | None, meet: Callable[[], Any]) -> None:
    """One run; None: it does not count."""
    run.before()
    gc.collect()
    meet()
    resident, read = _forget_peak(), _read_bytes()
    began, cpu = time.perf_counter(), _cpu_seconds()
    result = run.do()
    seconds, cpu = time.perf_counter() - began, _cpu_seconds() - cpu
    if measured is not None:
        measured.seconds.append(seconds)
        measured.cpu_seconds.append(cpu)
        measured.peak_bytes = max(measured.peak_bytes, _status("VmHWM") - resident)
        measured.read_bytes = _read_bytes() - read
    run.after(result)
    del result
    meet()
    if run.writes is not None:
        if measured is not None:
            measured.written_bytes, measured.files = of_directory(run.writes)
        meet()
        _remove(run.writes)
    meet()


def of_directory(path: Path | Folder) -> tuple[int, int]:
    """Bytes and number of the files there."""
    if not isinstance(path, Path):
        sizes = path.objects().values()
        return sum(sizes), len(sizes)
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return sum(p.stat().st_size for p in files), len(files)


def _remove(path: Path | Folder) -> None:
    with suppress(FileNotFoundError):
        if not isinstance(path, Path):
            path.remove()
        elif path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _forget_peak() -> int:
    """Let the high-water mark of resident memory begin anew; what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _cpu_seconds() -> float:
    """Of all threads of this process, and of no other."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _status(key: str) -> int:
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)
    )
    return int(line.split()[1]) * 1024


def _read_bytes() -> int:
    line = next(
        line
        for line in Path(f"/proc/{os.getpid()}/io").read_text().splitlines()
        if line.startswith("rchar")
    )
    return int(line.split()[1])
