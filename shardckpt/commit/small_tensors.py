"""Chunks of small plain tensors, whose elements are in the hosts' contents, not in data files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt.format.stored_chunks import encode
from shardckpt.format.table import OWN_OBJECT, ArrayChunks, Table
from shardckpt.plan.pieces import chunk_boxes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.format.record import Contents
    from shardckpt.plan.pieces import Piece

SMALL_TABLE = "hosts/small/table"
"""The chunk table of the small plain tensors, for readers that cannot read the table of all
hosts."""
SMALL = "small"
"""Data file of the small plain tensors' chunks (packed layout), relative to the attempt."""


def small_chunks(
    contents: Contents, compression: str | None
) -> tuple[list[tuple[Piece, int, Any, int]], bytes]:
    """The chunks of the small tensors, and all their bytes concatenated.

    A chunk is given as piece, position, stored bytes and crc32c.
    """
    chunks = []
    for name, elements in sorted(contents.small.items()):
        tensor = contents.structure.tensors[name]
        whole = np.frombuffer(elements, tensor.dtype.storage).reshape(tensor.shape)
        for piece in tensor.pieces:
            boxes = chunk_boxes(piece, np.arange(piece.num_chunks))
            for position in range(piece.num_chunks):
                inside: Any = (*boxes[position].slices, ...)
                stored, crc = encode(whole[inside], piece.chunks, compression)
                chunks.append((piece, position, stored, crc))
    return chunks, b"".join(stored.tobytes() for _, _, stored, _ in chunks)


def small_table(chunks: Sequence[tuple[Piece, int, Any, int]], *, packed: bool) -> Table:
    """The chunk table of those chunks."""
    rows: dict[str, list[tuple[int, int, int, int, int]]] = {}
    offset = 0
    for piece, position, stored, crc in chunks:
        file, start = (0, offset) if packed else (OWN_OBJECT, 0)
        rows.setdefault(piece.path, []).append((position, file, start, len(stored), crc))
        offset += len(stored)
    return Table.of(
        [SMALL] if packed and chunks else [],
        {path: ArrayChunks.of_rows(of_array) for path, of_array in rows.items()},
    )
