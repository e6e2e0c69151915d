"""Floors: the same bytes, only moved, by as many threads as shardckpt has.

Memory that is read into has been written to before.

Arrays are cut into parts, and parts are joined to pieces of some MiB, which the threads share out.
Each thread writes its pieces to a file of its own, as shardckpt does, and reads them back from
there with readv(2), each part into its place. In a bucket, the floors are those of
`tools.bench.bucket`.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.io.cores import cores
from shardckpt.reading.reader import OBJECT_MEMORY, reading_limits
from shardckpt.writing.save import _LEAST_MEAN, _LEAST_SHARE
from tools.bench.bucket import Folder, http_floors
from tools.bench.measure import MEMCPY, READ, WRITE, Run, Subject
from tools.bench.pieces import pieces_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from tools.bench.pieces import Bytes, Piece

__all__ = ["floors"]

PIECE = 4 << 20
"""Bytes of a piece: what a thread of shardckpt lays out, or reads, at a time."""


def floors(
    arrays: dict[str, np.ndarray],
    targets: dict[str, np.ndarray],
    directory: Path | Folder,
    *,
    devices: int = 1,
    processes: int = 1,
) -> list[Subject]:
    """write(2), readv(2) and memcpy of the same bytes; in a bucket, puts and gets.

    Args:
        arrays: what is saved.
        targets: memory of the same shapes that has been written to.
        directory: where files go.
        devices: each matrix is saved in that many shards.
        processes: processes that do the same at the same time, each with a part of the state.
    """
    sources, places = (
        [a.reshape(-1).view(np.uint8) for a in group.values()] for group in (arrays, targets)
    )
    if isinstance(directory, Folder):
        return http_floors(sources, places, directory)
    nbytes = sum(s.nbytes for s in sources)
    eighths = [
        place[: place.nbytes // 8] if array.ndim > 1 else place
        for place, array in zip(places, arrays.values(), strict=True)
    ]
    blocks = sum(devices if array.ndim > 1 else 1 for array in arrays.values())
    writers, readers, copiers = _writing_threads(nbytes, blocks), _reading_threads(), cores()
    out, kept, file = directory / "floor-out", directory / "floor", directory / "floor-file"
    pool = ThreadPoolExecutor(max(writers, readers, copiers))

    def together(work: Callable[..., None], *shares: Iterable[object]) -> None:
        list(pool.map(work, *shares))

    def write(path: Path, threads: int) -> None:
        path.mkdir()
        together(_write, [path / str(i) for i in range(threads)], _shared_out(sources, threads))

    def read(into: list[Bytes]) -> None:
        together(_read, [kept / str(i) for i in range(readers)], _shared_out(into, readers))

    def written() -> None:
        if not kept.exists():
            write(kept, readers)

    def copy() -> None:
        together(_copy, _shared_out(sources, copiers), _shared_out(places, copiers))

    save = Run(lambda: write(out, writers), nbytes, writes=out)
    export = Run(lambda: _write(file, pieces_of(sources, PIECE)), nbytes, writes=file)
    whole = Run(lambda: read(places), nbytes, before=written)
    part = Run(lambda: read(eighths), sum(e.nbytes for e in eighths), before=written)
    return [
        Subject(f"{WRITE}, {_count(writers, processes)}", {"save": save}, floor=True),
        Subject(f"{WRITE}, {_count(1, processes)}", {"export": export}, floor=True),
        Subject(
            f"{READ}, {_count(readers, processes)}",
            {"restore": whole, "other": whole, "verify": whole, "columns": part},
            floor=True,
        ),
        Subject(
            f"{MEMCPY}, {_count(copiers, processes)}", {"stall": Run(copy, nbytes)}, floor=True
        ),
    ]


def _writing_threads(nbytes: int, blocks: int) -> int:
    """Threads that shardckpt saves so many bytes with."""
    if nbytes < blocks * _LEAST_MEAN:
        return 1
    return max(1, min(cores(), nbytes // _LEAST_SHARE))


def _reading_threads() -> int:
    """Threads that shardckpt reads from local files with."""
    return reading_limits(local=True, threads=None, memory=OBJECT_MEMORY)[1]


def _count(threads: int, processes: int) -> str:
    count = "1 thread" if threads == 1 else f"{threads} threads"
    return count if processes == 1 else f"{processes} processes of {count}"


def _shared_out(arrays: list[Bytes], threads: int) -> list[list[Piece]]:
    """Each thread's pieces."""
    pieces = pieces_of(arrays, PIECE)
    return [pieces[i::threads] for i in range(threads)]


def _write(path: Path, pieces: list[Piece]) -> None:
    """Write pieces one after another into a fresh file, and make it durable."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        for piece in pieces:
            _check(os.writev(descriptor, piece), piece)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path, pieces: list[Piece]) -> None:
    """Fill pieces from a file, from its beginning."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for piece in pieces:
            _check(os.readv(descriptor, piece), piece)
    finally:
        os.close(descriptor)


def _copy(sources: list[Piece], places: list[Piece]) -> None:
    for source, place in zip(sources, places, strict=True):
        for part, into in zip(source, place, strict=True):
            np.copyto(into, part)


def _check(moved: int, piece: Piece) -> None:
    if moved != sum(part.nbytes for part in piece):
        raise OSError(
            "the kernel moved a part of a piece: the disk is full, or the file is too short"
        )
