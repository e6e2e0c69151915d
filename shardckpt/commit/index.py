"""Metadata for all other zarr readers, built after all hosts have written.

Packed layout: one OCDBT database over the complete attempt. Few chunks and documents make one leaf (`write_index`). For many, the hosts'
lanes, which are databases below it, are merged by TensorStore (`merge_lanes`). Merging copies references, not chunks; the `zarr.json`
documents are written in a transaction of their own. A key that two lanes have would be lost silently, so the keys are counted afterwards.

Plain layout: the `zarr.json` files of arrays and groups, the root with consolidated metadata.

`stock_spec` and `stock_url` say how stock TensorStore opens an array of either layout. Our own readers use the chunk tables
and none of this.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import tensorstore as ts

from shardckpt.errors import CommitError, FormatError
from shardckpt.format.zarr_arrays import PLAIN_ROOT, encode_document, group_json, parent_groups, plain_key
from shardckpt.io import ocdbt
from shardckpt.io.failures import storage_errors
from shardckpt.io.files import LARGEST_WHOLE, clear
from shardckpt.io.store import Store, shared_context, with_new_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from shardckpt.io.ocdbt import Place, Version
    from shardckpt.io.url import Location

_MOST_INSIDE = 1 << 20
"""Most bytes of a value inside a node, the format's limit. A document inside is covered by the node's checksum; one outside is not."""
_CONFIG = {
    "max_inline_value_bytes": _MOST_INSIDE,
    "compression": {"id": "zstd"},
}
_MANIFEST = "manifest.ocdbt"
_LEAF = "d/leaf"
MOST_IN_A_LEAF = 1 << 12
"""Most chunks and documents of an index that `write_index` makes. TensorStore takes five requests, one after another, to merge indexes."""
_MOST_HEIGHT = 16
"""Height that a tree of valid nodes never exceeds; a damaged tree might have cycles."""


@with_new_keys
def merge_lanes(
    attempt: Store,
    lanes: Sequence[str],
    documents: Callable[[], Iterable[tuple[str, bytes]]],
    *,
    values: Mapping[str, bytes] | None = None,
    expected_chunks: int,
    expected_bytes: int,
) -> None:
    """Build the merged index of an attempt; if one is there already, the result is the same.

    Args:
        attempt: the attempt's place.
        lanes: OCDBT databases relative to it.
        documents: yields array path and encoded `zarr.json` of each array; the groups' documents are made here. Called again where all is
            repeated because keys were rotated.
        values: key → chunk, for chunks that no lane has; None: there are none.
        expected_chunks: number of chunks in all lanes together.
        expected_bytes: their stored bytes.

    Raises:
        CommitError: two lanes have the same chunk, or chunks are missing.
        StorageError: the storage failed.
    """
    attempt.make_parents("d/x")
    manifest = attempt.local_path(_MANIFEST)
    if manifest is not None:
        clear(manifest)
    with storage_errors("merge the index of", attempt):
        database = _database(attempt, _CONFIG)
        # Two transactions: if one transaction copies and writes, TensorStore 0.1.86 stores the copied values empty.
        # The few documents come first, because the second transaction rewrites the nodes that it touches.
        with ts.Transaction() as writes:
            within = database.with_transaction(writes)
            written = _await(within.write(key, data) for key, data in chain(packed_documents(documents()), (values or {}).items()))
        with ts.Transaction() as copies:
            within = database.with_transaction(copies)
            _await(_database(attempt.sub(lane)).experimental_copy_range_to(within) for lane in lanes)
        found = _versions(attempt)[-1]
    # A document of more than 1 MiB is stored outside the nodes, like a chunk.
    if found.num_keys != expected_chunks + written or found.num_indirect_value_bytes < expected_bytes:
        raise CommitError(
            f"{attempt}: the hosts wrote {expected_chunks} chunks of {expected_bytes} bytes, the merged index has "
            f"{found.num_keys - written} of {found.num_indirect_value_bytes}; two hosts wrote the same chunk, or an array's "
            f"path is another's chunk. Nothing was published."
        )


@with_new_keys
def write_index(
    attempt: Store,
    chunks: Callable[[], Iterable[tuple[str, str, int, int]]],
    documents: Callable[[], Iterable[tuple[str, bytes]]],
    values: Mapping[str, bytes],
) -> bool:
    """Build the merged index of an attempt with few chunks, as one leaf; if one is there already, the result is the same.

    Returns False, and writes nothing, if a document is too large for a node.

    Args:
        attempt: the attempt's place.
        chunks: yields the chunks in data files: key, file relative to the attempt, offset and bytes. Called as `documents` is.
        documents: as for `merge_lanes`.
        values: as for `merge_lanes`.

    Raises:
        CommitError: TensorStore does not find every key.
        StorageError: the storage failed.
    """
    inside = {key.encode(): data for key, data in chain(packed_documents(documents()), values.items())}
    if max(map(len, inside.values()), default=0) > _MOST_INSIDE:
        return False
    places = {key.encode(): (file, offset, length) for key, file, offset, length in chunks()}
    files = {file: i for i, file in enumerate(dict.fromkeys(file for file, _, _ in places.values()))}
    keys = sorted([*inside, *places])
    rows = np.zeros((len(keys), 3), np.int64)
    for row, key in zip(rows, keys, strict=True):
        if key in places:
            file, *row[1:] = places[key]
            row[0] = files[file]
    file_number, offset, length = (rows[:, i] for i in range(3))
    node = ocdbt.leaf_node(keys, list(files), file_number, offset, length, [inside.get(key) for key in keys])
    attempt.write(_LEAF, node)
    attempt.write(_MANIFEST, ocdbt.manifest(_LEAF, len(node), len(keys), int(length.sum())))
    with storage_errors("read back the index of", attempt):
        found = _database(attempt).list().result()
    if found != keys:
        raise CommitError(f"{attempt}: TensorStore finds {len(found)} keys in the merged index where {len(keys)} were written.")
    return True


def _await(futures: Iterable[Any]) -> int:
    """Start all futures, then wait for each: a write whose future is dropped may be left out of the commit. Their number."""
    started = list(futures)
    for future in started:
        future.result()
    return len(started)


def write_plain_documents(attempt: Store, documents: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the `zarr.json` files of the plain layout, the root's with consolidated metadata.

    Args:
        attempt: the attempt's place.
        documents: array path → its `zarr.json`; the groups' documents are made here.
    """
    for key, data in plain_documents(documents).items():
        attempt.write(key, data)


