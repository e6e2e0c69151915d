"""The merged index of an attempt and the chunk table of all hosts, as a lone host writes them.

The committer does the same for several hosts (`assemble`).
"""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.commit import index
from shardckpt.commit.small_tensors import SMALL
from shardckpt.format.documents import TableReference
from shardckpt.format.zarr_arrays import chunk_object_keys, encoded_documents
from shardckpt.io.together import Uploads

if TYPE_CHECKING:
    from shardckpt.format.structure import Structure
    from shardckpt.format.table import Table
    from shardckpt.io.store import Store

TABLE = "table"
"""All hosts' chunk tables as one, relative to the attempt."""


def write_merged(
    place: Store,
    table: Table,
    structure: Structure,
    compression: str | None,
    nodes: str,
    leaf: bytes,
) -> index.MergedIndex | None:
    """Write the merged index and the table of all, for the only host of an attempt.

    They are written before the host's record, in the layout "packed".

    If that fails, the host's data is complete all the same. The manifest is deleted, so that the
    committer writes the index and the table. The file `nodes` has the leaf in any case. If a bucket
    applies a lost write of the manifest later, all that it refers to is there.

    Args:
        place: the attempt.
        table: the host's chunk table.
        structure: the structure; all of its chunks are in the table.
        compression: of the chunks.
        nodes: the file with the leaf of the host's own index; the nodes of the merged one follow in
            it.
        leaf: this leaf.

    Returns:
        The index, to be checked before the host's record is written; None: it could not be written.
    """
    try:
        documents = [*encoded_documents(structure, compression)]
        merged = index.merged_index(
            place, chunk_places(table, structure), documents, {}, nodes, leaf
        )
        # Before the manifest: a committer that finds the index relies on the table.
        with Uploads(place) as uploads:
            write_table(uploads, TABLE, table)
            merged.write_nodes(uploads)
        place.write(index.MANIFEST, merged.manifest)
    except Exception:  # noqa: BLE001  (whatever it is: after the host's record, the committer does this again, and raises it)
        place.delete(index.MANIFEST)
        if not place.exists(nodes):  # else they stay: a bucket may apply a lost write later
            place.write(nodes, leaf)
        return None
    return merged


def check_merged(place: Store, merged: index.MergedIndex) -> None:
    """Check what `write_merged` has written; if that fails, the manifest is deleted as there."""
    try:
        merged.check(place)
    except Exception:  # noqa: BLE001  (as above)
        place.delete(index.MANIFEST)


def chunk_places(table: Table, structure: Structure) -> index.Chunks:
    """The chunks that hosts wrote into data files."""
    pieces = {piece.path: piece for tensor in structure.tensors.values() for piece in tensor.pieces}
    own = np.array([file != SMALL for file in table.files], bool)[table.rows.file]
    keys: list[str] = []
    for path, count in table.counts.items():
        keys += chunk_object_keys(pieces[path], table.rows.chunk[len(keys) : len(keys) + count])
    columns = (table.rows.file, table.rows.offset, table.rows.length)
    rows = np.stack([column[own].astype(np.int64) for column in columns], axis=1)
    return index.Chunks([key.encode() for key in compress(keys, own)], table.files, rows)


def write_table(place: Store | Uploads, key: str, table: Table) -> TableReference:
    """Write a chunk table, or begin to; return the reference to it."""
    data = table.encode()
    place.write(key, data)
    return TableReference.of(key, data, len(data) - table.body_bytes)
