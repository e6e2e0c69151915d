"""Metadata for all other zarr readers, and the table of all chunks, which is written before it.

The committer builds them after all hosts have written, or a lone host before its record
(`write_merged`).

Packed layout: one OCDBT database over the complete attempt (`write_index`), which refers to the
hosts' data files. Before that, each host has written databases of its own over its data files, its
*lanes* (`Lane`). All are written without TensorStore, whose conditional writes of a file go by
its inode number, and never end where that changes with each look (as on some mounts of buckets).

Plain layout: the `zarr.json` files of arrays and groups, the root with consolidated metadata.

`stock` says how stock TensorStore opens an array of either layout. Our own readers use chunk tables
and no index.
"""

from __future__ import annotations

from functools import partial
from itertools import chain, compress, pairwise, repeat
from threading import Event
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tensorstore as ts

from shardckpt.commit.small_tensors import SMALL
from shardckpt.errors import CommitError, FormatError, StorageError
from shardckpt.format.documents import TableReference
from shardckpt.format.zarr_arrays import (
    PLAIN_ROOT,
    chunk_object_keys,
    encode_document,
    encoded_documents,
    group_json,
    parent_groups,
    plain_key,
)
from shardckpt.io import ocdbt
from shardckpt.io.failures import storage_errors
from shardckpt.io.files import LARGEST_WHOLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardckpt.format.structure import Structure
    from shardckpt.format.table import Table
    from shardckpt.io.ocdbt import Place, Version
    from shardckpt.io.requests import ObjectWriter
    from shardckpt.io.store import Store

_MOST_INSIDE = 1 << 20
"""Most bytes of a value inside a node, the format's limit. A document inside is covered by the
node's checksum; one outside is not."""
TABLE = "table"
"""All hosts' chunk tables as one, relative to the attempt."""
MANIFEST = "manifest.ocdbt"
TREE = "d/tree"
"""The leaf of a lane."""
_NODES = "d/leaf"
"""The leaf of a small index, all nodes of a large one."""
_LARGE = "d/documents"
"""Documents that are too large for a node."""
_MOST_HEIGHT = 16
"""Height that a tree of valid nodes never exceeds; a damaged tree might have cycles."""
_places_seen = Event()
"""Set when TensorStore has returned the expected places of all chunks of one lane of this
process."""


class Chunks(NamedTuple):
    """Chunks in data files, in any order."""

    keys: Sequence[bytes]
    """n keys."""
    files: Sequence[str]
    """Data files, relative to the attempt."""
    rows: NDArray[np.int64]
    """(n, 3) index into `files`, offset of the first byte, bytes."""


class MergedIndex(NamedTuple):
    """The index of a complete attempt, to be written."""

    name: str
    """The file of the nodes, relative to the attempt."""
    nodes: bytes
    large: bytes
    """Documents that are too large for a node."""
    manifest: bytes
    keys: list[bytes]
    """All keys, ascending."""

    def write_nodes(self, uploads: ObjectWriter) -> None:
        """Begin to write all but the manifest."""
        uploads.write(self.name, self.nodes)
        if self.large:
            uploads.write(_LARGE, self.large)

    def check(self, attempt: Store) -> None:
        """Check that TensorStore finds all keys, or our own reader where it has no driver.

        Raises:
            CommitError: it finds others.
        """
        listed = sorted(attempt.with_new_keys(partial(_list_keys, attempt)))
        if listed != self.keys:
            reader = "TensorStore finds" if attempt.has_driver else "reading it back finds"
            raise CommitError(
                f"{attempt}: {reader} {len(listed)} keys in the index where {len(self.keys)} were "
                "written."
            )


def write_index(
    attempt: Store,
    chunks: Chunks,
    documents: Sequence[tuple[str, bytes]],
    values: Mapping[str, bytes],
) -> None:
    """Build the index of a complete attempt; if one is there already, the result is the same.

    Args:
        attempt: the attempt's place.
        chunks: as for `merged_index`.
        documents: as for `merged_index`.
        values: as for `merged_index`.

    Raises:
        CommitError: as for `merged_index`; or the index that is read back has other keys.
        StorageError: the storage failed.
    """
    index = merged_index(attempt, chunks, documents, values)
    with attempt.uploads() as uploads:
        index.write_nodes(uploads)
    attempt.write(MANIFEST, index.manifest)
    index.check(attempt)


