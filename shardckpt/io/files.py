"""Whole files on this machine's file systems: read, replaced completely and durably, listed.

A file is written as `<name>.__lock` under a lock on that file, which is then renamed. TensorStore's file driver, which writes merged
indexes, has the same protocol, so either may write a file that the other one reads or replaces. When a process dies in the
middle, the kernel frees its lock, and its bytes stay; the next writer here truncates them. TensorStore 0.1.86 does not: if they are
more than its own, its file ends in them. So `clear` comes before a write of TensorStore's.

TensorStore syncs each file and its directory, but not the parent directories that it creates. `DurableDirectories` creates
those, and syncs the parent of each, so that after a power failure a file is complete and can be found.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import time
from contextlib import contextmanager, suppress
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
"""Seconds that a writer waits for another one of the same file, which needs milliseconds."""
_LEAST_PAUSE, _MOST_PAUSE = 0.001, 0.1
"""Least and most seconds between two tries to lock a file."""


_ABSENT = b"absent"
"""The generation of a missing file."""


def read(path: Path, start: int = 0, stop: int | None = None) -> tuple[bytes | None, bytes]:
    """A file's bytes (None if it does not exist) from `start` to `stop`, or as many as there are, and its generation.

    Raises:
        FormatError: no `stop` is given, and the file has more than `LARGEST_WHOLE` bytes.
        OSError: it cannot be read, or is a directory, pipe or device.
    """
    with _opened(path) as fd:
        if fd is None:
            return None, _ABSENT
        found = os.fstat(fd)
        if stop is None and found.st_size - start > LARGEST_WHOLE:
            raise FormatError(f"{path} has {found.st_size} bytes, at most {LARGEST_WHOLE} are expected; it was not written by shardckpt.")
        end = found.st_size if stop is None else min(stop, found.st_size)
        data = bytearray(max(0, end - start))
        filled = _fill(fd, start, memoryview(data))
        return bytes(memoryview(data)[:filled]), _generation(found)


def replace(path: Path, data: bytes | bytearray | memoryview, generation: bytes | None) -> bytes:
    """Write a file whose directory exists, and replace any file there; durable when this returns.

    Args:
        path: the file.
        data: its bytes.
        generation: write only if the file still has this generation (a missing file has one, too); None: in any case.

    Returns:
        The new generation; b"" if the file had another one than `generation`, and was not written.

    Raises:
        OSError: it cannot be written; TimeoutError: another process had locked it for too long.
    """
    try:
        with _locked(path) as (fd, lock):
            if generation not in (None, _generation_now(path)):
                lock.unlink()
                return b""
            os.ftruncate(fd, 0)
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(fd, rest) :]
            os.fsync(fd)
            lock.rename(path)
            sync_directory(path.parent)
            return _generation(os.fstat(fd))
    except FileNotFoundError:  # the directory was removed just now
        if generation in (None, _ABSENT):
            raise
        return b""


def remove(path: Path, generation: bytes) -> bool:
    """Delete a file if it still has the generation; whether it had.

    Raises:
        OSError: as for `replace`.
    """
    same = False
    with suppress(FileNotFoundError), _locked(path) as (_, lock):  # if the directory was removed just now, the file was, too
        same = generation == _generation_now(path)
        if same:
            path.unlink()
        lock.unlink()
        sync_directory(path.parent)
    return same


def delete(path: Path) -> None:
    """Delete a file, if it exists."""
    with suppress(FileNotFoundError, NotADirectoryError):
        path.unlink()
        sync_directory(path.parent)


def names(top: Path, prefix: str = "") -> Iterator[str]:
    """The names, relative to `top`, of all files below it that start with `prefix`; a file that is deleted meanwhile may be missing."""
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
            yield from names(top, f"{name}/")
        elif not name.endswith(LOCK_SUFFIX):
            yield name


def clear(path: Path) -> None:
    """Truncate the remains of a killed write of this file, if there are any; leave the file alone while a process writes it."""
    # There are none, or a living process's; if it is an error, the write itself reports it.
    with suppress(OSError), _locked(path, create=False, seconds=0) as (fd, _):
        os.ftruncate(fd, 0)


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
        """Sync directories from `top` down even if they exist: another process may just have created them and not have synced them yet."""
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
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)
        self._synced.add(path)


@contextmanager
def _opened(path: Path) -> Iterator[int | None]:
    """Open a regular file to read; None if it does not exist."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # without O_NONBLOCK it might wait for the writer of a pipe
    except (FileNotFoundError, NotADirectoryError):
        yield None
        return
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(f"{path} is no file, but a directory, pipe or device")
        yield fd
    finally:
        os.close(fd)


def _fill(fd: int, start: int, into: memoryview) -> int:
    """Read as many bytes as there are, at most `into` has; their number."""
    filled = 0
    while filled < len(into) and (count := os.preadv(fd, [into[filled:]], start + filled)):
        filled += count
    return filled


@contextmanager
def _locked(path: Path, *, create: bool = True, seconds: float | None = None) -> Iterator[tuple[int, Path]]:
    """Lock the file that a write of `path` goes to; yields it open, and its path.

    Raises:
        TimeoutError: another process has locked it, and did not end within `seconds` (None: within `_LOCK_SECONDS`).
        OSError: it cannot be created or locked, or is no regular file.
    """
    lock, most = path.with_name(f"{path.name}{LOCK_SUFFIX}"), _LOCK_SECONDS if seconds is None else seconds
    flags = os.O_WRONLY | (os.O_CREAT if create else 0) | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    deadline, pause = time.monotonic() + most, _LEAST_PAUSE
    while True:
        fd = os.open(lock, flags, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(f"{lock} is no file, but a directory, pipe or device")
            try:
                _lock(fd)
            except (BlockingIOError, PermissionError):
                if time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"another process has locked {lock} for {most:g} s; if it is stopped, let it go on, or end it"
                    ) from None
            else:
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(fd), lock.lstat()):
                        yield fd, lock
                        return
                continue  # the writer before has just renamed or removed it
        finally:
            os.close(fd)
        time.sleep(pause)
        pause = min(2 * pause, _MOST_PAUSE)


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
