"""Check that the index for other zarr readers agrees with the record and the chunk tables.

Our own readers do not use the index, so a wrong one cannot mislead them; but `verify` also covers
stock readers.
"""

from __future__ import annotations

import json
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import crc32c
import numpy as np

from shardckpt.commit import index
from shardckpt.commit.small_tensors import SMALL
from shardckpt.errors import ShardckptError
from shardckpt.format.table import OWN_OBJECT
from shardckpt.format.zarr_arrays import (
    CHECKSUM_BYTES,
    chunk_object_key,
    encode_document,
    group_json,
    parent_groups,
    split_chunk_key,
)
from shardckpt.io.failures import raise_unless_damage

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from shardckpt.format.table import Table
    from shardckpt.io.ocdbt import Place
    from shardckpt.io.store import Store
    from shardckpt.plan.pieces import Piece

Fault = tuple[str, str]
"""A file relative to the attempt, and its fault."""
_AT_ONCE = 1 << 12
"""Number of entries that are compared at a time."""


class IndexCheck:
    """Compares the indexes of an attempt with its chunk tables."""

    def __init__(
        self,
        attempt: Store,
        document: Callable[[str], bytes],
        pieces: dict[str, Piece],
        table: Table,
    ) -> None:
        """Set the expected contents of the indexes.

        Args:
            attempt: the attempt's place.
            document: makes the encoded zarr.json of an array, by its path.
            pieces: array path → the array.
            table: the places of its chunks.
        """
        self._attempt = attempt
        self._document = document
        self._pieces = pieces
        self._groups = parent_groups(pieces)
        self._table = table
        self._only: dict[str, int] = {}
        """Key of the chunk → table row, for arrays of one chunk; -1: the table lacks it."""

    def packed(self, lanes: Sequence[str]) -> Iterator[Fault]:
        """Faults of the merged index and the lanes' own indexes, from which it can be rebuilt."""
        alone = [piece for piece in self._pieces.values() if piece.num_chunks == 1]
        number = np.arange(len(alone))
        rows = self._table.find([piece.path for piece in alone], number, np.zeros_like(number))
        self._only = {
            chunk_object_key(piece, 0): row for piece, row in zip(alone, rows.tolist(), strict=True)
        }
        inline = self._inline_keys()
        chunks = len(self._table.rows) - len(inline)
        documents = {index.document_key(path): path for path in (*self._pieces, *self._groups)}
        in_index = yield from self._database("", {**documents, **inline})
        if in_index not in (None, chunks):
            yield index.MANIFEST, f"the index has {in_index} chunks, the chunk tables have {chunks}"
        in_lanes: int | None = 0
        for lane in lanes:
            in_lane = yield from self._database(lane, {})
            in_lanes = None if in_lanes is None or in_lane is None else in_lanes + in_lane
        if in_lanes not in (None, chunks):
            yield (
                "hosts",
                f"the lanes' indexes have {in_lanes} chunks, the chunk tables have {chunks}",
            )

    def _inline_keys(self) -> dict[str, tuple[int, int]]:
        """The chunks of small tensors: key → bytes and crc32c from the chunk table.

        These chunks are values in the index itself.
        """
        chunks = {}
        if SMALL in self._table.files:
            small = self._table.files.index(SMALL)
            for path, rows in self._table.arrays().items():
                piece = self._pieces.get(path)
                if piece is not None:  # the table is untrusted
                    for row in np.flatnonzero(
                        (rows.file == small) & (rows.chunk < piece.num_chunks)
                    ).tolist():
                        chunks[chunk_object_key(piece, int(rows.chunk[row]))] = (
                            int(rows.length[row]),
                            int(rows.crc[row]),
                        )
        return chunks

    def plain(self) -> Iterator[Fault]:
        """Faults of the zarr.json documents of the plain layout."""
        documents = {path: json.loads(self._document(path)) for path in self._pieces}
        looks = [
            partial(self._plain_fault, key, document)
            for key, document in index.plain_documents(documents).items()
        ]
        yield from filter(None, self._attempt.read_together(looks))

    def _plain_fault(self, key: str, document: bytes) -> Fault | None:
        """The fault of a document that should have these contents."""
        try:
            if _same_json(self._attempt.read(key), document):
                return None
        except ShardckptError as e:
            raise_unless_damage(e, self._attempt.read_versioned)
            return key, str(e)
        return key, "the zarr document differs from the saved one"

    def _database(
        self, lane: str, others: dict[str, str | tuple[int, int]]
    ) -> Generator[Fault, None, int | None]:
        """Faults of the entries of a lane ("": the merged index).

        Returns its number of chunks in files, or None if it cannot be read.

        Args:
            lane: relative to the attempt.
            others: keys of all other values: documents with the paths of their arrays or groups,
                and small chunks with their bytes and crc32c. Those that the database has are
                removed.
        """
        prefix = f"{lane}/" if lane else ""
        count = 0
        try:
            place = self._attempt.sub(lane) if lane else self._attempt
            entries = iter(index.index_values(place))
            while batch := list(islice(entries, _AT_ONCE)):
                chunks: list[tuple[str, Place]] = []
                for key, value in batch:
                    if key in others:  # a document that is too large for a node is in a file
                        data = (
                            value
                            if isinstance(value, bytes)
                            else place.read(value[0], value[1], value[1] + value[2])
                        )
                        if self._is(others[key], data):
                            del others[key]
                    elif not isinstance(value, bytes):
                        chunks.append((key, (prefix + value[0], *value[1:])))
                count += len(chunks)
                for fault in self._find_misplaced(chunks):
                    yield prefix + index.MANIFEST, fault
        except ShardckptError as e:
            raise_unless_damage(e, self._attempt.read_versioned)
            yield prefix + index.MANIFEST, str(e)
            return None
        for key in others:
            yield prefix + index.MANIFEST, f"{key} in the index is missing or not what was written"
        return count

    def _is(self, expected: str | tuple[int, int], value: bytes) -> bool:
        """Whether a value is the document of a path, or a chunk of those bytes and crc32c."""
        if not isinstance(expected, str):
            return _same_chunk(value, expected)
        return _same_json(
            value,
            self._document(expected) if expected in self._pieces else encode_document(group_json()),
        )

    def _find_misplaced(self, entries: Sequence[tuple[str, Place]]) -> Iterator[str]:
        """The faults of entries of chunks."""
        rows = np.array([self._only.get(key, -1) for key, _ in entries], np.int64)
        others = np.flatnonzero(rows < 0)
        chunks = [split_chunk_key(entries[i][0], self._pieces) for i in others.tolist()]
        paths = ["" if chunk is None else chunk[0].path for chunk in chunks]
        positions = np.array([-1 if chunk is None else chunk[1] for chunk in chunks], np.int64)
        rows[others] = self._table.find(paths, np.arange(len(paths)), positions)
        of_table = self._table.rows.take(rows[rows >= 0])
        places = zip(
            of_table.file.tolist(), of_table.offset.tolist(), of_table.length.tolist(), strict=True
        )
        for (key, place), row in zip(entries, rows.tolist(), strict=True):
            if row < 0:
                yield f"the index has {key}, which is not a chunk of this checkpoint"
                continue
            file, *extent = next(places)
            if file == OWN_OBJECT:
                yield (
                    f"the chunk table has {key} as an object of its own, which it is not in the "
                    "packed layout"
                )
            elif place != (expected := (self._table.files[file], *extent)):
                yield f"the index has {key} at {place}, the chunk table at {expected}"


def _same_json(stored: bytes, expected: bytes) -> bool:
    """Whether two documents have equal contents; other versions may use different whitespace."""
    try:
        return stored == expected or bool(json.loads(stored) == json.loads(expected))
    except (ValueError, RecursionError):
        return False


def _same_chunk(value: bytes, expected: tuple[int, int]) -> bool:
    """Whether a small tensor's chunk has the length and the checksum of the chunk table."""
    length, crc = expected
    checksum = crc.to_bytes(CHECKSUM_BYTES, "little")
    return (
        len(value) == length
        and value[-CHECKSUM_BYTES:] == checksum
        and crc32c.crc32c(value[:-CHECKSUM_BYTES]) == crc
    )