def merged_index(
    attempt: Store,
    chunks: Chunks,
    documents: Sequence[tuple[str, bytes]],
    values: Mapping[str, bytes],
    name: str = _NODES,
    before: bytes = b"",
) -> MergedIndex:
    """Lay out the index of a complete attempt.

    Args:
        attempt: the attempt's place, for messages.
        chunks: the chunks in data files.
        documents: array path and encoded `zarr.json` of each array; the groups' documents are made
            here.
        values: key → chunk, for chunks that are in no data file.
        name: the file of the nodes, relative to the attempt.
        before: bytes that come before them in that file.

    Raises:
        CommitError: an array's path is another's chunk.
    """
    inside = {
        key.encode(): data for key, data in chain(packed_documents(documents), values.items())
    }
    large = {key: data for key, data in inside.items() if len(data) > _MOST_INSIDE}
    keys, files, rows = [*chunks.keys], [*chunks.files], chunks.rows
    if large:
        ends = np.cumsum([*map(len, large.values())])
        places = [
            (len(files), end - len(data), len(data))
            for end, data in zip(ends.tolist(), large.values(), strict=True)
        ]
        keys, files, rows = (
            [*keys, *large],
            [*files, _LARGE],
            np.concatenate([rows, np.array(places, np.int64)]),
        )
    small = [key for key in inside if key not in large]
    keys += small
    order = np.array(sorted(range(len(keys)), key=keys.__getitem__))
    keys = [keys[i] for i in order.tolist()]
    if (twice := next((key for key, after in pairwise(keys) if key == after), None)) is not None:
        raise CommitError(
            f"{attempt}: {twice.decode()} is a chunk or document of two arrays; nothing was "
            "published."
        )
    rows = np.concatenate([rows, np.zeros((len(small), 3), np.int64)])[order]
    held = [*repeat(None, len(keys) - len(small)), *(inside[key] for key in small)]
    nodes, manifest = ocdbt.tree(
        name, keys, files, rows, [held[i] for i in order.tolist()], len(before)
    )
    return MergedIndex(name, before + nodes, b"".join(large.values()), manifest, keys)


def write_merged(
    place: Store,
    table: Table,
    structure: Structure,
    compression: str | None,
    nodes: str,
    leaf: bytes,
) -> MergedIndex | None:
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
        merged = merged_index(place, places_in_files(table, structure), documents, {}, nodes, leaf)
        # Before the manifest: a committer that finds the index relies on the table.
        with place.uploads() as uploads:
            write_table(uploads, TABLE, table)
            merged.write_nodes(uploads)
        place.write(MANIFEST, merged.manifest)
    except Exception:  # noqa: BLE001  (whatever it is: after the host's record, the committer does this again, and raises it)
        place.delete(MANIFEST)
        if not place.exists(nodes):  # else they stay: a bucket may apply a lost write later
            place.write(nodes, leaf)
        return None
    return merged


def is_whole(place: Store, merged: MergedIndex) -> bool:
    """Whether what `write_merged` has written can be read; if not, the manifest must go."""
    try:
        merged.check(place)
    except Exception:  # noqa: BLE001  (as above)
        return False
    return True


def places_in_files(table: Table, structure: Structure) -> Chunks:
    """The chunks that hosts wrote into data files."""
    pieces = {piece.path: piece for tensor in structure.tensors.values() for piece in tensor.pieces}
    own = np.array([file != SMALL for file in table.files], bool)[table.rows.file]
    keys: list[str] = []
    for path, count in table.counts.items():
        keys += chunk_object_keys(pieces[path], table.rows.chunk[len(keys) : len(keys) + count])
    columns = (table.rows.file, table.rows.offset, table.rows.length)
    rows = np.stack([column[own].astype(np.int64) for column in columns], axis=1)
    return Chunks([key.encode() for key in compress(keys, own)], table.files, rows)


