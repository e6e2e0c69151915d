"""The zarr arrays of a checkpoint: the keys of their chunks, and their `zarr.json` documents.

Arrays follow the zarr v3 core specification (2024-2026): `bytes`, `zstd` and `crc32c` codecs, a
regular grid, the default chunk key encoding. Stock TensorStore and zarr-python find ordinary
arrays; our own readers do not read the documents.

1. Documents are dicts, both as input and as output. An array's attributes contain mesh, spec and
   OpSharding.
2. A chunk's key is `model/w/c/0/1`. The plain layout has an object for each chunk, and a directory
   for each component. There a component's suffix `.__lock` is written `=2E__lock`, because
   TensorStore uses that suffix for its lock files. No array path contains `=2E__lock` otherwise.
   (The packed layout has its keys in an index, unchanged.)
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import lru_cache
from itertools import repeat
from json.encoder import encode_basestring
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt.plan.pieces import whole_chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardckpt.format.structure import Structure, TensorRecord
    from shardckpt.layout.box import Box
    from shardckpt.layout.dtypes import DType
    from shardckpt.plan.pieces import Piece

Json = dict[str, Any]

_FEW = 8
"""Chunks whose keys are made one by one, which is quicker."""
ZSTD_LEVEL = 1
"""Fast enough for a training loop; higher levels gain only a few per cent on floats. Readers ignore
it."""


# --- documents


def array_json(
    shape: Sequence[int],
    dtype: DType,
    chunk_shape: Sequence[int],
    compression: str | None = None,
    attributes: Mapping[str, Any] | None = None,
) -> Json:
    """The `zarr.json` of an array.

    Args:
        shape: elements per dimension.
        dtype: its *stored* type goes into the document; the logical type belongs in the attributes.
        chunk_shape: elements per dimension of a chunk, each at least 1 (also if the array has no
            elements).
        compression: None, "zstd" or "difference".
        attributes: JSON, stored unchanged.
    """
    assert len(shape) == len(chunk_shape), "a chunk has as many dimensions as its array"
    assert all(n > 0 for n in chunk_shape), (
        "zarr has no empty chunks; use 1 where a dimension is empty"
    )
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [int(n) for n in shape],
        "data_type": dtype.zarr,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": [int(n) for n in chunk_shape]},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": _fill_value(dtype.storage),
        "codecs": codecs_json(dtype, compression),
        "attributes": dict(attributes or {}),
        "storage_transformers": [],
    }


def codecs_json(dtype: DType, compression: str | None) -> list[Json]:
    """The codecs, in the order of encoding; one-byte types need no byte order."""
    codecs: list[Json] = [{"name": "bytes"}]
    if dtype.storage.itemsize > 1:
        codecs[0]["configuration"] = {"endian": "little"}
    # zarr has no codec for differences; `Checkpoint.zarr_store` shows their chunks uncompressed.
    if compression == "zstd":
        codecs.append({"name": "zstd", "configuration": {"level": ZSTD_LEVEL, "checksum": False}})
    return [*codecs, {"name": "crc32c"}]


def group_json(
    attributes: Mapping[str, Any] | None = None, members: Mapping[str, Json] | None = None
) -> Json:
    """The `zarr.json` of a group.

    Args:
        attributes: JSON, stored unchanged.
        members: path → document of everything below, to be consolidated into this document (see
            `consolidated`).
    """
    document: Json = {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes or {})}
    if members is not None:
        document["consolidated_metadata"] = consolidated(members)
    return document


def consolidated(members: Mapping[str, Json]) -> Json:
    """All documents below a group, consolidated as zarr-python 3.1 writes and reads them.

    zarr-python treats the `consolidated_metadata` of a member group as empty.
    """
    return {
        "kind": "inline",
        "must_understand": False,
        "metadata": {path: members[path] for path in sorted(members)},
    }


def parent_groups(array_paths: Iterable[str]) -> list[str]:
    """All groups above those arrays, the root ("") first.

    >>> parent_groups(["model/layers/w", "step"])
    ['', 'model', 'model/layers']
    """
    groups = {""}
    above = {path.rpartition("/")[0] for path in array_paths}
    while not above <= groups:
        groups |= above
        above = {path.rpartition("/")[0] for path in above}
    return sorted(groups)


def chunk_key(index: Sequence[int]) -> str:
    """A chunk's key below its array (default chunk key encoding with "/").

    >>> chunk_key((0, 12)), chunk_key(())
    ('c/0/12', 'c')
    """
    return "/".join(["c", *map(str, index)])


def _fill_value(stored: np.dtype[Any]) -> Any:
    """Zero as JSON, in zarr's form for that type.

    Every chunk is stored, so readers should never need it.
    """
    if stored.kind == "b":
        return False
    if stored.kind in "iu" or stored.name in ("int2", "int4"):
        return 0
    if stored.kind == "c":
        return [0.0, 0.0]
    return 0.0


LONGEST_TEXT = 1 << 14
"""Most characters of a sharding that are repeated in an array's attributes."""


