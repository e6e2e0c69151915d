"""What nobody can be much faster than: the same bytes, only moved. One thread, into memory that has been written to before."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from tools.bench.measure import Run, Subject

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

__all__ = ["MEMCPY", "READ", "WRITE", "floors", "read_all", "write_all"]

WRITE, READ, MEMCPY = "write(2)", "readv(2)", "memcpy"
AT_ONCE = 1 << 30
"""Bytes that one call moves, at most: the kernel's own limit is 2 GiB."""


def write_all(path: Path, arrays: Sequence[Bytes]) -> None:
    """Write arrays one after another into a fresh file, and make it durable."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        for array in arrays:
            _whole(lambda part: os.write(descriptor, part), array)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_all(path: Path, arrays: Sequence[Bytes]) -> None:
    """Fill arrays from a file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for array in arrays:
            _whole(lambda part: os.readv(descriptor, [part]), array)
    finally:
        os.close(descriptor)


def _whole(call: Callable[[Bytes], int], array: Bytes) -> None:
    done = 0
    while done < array.nbytes:
        moved = call(array[done : done + AT_ONCE])
        if moved <= 0:
            raise OSError("the file is shorter than the arrays")
        done += moved


def floors(arrays: dict[str, np.ndarray], targets: dict[str, np.ndarray], directory: Path) -> list[Subject]:
    """write(2), readv(2) and memcpy of the same bytes.

    Args:
        arrays: what is saved.
        targets: memory of the same shapes that has been written to.
        directory: where files go.
    """
    sources, places = ([a.reshape(-1).view(np.uint8) for a in some.values()] for some in (arrays, targets))
    nbytes = sum(s.nbytes for s in sources)
    eighths = [place[: place.nbytes // 8] if array.ndim > 1 else place for place, array in zip(places, arrays.values(), strict=True)]
    out, kept = directory / "floor-out", directory / "floor"

    def written() -> None:
        if not kept.exists():
            write_all(kept, sources)

    def copied() -> None:
        for source, place in zip(sources, places, strict=True):
            np.copyto(place, source)

    write = Run(lambda: write_all(out, sources), nbytes, writes=out)
    read = Run(lambda: read_all(kept, places), nbytes, before=written)
    part = Run(lambda: read_all(kept, eighths), sum(e.nbytes for e in eighths), before=written)
    return [
        Subject(WRITE, {"save": write, "export": write}, floor=True),
        Subject(READ, {"restore": read, "other": read, "verify": read, "columns": part}, floor=True),
        Subject(MEMCPY, {"stall": Run(copied, nbytes)}, floor=True),
    ]