def write_table(place: ObjectWriter, key: str, table: Table) -> TableReference:
    """Write a chunk table, or begin to; return the reference to it."""
    data = table.encode()
    place.write(key, data)
    return TableReference.of(key, data, len(data) - table.body_bytes)


def is_by_host(attempt: Store) -> bool:
    """Whether the only host of an attempt has written the index.

    In this case the index's nodes are in the host's own folder, and as durable as its record.
    """
    manifest, _ = attempt.read_versioned(MANIFEST)
    if manifest is None:
        return False
    try:
        root = _versions(attempt, manifest)[-1].node
    except StorageError:  # damaged, or not by us: it is written anew
        return False
    return root is not None and root[0].startswith("hosts/")


def _list_keys(attempt: Store) -> list[bytes]:
    """The keys of an index, as TensorStore or our own reader lists them.

    Our own reader is used where TensorStore has no driver.
    """
    with storage_errors("read back the index of", attempt):
        return (
            _database(attempt).list().result()
            if attempt.has_driver
            else [key.encode() for key, _ in index_values(attempt)]
        )


class Lane(NamedTuple):
    """One of a host's own databases, to be written."""

    name: str
    """Relative to the attempt."""
    keys: list[bytes]
    """Keys of the chunks, ascending."""
    files: list[str]
    """Its data files."""
    places: NDArray[np.int64]
    """(n, 3) file, offset and length of each chunk."""

    def objects(self) -> dict[str, bytes]:
        """Key, relative to the attempt → bytes of the leaf and of the manifest."""
        leaf = ocdbt.leaf_node(self.keys, self.files, *self.places.T)
        nbytes = int(self.places[:, 2].sum())
        return {
            f"{self.name}/{TREE}": leaf,
            f"{self.name}/{MANIFEST}": ocdbt.manifest(TREE, len(leaf), len(self.keys), nbytes),
        }

    def write(self, attempt: Store) -> None:
        """Write it, and `check` it."""
        with attempt.uploads() as uploads:
            for key, data in self.objects().items():
                uploads.write(key, data)
        self.check(attempt)

    def check(self, attempt: Store) -> None:
        """Check that TensorStore finds every chunk.

        Raises:
            CommitError: it finds others, or elsewhere.
        """
        store = attempt.sub(self.name)
        store.with_new_keys(partial(_check_lane, store, self.keys, self.files, self.places))


def _check_lane(
    store: Store, keys: list[bytes], files: list[str], places: NDArray[np.int64]
) -> None:
    """Compare TensorStore's view with the chunks that were put.

    Keys are always compared, places only the first time in a process.

    Where TensorStore has no driver, our own reader's view is compared.
    `ts.ocdbt.dump`, which shows places, leaks some 500 bytes per key each time (0.1.86).
    """
    if not store.has_driver:
        placed = [
            (key.decode(), (files[file], offset, length))
            for key, (file, offset, length) in zip(keys, places.tolist(), strict=True)
        ]
        if [*index_values(store)] != placed:
            raise CommitError(
                f"{store}: the index does not have all {len(placed)} chunks at their places when "
                "it is read back."
            )
        return
    base = store.kvstore()
    if _places_seen.is_set():
        with storage_errors("read back", store):
            database = ts.KvStore.open(
                {"driver": "ocdbt", "base": base.spec()}, context=store.context()
            ).result()
            listed = database.list().result()
        if listed != keys:
            raise CommitError(
                f"{store}: TensorStore finds {len(listed)} chunks where {len(keys)} were put."
            )
        return
    with storage_errors("read back", store):
        root = ts.ocdbt.dump(base, context=store.context()).result()["versions"][-1]["root"]
        entries = ts.ocdbt.dump(base, root["location"], context=store.context()).result()["entries"]
    places_listed = [(e["key"], e.get("indirect_value")) for e in entries]
    expected = [
        (key, f"value::{files[file]}:{offset}:{length}")
        for key, (file, offset, length) in zip(keys, places.tolist(), strict=True)
    ]
    if places_listed != expected:
        raise CommitError(
            f"{store}: TensorStore finds {len(places_listed)} chunks where {len(expected)} were "
            "put, or not in their places."
        )
    _places_seen.set()


