"""A log of how far a file is written, with checksums, by which an export that was killed is continued.

The log lies beside the files. It begins with the plan's identity. Each note adds the crc32c of the blocks that became durable since
the last note, in the order of writing; an empty note says that the files have their final names. A note that was truncated, or never
became durable, does not match its own checksum and is ignored: its blocks are written again. The writer holds a lock on the log while
it lives.
"""

from __future__ import annotations

import fcntl
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import crc32c
import numpy as np

from shardckpt.errors import StorageError
from shardckpt.io.failures import storage_errors

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_IDENTITY_BYTES = 32
_WORD = 4


class Notes:
    """The log of one writer, locked until `close`."""

    def __init__(self, path: Path) -> None:
        """Open and lock the log; create it if it does not exist.

        Raises:
            StorageError: another process holds the lock, or the log cannot be opened.
        """
        self._path = path
        while True:
            with storage_errors("create", path):
                self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(self._fd).st_nlink:
                    break
            except BlockingIOError:
                os.close(self._fd)
                raise StorageError(f"{path.parent}: another export is writing there; wait for it, or choose another name.") from None
            except OSError as e:
                os.close(self._fd)
                raise StorageError(f"cannot lock {path}: {e}; choose a place on a file system that has locks.") from e
            os.close(self._fd)  # the previous holder of the lock has removed the file
        self._thread = ThreadPoolExecutor(1, "shardckpt-notes")
        self._adding: Future[None] | None = None

    def read(self, identity: bytes) -> tuple[list[int], bool] | None:
        """Read the checksums of all durable blocks, and whether the files have their names; truncate an incomplete note.

        Returns None if the log is empty or belongs to another plan.
        """
        with storage_errors("read", self._path):
            data = np.fromfile(self._path, np.uint8)
        if data[:_IDENTITY_BYTES].tobytes() != identity:
            return None
        words = data[_IDENTITY_BYTES : len(data) - (len(data) - _IDENTITY_BYTES) % _WORD].view("<u4")
        at, found, named = 0, list[int](), False
        while at < len(words):
            end = at + int(words[at]) + 1
            if end >= len(words) or crc32c.crc32c(words[at:end].tobytes()) != words[end]:
                break
            named = end == at + 1
            found += words[at + 1 : end].tolist()
            at = end + 1
        with storage_errors("write", self._path):
            os.ftruncate(self._fd, _IDENTITY_BYTES + at * _WORD)
            os.lseek(self._fd, 0, os.SEEK_END)
        return found, named

    def begin(self, identity: bytes) -> None:
        """Discard all notes, and begin the log of a plan."""
        with storage_errors("write", self._path):
            os.ftruncate(self._fd, 0)
            os.lseek(self._fd, 0, os.SEEK_SET)
            self._append(identity)

    def add(self, checks: Sequence[int]) -> None:
        """Record durable blocks; an empty list records that the files have their names."""
        note = np.array([len(checks), *checks], "<u4").tobytes()
        with storage_errors("write", self._path):
            self._append(note + crc32c.crc32c(note).to_bytes(_WORD, "little"))
            os.fdatasync(self._fd)

    def add_later(self, checks: Sequence[int], path: Path, fd: int) -> None:
        """Make the file of some blocks durable, then record them, in another thread; `wait` raises its error."""
        self.wait()

        def add() -> None:
            with storage_errors("write", path):
                os.fdatasync(fd)
            self.add(checks)

        self._adding = self._thread.submit(add)

    def wait(self) -> None:
        """Wait for the note that is being added."""
        if self._adding is None:
            return
        try:
            self._adding.result()
        finally:
            if self._adding.done():  # not if Ctrl-C has ended the waiting
                self._adding = None

    def close(self) -> None:
        """Release the lock and close the log."""
        self._thread.shutdown()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _append(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._fd, rest) :]
