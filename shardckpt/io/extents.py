"""Where the chunks of one host went: an extent, a run of bytes in a file, for each.

In columns, one row per chunk in the order in which they were put.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.errors import CommitError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["ExtentLog", "Extents"]


@dataclass(frozen=True, slots=True)
class Extents:
    """Of n chunks, in the order in which they were put."""

    files: tuple[str, ...]
    """Data files, relative to the attempt; none in the plain layout, where each chunk's key names its object."""
    file: NDArray[np.uint32]
    """(n,) index into `files`."""
    offset: NDArray[np.uint64]
    """(n,) first byte."""
    length: NDArray[np.uint64]
    """(n,) bytes stored."""

    def __len__(self) -> int:
        """Number of chunks."""
        return len(self.length)


class ExtentLog:
    """Extents as they come to be: 20 bytes per chunk, and its key, so that no key is put twice."""

    def __init__(self) -> None:
        self.files: list[str] = []
        """Data files so far, relative to the attempt."""
        self._keys: set[str] = set()
        self._file = array("I")
        self._offset = array("Q")
        self._length = array("Q")

    def __len__(self) -> int:
        """Number of chunks so far."""
        return len(self._length)

    def add(self, key: str, offset: int, length: int) -> None:
        """Note a chunk in the last of the files.

        Raises:
            CommitError: a chunk of that key was put already, or there are no bytes.
        """
        if not length:
            raise CommitError(f"chunk {key} has no bytes; every stored chunk ends in a checksum.")
        if key in self._keys:
            raise CommitError(f"chunk {key} was put twice by one host; two tensors, or two boxes of one, claim the same chunk.")
        self._keys.add(key)
        self._file.append(max(0, len(self.files) - 1))
        self._offset.append(offset)
        self._length.append(length)

    def extents(self) -> Extents:
        """All that was noted."""
        columns = (np.array(self._file, np.uint32), np.array(self._offset, np.uint64), np.array(self._length, np.uint64))
        return Extents(tuple(self.files), *columns)
