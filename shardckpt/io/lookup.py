"""Where are these chunks? What a reader asks of a chunk table, and a table in memory that answers it.

`TableBlocks` answers the same without reading all of a table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from shardckpt.io.table import ArrayChunks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from shardckpt.box import BoxArray
    from shardckpt.planning.plan import Piece

__all__ = ["Lookup", "WholeTable"]

_NO_CHUNKS = ArrayChunks.none()


class Lookup(Protocol):
    """Finds chunks. Safe to use from several threads."""

    def first_missing(self, path: str, num_chunks: int) -> int | None:
        """The first of a grid's chunks that an array lacks, None where it has all; cheap however large the grid claims to be."""

    def prepare(self, wanted: Iterable[tuple[Piece, BoxArray]]) -> None:
        """Get ready to `find` all chunks of the pieces that boxes touch; what is read for it is read together."""

    def find(self, path: str, chunks: NDArray[np.int64]) -> tuple[Sequence[str], ArrayChunks]:
        """Data files, and of each of an array's chunks the row, which refers to them.

        Raises:
            KeyError: there is no such chunk; its argument is the first of them.
        """

    def whole(self) -> WholeTable:
        """All of it in memory."""


@dataclass(frozen=True, slots=True)
class WholeTable:
    """A chunk table in memory, or several as one."""

    files: Sequence[str]
    """Data files, relative to the attempt."""
    arrays: Mapping[str, ArrayChunks]
    """Array path → its chunks."""

    def first_missing(self, path: str, num_chunks: int) -> int | None:
        """See `Lookup`."""
        return self.arrays.get(path, _NO_CHUNKS).first_missing(num_chunks)

    def prepare(self, wanted: Iterable[tuple[Piece, BoxArray]]) -> None:
        """See `Lookup`; all is here."""

    def find(self, path: str, chunks: NDArray[np.int64]) -> tuple[Sequence[str], ArrayChunks]:
        """See `Lookup`."""
        table = self.arrays.get(path, _NO_CHUNKS)
        row = table.find(chunks)
        if (row < 0).any():
            raise KeyError(int(chunks[row < 0][0]))
        return self.files, table.take(row)

    def whole(self) -> WholeTable:
        """Itself."""
        return self
