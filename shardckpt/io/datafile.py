"""Data files, written once from front to back and then made durable, and a disk's free space.

On a local disk bytes go from the caller's buffer straight into the file, without a copy. The disk
starts to write them while others are appended (`begin_write_back`), so that making the file durable
finds little left to do. An object in an object store is written in one request, from the buffer in
which its bytes were collected. The caller provides it, and may lay bytes out there (`room`), so
that they are not copied.

A local disk reports its free space (`statvfs`). Buckets and memory do not, nor do file systems that
report no size at all. Other processes may write to the same disk meanwhile, so free space now is no
guarantee.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from crc32c import crc32c

from shardckpt.errors import StorageError
from shardckpt.format.fingerprint import crc_with_chunks
from shardckpt.format.zarr_arrays import CHECKSUM_BYTES
from shardckpt.io import extension
from shardckpt.io.buffers import MOST_VECTORS, after
from shardckpt.io.failures import storage_errors
from shardckpt.io.files import OpenFile, write_all
from shardckpt.io.store import Data, byte_view
from shardckpt.text import file_size

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from shardckpt.io.requests import Upload
    from shardckpt.io.store import Store


@dataclass(slots=True)
class BlocksOut:
    """Blocks of one shape and dtype on their way to a local file, cut into chunks of one shape.

    The chunks of each block are in grid order.
    """

    blocks: Sequence[NDArray[Any]]
    chunks: tuple[int, ...]
    scratch: NDArray[np.uint8]
    crcs: NDArray[np.uint32]
    """(n,) checksums of the chunks; filled as they are written."""
    first: int
    """The first chunk to write, among those of all blocks."""
    last: int
    """One past the last chunk to write."""

    @classmethod
    def of(
        cls,
        blocks: Sequence[NDArray[Any]],
        chunks: tuple[int, ...],
        scratch: NDArray[np.uint8],
        count: int,
    ) -> BlocksOut:
        """All `count` chunks of blocks."""
        # That C takes.
        buffers = tuple(block.view(extension.KINDS[block.itemsize]) for block in blocks)
        return cls(buffers, chunks, scratch, np.empty(count, np.uint32), 0, count)

    @property
    def chunk_bytes(self) -> int:
        """Stored bytes of each chunk."""
        elements: int = prod(self.chunks)
        return elements * self.blocks[0].dtype.itemsize + CHECKSUM_BYTES

    @property
    def nbytes(self) -> int:
        """Stored bytes of the chunks to write."""
        return (self.last - self.first) * self.chunk_bytes

    def lay_out(self, memory: NDArray[np.uint8]) -> None:
        """Write the chunks, one after another, to memory of `nbytes`."""
        self._move(-1, 0, 0, memory)

    def write(self, fd: int, offset: int, begun: int) -> int:
        """Write the chunks, one after another, at an offset of a file.

        Args:
            fd: the file.
            offset: offset of the first chunk.
            begun: the offset up to which write-back of the file has begun; it begins for the rest
                after each call with many bytes.

        Returns:
            The same offset afterwards.

        Raises:
            OSError: the error of the system call.
        """
        return self._move(fd, offset, begun, self.scratch)

    def _move(self, fd: int, offset: int, begun: int, room: NDArray[np.uint8]) -> int:
        """As `write`; without a file (-1), the chunks stay in `room`."""
        first, last = self.first, self.last
        while first < last:
            crcs = self.crcs[first:last]
            how, done, error = extension.moving.write_chunks(
                *(fd, offset, begun, self.blocks, self.chunks, first, last),
                *(crcs, room, extension.LONGEST_S),
            )
            if how == extension.SYSTEM_ERROR:
                raise OSError(error, os.strerror(error))
            first += done
            nbytes = done * self.chunk_bytes
            if fd < 0:
                room = room[nbytes:]
                continue
            offset += nbytes
            if offset - begun >= extension.WRITE_BACK_BYTES:
                begun = offset
        return begun


_SYNCED_TOGETHER = 1 << 20
"""Most bytes of a data file that is synced with the small files of its attempt."""
_SUMMED_BYTES = 1 << 20
"""The checksum of fewer bytes comes faster from the bytes than from the number of chunks."""
Output: TypeAlias = Data | list[Data] | BlocksOut
"""Bytes to append: one buffer, several buffers one after another, or blocks that the extension
moves."""


class DataFile(Protocol):
    """A file that bytes are appended to."""

    def room(self, nbytes: int) -> NDArray[np.uint8] | None:
        """Memory for the next bytes, which are then appended without a copy.

        None if the file has none.
        """

    def append(self, data: Output) -> None:
        """Append bytes; the caller may reuse the buffers when this returns."""

    def seal(self) -> None:
        """End the file: nothing is appended any more. Making it durable may have begun."""

    def wait(self) -> None:
        """After `seal`: return when everything is durable, or will be with the store's `sync`.

        May run on another thread than `append`.
        """

    def interrupt(self) -> None:
        """After `seal`: cancel work that would block `wait` on another thread for long."""

    def abandon(self) -> None:
        """Give up and free resources; no other thread may be in `wait` any more.

        The written bytes may or may not be there.
        """


def create_data_file(
    store: Store, key: str, buffer: NDArray[np.uint8] | None = None, *, draft: str | None = None
) -> DataFile:
    """Create an empty data file.

    Args:
        store: location of the file.
        key: its name, which is new because attempt names are never reused.
        draft: another name for the file on a local disk until it is complete and durable. Then it
            is renamed, and replaces any file of that name. (An object replaces another one in any
            case.)
        buffer: memory in which an object's bytes are collected; if it is too small, other memory.
            It may be used again after `wait`.

    Raises:
        StorageError: a file of that name exists already, or none can be created (on a local disk).
    """
    path = store.local_path(key)
    if path is None:
        return _ObjectDataFile(store, key, np.empty(0, np.uint8) if buffer is None else buffer)
    store.make_parents(key)
    if draft is None:
        return _LocalDataFile(store, path)
    store.make_parents(draft)
    written = store.local_path(draft)
    assert written is not None
    return _LocalDataFile(store, written, path)


class _LocalDataFile:
    """A file on this machine."""

    def __init__(self, store: Store, path: Path, final: Path | None = None) -> None:
        self._store = store
        self._path = path
        self._final = path if final is None else final
        self._size = self._begun = 0
        self._position = 0
        """Offset at which the descriptor writes; the extension does not move it."""
        with storage_errors("create", path):
            # O_EXCL: attempt names are never reused, so an existing file belongs to another writer.
            self._open = OpenFile(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            self._fd = self._open.fileno()

    def room(self, nbytes: int) -> None:
        pass

    def append(self, data: Output) -> None:
        if isinstance(data, BlocksOut):
            with storage_errors("write", self._path):
                self._begun = data.write(self._fd, self._size, self._begun)
            self._size += data.nbytes
        elif isinstance(data, list):
            for first in range(0, len(data), MOST_VECTORS):
                views = [*map(byte_view, data[first : first + MOST_VECTORS])]
                with storage_errors("write", self._path):
                    self._go_to_end()
                    written = os.writev(self._fd, views)
                self._note_appended(written)
                for part in after(views, written):
                    self.append(part)
        else:
            view = byte_view(data)
            with storage_errors("write", self._path):
                self._go_to_end()
                write_all(self._fd, view)
            self._note_appended(view.nbytes)

    def _go_to_end(self) -> None:
        if self._position != self._size:
            self._position = os.lseek(self._fd, self._size, os.SEEK_SET)

    def _note_appended(self, nbytes: int) -> None:
        self._size += nbytes
        self._position = self._size
        if self._size - self._begun >= extension.WRITE_BACK_BYTES:
            begin_write_back(self._fd, self._begun, self._size - self._begun)
            self._begun = self._size

    def seal(self) -> None:
        pass

    def wait(self) -> None:
        with storage_errors("write", self._path):
            try:
                small = self._size <= _SYNCED_TOGETHER and self._final == self._path
                if not (small and self._store.note_unsynced(self._path)):
                    os.fsync(self._fd)
            finally:
                self.abandon()
            if self._final != self._path:
                self._path.replace(self._final)
            self._store.sync_name(self._final)

    def interrupt(self) -> None:
        pass

    def abandon(self) -> None:
        self._fd = -1
        self._open.close()


class _ObjectDataFile:
    """An object that is written in one request when it is sealed.

    The service gets the crc32c that its bytes must have. Of chunks that the extension lays out, it
    depends on their number and length alone, so nobody reads large ones for it.
    """

    def __init__(self, store: Store, key: str, buffer: NDArray[np.uint8]) -> None:
        self._store = store
        self._key = key
        self._buffer = buffer
        self._size = 0
        self._crc: int | None = 0
        """crc32c of the bytes; None: the upload computes it."""
        self._upload: Upload | None = None

    def room(self, nbytes: int) -> NDArray[np.uint8] | None:
        end = self._size + nbytes
        return self._buffer[self._size : end] if end <= self._buffer.nbytes else None

    def append(self, data: Output) -> None:
        if isinstance(data, list):
            for part in data:
                self.append(part)
            return
        view = data if isinstance(data, BlocksOut) else np.frombuffer(data, np.uint8)
        end = self._size + view.nbytes
        if self._buffer.nbytes < end:
            larger = np.empty(end, np.uint8)
            larger[: self._size] = self._buffer[: self._size]
            self._buffer = larger
        place = self._buffer[self._size : end]
        if isinstance(view, BlocksOut):
            view.lay_out(place)
            if self._crc is not None:
                self._crc = (
                    crc32c(place, self._crc)
                    if view.nbytes < _SUMMED_BYTES
                    else crc_with_chunks(self._crc, view.chunk_bytes, view.last - view.first)
                )
        else:
            self._crc = None
            if place.ctypes.data != view.ctypes.data:
                place[:] = view
        self._size = end

    def seal(self) -> None:
        self._upload = self._store.upload(self._key, self._buffer[: self._size], self._crc)

    def wait(self) -> None:
        assert self._upload is not None, "seal it first"
        self._upload.wait()

    def interrupt(self) -> None:
        if self._upload is not None:
            self._upload.abandon()

    def abandon(self) -> None:
        self.interrupt()
        if self._upload is not None:
            self._upload.let_go()
        self._buffer = self._buffer[:0]


# --- a disk begins to write

_SYNC_FILE_RANGE_WRITE = 2


def _find_function() -> Any:
    """The C library's function; None if there is none (everywhere except on Linux)."""
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return call


