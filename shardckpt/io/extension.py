"""The C extension, which moves the elements of raw chunks between memory and local files.

Python does the same where it is missing.

One call copies, sums and writes, or reads, checks and copies, many chunks without the interpreter
lock. Python takes several calls for each of them, and waits up to 5 ms for the lock after each
where another thread is busy in Python. Another call compares chunks with those of an earlier
version (`format.differences`).

The installation builds the extension if the machine has a C compiler, and goes on without it
otherwise. `SHARDCKPT_NO_EXTENSION=1` in the environment switches it off.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np

moving: Any = None
"""The extension; None: Python moves the elements."""
if not os.environ.get("SHARDCKPT_NO_EXTENSION") and sys.byteorder == "little":
    try:
        from shardckpt.io import _moving as moving
    except ImportError:
        moving = None

ENGINE = "Python" if moving is None else "C"
"""The engine that moves the elements of raw chunks on a local disk, for reports."""
SCRATCH_BYTES = (1 << 20) + (64 << 10)
"""Memory of a thread in which chunks are put together: it stays in the processor's cache, and has
room for a chunk of 1 MiB."""
CALL_BYTES = 32 << 20
"""Bytes of elements that one thread moves with one call, unless one chunk has more."""
WRITE_BACK_BYTES = 8 << 20
"""Bytes of a file per write-back request."""
LONGEST_S = 0.05
"""Seconds after which a call begins no further chunk, so that Ctrl-C is prompt on slow disks."""
WRONG_CHECKSUM, END_OF_FILE, SYSTEM_ERROR = 1, 2, 3
"""The answers of a call that did not move everything; 0: it did, or its time was over."""
MOST_DIMS = 8
"""Most dimensions of boxes that C moves."""
KINDS = {n: np.dtype(f"u{n}") for n in (1, 2, 4, 8)} | {16: np.dtype("c16")}
"""Types of the buffers that C gets, by the bytes of an element; others numpy does not describe to
C, and they are not moved."""
COMPARED = (1, 2, 4, 8)
"""Bytes of the elements that C compares with those of an earlier version."""
