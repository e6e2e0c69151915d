"""How does a disk begin to write a file that is still being appended to?

The kernel by itself waits for some seconds, or until a tenth of the memory is to be written. Who asks for such a file to be durable
then waits for nearly all of it, while until there the disk did nothing. Linux can be told to begin.

It is a hint and no promise: it waits for no byte to be written, though perhaps for room in the disk's queue, makes nothing durable, and
takes note of no error. `fsync` does, of whatever went wrong since the file was opened.
"""

from __future__ import annotations

import ctypes
from typing import Any

__all__ = ["begin_write_back"]

_SYNC_FILE_RANGE_WRITE = 2


def _found() -> Any:
    """The C library's function; None where there is none, which is everywhere but on Linux."""
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return call


_sync_file_range = _found()


def begin_write_back(fd: int, offset: int, nbytes: int) -> bool:
    """Have the disk begin to write a part of a file; whether it was told to."""
    return _sync_file_range is not None and _sync_file_range(fd, offset, nbytes, _SYNC_FILE_RANGE_WRITE) == 0
