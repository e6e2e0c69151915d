"""Data files, written front to back, once, and made durable at their end; and the room that a disk has for them.

On a local disk bytes go from the caller's buffer straight into the file: no copy, no memory of ours. The disk is told to begin
with them while others are appended (`begin_write_back`), so that making the file durable finds little left to do. Elsewhere an
object is written whole, so its bytes are collected first, in a buffer that the caller lends and has back as soon as
the file is sealed: fresh memory is slow, and the upload has a copy of its own.

A local disk can say how much room it has (`statvfs`); buckets and memory cannot, nor can file systems that report no size at
all. Other processes may write to the same disk meanwhile, so room that is there now is no promise.
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Any, Protocol

from shardckpt.errors import StorageError
from shardckpt.excerpt import file_size
from shardckpt.io.buffers import MOST_VECTORS, after
from shardckpt.io.failures import storage_errors
from shardckpt.io.requests import Upload
from shardckpt.io.store import Data, Store, byte_view, sync_directory

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from shardckpt.io.requests import Upload
    from shardckpt.io.store import Store


_AT_ONCE = 8 << 20
"""Bytes of a local file that its disk is told of at a time."""


class DataFile(Protocol):
    """Bytes that are appended."""

    def append(self, data: Data) -> None:
        """Add bytes at the end; the buffer is the caller's again when this returns."""

    def append_all(self, parts: Sequence[memoryview]) -> None:
        """Add the bytes of several buffers, one after the other."""

    def seal(self) -> None:
        """End it: nothing is appended any more. What makes it durable may have begun."""

    def wait(self) -> None:
        """After `seal`: return when everything is durable. May run on another thread than `append`."""

    def interrupt(self) -> None:
        """After `seal`: give up what would keep a `wait` on another thread for long."""

    def abandon(self) -> None:
        """Give up and free what is held; no other thread is in `wait` any more. What was written may or may not be there."""


def create_data_file(store: Store, key: str, buffer: bytearray | None = None, *, draft: str | None = None) -> DataFile:
    """A new, empty data file.

    Args:
        store: where.
        key: its name; attempts are never used twice, so it is a new one.
        draft: another name, under which it is written on a local disk until it is whole and durable. Then it takes the place of
            whatever has its name. (An object does so anyway.)
        buffer: memory to collect an object's bytes in; it grows as it must, and is the lender's again after `seal`.

    Raises:
        StorageError: there is one of that name already, or none can be made (on a local disk).
    """
    path = store.local_path(key)
    if path is None:
        return _ObjectDataFile(store, key, bytearray() if buffer is None else buffer)
    store.make_parents(key)
    if draft is None:
        return _LocalDataFile(path)
    store.make_parents(draft)
    written = store.local_path(draft)
    assert written is not None
    return _LocalDataFile(written, path)


class _LocalDataFile:
    """A file on this machine."""

    def __init__(self, path: Path, final: Path | None = None) -> None:
        self._path = path
        self._final = path if final is None else final
        self._size = self._begun = 0
        with storage_errors("create", path):
            # O_EXCL: attempts are never used twice, so a file that is there belongs to somebody else.
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def append(self, data: Data) -> None:
        rest = byte_view(data)
        nbytes = rest.nbytes
        with storage_errors("write", self._path):
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        self._appended(nbytes)

    def append_all(self, parts: Sequence[memoryview]) -> None:
        for first in range(0, len(parts), MOST_VECTORS):
            some = parts[first : first + MOST_VECTORS]
            with storage_errors("write", self._path):
                written = os.writev(self._fd, some)
            self._appended(written)
            for part in after(some, written):
                self.append(part)

    def _appended(self, nbytes: int) -> None:
        self._size += nbytes
        if self._size - self._begun >= _AT_ONCE:
            begin_write_back(self._fd, self._begun, self._size - self._begun)
            self._begun = self._size

    def seal(self) -> None:
        pass

    def wait(self) -> None:
        with storage_errors("write", self._path):
            try:
                os.fsync(self._fd)
            finally:
                self.abandon()
            if self._final != self._path:
                self._path.replace(self._final)
            sync_directory(self._final.parent)

    def interrupt(self) -> None:
        pass

    def abandon(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class _ObjectDataFile:
    """An object that is written whole when it is sealed."""

    def __init__(self, store: Store, key: str, buffer: bytearray) -> None:
        self._store = store
        self._key = key
        self._buffer = buffer
        self._size = 0
        self._upload: Upload | None = None

    def append(self, data: Data) -> None:
        view = byte_view(data)
        end = self._size + view.nbytes
        if len(self._buffer) < end:
            self._buffer.extend(bytes(end - len(self._buffer)))
        with memoryview(self._buffer) as place:
            place[self._size : end] = view
        self._size = end

    def append_all(self, parts: Sequence[memoryview]) -> None:
        for part in parts:
            self.append(part)

    def seal(self) -> None:
        # Python keeps the memory of a bytearray that loses less than half of itself.
        del self._buffer[self._size :]
        self._upload = self._store.upload(self._key, self._buffer)
        self._buffer = bytearray()

    def wait(self) -> None:
        assert self._upload is not None, "seal it first"
        self._upload.wait()

    def interrupt(self) -> None:
        if self._upload is not None:
            self._upload.abandon()

    def abandon(self) -> None:
        self.interrupt()
        self._buffer = bytearray()


# --- a disk begins to write

_SYNC_FILE_RANGE_WRITE = 2


def _found() -> Any:
    """The C library's function; None where there is none, which is everywhere but on Linux."""
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return call


_sync_file_range = _found()


def begin_write_back(fd: int, offset: int, nbytes: int) -> bool:
    """Have the disk begin to write a part of a file that is still being appended to; whether it was told to.

    The kernel by itself waits for some seconds, or until a tenth of the memory is to be written; `fsync` then waits for nearly all
    of it. Linux can be told to begin. That is a hint: it waits for no byte to be written, though perhaps for room in the disk's
    queue, makes nothing durable, and takes note of no error. `fsync` reports whatever went wrong since the file was opened.
    """
    return _sync_file_range is not None and _sync_file_range(fd, offset, nbytes, _SYNC_FILE_RANGE_WRITE) == 0


# --- room


def check_space(store: Store, nbytes: int) -> None:
    """Refuse a save for which there is no room.

    Args:
        store: where to; nothing needs to be there yet, and nothing is created.
        nbytes: bytes that the save will take there.

    Raises:
        StorageError: fewer are free; names the place, both numbers and what to do.
    """
    free = free_bytes(store)
    if free is not None and free < nbytes:
        raise StorageError(
            f"{store}: this save takes {file_size(nbytes)} and the disk has {file_size(free)} free, {file_size(nbytes - free)} too little; "
            f"make room (keep fewer checkpoints, delete what failed saves left with `shardckpt gc`), or save elsewhere."
        )


def free_bytes(store: Store) -> int | None:
    """Bytes that may still be written there by this user; None where the storage does not say."""
    path = store.local_path("")
    if path is None:
        return None
    for existing in (path, *path.parents):
        try:
            found = os.statvfs(existing)
        except FileNotFoundError:  # the save will make it, on the disk of the nearest directory that is there
            continue
        except OSError:  # what is wrong there, the save itself says better
            return None
        return found.f_bavail * found.f_frsize if found.f_blocks else None
    return None