def zarr_documents(
    structure: Structure, compression: str | None, *, in_bases: bool = False
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each array's path and document.

    Args:
        structure: the checkpoint's structure.
        compression: compression of its own chunks.
        in_bases: include tensors that lie in bases; a stock reader would find no chunks beside
            their documents.
    """
    document = zarr_document_maker(structure, compression)
    for tensor in structure.tensors.values():
        if tensor.base is None or in_bases:
            for piece in tensor.pieces:
                yield piece.path, document(tensor, piece)


def encoded_documents(structure: Structure, compression: str | None) -> Iterator[tuple[str, bytes]]:
    """The path and the encoded document of each array that lies in the checkpoint itself."""
    encoded = document_encoder(structure, compression)
    for tensor in structure.tensors.values():
        if tensor.base is None:
            for piece in tensor.pieces:
                yield piece.path, encoded(tensor, piece)


def document_encoder(
    structure: Structure, compression: str | None
) -> Callable[[TensorRecord, Piece], bytes]:
    """A function that makes and encodes the document of a piece of a tensor.

    The tensor lies in the checkpoint itself.

    Documents of most tensors differ in the name alone, so each form of document is encoded once,
    and cut where the name goes.
    """
    document = zarr_document_maker(structure, compression)
    forms: dict[Hashable, tuple[str, str]] = {}

    def encoded(tensor: TensorRecord, piece: Piece) -> bytes:
        form = (
            tensor.layout,
            tensor.shape,
            tensor.dtype.name,
            piece.start,
            piece.shape,
            piece.chunks,
        )
        cut = forms.get(form)
        if cut is None:
            before, _, after = (
                encode_document(document(replace(tensor, name=_NAME), piece))
                .decode()
                .partition(json.dumps(_NAME))
            )
            cut = forms[form] = before, after
        return f"{cut[0]}{encode_basestring(tensor.name)}{cut[1]}".encode()

    return encoded


_NAME = "\0"
"""A name that no tensor has."""


def encode_document(document: Mapping[str, Any]) -> bytes:
    """A document's bytes."""
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def zarr_document_maker(
    structure: Structure, compression: str | None
) -> Callable[[TensorRecord, Piece], dict[str, Any]]:
    """A function that makes the document of a tensor's piece.

    The arguments are described in `zarr_documents`.
    """
    number, doc = structure.layouts_json()
    forms: dict[Hashable, dict[str, Any]] = {}
    """Documents without attributes, shared by equal arrays."""

    def document(tensor: TensorRecord, piece: Piece) -> dict[str, Any]:
        codec = compression if tensor.base is None else tensor.base.base.compression
        attribute: dict[str, Any] = {
            "name": tensor.name,
            "dtype": tensor.dtype.name,
            "shape": list(tensor.shape),
        }
        if tensor.layout is not None:
            sharding = doc["shardings"][number[tensor.layout, len(tensor.shape)]]
            attribute |= {k: v for k, v in sharding.items() if k != "mesh"}
            if "mesh" in sharding:
                attribute["mesh"] = dict(doc["meshes"][sharding["mesh"]])
            listed = attribute.get("mesh", attribute).get("devices")
            if (
                max(
                    len(sharding.get("op_sharding", "")),
                    2 * len(listed) if isinstance(listed, list) else 0,
                )
                > LONGEST_TEXT
            ):
                # Irregular device ids of very many devices: only the record has them, once, instead
                # of every array.
                for key in ("op_sharding", "devices"):
                    attribute.pop(key, None)
                attribute.get("mesh", {}).pop("devices", None)
        start = {} if piece.shape == tensor.shape else {"start": list(piece.start)}
        cut = (piece.shape, tensor.dtype.name, piece.chunks, codec)
        form = forms.get(cut)
        if form is None:
            form = forms[cut] = array_json(piece.shape, tensor.dtype, piece.chunks, codec)
        return {**form, "attributes": {"shardckpt": {**attribute, **start}}}

    return document


# --- keys of chunks

PLAIN_ROOT = "zarr"
"""The zarr group of the plain layout, relative to the attempt."""
_LOCK = re.compile(r"\.__lock(?=/|\Z)")


def plain_key(key: str) -> str:
    """The key of a chunk, a document or an array in the plain layout, relative to the attempt.

    >>> plain_key("model/w.__lock/c/0/1")
    'zarr/model/w=2E__lock/c/0/1'
    """
    return f"{PLAIN_ROOT}/{_LOCK.sub('=2E__lock', key) if '.__lock' in key else key}"


def chunk_object_key(piece: Piece, position: int) -> str:
    """The key of a chunk, relative to the root of the arrays.

    >>> from shardckpt.plan.pieces import Piece
    >>> chunk_object_key(Piece("w", (0, 0), (4, 4), (2, 2)), 3)
    'w/c/1/1'
    """
    index = []
    for n in reversed(piece.grid):
        position, i = divmod(position, n)
        index.append(i)
    return f"{piece.path}/{chunk_key(index[::-1])}"


def chunk_places(piece: Piece, box: Box) -> tuple[list[int], list[str]]:
    """Grid positions of an array's chunks in a box, and the ends of their keys.

    The end of a key is the part after the array's path.
    """
    positions, ends = [0], ["/c"]
    for span, n in zip(whole_chunks(piece, box), piece.grid, strict=True):
        positions = [row * n + i for row in positions for i in span]
        ends = [f"{end}/{i}" for end in ends for i in span]
    return positions, ends


def chunk_object_keys(piece: Piece, positions: NDArray[np.integer]) -> list[str]:
    """The keys of many chunks of one array, as `chunk_object_key` makes them.

    >>> from shardckpt.plan.pieces import Piece
    >>> chunk_object_keys(Piece("w", (0, 0), (4, 4), (2, 2)), np.array([0, 3]))
    ['w/c/0/0', 'w/c/1/1']
    """
    # An array of one chunk, as most small tensors are.
    if len(positions) == 1 and piece.shape == piece.chunks:
        return [f"{piece.path}/c{'/0' * len(piece.shape)}"]
    if len(positions) < _FEW or not piece.grid:
        return [chunk_object_key(piece, position) for position in positions.tolist()]
    columns = (map(str, column.tolist()) for column in np.unravel_index(positions, piece.grid))
    return ["/".join(index) for index in zip(repeat(f"{piece.path}/c"), *columns, strict=False)]


def split_chunk_key(key: str, pieces: dict[str, Piece]) -> tuple[Piece, int] | None:
    """The array and the position of a chunk; None if no array has such a chunk.

    >>> from shardckpt.plan.pieces import Piece
    >>> w = Piece("w", (0, 0), (4, 4), (2, 2))
    >>> split_chunk_key("w/c/1/1", {"w": w})[1]
    3
    """
    # A scalar's only chunk is called "c"; a component of a name may have the same name.
    if key.endswith("/c"):
        path, index = key[:-2], ""
    else:
        path, _, index = key.rpartition("/c/")
        if not index:  # "s/c/" is not a second key of a scalar's chunk
            return None
    piece = pieces.get(path)
    position = None if piece is None else chunk_position(index, piece.grid)
    return None if piece is None or position is None else (piece, position)


@lru_cache(1 << 12)
def chunk_position(index: str, grid: tuple[int, ...]) -> int | None:
    """The position of the chunk whose key ends with these coordinates.

    None if the grid has no such chunk.
    """
    parts = index.split("/") if index else []
    if len(parts) != len(grid) or not all(
        p.isdecimal() and p.isascii() and len(p) < 20 for p in parts
    ):
        return None
    position = 0
    for i, n in zip(map(int, parts), grid, strict=True):
        if i >= n:
            return None
        position = position * n + i
    # Each chunk has one key: "w/c/01" is not a valid one.
    return position if "/".join([str(int(p)) for p in parts]) == index else None


# --- sizes of stored chunks

CHECKSUM_BYTES = 4


def room_for(chunk_shape: tuple[int, ...], itemsize: int) -> int:
    """Bytes of an uncompressed stored chunk: its elements and its checksum."""
    return prod(chunk_shape) * itemsize + CHECKSUM_BYTES


def largest_chunk(tensors: Iterable[TensorRecord]) -> int:
    """Bytes of the largest chunk of some tensors, with its checksum."""
    return max(
        (room_for(p.chunks, t.dtype.itemsize) for t in tensors for p in t.pieces if p.num_chunks),
        default=0,
    )
