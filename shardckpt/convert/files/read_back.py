"""Verification of written files: read them back and compare checksums."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from shardckpt.errors import CorruptionError
from shardckpt.io.failures import storage_errors
from shardckpt.io.threads import run_on_threads
from shardckpt.plan.pieces import batches
from shardckpt.state.names import shown
from shardckpt.streaming.memory import READERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    Checksum = Callable[[memoryview, int], int]
    """Computes a checksum of bytes, given the checksum of the bytes before them."""

_READ_BYTES = 256 << 10
"""Bytes that each thread reads at a time: they are still in the CPU's cache when the checksum is
computed."""
_BATCH = (32 << 20, 1024)
"""Most bytes and most blocks that a thread takes at a time."""


@dataclass(frozen=True, slots=True)
class WrittenBlock:
    """Runs of bytes that were written to a file."""

    name: str
    """Name of the content, for messages."""
    path: Path
    runs: Sequence[tuple[int, int]]
    """Offset and length of each run."""
    checksum: int
    """Checksum of the written bytes, all runs together."""


def read_back(blocks: Iterable[WrittenBlock], checksum: Checksum, place: object) -> None:
    """Compare files with the bytes that were written to them, on several threads.

    Args:
        blocks: what was written; it must be durable.
        checksum: computes the blocks' checksums.
        place: where the files will be, for messages.

    Raises:
        CorruptionError: a block differs from the bytes written.
        StorageError: a file cannot be read.
    """

    def check(group: Sequence[WrittenBlock]) -> None:
        buffer = memoryview(bytearray(_READ_BYTES))
        for path, of_file in groupby(group, key=lambda block: block.path):
            with storage_errors("read", path), path.open("rb", buffering=0) as file:
                for block in of_file:
                    if _checksum(file.fileno(), block.runs, checksum, buffer) != block.checksum:
                        raise CorruptionError(
                            f"{shown(block.name)} does not read back as it was written to "
                            f"{place}; nothing was published. Check the disk and the memory of "
                            "this machine, and export again."
                        )

    groups = batches(blocks, lambda block: (sum(length for _, length in block.runs), 1), _BATCH)
    run_on_threads(groups, [check] * READERS, "shardckpt-verify")


def _checksum(
    fd: int, runs: Sequence[tuple[int, int]], checksum: Checksum, buffer: memoryview
) -> int | None:
    """Checksum of some runs of bytes, read through a buffer; None: the file ends before them."""
    total = 0
    for offset, length in runs:
        at, end = offset, offset + length
        while at < end:
            # A file system may return fewer bytes than requested.
            got = os.preadv(fd, [buffer[: end - at]], at)
            if not got:
                return None
            total = checksum(buffer[:got], total)
            at += got
    return total