def packed_documents(documents: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, bytes]]:
    """Key in the merged index and encoded `zarr.json` of every array and of every group above it."""
    paths = []
    for path, document in documents:
        paths.append(path)
        yield document_key(path), document
    for path in parent_groups(paths):
        yield document_key(path), encode_document(group_json())


def plain_documents(documents: Mapping[str, Mapping[str, Any]]) -> dict[str, bytes]:
    """The documents as objects of the attempt; the root has consolidated metadata and comes last: a reader that sees it sees all."""
    arrays = {plain_key(path).removeprefix(f"{PLAIN_ROOT}/"): document for path, document in documents.items()}
    groups = {path: group_json() for path in parent_groups(arrays) if path}
    members: dict[str, Any] = {**groups, **arrays}
    everything = [*members.items(), ("", group_json(members=members))]
    return {f"{PLAIN_ROOT}/{document_key(path)}": encode_document(document) for path, document in everything}


def dump_index(attempt: Store) -> dict[str, Place]:
    """Every chunk of the merged index: key → place. Some 400 bytes of memory per chunk; see `index_entries`."""
    return dict(index_entries(attempt))


def index_entries(attempt: Store) -> Iterator[tuple[str, Place]]:
    """The chunks of an index in files; as `index_values`, without the values that are in the index itself.

    A document that is too large for a node is included, because it has a place like a chunk.
    """
    return ((key, value) for key, value in index_values(attempt) if not isinstance(value, bytes))


def index_values(attempt: Store) -> Iterator[tuple[str, Place | bytes]]:
    """The values of an index (merged or a host's own), or their places in files; node after node in order of their keys.

    The intermediate versions that TensorStore made, which no reader uses, are walked last, so that damage to their nodes is found too.

    Raises:
        MissingDataError: there is no index, or a part of it is gone.
        StorageError: the index cannot be read, or is damaged.
        FormatError: the index has a form that neither TensorStore nor we can read.
    """
    seen: set[Place] = set()
    newest, *older = _versions(attempt)[::-1]
    yield from _entries(attempt, newest.node, b"", seen, 0)
    for version in older:
        for _ in _entries(attempt, version.node, b"", seen, 0):
            pass


def stock_spec(location: Location, attempt: str, array_path: str, layout: str = "packed") -> dict[str, Any]:
    """The spec with which stock TensorStore opens an array; a missing chunk is an error."""
    place = location.join(attempt)
    strict = {"fill_missing_data_reads": False, "store_data_equal_to_fill_value": True}
    if layout == "packed":
        return {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": place.kvstore(), "path": f"{array_path}/"}, **strict}
    return {"driver": "zarr3", "kvstore": place.join(plain_key(array_path)).kvstore(), **strict}


def stock_url(location: Location, attempt: str, array_path: str, layout: str = "packed") -> str:
    """The url with which stock TensorStore opens an array, for people to paste."""
    place = location.join(attempt)
    if layout == "packed":
        return f"{place.url}/|ocdbt:|zarr3:{quote(array_path)}/"
    return f"{place.join(plain_key(array_path)).url}/|zarr3:"


def _database(place: Store, config: Mapping[str, Any] | None = None, context: ts.Context | None = None) -> Any:
    """Open the OCDBT database at a place."""
    spec: dict[str, Any] = {"driver": "ocdbt", "base": place.location.kvstore()}
    if config is not None:
        spec["config"] = config
    return ts.KvStore.open(spec, context=context or shared_context(place.location)).result()


def _versions(place: Store) -> list[Version]:
    """All versions of a database, the newest last."""
    with storage_errors("read the index of", place):
        return ocdbt.read_manifest(place.read(_MANIFEST))


def _entries(place: Store, node: Place | None, prefix: bytes, seen: set[Place], depth: int) -> Iterator[tuple[str, Place | bytes]]:
    """The values at and below one node, whose keys all start with `prefix`; nodes in `seen` are skipped."""
    if node is None or node in seen:
        return
    seen.add(node)
    if depth > _MOST_HEIGHT:
        raise FormatError(f"{place}: the index is more than {_MOST_HEIGHT} nodes high; it is damaged.")
    file, offset, length = node
    if length > LARGEST_WHOLE:
        raise FormatError(
            f"{place}: the index has a node of {length} bytes, at most {LARGEST_WHOLE} are expected; it was not written by shardckpt."
        )
    with storage_errors("read the index of", place):
        found = ocdbt.read_node(place.read(file, offset, offset + length))
        for key, value in found.values:
            yield (prefix + key).decode(), value
        for key, inside in found.inside:
            yield (prefix + key).decode(), inside
    for child_prefix, child in found.children:
        yield from _entries(place, child, prefix + child_prefix, seen, depth + 1)


def document_key(path: str) -> str:
    """The key of the `zarr.json` of an array or group."""
    return f"{path}/zarr.json" if path else "zarr.json"
