"""Small files on this machine's file systems: read, replaced as one and durably, listed.

A writer locks `<name>.__lock`, writes the bytes into it, and renames it to `<name>`. TensorStore's file driver follows the same protocol,
so both may write the same file. If a writer is killed, the kernel releases its lock, and `<name>.__lock` keeps the bytes written so far;
the next writer here truncates them. TensorStore 0.1.86 does not: a shorter new file then ends in the old bytes. So call `clear`
before TensorStore writes a file.

TensorStore syncs each file and its directory, but not the parent directories that it creates. `DurableDirectories` creates
those, and syncs the parent of each, so that after a power failure a file is complete and can be found.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from shardckpt.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOCK_SUFFIX = ".__lock"
"""Suffix of the name of a file while it is written."""
LARGEST_WHOLE = 1 << 30
"""Most bytes of a file that is read completely: a record, table or index. A sparse file can have any size."""
_LOCK_SECONDS = 60.0
"""Seconds that a writer waits for another writer of the same file. A write takes milliseconds."""
_LEAST_PAUSE, _MOST_PAUSE = 0.001, 0.1
"""Least and most seconds between two tries to lock a file."""
_ABSENT = b"absent"
"""The generation of a missing file."""


def read(path: Path, start: int = 0, stop: int | None = None) -> tuple[bytes | None, bytes]:
    """Bytes `start` to `stop` of a file (fewer at its end; None: no such file), and the file's generation.

    Raises:
        FormatError: no `stop` is given, and the file has more than `LARGEST_WHOLE` bytes.
        OSError: it cannot be read, or is a directory, pipe or device.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # without O_NONBLOCK it might wait for the writer of a pipe
    except (FileNotFoundError, NotADirectoryError):
        return None, _ABSENT
    try:
        status = _regular(fd, path)
        if stop is None and status.st_size - start > LARGEST_WHOLE:
            raise FormatError(f"{path} has {status.st_size} bytes, at most {LARGEST_WHOLE} are expected; it was not written by shardckpt.")
        length = max(0, (status.st_size if stop is None else min(stop, status.st_size)) - start)
        data = os.pread(fd, length, start)
        while len(data) < length and (more := os.pread(fd, length - len(data), start + len(data))):
            data += more
        return data, _generation(status)
    finally:
        os.close(fd)


def replace(path: Path, data: bytes | bytearray | memoryview, generation: bytes | None) -> bytes:
    """Write a file, or replace it, in an existing directory; durable when this returns.

    Args:
        path: the file.
        data: its bytes.
        generation: write only if the file still has this generation (`read` returns one for a missing file, too); None: write always.

    Returns:
        The new generation; b"" if the file has another generation: nothing was written.

    Raises:
        OSError: it cannot be written; TimeoutError: another writer held its lock for too long.
    """
    lock = _lock_of(path)
    try:
        fd = _open_locked(lock)
        renamed = False
        try:
            if generation not in (None, _generation_now(path)):
                return b""
            os.ftruncate(fd, 0)
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(fd, rest) :]
            os.fsync(fd)
            if not _is_at(fd, lock):
                raise FileNotFoundError(errno.ENOENT, "its directory was removed while it was written", str(path))
            lock.rename(path)
            renamed = True
            sync_directory(path.parent)
            return _generation(os.fstat(fd))
        finally:
            _release(fd, None if renamed else lock)
    except FileNotFoundError:  # the directory was removed, or everything in it
        if generation in (None, _ABSENT):
            raise
        return b""


def remove(path: Path, generation: bytes) -> bool:
    """Delete a file if it still has this generation; return whether this call deleted it.

    Raises:
        OSError: as for `replace`.
    """
    lock = _lock_of(path)
    try:
        fd = _open_locked(lock)
        try:
            if generation != _generation_now(path):
                return False
            path.unlink()
            sync_directory(path.parent)
            return True
        finally:
            _release(fd, lock)
    except FileNotFoundError:  # the file, or its directory, is gone
        return False


def delete(path: Path) -> None:
    """Delete a file, if it exists. It takes no lock: a `replace` at the same moment may succeed, and the file may stay."""
    with suppress(FileNotFoundError, NotADirectoryError):
        path.unlink()
        sync_directory(path.parent)


