"""Costs of an operation, counted and not timed: bytes and calls of the kernel, memory, elements
copied, and steps of Python."""

from __future__ import annotations

import sys
import threading
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType


@dataclass(frozen=True)
class Counted:
    """Of one run."""

    read: int
    """Bytes that read(2) and its kin returned, to all threads of this process."""
    written: int
    reads: int
    """Calls of read(2) and its kin."""
    writes: int
    peak: int
    """Bytes that numpy and Python held at the most, above what they held before."""
    copied: int
    """Bytes that `np.copyto` wrote."""
    steps: int
    """Calls of Python functions in this thread, and in those that began meanwhile."""


def counted(do: Callable[[], object], before: Callable[[], object] = lambda: None) -> Counted:
    """Do it three times: so that what is kept is there, for the kernel and memory, and for Python's
    steps, which counting slows."""
    before()
    do()
    before()
    copied, copyto = [0], np.copyto

    def counting(target: np.ndarray, *arguments: object, **options: object) -> None:
        copied[0] += target.nbytes
        copyto(target, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "copyto", counting)
        tracemalloc.start()
        try:
            resident, io = tracemalloc.get_traced_memory()[0], _io()
            do()
            took = {name: now - io[name] for name, now in _io().items()}
            peak = tracemalloc.get_traced_memory()[1] - resident
        finally:
            tracemalloc.stop()
    before()
    return Counted(
        took["rchar"], took["wchar"], took["syscr"], took["syscw"], peak, copied[0], steps(do)
    )


def _io() -> dict[str, int]:
    """The kernel's counters of this process, see proc(5)."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(number) for name, number in (line.split(": ") for line in lines)}


def _profiled(do: Callable[[], object], count: Callable[[FrameType, str, object], None]) -> None:
    """Call `do`, and `count` at each call in it, in this thread and in those that begin
    meanwhile."""
    threading.setprofile(count)
    sys.setprofile(count)
    try:
        do()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def steps(do: Callable[[], object]) -> int:
    """Number of calls of Python functions in `do`, in this thread and in those that begin
    meanwhile."""
    made: dict[int, int] = {}

    def count(_frame: object, event: str, _argument: object) -> None:
        if event == "call":
            thread = threading.get_ident()
            made[thread] = made.get(thread, 0) + 1

    _profiled(do, count)
    return sum(made.values())


_LETTING_GO = ("posix", "crc32c._crc32c", "shardckpt.io._moving")
"""Modules in C."""
_NUMPYS = ("begin_write_back", "_copy", "scatter", "lay_out_all", "OpenFile.__init__")
"""Functions of the product that call C functions which the interpreter does not report: `os.open`
in `map`, the C library, numpy."""


def turns(do: Callable[[], object]) -> dict[str, int]:
    """Calls in `do` that give the interpreter lock up, by name, in this thread and in those that
    begin meanwhile.

    Counted are functions of the operating system, checksums, copies by numpy, and calls of the
    extension. Waits of a thread for another one are not: such a thread has nothing to do. A call
    counts whether another thread wants the lock or not.
    """
    made: dict[int, dict[str, int]] = {}

    def count(frame: FrameType, event: str, argument: object) -> None:
        name = None
        if event == "c_call" and getattr(argument, "__module__", None) in _LETTING_GO:
            name = argument.__name__  # type: ignore[attr-defined]
            name = None if name == "fspath" else name  # asks the system nothing
        elif event == "call" and frame.f_code.co_qualname.removeprefix("Band.") in _NUMPYS:
            name = frame.f_code.co_qualname
        if name is not None:
            own = made.setdefault(threading.get_ident(), {})
            # Which is closed, too.
            own[name] = own.get(name, 0) + (2 if name == "OpenFile.__init__" else 1)

    _profiled(do, count)
    total: dict[str, int] = {}
    for own in made.values():
        for name, number in own.items():
            total[name] = total.get(name, 0) + number
    return total
