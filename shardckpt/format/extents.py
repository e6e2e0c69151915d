"""Where the chunks of one host went: an extent, a run of bytes in a file, for each.

In columns, one row per chunk in the order in which they were put.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.errors import CommitError

if TYPE_CHECKING:
    from collections.abc import Sequence

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

    def add(self, keys: Sequence[str], offset: int, lengths: Sequence[int]) -> None:
        """Note chunks in the last of the files, one behind the other.

        Args:
            keys: of each.
            offset: where the first one begins.
            lengths: bytes of each.

        Raises:
            CommitError: a chunk of one of the keys was put already, or one has no bytes.
        """
        if not all(lengths):
            raise CommitError(f"chunk {keys[lengths.index(0)]} has no bytes; every stored chunk ends in a checksum.")
        before = len(self._keys)
        twice = None if self._keys.isdisjoint(keys) else next(key for key in keys if key in self._keys)
        self._keys.update(keys)
        if len(self._keys) != before + len(keys):
            twice = twice or next(key for i, key in enumerate(keys) if key in keys[:i])
            raise CommitError(f"chunk {twice} was put twice by one host; two tensors, or two boxes of one, claim the same chunk.")
        self._file.extend([max(0, len(self.files) - 1)] * len(keys))
        self._offset.extend(accumulate(lengths[:-1], initial=offset))
        self._length.extend(lengths)

    def extents(self, first: int = 0) -> Extents:
        """All that was noted, from a row on."""
        columns = (
            np.array(self._file[first:], np.uint32),
            np.array(self._offset[first:], np.uint64),
            np.array(self._length[first:], np.uint64),
        )
        return Extents(tuple(self.files), *columns)