def write_plain_documents(attempt: Store, documents: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the `zarr.json` files of the plain layout, the root's with consolidated metadata.

    Args:
        attempt: the attempt's place.
        documents: array path → its `zarr.json`; the groups' documents are made here.
    """
    *members, (root, consolidated) = plain_documents(documents).items()
    with attempt.uploads() as uploads:
        for key, data in members:
            uploads.write(key, data)
    attempt.write(root, consolidated)


def packed_documents(documents: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, bytes]]:
    """Key in the merged index and encoded `zarr.json` of every array and every group above it."""
    paths = []
    for path, document in documents:
        paths.append(path)
        yield document_key(path), document
    for path in parent_groups(paths):
        yield document_key(path), encode_document(group_json())


def plain_documents(documents: Mapping[str, Mapping[str, Any]]) -> dict[str, bytes]:
    """The documents as objects of the attempt.

    The root has consolidated metadata and comes last: a reader that sees it sees all.
    """
    arrays = {
        plain_key(path).removeprefix(f"{PLAIN_ROOT}/"): document
        for path, document in documents.items()
    }
    groups = {path: group_json() for path in parent_groups(arrays) if path}
    members: dict[str, Any] = {**groups, **arrays}
    everything = [*members.items(), ("", group_json(members=members))]
    return {
        f"{PLAIN_ROOT}/{document_key(path)}": encode_document(document)
        for path, document in everything
    }


def index_values(attempt: Store) -> Iterator[tuple[str, Place | bytes]]:
    """The values of an index (merged or a host's own), or their places in files.

    Node after node in order of their keys.

    The intermediate versions that TensorStore made, which no reader uses, are walked last, so that
    damage to their nodes is found too.

    Raises:
        MissingDataError: there is no index, or a part of it is gone.
        StorageError: the index cannot be read, or is damaged.
        FormatError: the index has a form that neither TensorStore nor we can read.
    """
    seen: set[Place] = set()
    newest, *older = _versions(attempt, attempt.read(MANIFEST))[::-1]
    yield from _entries(attempt, newest.node, b"", seen, 0)
    for version in older:
        for _ in _entries(attempt, version.node, b"", seen, 0):
            pass


def _database(place: Store) -> Any:
    """Open the OCDBT database at a place with TensorStore."""
    spec = {"driver": "ocdbt", "base": place.location.kvstore()}
    return ts.KvStore.open(spec, context=place.context()).result()


def _versions(place: Store, manifest: bytes) -> list[Version]:
    """All versions of a database, the newest last."""
    with storage_errors("read the index of", place):
        return ocdbt.read_manifest(manifest)


def _entries(
    place: Store, node: Place | None, prefix: bytes, seen: set[Place], depth: int
) -> Iterator[tuple[str, Place | bytes]]:
    """The values at and below one node, whose keys all start with `prefix`.

    Nodes in `seen` are skipped.
    """
    if node is None or node in seen:
        return
    seen.add(node)
    if depth > _MOST_HEIGHT:
        raise FormatError(
            f"{place}: the index is more than {_MOST_HEIGHT} nodes high; it is damaged."
        )
    file, offset, length = node
    if length > LARGEST_WHOLE:
        raise FormatError(
            f"{place}: the index has a node of {length} bytes, at most {LARGEST_WHOLE} are "
            "expected; it was not written by shardckpt."
        )
    with storage_errors("read the index of", place):
        content = ocdbt.read_node(place.read(file, offset, offset + length))
        for key, value in content.values:
            yield (prefix + key).decode(), value
        for key, inside in content.inside:
            yield (prefix + key).decode(), inside
    for child_prefix, child in content.children:
        yield from _entries(place, child, prefix + child_prefix, seen, depth + 1)


def document_key(path: str) -> str:
    """The key of the `zarr.json` of an array or group."""
    return f"{path}/zarr.json" if path else "zarr.json"
