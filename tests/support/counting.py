"""Costs of an operation, counted and not timed: bytes and calls of the kernel, memory, elements copied, and steps of Python."""

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
    """Do it three times: so that what is kept is there, for the kernel and memory, and for Python's steps, which counting slows."""
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
    return Counted(took["rchar"], took["wchar"], took["syscr"], took["syscw"], peak, copied[0], steps(do))


def _io() -> dict[str, int]:
    """The kernel's counters of this process, see proc(5)."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(number) for name, number in (line.split(": ") for line in lines)}


def steps(do: Callable[[], object]) -> int:
    """Number of calls of Python functions in `do`, in this thread and in those that begin meanwhile."""
    made: dict[int, int] = {}

    def count(_frame: object, event: str, _argument: object) -> None:
        if event == "call":
            thread = threading.get_ident()
            made[thread] = made.get(thread, 0) + 1

    threading.setprofile(count)
    sys.setprofile(count)
    try:
        do()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return sum(made.values())
