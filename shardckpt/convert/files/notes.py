"""A log of how far a file is written, with checksums, to continue an export that was killed.

The log lies beside the files. It begins with the plan's identity, and a note with the names of the
files. Each further note adds the crc32c of the blocks that became durable since the last note, in
the order of writing; an empty note says that the files have their final names. A note that was
truncated, or never became durable, does not match its own checksum and is ignored: its blocks are
written again. The writer holds a lock on the log while it lives.
"""

from __future__ import annotations

import os
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import crc32c
import numpy as np

from shardckpt.errors import StorageError
from shardckpt.io.failures import storage_errors
from shardckpt.io.files import OpenFile, write_all
from shardckpt.io.locks import is_at, lock_whole
from shardckpt.io.threads import PoolCall

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_IDENTITY_BYTES = 32
_WORD = 4
_OPEN_SECONDS = 10.0
"""Seconds in which the log must be the file that was opened for it; holders that end remove it."""
_COMPARED = 1 << 20


class Notes:
    """The log of one writer, locked until `close`."""

    def __init__(self, path: Path) -> None:
        """Open and lock the log; create it if it does not exist.

        Raises:
            StorageError: another process holds the lock, or the log cannot be opened.
        """
        self._path = path
        deadline = time.monotonic() + _OPEN_SECONDS
        while (log := _open_log(path)) is None:
            if time.monotonic() >= deadline:
                raise StorageError(
                    f"{path} is another file at each look; choose a place on another file system."
                )
        self._log = log
        self._fd = log.fileno()
        self._thread = ThreadPoolExecutor(1, "shardckpt-notes")
        self._adding: PoolCall[None] | None = None

    def read(self, identity: bytes) -> tuple[list[int], bool] | None:
        """Read the checksums of all durable blocks, and whether the files have their names.

        Truncate an incomplete note.

        Returns None if the log is empty or belongs to another plan.
        """
        with storage_errors("read", self._path):
            data = self._path.read_bytes()
        if data[:_IDENTITY_BYTES] != identity:
            return None
        notes, end = _parse(data)
        with storage_errors("write", self._path):
            os.ftruncate(self._fd, end)
            os.lseek(self._fd, 0, os.SEEK_END)
        blocks = notes[1:]
        return [check for note in blocks for check in note], bool(blocks) and not blocks[-1]

    def has_blocks(self) -> bool:
        """Whether the log records blocks, of any plan."""
        with storage_errors("read", self._path):
            return any(_parse(self._path.read_bytes())[0][1:])

    def begin(self, identity: bytes, names: Sequence[str]) -> None:
        """Discard all notes, and begin the log of a plan that writes files of these names."""
        with storage_errors("write", self._path):
            os.ftruncate(self._fd, 0)
            os.lseek(self._fd, 0, os.SEEK_SET)
            write_all(self._fd, identity)
        text = "\0".join(names).encode()
        padded = text + bytes(-len(text) % _WORD)
        self.add(np.frombuffer(padded, "<u4").tolist())

    def add(self, checks: Sequence[int]) -> None:
        """Record durable blocks; an empty list records that the files have their names."""
        note = np.array([len(checks), *checks], "<u4").tobytes()
        with storage_errors("write", self._path):
            write_all(self._fd, note + crc32c.crc32c(note).to_bytes(_WORD, "little"))
            os.fdatasync(self._fd)

    def add_later(self, checks: Sequence[int], path: Path, fd: int) -> None:
        """Make the file of some blocks durable, then record them, in another thread.

        `wait` raises its error.
        """
        self.wait()

        def add() -> None:
            with storage_errors("write", path):
                os.fdatasync(fd)
            self.add(checks)

        self._adding = PoolCall(self._thread, add)

    def wait(self) -> None:
        """Wait for the note that is being added."""
        if self._adding is None:
            return
        try:
            self._adding.result()
        finally:
            if self._adding.done():  # not if Ctrl-C has ended the waiting
                self._adding = None

    def close(self, *, remove: bool = False) -> None:
        """Release the lock and close the log; `remove` it, too.

        A file that is removed while it is open stays in the directory on NFS and FUSE until it is
        closed. So it gets another name first, which no other export locks.
        """
        self._thread.shutdown()
        if self._fd < 0:
            return
        self._fd = -1
        ended = self._path.with_name(f"{self._path.name}.{secrets.token_hex(4)}")
        try:
            if remove:
                with storage_errors("remove", self._path):
                    self._path.rename(ended)
        finally:
            self._log.close()
        if remove:
            with storage_errors("remove", ended):
                ended.unlink(missing_ok=True)  # another export that has begun there removes it, too


def begun_files(path: Path) -> list[str]:
    """Names of the files that the export with this log writes; empty without a log.

    Raises:
        StorageError: the log cannot be read.
    """
    with storage_errors("read", path):
        try:
            names = _parse(path.read_bytes())[0][:1]
        except (FileNotFoundError, NotADirectoryError):
            return []
    try:
        text = np.array(names, "<u4").tobytes().decode()
    except UnicodeDecodeError:  # the first note of an earlier release has checksums
        return []
    return [name for name in text.split("\0") if name]


def _parse(data: bytes) -> tuple[list[list[int]], int]:
    """The valid notes of a log, the names of the files first; and the offset of their end."""
    whole = len(data) - len(data) % _WORD
    words = np.frombuffer(data[_IDENTITY_BYTES:whole], "<u4")
    at, notes = 0, list[list[int]]()
    while at < len(words):
        end = at + int(words[at]) + 1
        if end >= len(words) or crc32c.crc32c(words[at:end].tobytes()) != words[end]:
            break
        notes.append(words[at + 1 : end].tolist())
        at = end + 1
    return notes, _IDENTITY_BYTES + at * _WORD


def _open_log(path: Path) -> OpenFile | None:
    """Open and lock the log.

    None: it is another file by now, as its last holder has just removed it.
    """
    with storage_errors("create", path):
        log = OpenFile(path, os.O_RDWR | os.O_CREAT)
    here: bool | None = False
    try:
        with storage_errors("lock", path):
            lock_whole(log.fileno(), path)
            here = is_at(log.fileno(), path)
            if here is None:  # no two logs have the same bytes, unless neither has any
                here = os.pread(log.fileno(), _COMPARED, 0) == path.read_bytes()[:_COMPARED]
    except StorageError as e:
        if isinstance(e.__cause__, BlockingIOError):
            raise StorageError(
                f"{path.parent}: another export is writing there; wait for it, or choose another "
                "name."
            ) from None
        if os.fstat(log.fileno()).st_size == 0:
            path.unlink(missing_ok=True)
        raise
    finally:
        if not here:
            log.close()
    return log if here else None
