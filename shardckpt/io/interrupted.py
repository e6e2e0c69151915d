"""What does a write leave on a local disk whose process was killed, and how is the next one kept from taking it over?

TensorStore writes a file as `<name>.__lock`, holds a lock on that, and renames it. When the process dies the kernel frees the
lock, and the bytes stay. The next writer of the same file finds them under the name that it writes to, overwrites them from
the start, and does not cut off what was longer (TensorStore 0.1.86): its file then ends in bytes of the dead one's. So before
a write:

1. Open the `.__lock` file, if there is one; lock it as TensorStore does, without waiting. If that fails, somebody alive is
   writing.
2. If it still goes by that name (a writer that has just ended has renamed it, and it is the file itself now), empty it.

Where another process dies between that and the write, its bytes are met all the same: who must not be wrong looks at the
length afterwards.
"""

from __future__ import annotations

import fcntl
import os
import struct
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["LOCK_SUFFIX", "forget_interrupted_write"]

LOCK_SUFFIX = ".__lock"
"""What TensorStore's file driver calls a file while it writes it."""


def forget_interrupted_write(path: Path) -> None:
    """Empty what a dead process has left of a write to this file, if there is something; leave alone what is being written.

    Args:
        path: the file. It need not exist, nor its directory.
    """
    lock = f"{path}{LOCK_SUFFIX}"
    with suppress(OSError):  # no such file, or somebody's: writing it then tells what is wrong, if anything is
        fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            _lock(fd)
            found = os.fstat(fd)
            if found.st_size and os.path.samestat(found, os.lstat(lock)):
                os.ftruncate(fd, 0)
        finally:
            os.close(fd)


def _lock(fd: int) -> None:
    """Take TensorStore's kind of lock on an open file; it ends when that is closed. Raises OSError if somebody has it."""
    if hasattr(fcntl, "F_OFD_SETLK"):  # of the open file, not of the process: it excludes other threads, too
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    else:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
