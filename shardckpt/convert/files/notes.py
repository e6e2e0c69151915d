"""A log of how far a file is written, with checksums, by which an export that was killed is continued.

A file of notes lies beside it. It begins with the plan's identity; each note adds the crc32c of the blocks that have become durable
since the last one, in the order of writing; a note of none says that the files have their names. A note that is cut off, or that was
never durable itself, does not agree with its own checksum, and counts for nothing: blocks are written again. The file is locked while
its writer lives.
"""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

import crc32c
import numpy as np

from shardckpt.errors import StorageError
from shardckpt.io.failures import storage_errors

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["IDENTITY_BYTES", "Notes"]

IDENTITY_BYTES = 32
_WORD = 4


class Notes:
    """The notes of one writer, who has them locked until `close`."""

    def __init__(self, path: Path) -> None:
        """Open and lock them; they are made where there are none.

        Raises:
            StorageError: somebody else has them locked, or they cannot be opened.
        """
        self._path = path
        while True:
            with storage_errors("create", path):
                self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(self._fd).st_nlink:
                    return
            except BlockingIOError:
                self.close()
                raise StorageError(f"{path.parent}: another export is writing there; wait for it, or choose another name.") from None
            except OSError as e:
                self.close()
                raise StorageError(f"cannot lock {path}: {e}; choose a place on a file system that has locks.") from e
            self.close()  # who held it before has removed it

    def read(self, identity: bytes) -> tuple[list[int], bool] | None:
        """The checksums of all durable blocks, and whether the files have their names. What is cut off goes.

        None where the notes are of another plan, or there are none.
        """
        with storage_errors("read", self._path):
            data = np.fromfile(self._path, np.uint8)
        if data[:IDENTITY_BYTES].tobytes() != identity:
            return None
        words = data[IDENTITY_BYTES : len(data) - (len(data) - IDENTITY_BYTES) % _WORD].view("<u4")
        at, found, named = 0, list[int](), False
        while at < len(words):
            end = at + int(words[at]) + 1
            if end >= len(words) or crc32c.crc32c(words[at:end].tobytes()) != words[end]:
                break
            named = end == at + 1
            found += words[at + 1 : end].tolist()
            at = end + 1
        with storage_errors("write", self._path):
            os.ftruncate(self._fd, IDENTITY_BYTES + at * _WORD)
            os.lseek(self._fd, 0, os.SEEK_END)
        return found, named

    def begin(self, identity: bytes) -> None:
        """Forget all notes, and begin those of a plan."""
        with storage_errors("write", self._path):
            os.ftruncate(self._fd, 0)
            os.lseek(self._fd, 0, os.SEEK_SET)
            self._append(identity)

    def add(self, checks: Sequence[int]) -> None:
        """Note blocks that are durable; none: that the files have their names."""
        note = np.array([len(checks), *checks], "<u4").tobytes()
        with storage_errors("write", self._path):
            self._append(note + crc32c.crc32c(note).to_bytes(_WORD, "little"))
            os.fdatasync(self._fd)

    def close(self) -> None:
        """Unlock them."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _append(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._fd, rest) :]
