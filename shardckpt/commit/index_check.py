"""Check that the index for other zarr readers agrees with the record and the chunk tables.

Our own readers do not use the index, so a wrong one cannot mislead them; but `verify` also covers stock readers.
"""

from __future__ import annotations

import json
from itertools import tee
from typing import TYPE_CHECKING, Any, TypeVar

import crc32c
import numpy as np

from shardckpt.commit import index
from shardckpt.commit.assemble import SMALL
from shardckpt.errors import ShardckptError
from shardckpt.format.table import OWN_OBJECT
from shardckpt.format.zarr_arrays import CHECKSUM_BYTES, chunk_object_key, parent_groups, split_chunk_key

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence

    from shardckpt.format.table import ArrayChunks
    from shardckpt.io.store import Store
    from shardckpt.plan.pieces import Piece

Fault = tuple[str, str]
"""A file relative to the attempt, and its fault."""
MANIFEST = "manifest.ocdbt"
Wanted = TypeVar("Wanted")


class IndexCheck:
    """Compares the indexes of an attempt with its chunk tables."""

    def __init__(
        self,
        attempt: Store,
        documents: Callable[[], Iterable[tuple[str, Mapping[str, Any]]]],
        pieces: dict[str, Piece],
        files: Sequence[str],
        arrays: Mapping[str, ArrayChunks],
    ) -> None:
        """Set the expected contents of the indexes.

        Args:
            attempt: the attempt's place.
            documents: yields each array's path and its zarr.json.
            pieces: array path → the array.
            files: the chunk tables' data files.
            arrays: array path → its chunks.
        """
        self._attempt = attempt
        self._documents = documents
        self._pieces = pieces
        self._files = files
        self._arrays = arrays

    def packed(self, lanes: Sequence[str]) -> Iterator[Fault]:
        """Faults of the merged index and of the lanes' own indexes, from which it can be rebuilt."""
        inline = self._inline_keys()
        chunks = sum(map(len, self._arrays.values())) - len(inline)
        groups = {index.document_key(path) for path in parent_groups(self._pieces)}
        found = yield from self._database("", groups)
        if found is not None:
            if found != chunks:
                yield MANIFEST, f"the index has {found} chunks, the chunk tables have {chunks}"
            yield from self._compare(index.packed_documents(self._documents()), _same_json)
            yield from self._compare(inline.items(), _same_chunk)
        in_lanes: int | None = 0
        for lane in lanes:
            found = yield from self._database(lane, None)
            in_lanes = None if in_lanes is None or found is None else in_lanes + found
        if in_lanes not in (None, chunks):
            yield "hosts", f"the lanes' indexes have {in_lanes} chunks, the chunk tables have {chunks}"

    def _inline_keys(self) -> dict[str, tuple[int, int]]:
        """The chunks of small tensors, which are values in the index itself: key → bytes and crc32c from the chunk table."""
        found = {}
        if SMALL in self._files:
            small = self._files.index(SMALL)
            for path, rows in self._arrays.items():
                piece = self._pieces.get(path)
                if piece is not None:  # the table is untrusted
                    for row in np.flatnonzero((rows.file == small) & (rows.chunk < piece.num_chunks)).tolist():
                        found[chunk_object_key(piece, int(rows.chunk[row]))] = int(rows.length[row]), int(rows.crc[row])
        return found

    def _compare(self, expected: Iterable[tuple[str, Wanted]], same: Callable[[bytes | None, Wanted], bool]) -> Iterator[Fault]:
        """Faults of values in the merged index; `expected` has each key with what `same` compares to its value."""
        expected, keys = tee(expected)
        try:
            for (key, wanted), value in zip(expected, index.read_values(self._attempt, (key for key, _ in keys)), strict=True):
                if not same(value, wanted):
                    yield MANIFEST, f"{key} in the index is missing or not what was written"
        except ShardckptError as e:
            yield MANIFEST, str(e)

    def plain(self) -> Iterator[Fault]:
        """Faults of the zarr.json documents of the plain layout."""
        for key, document in index.plain_documents(dict(self._documents())).items():
            try:
                if not _same_json(self._attempt.read(key), document):
                    yield key, "the zarr document differs from the saved one"
            except ShardckptError as e:
                yield key, str(e)

    def _database(self, lane: str, groups: Container[str] | None) -> Generator[Fault, None, int | None]:
        """Faults of the entries of a lane ("": the merged index); returns its number of chunks, or None if it cannot be read.

        Args:
            lane: relative to the attempt.
            groups: keys of the documents of groups; None: the database holds no documents.
        """
        prefix = f"{lane}/" if lane else ""
        found = 0
        try:
            place = self._attempt.sub(lane) if lane else self._attempt
            for key, (file, offset, length) in index.index_entries(place):
                if groups is not None and (key in groups or key.removesuffix("/zarr.json") in self._pieces):
                    place.read(file, offset, offset + length)  # too large for a node; only its existence is checked here
                    continue
                found += 1
                fault = self._entry(key, (prefix + file, offset, length))
                if fault is not None:
                    yield prefix + MANIFEST, fault
        except ShardckptError as e:
            yield prefix + MANIFEST, str(e)
            return None
        return found

    def _entry(self, key: str, place: tuple[str, int, int]) -> str | None:
        """The fault of an entry, or None."""
        found = split_chunk_key(key, self._pieces)
        table = self._arrays.get(found[0].path) if found else None
        row = -1 if table is None or found is None else table.row(found[1])
        if table is None or row < 0:
            return f"the index has {key}, which is no chunk of this checkpoint"
        file = int(table.file[row])
        if file == OWN_OBJECT:
            return f"the chunk table has {key} as an object of its own, which it is not in the packed layout"
        wanted = (self._files[file], int(table.offset[row]), int(table.length[row]))
        return None if place == wanted else f"the index has {key} at {place}, the chunk table at {wanted}"


def _same_json(found: bytes | None, expected: bytes) -> bool:
    """Whether two documents have equal contents; other versions may use different whitespace."""
    try:
        return found is not None and bool(json.loads(found) == json.loads(expected))
    except (ValueError, RecursionError):
        return False


def _same_chunk(found: bytes | None, expected: tuple[int, int]) -> bool:
    """Whether a small tensor's chunk has the length and the checksum of the chunk table."""
    length, crc = expected
    value = found or b""
    checksum = crc.to_bytes(CHECKSUM_BYTES, "little")
    return len(value) == length and value[-CHECKSUM_BYTES:] == checksum and crc32c.crc32c(value[:-CHECKSUM_BYTES]) == crc
