"""The keys and bytes of a checkpoint as a zarr hierarchy, in either layout.

1. `zarr.json` documents are made from the commit record, never read from the storage.
2. Chunks come from a `ChunkReader`: found with the chunk table, compared with its checksums.

Names become nested groups at their slashes. A tensor that is stored in pieces appears as the arrays
of its pieces.
"""

from __future__ import annotations

import json
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.format.stored_chunks import close
from shardckpt.format.zarr_arrays import (
    CHECKSUM_BYTES,
    chunk_object_key,
    chunk_position,
    group_json,
    parent_groups,
    room_for,
    split_chunk_key,
    zarr_documents,
)
from shardckpt.layout.box import BoxArray
from shardckpt.plan.pieces import chunk_boxes
from shardckpt.reading.fetch import CODECS, as_readable
from shardckpt.reading.locate import Request

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardckpt.format.record import CheckpointRecord
    from shardckpt.format.structure import TensorRecord
    from shardckpt.plan.pieces import Piece
    from shardckpt.reading.reader import ChunkReader


DOCUMENT = "zarr.json"


class ZarrKeys:
    """Documents and chunks by key. Safe to use from several threads."""

    def __init__(self, record: CheckpointRecord, reader: ChunkReader) -> None:
        """Show the checkpoint of a commit record.

        `reader` reads its chunks, also those in bases.
        """
        self._record = record
        self._reader = reader
        tensors = record.structure.tensors.values()
        self._tensors = {piece.path: tensor for tensor in tensors for piece in tensor.pieces}
        self._pieces = {piece.path: piece for tensor in tensors for piece in tensor.pieces}
        documents = dict(zarr_documents(record.structure, record.compression, in_bases=True))
        groups = {path: group_json() for path in parent_groups(documents)}
        self._documents = {**groups, **documents}
        self._documents[""] = group_json(
            members={path: document for path, document in self._documents.items() if path}
        )
        self._children: dict[str, list[str]] = {path: [] for path in groups}
        for path in self._documents:
            if path:
                parent, _, name = path.rpartition("/")
                self._children[parent].append(name)

    def document(self, key: str) -> bytes | None:
        """The document with that key; None if there is none. Nothing is read."""
        path, _, name = key.rpartition("/")
        document = self._documents.get(path) if name == DOCUMENT else None
        return None if document is None else json.dumps(document).encode()

    def read(self, key: str) -> bytes | None:
        """The bytes of a document or of a chunk; None for a key that names neither.

        Raises:
            MissingDataError: a chunk is gone. CorruptionError: it is damaged.
        """
        document = self.document(key)
        if document is not None:
            return document
        chunk = self._chunk(key)
        if chunk is None:
            return None
        tensor, piece, position = chunk
        return stored_chunk(self._reader, tensor.name, tensor.dtype.storage, piece, position)

    def chunk_bytes(self, key: str) -> int | None:
        """Bytes of the elements of a chunk; None if there is no chunk with that key."""
        chunk = self._chunk(key)
        return None if chunk is None else prod(chunk[1].chunks) * chunk[0].dtype.storage.itemsize

    def exists(self, key: str) -> bool:
        """Whether the checkpoint has such a document or chunk, according to its record.

        By the record, every chunk of a grid exists.
        """
        return self.document(key) is not None or self._chunk(key) is not None

    def size(self, key: str) -> int | None:
        """Bytes of a document or chunk; None if there is none.

        A compressed chunk is read for that.
        """
        chunk = self._chunk(key)
        compression = (
            chunk and (self._record if chunk[0].base is None else chunk[0].base.base).compression
        )
        if chunk is None or compression is not None:
            data = self.read(key)
            return None if data is None else len(data)
        tensor, piece, _ = chunk
        return prod(piece.chunks) * tensor.dtype.storage.itemsize + CHECKSUM_BYTES

    def children(self, path: str) -> list[str] | None:
        """The names directly below a path.

        None if the path is not a group, array, or directory of chunks.
        """
        if path in self._children:
            return [DOCUMENT, *self._children[path]]
        array = self._array(path)
        if array is None:
            return None
        piece, rest = array
        if not rest:
            return [DOCUMENT, *(["c"] if piece.num_chunks else [])]
        depth = len(rest) - 1
        above = rest[0] == "c" and depth < len(piece.grid)
        if not above or chunk_position("/".join(rest[1:]), piece.grid[:depth]) is None:
            return None
        return [str(i) for i in range(piece.grid[depth])]

    def starting_with(self, prefix: str = "") -> Iterator[str]:
        """All keys that start with `prefix`."""
        for path in self._documents:
            key = f"{path}/{DOCUMENT}" if path else DOCUMENT
            if key.startswith(prefix):
                yield key
        for path, piece in self._pieces.items():
            chunks = f"{path}/c"
            if chunks.startswith(prefix) or prefix.startswith(chunks):
                keys = (chunk_object_key(piece, position) for position in range(piece.num_chunks))
                yield from (key for key in keys if key.startswith(prefix))

    def _array(self, path: str) -> tuple[Piece, Sequence[str]] | None:
        """The array that a path leads into, and the rest of the path. Arrays are never nested."""
        parts = path.split("/")
        for end in range(1, len(parts) + 1):
            piece = self._pieces.get("/".join(parts[:end]))
            if piece is not None:
                return piece, parts[end:]
        return None

    def _chunk(self, key: str) -> tuple[TensorRecord, Piece, int] | None:
        """The chunk with that key: tensor, array, position in grid order; None if there is none."""
        chunk = split_chunk_key(key, self._pieces)
        return None if chunk is None else (self._tensors[chunk[0].path], *chunk)


def stored_chunk(
    reader: ChunkReader, name: str, dtype: np.dtype[np.generic], piece: Piece, position: int
) -> bytes:
    """A chunk's stored bytes with the checksum, verified.

    They are for readers that decode chunks themselves.

    Args:
        reader: reads them.
        name: the tensor, for messages.
        dtype: the stored dtype.
        piece: the array.
        position: the chunk's position in grid order.
    """
    (request,) = reader.source.resolve(
        [Request(name, dtype, [piece], BoxArray.of([], len(piece.shape)), [])]
    )
    if as_readable(reader.finder.source(request)).codec in CODECS.values():
        return reader.stored_chunk(request, position)
    # Differences, which zarr has no codec for.
    rows = np.zeros((1, room_for(piece.chunks, dtype.itemsize)), np.uint8)
    elements = rows[:, :-CHECKSUM_BYTES].view(dtype).reshape(piece.chunks)
    reader.read(
        [Request(name, dtype, [piece], chunk_boxes(piece, np.array([position])), [elements])]
    )
    return close(rows, None)[0].tobytes()
