"""The file, offset and writing host of every chunk of a checkpoint.

The table of all chunks names each chunk's data file, and a host's files lie below a prefix of its
own. If chunks are objects of their own (layout "zarr"), their names do not show the host, but each
host's own table lists the chunks that it wrote.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.commit.table_reading import read_host_files, read_table
from shardckpt.errors import FormatError, MissingDataError
from shardckpt.format.table import OWN_OBJECT
from shardckpt.io.threads import map_on_threads
from shardckpt.reading.host_rows import host_of_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from shardckpt.format.record import CheckpointRecord
    from shardckpt.format.table import ArrayChunks
    from shardckpt.io.store import Store
    from shardckpt.plan.pieces import Piece
    from shardckpt.reading.lookup import WholeTable

    Ints = NDArray[np.int64]


_NOBODY = -1


@dataclass(frozen=True, slots=True, eq=False)
class ChunkPlaces:
    """The chunks of some pieces, one after another, each in grid order."""

    file: Ints
    """(n,) number of the data file; each chunk that is an object of its own has a different
    number."""
    offset: Ints
    """(n,) offset of the first byte."""
    length: Ints
    """(n,) stored bytes, including the checksum."""
    host: Ints
    """(n,) number of the host that wrote it; -1: the committer, for small plain tensors."""


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Places of all chunks of a checkpoint."""

    table: WholeTable
    host_of_file: Ints
    """(files,) number of the host that wrote each file."""
    host_of_object: Mapping[str, Ints]
    """Array path → number of the host that wrote each chunk that is an object of its own."""

    def of(self, name: str, pieces: Sequence[Piece]) -> ChunkPlaces:
        """The places of a tensor's chunks.

        Raises:
            MissingDataError: the table lacks some of its chunks.
        """
        of_pieces = [self._of_piece(name, piece) for piece in pieces]
        file, offset, length, host = (
            np.concatenate(columns) for columns in zip(*of_pieces, strict=True)
        )
        own = file == OWN_OBJECT
        file[own] = len(self.host_of_file) + np.arange(int(own.sum()))
        return ChunkPlaces(file, offset, length, host)

    def _of_piece(self, name: str, piece: Piece) -> tuple[Ints, Ints, Ints, Ints]:
        rows: ArrayChunks | None = self.table.arrays.get(piece.path)
        if piece.num_chunks == 0:
            return tuple(np.empty(0, np.int64) for _ in range(4))  # type: ignore[return-value]
        if rows is None or rows.first_missing(piece.num_chunks) is not None:
            raise MissingDataError(
                f"{name}: the chunk table lacks chunks of it; run `shardckpt verify` for the full "
                "list."
            )
        file, offset, length = (
            np.asarray(column[: piece.num_chunks], np.int64)
            for column in (rows.file, rows.offset, rows.length)
        )
        own = file == OWN_OBJECT
        host = np.full(len(file), _NOBODY, np.int64)
        host[~own] = self.host_of_file[file[~own]]
        if own.any() and piece.path in self.host_of_object:
            host[own] = self.host_of_object[piece.path][own]
        return file, offset, length, host


def read_places(place: Store, record: CheckpointRecord, table: WholeTable) -> Places:
    """Find the host that wrote each chunk.

    Args:
        place: the attempt.
        record: the checkpoint's commit record.
        table: the table of all chunks.

    Raises:
        FormatError: a host's own table contradicts the table of all chunks.
    """
    hosts = (host_of_file(file, len(record.hosts)) for file in table.files)
    of_files = np.array([_NOBODY if host is None else host for host in hosts], np.int64)
    of_objects: dict[str, Ints] = {}
    arrays = table.arrays
    if record.layout == "zarr":
        references = [
            host.table for host in map_on_threads(partial(read_host_files, place), record.hosts)
        ]
        for host, written in enumerate(map_on_threads(partial(read_table, place), references)):
            for path, rows in written.arrays().items():
                chunks = len(arrays.get(path, ()))
                if (rows.chunk >= chunks).any():
                    raise FormatError(
                        f"{place.path_of(references[host].key)}: the table of host {host} has "
                        f"chunks of {path} that the table of all chunks lacks; one of them is "
                        "damaged. Run `shardckpt verify` for the full list."
                    )
                known = of_objects.setdefault(path, np.full(chunks, _NOBODY, np.int64))
                known[rows.chunk.astype(np.int64)] = host
    return Places(table, of_files, of_objects)
