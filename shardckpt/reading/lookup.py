"""Lookup of chunks: the interface of a chunk table, and an implementation for a table in memory.

`TableBlocks` is a lookup that does not read the complete table, and `convert.foreign_chunks` has
one for checkpoints of other formats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from shardckpt.format.table import OWN_OBJECT, Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardckpt.format.table import ArrayChunks
    from shardckpt.io.store import Store
    from shardckpt.layout.box import BoxArray
    from shardckpt.plan.pieces import Piece


class Lookup(Protocol):
    """Finds chunks. Safe to use from several threads."""

    def first_missing(self, path: str, num_chunks: int) -> int | None:
        """The first chunk of a grid that an array lacks, None if it has all.

        Cheap however large the grid claims to be.
        """

    def prepare(self, boxes: Iterable[tuple[Piece, BoxArray]]) -> None:
        """Prepare `find` for all chunks of the pieces that the boxes touch.

        Reads what is missing together.
        """

    def find(
        self, paths: Sequence[str], array: NDArray[np.int64], chunks: NDArray[np.int64]
    ) -> tuple[Sequence[str], ArrayChunks]:
        """The data files, and each chunk's row, which refers to them.

        Args:
            paths: arrays.
            array: (n,) the chunk's array among those.
            chunks: (n,) the chunk's position in its grid.

        Raises:
            KeyError: there is no such chunk; the argument is the index of the first one.
        """

    def whole(self) -> WholeTable:
        """The complete table in memory."""


class ChunkSource(Protocol):
    """A place with chunks and the table of them: what is needed to find chunks.

    `ReadableChunks` also reads them.
    """

    place: Store
    """Data files are relative to it."""
    table: Lookup
    """The file, offset, length and checksum of each chunk."""
    checksum_bytes: int
    """Bytes of the checksum at the end of each chunk."""

    def lengths(self, nbytes: int) -> tuple[int, int]:
        """Least and most stored bytes of a chunk whose elements have `nbytes` bytes."""


@dataclass(frozen=True, slots=True)
class WholeTable:
    """A chunk table in memory, or several merged ones."""

    table: Table

    @classmethod
    def of(cls, files: Sequence[str], arrays: Mapping[str, ArrayChunks]) -> WholeTable:
        """The table of those data files and arrays."""
        return cls(Table.of(files, arrays))

    @property
    def files(self) -> Sequence[str]:
        """Data files, relative to the attempt."""
        return self.table.files

    @property
    def arrays(self) -> Mapping[str, ArrayChunks]:
        """Array path → its chunks."""
        return self.table.arrays()

    def first_missing(self, path: str, num_chunks: int) -> int | None:
        """See `Lookup`."""
        return self.table.array(path).first_missing(num_chunks)

    def prepare(self, boxes: Iterable[tuple[Piece, BoxArray]]) -> None:
        """See `Lookup`; nothing to do."""

    def find(
        self, paths: Sequence[str], array: NDArray[np.int64], chunks: NDArray[np.int64]
    ) -> tuple[Sequence[str], ArrayChunks]:
        """See `Lookup`."""
        row = self.table.find(paths, array, chunks)
        if (row < 0).any():
            raise KeyError(int(np.argmax(row < 0)))
        return self.files, self.table.rows.take(row)

    def has_only_chunk(self, piece: Piece) -> bool:
        """Whether an array has one chunk, and the table has that and no other."""
        if piece.num_chunks != 1:
            return False
        chunks = self.table.chunks_of(piece.path)
        return len(chunks) == 1 and not chunks[0]

    def ranges(
        self, piece: Piece, begin: int, most: int
    ) -> Iterator[tuple[range, NDArray[np.int64]]]:
        """Cut the grid of an array into ranges with at most `most` chunks that the table has.

        Yield each, and those chunks.

        The number of ranges follows from the table, which is in memory, and not from the grid,
        which may claim any number of chunks.

        Args:
            piece: the array.
            begin: the first chunk.
            most: at least 1 in any case.
        """
        chunk = self.table.chunks_of(piece.path)
        num_chunks = piece.num_chunks
        most = max(1, most)
        held = chunk[chunk < num_chunks].astype(np.int64)
        if begin:
            held = held[held >= begin]
        for row in range(0, max(1, len(held)), most):
            end = int(held[row + most]) if row + most < len(held) else num_chunks
            if begin < end:
                yield range(begin, end), held[row : row + most]
            begin = end

    def bytes_in_files(self) -> dict[str, int]:
        """Bytes of each data file that belong to chunks."""
        rows, held = self.table.rows, np.zeros(len(self.files), np.uint64)
        packed = rows.file != OWN_OBJECT
        np.add.at(held, rows.file[packed], rows.length[packed])
        return dict(zip(self.files, held.tolist(), strict=True))

    def whole(self) -> WholeTable:
        """Return this table."""
        return self
