"""The C extension, which moves the elements of raw chunks between memory and local files; Python does the same where it is missing.

One call copies, sums and writes, or reads, checks and copies, many chunks without the interpreter lock. Python takes several calls for
each of them, and waits up to 5 ms for the lock after each where another thread is busy in Python.

The installation builds the extension if the machine has a C compiler, and goes on without it otherwise. `SHARDCKPT_NO_EXTENSION=1`
in the environment switches it off.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Place = tuple[NDArray[Any], tuple[int, ...], int]
    """Memory for the elements of all chunks of a band, the first index in each chunk, and the dimension along which chunks follow."""
    BandOfChunks = tuple[int, int, int, tuple[int, ...], tuple[Place, ...]]
    """Offset of the first chunk in the file, number of chunks, bytes of an element, shape of a chunk, and places."""

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
"""Memory of a thread in which chunks are put together: it stays in the processor's cache, and has room for a chunk of 1 MiB."""
CALL_BYTES = 32 << 20
"""Bytes of elements that one thread moves with one call, unless one chunk has more."""
WRITE_BACK_BYTES = 8 << 20
"""Bytes of a file per write-back request."""
LONGEST_S = 0.05
"""Seconds after which a call begins no further chunk, so that Ctrl-C is prompt on slow disks."""
_WRONG_CHECKSUM, _END_OF_FILE, _SYSTEM_ERROR = 1, 2, 3
_KINDS = {n: np.dtype(f"u{n}") for n in (1, 2, 4, 8)} | {16: np.dtype("c16")}
"""Types that every buffer may have, instead of those that numpy does not know itself."""


def can_move(chunk_shape: Sequence[int], itemsize: int) -> bool:
    """Whether the extension is there and moves chunks of that shape."""
    return moving is not None and len(chunk_shape) <= moving.MOST_DIMS and itemsize in _KINDS


def _bare(array: NDArray[Any]) -> NDArray[Any]:
    return array.view(_KINDS[array.itemsize])


@dataclass(slots=True)
class BlocksOut:
    """Blocks of one shape and dtype on their way to a local file, each cut into chunks of one shape, in grid order."""

    blocks: Sequence[NDArray[Any]]
    chunks: tuple[int, ...]
    scratch: NDArray[np.uint8]
    crcs: NDArray[np.uint32]
    """(n,) checksums of the chunks; filled as they are written."""

    def __post_init__(self) -> None:
        """Make buffers of them that C takes."""
        self.blocks = tuple(map(_bare, self.blocks))

    def write(self, fd: int, offset: int, first: int, last: int, begun: int) -> int:
        """Write some of the chunks, one after another, at an offset of a file.

        Args:
            fd: the file.
            offset: where they begin.
            first: the first chunk.
            last: one past the last chunk.
            begun: the offset up to which write-back of the file has begun; it begins for the rest after each call with many bytes.

        Returns:
            The same offset afterwards.

        Raises:
            OSError: what the system said.
        """
        stored = int(np.prod(self.chunks, dtype=np.int64)) * self.blocks[0].itemsize + 4
        while first < last:
            how, done, error = moving.write_chunks(
                fd, offset, begun, self.blocks, self.chunks, first, last, self.crcs[first:last], self.scratch, LONGEST_S
            )
            if how == _SYSTEM_ERROR:
                raise OSError(error, os.strerror(error))
            first += done
            offset += done * stored
            if offset - begun >= WRITE_BACK_BYTES:
                begun = offset
        return begun


def read_bands(
    fd: int, bands: Sequence[BandOfChunks], crcs: NDArray[np.uint32], scratch: NDArray[np.uint8]
) -> tuple[int, OSError | EOFError | None]:
    """Read chunks from a file, compare them with their checksums, and copy them to their places.

    Args:
        fd: the file.
        bands: chunks and their places.
        crcs: (n,) checksums of all chunks.
        scratch: memory for this call.

    Returns:
        The number of chunks that were read: all of them, or those before the first that cannot be read. And the reason: the system's
        error, or the end of the file, or None: it does not have its checksum.
    """
    some = tuple(
        (offset, count, itemsize, chunk, tuple((_bare(array), start, along) for array, start, along in places))
        for offset, count, itemsize, chunk, places in bands
    )
    done = 0
    while done < len(crcs):
        how, done, error = moving.read_chunks(fd, some, done, crcs, scratch, LONGEST_S)
        if how == _SYSTEM_ERROR:
            return done, OSError(error, os.strerror(error))
        if how == _END_OF_FILE:
            return done, EOFError()
        if how == _WRONG_CHECKSUM:
            break
    return done, None