_sync_file_range = _find_function()


def begin_write_back(fd: int, offset: int, nbytes: int) -> bool:
    """Start write-back of a part of a file that is still appended to.

    Return whether the system accepted that.

    By itself the kernel waits for some seconds, or until a tenth of the memory is dirty; `fsync`
    then waits for nearly all of it. Linux can be asked to begin earlier. The request is only a
    hint: it does not wait for bytes to be written, though perhaps for room in the disk's queue. It
    makes nothing durable and reports no error. `fsync` reports all errors since the file was
    opened.
    """
    return (
        _sync_file_range is not None
        and _sync_file_range(fd, offset, nbytes, _SYNC_FILE_RANGE_WRITE) == 0
    )


# --- room


def check_space(store: Store, nbytes: int) -> None:
    """Refuse a save if there is not enough free space.

    Args:
        store: destination; nothing needs to exist there, and nothing is created.
        nbytes: bytes that the save will need there.

    Raises:
        StorageError: less is free; the message has the place, both numbers and what to do.
    """
    lack = lack_of_space(store, nbytes)
    if lack is not None:
        raise StorageError(
            f"{store}: this save takes {file_size(nbytes)} and {lack}; make room (keep fewer "
            "checkpoints, delete what failed saves left with `shardckpt gc`), or save elsewhere."
        )


def lack_of_space(store: Store, nbytes: int) -> str | None:
    """A text about the free space at a place and the bytes that are missing.

    None if there is enough, or the storage does not say.
    """
    free = free_bytes(store)
    if free is None or free >= nbytes:
        return None
    return f"the disk has {file_size(free)} free, {file_size(nbytes - free)} too little"


def free_bytes(store: Store) -> int | None:
    """Bytes that this user may still write there; None if the storage does not say."""
    path = store.local_path("")
    if path is None:
        return None
    for existing in (path, *path.parents):
        try:
            status = os.statvfs(existing)
        except FileNotFoundError:
            # The save creates this directory, on the disk of the nearest existing parent.
            continue
        except OSError:  # the save itself reports this error better
            return None
        return status.f_bavail * status.f_frsize if status.f_blocks else None
    return None
