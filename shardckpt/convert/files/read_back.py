"""Is what was written to files what they give back?"""

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
"""Bytes that are read at a time, by each thread."""
_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class WrittenRun:
    """Bytes that were written side by side."""

    name: str
    """What they are, for messages."""
    path: Path
    offset: int
    length: int
    checksum: int
    """Of what was written."""


def read_back(parts: Iterable[WrittenRun], checksum: Callable[[bytes, int], int]) -> None:
    """Compare files with what was written to them.

    Args:
        parts: of the files; durable.
        checksum: of bytes, given that of the bytes before them.

    Raises:
        CorruptionError: a part is not what was written.
        StorageError: it cannot be read.
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
