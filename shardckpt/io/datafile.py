"""A data file that is written front to back, once, and durable when it is closed.

On a local disk bytes go from the caller's buffer straight into the file: no copy, no memory of ours. Elsewhere an
object is written whole, so its bytes are collected first.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol

from shardckpt.io.store import Data, Store, byte_view, storage_errors, sync_directory

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["DataFile", "create_data_file"]


class DataFile(Protocol):
    """Bytes that are appended."""

    def append(self, data: Data) -> None:
        """Add bytes at the end; the buffer is the caller's again when this returns."""

    def close(self) -> None:
        """Make everything durable. May run on another thread than `append`, after its last call."""

    def abandon(self) -> None:
        """Give up: free what is held. What was written may or may not be there."""


def create_data_file(store: Store, key: str) -> DataFile:
    """A new, empty data file.

    Raises:
        StorageError: there is one of that name already, or none can be made.
    """
    path = store.local_path(key)
    if path is None:
        return _ObjectDataFile(store, key)
    store.make_parents(key)
    return _LocalDataFile(path)


class _LocalDataFile:
    """A file on this machine."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with storage_errors("create", path):
            # O_EXCL: attempts are never used twice, so a file that is there belongs to somebody else.
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def append(self, data: Data) -> None:
        rest = byte_view(data)
        with storage_errors("write", self._path):
            while rest:
                rest = rest[os.write(self._fd, rest) :]

    def close(self) -> None:
        with storage_errors("write", self._path):
            try:
                os.fsync(self._fd)
            finally:
                self.abandon()
            sync_directory(self._path.parent)

    def abandon(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class _ObjectDataFile:
    """An object that is written whole when it is closed."""

    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self._key = key
        self._buffer = bytearray()

    def append(self, data: Data) -> None:
        self._buffer += byte_view(data)

    def close(self) -> None:
        self._store.write(self._key, self._buffer)
        self._buffer = bytearray()

    def abandon(self) -> None:
        self._buffer = bytearray()
