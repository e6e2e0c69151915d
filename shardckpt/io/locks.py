"""Locks on open files, and the identity of an open file, on file systems that differ in both.

1. *Locks.* `lock_file` takes the lock that TensorStore takes: fcntl's lock of an open file, and
   flock(2) where the file system does not know that one (GPFS, Lustre without `-o flock`). Where it
   knows neither, nothing is written: two writers would both succeed.
2. *Identity.* On most file systems a file keeps its inode number. File systems in user space may
   make up another one when the kernel has forgotten the file, or at every look-up. `is_at` returns
   None if the numbers do not tell.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import struct
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_NO_LOCKS = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK})
"""Errors of file systems that do not have a kind of lock, or no service for it."""
GONE = frozenset({errno.ENOENT, errno.ESTALE})
"""Errors of an open file that was removed, or replaced, on a file system that does not keep it
until it is closed."""
HIDDEN = re.compile(r"\.nfs[0-9a-f]{16,}|\.fuse_hidden[0-9a-f]{16,}")
"""Names that NFS and FUSE give to a deleted file as long as it is open."""
_HIDDEN_SECONDS = 1.0
"""Seconds to wait for deleted files to be closed. FUSE closes a file a moment after the program
does."""
LEAST_PAUSE, MOST_PAUSE = 0.001, 0.1
"""Least and most seconds between two tries to lock a file, or to remove a directory."""


def lock_file(fd: int, path: Path) -> None:
    """Lock an open file as TensorStore does; closing the file releases the lock.

    Raises:
        BlockingIOError: another holder has it.
        OSError: it cannot be locked; the file system has no locks.
    """
    # Of the open file, not of the process: it excludes other threads, too.
    if hasattr(fcntl, "F_OFD_SETLK"):
        try:
            fcntl.fcntl(
                fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            )
        except OSError as e:
            if e.errno not in _NO_LOCKS:
                raise
        else:
            return
    lock_whole(fd, path)


def lock_whole(fd: int, path: Path) -> None:
    """Lock an open file or directory with flock(2); raises the errors of `lock_file`."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        if e.errno not in _NO_LOCKS:
            raise
        raise OSError(e.errno, f"this file system has no locks ({e.strerror})", str(path)) from e


def is_at(fd: int, path: Path) -> bool | None:
    """Whether an open file is the one at a path.

    None if the file system makes up another inode number at each look-up.
    """
    try:
        there = path.lstat()
        if os.path.samestat(os.fstat(fd), there):
            return True
        return False if os.path.samestat(there, path.lstat()) else None
    except OSError as e:
        if e.errno in GONE or isinstance(e, NotADirectoryError):
            return False
        raise


def seems_at(fd: int, path: Path) -> bool:
    """Whether an open file, which no process writes now, is the one at a path.

    The files are compared by inode number, or by size, times and links.

    Raises:
        FileNotFoundError: nothing is at the path.
    """
    mine, there = os.fstat(fd), path.stat()
    return os.path.samestat(mine, there) or _looks(mine) == _looks(there)


def _looks(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_nlink


def remove_directory(path: Path) -> bool:
    """Remove an empty directory, and return whether it is gone.

    Wait a moment if deleted files in it are still open.

    Raises:
        OSError: it cannot be removed for another reason than its contents.
    """
    deadline, pause = time.monotonic() + _HIDDEN_SECONDS, LEAST_PAUSE
    while True:
        try:
            path.rmdir()
        except FileNotFoundError:
            return True
        except OSError as e:
            if e.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
                raise
        else:
            return True
        if time.monotonic() >= deadline or not all(
            HIDDEN.fullmatch(entry.name) for entry in path.iterdir()
        ):
            return False
        time.sleep(pause)
        pause = min(2 * pause, MOST_PAUSE)
