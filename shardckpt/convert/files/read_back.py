"""Verification of written files: read them back and compare checksums."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from shardckpt.errors import CorruptionError
from shardckpt.io.failures import storage_errors
from shardckpt.reshard.memory import READERS
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

__all__ = ["WrittenRun", "read_back"]

_READ_BYTES = 4 << 20
"""Bytes that each thread reads at a time."""
_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class WrittenRun:
    """Contiguous bytes that were written to a file."""

    name: str
    """Name of the content, for messages."""
    path: Path
    offset: int
    length: int
    checksum: int
    """Checksum of the written bytes."""


def read_back(parts: Iterable[WrittenRun], checksum: Callable[[bytes, int], int]) -> None:
    """Compare files with the bytes that were written to them.

    Args:
        parts: runs of the files; they must be durable.
        checksum: computes a checksum of bytes, given the checksum of the bytes before them.

    Raises:
        CorruptionError: a run differs from the bytes written.
        StorageError: a file cannot be read.
    """

    def check(part: WrittenRun) -> None:
        found = 0
        with storage_errors("read", part.path), part.path.open("rb", buffering=0) as file:
            for at in range(part.offset, part.offset + part.length, _READ_BYTES):
                found = checksum(os.pread(file.fileno(), min(_READ_BYTES, part.offset + part.length - at), at), found)
        if found != part.checksum:
            raise CorruptionError(
                f"{shown(part.name)} does not read back as it was written to {part.path.parent}; nothing was published. Check the disk and "
                f"the memory of this machine, and export again."
            )

    rest = iter(parts)
    with ThreadPoolExecutor(READERS, "shardckpt-verify") as pool:
        while some := list(islice(rest, _AT_ONCE)):
            list(pool.map(check, some))
