"""Lookup of chunks: the interface of a chunk table, and an implementation for a table in memory.

`TableBlocks` implements the same without reading the complete table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from shardckpt.format.table import OWN_OBJECT, ArrayChunks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardckpt.layout.box import BoxArray
    from shardckpt.plan.pieces import Piece


_NO_CHUNKS = ArrayChunks.none()


class Lookup(Protocol):
    """Finds chunks. Safe to use from several threads."""

    def first_missing(self, path: str, num_chunks: int) -> int | None:
        """The first chunk of a grid that an array lacks, None if it has all; cheap however large the grid claims to be."""

    def prepare(self, wanted: Iterable[tuple[Piece, BoxArray]]) -> None:
        """Prepare `find` for all chunks of the pieces that the boxes touch; reads what is missing together."""

    def find(self, paths: Sequence[str], array: NDArray[np.int64], chunks: NDArray[np.int64]) -> tuple[Sequence[str], ArrayChunks]:
        """The data files, and each chunk's row, which refers to them.

        Args:
            paths: arrays.
            array: (n,) the chunk's array among those; ascending.
            chunks: (n,) the chunk's position in its grid.

        Raises:
            KeyError: there is no such chunk; the argument is the index of the first one.
        """

    def whole(self) -> WholeTable:
        """The complete table in memory."""


@dataclass(frozen=True, slots=True)
class WholeTable:
    """A chunk table in memory, or several merged ones."""

    files: Sequence[str]
    """Data files, relative to the attempt."""
    arrays: Mapping[str, ArrayChunks]
    """Array path → its chunks."""

    def first_missing(self, path: str, num_chunks: int) -> int | None:
        """See `Lookup`."""
        return self.arrays.get(path, _NO_CHUNKS).first_missing(num_chunks)

    def prepare(self, wanted: Iterable[tuple[Piece, BoxArray]]) -> None:
        """See `Lookup`; nothing to do."""

    def find(self, paths: Sequence[str], array: NDArray[np.int64], chunks: NDArray[np.int64]) -> tuple[Sequence[str], ArrayChunks]:
        """See `Lookup`."""
        found = [_NO_CHUNKS]
        begins = np.searchsorted(array, np.arange(len(paths) + 1)).tolist()
        for path, begin, end in zip(paths, begins, begins[1:], strict=False):
            if begin == end:
                continue
            table = self.arrays.get(path, _NO_CHUNKS)
            row = table.find(chunks[begin:end])
            if (row < 0).any():
                raise KeyError(begin + int(np.argmax(row < 0)))
            found.append(table.take(row))
        return self.files, ArrayChunks.concatenate(found)

    def ranges(self, piece: Piece, begin: int, most: int) -> Iterator[tuple[range, NDArray[np.int64]]]:
        """Cut the grid of an array into ranges with at most `most` chunks that the table has; yield each, and those chunks.

        The number of ranges follows from the table, which is in memory, and not from the grid, which may claim any number of chunks.

        Args:
            piece: the array.
            begin: the first chunk.
            most: at least 1 in any case.
        """
        chunk = self.arrays.get(piece.path, _NO_CHUNKS).chunk
        num_chunks = piece.num_chunks
        held = chunk[chunk < num_chunks].astype(np.int64)
        if begin:
            held = held[held >= begin]
        most = max(1, most)
        for row in range(0, max(1, len(held)), most):
            end = int(held[row + most]) if row + most < len(held) else num_chunks
            if begin < end:
                yield range(begin, end), held[row : row + most]
            begin = end

    def bytes_in_files(self) -> dict[str, int]:
        """Bytes of each data file that belong to chunks."""
        held = np.zeros(len(self.files), np.uint64)
        for rows in self.arrays.values():
            packed = rows.file != OWN_OBJECT
            np.add.at(held, rows.file[packed], rows.length[packed])
        return dict(zip(self.files, held.tolist(), strict=True))

    def whole(self) -> WholeTable:
        """Return this table."""
        return self