def below(top: Path, prefix: str = "") -> Iterator[tuple[str, os.DirEntry[str]]]:
    """All files below `top` whose names relative to it start with `prefix`: name and directory entry; links are not followed.

    A file deleted during the listing may be left out.
    """
    above = prefix.rpartition("/")[0]
    try:
        with os.scandir(top / above) as found:
            entries = list(found)
    except FileNotFoundError:
        return
    for entry in entries:
        name = f"{above}/{entry.name}" if above else entry.name
        if not name.startswith(prefix):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from below(top, f"{name}/")
        elif not name.endswith(LOCK_SUFFIX):
            yield name, entry


def clear(path: Path) -> None:
    """Truncate the remains of a killed write of this file, if there are any; leave the file alone while a process writes it."""
    with suppress(OSError):  # nothing to truncate, or a process is writing it; the write that follows reports any other error
        fd = _open_locked(_lock_of(path), create=False, seconds=0)
        try:
            os.ftruncate(fd, 0)
        finally:
            _release(fd, None)


def sync_directory(path: Path) -> None:
    """Make the entries of a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class DurableDirectories:
    """Creates directories durably, and remembers which are durable."""

    def __init__(self, top: Path) -> None:
        """Begin at `top`: directories from there down are synced even if they exist, as another process may just have created them."""
        self._top = top
        self._synced: set[Path] = set()

    def make(self, path: Path) -> None:
        """Create a directory and its parents, if they are missing."""
        if path in self._synced and path.is_dir():
            return
        if not path.is_relative_to(self._top) and path.is_dir():
            return
        if path.parent != path:
            self.make(path.parent)
        existed = path.is_dir()
        path.mkdir(exist_ok=True)
        try:
            sync_directory(path.parent)
        except PermissionError:  # a directory that only others may list, above one of our own
            if not existed:
                raise
        self._synced.add(path)


def _regular(fd: int, path: Path) -> os.stat_result:
    """The status of an open file; raises OSError for a special file, whose read may never end."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{path} is not a regular file")
    return status


def _lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}{LOCK_SUFFIX}")


_held: set[int] = set()
"""Descriptors of locked files. A fork has them, too, and would hold the locks as long as it lives."""


def _close_held() -> None:
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_close_held)


def _open_locked(lock: Path, *, create: bool = True, seconds: float | None = None) -> int:
    """Open and lock a lock file; `_release` ends that.

    Raises:
        TimeoutError: another writer did not release it within `seconds` (None: within `_LOCK_SECONDS`).
        OSError: it cannot be created or locked, or is not a regular file.
    """
    most = _LOCK_SECONDS if seconds is None else seconds
    flags = os.O_WRONLY | (os.O_CREAT if create else 0) | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    deadline, pause = time.monotonic() + most, _LEAST_PAUSE
    while True:
        fd, keep = os.open(lock, flags, 0o666), False
        try:
            links = _regular(fd, lock).st_nlink
            _lock(fd)
            if links > 1:  # a copy of the directory by hard links: writing here would change the other one's file
                with suppress(FileNotFoundError):
                    lock.unlink()
            elif _is_at(fd, lock):  # otherwise the writer before has just renamed or removed it
                keep = True
                _held.add(fd)
                return fd
        except (BlockingIOError, PermissionError) as e:
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"waited {most:g} s for the lock on {lock}, which another process holds; if that process is stopped, continue or end it"
                ) from e
            time.sleep(pause)
            pause = min(2 * pause, _MOST_PAUSE)
        finally:
            if not keep:
                os.close(fd)


def _release(fd: int, lock: Path | None) -> None:
    """Unlock a file that `_open_locked` returned, and delete it first, if it is still at `lock`."""
    try:
        if lock is not None and _is_at(fd, lock):
            with suppress(OSError):
                lock.unlink()
    finally:
        _held.discard(fd)
        os.close(fd)


def _is_at(fd: int, path: Path) -> bool:
    """Whether an open file is the one at a path."""
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except (FileNotFoundError, NotADirectoryError):
        return False


def _lock(fd: int) -> None:
    """Lock an open file as TensorStore does; closing the file releases the lock. BlockingIOError if another holder has it."""
    if hasattr(fcntl, "F_OFD_SETLK"):  # of the open file, not of the process: it excludes other threads, too
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    else:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _generation(found: os.stat_result) -> bytes:
    return f"{found.st_dev}-{found.st_ino}-{found.st_mtime_ns}-{found.st_size}".encode()


def _generation_now(path: Path) -> bytes:
    try:
        return _generation(path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return _ABSENT
