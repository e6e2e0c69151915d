"""The zarr v3 documents of a checkpoint: what stock TensorStore and zarr-python read.

Pure: dicts in, dicts out. Our own readers take nothing from these documents; they are there so that every other
zarr reader finds ordinary arrays (zarr v3 core specification, 2024-2026: `bytes`, `zstd` and `crc32c` codecs, a
regular grid, the default chunk key encoding).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy as np

    from shardckpt.layout.dtypes import DType

__all__ = ["ZSTD_LEVEL", "array_json", "chunk_key", "codecs_json", "consolidated", "group_json", "parent_groups"]

Json = dict[str, Any]

ZSTD_LEVEL = 1
"""Fast enough for a training loop; what levels above gain on floats is a few per cent. Readers ignore it."""


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
        dtype: its *stored* type goes into the document; the logical one belongs into the attributes.
        chunk_shape: elements per dimension of a chunk, each at least 1 (also where the array has none).
        compression: None or "zstd".
        attributes: JSON, kept as it is.
    """
    assert len(shape) == len(chunk_shape), "a chunk has as many dimensions as its array"
    assert all(n > 0 for n in chunk_shape), "zarr has no empty chunks; use 1 where a dimension is empty"
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [int(n) for n in shape],
        "data_type": dtype.zarr,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [int(n) for n in chunk_shape]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": _fill_value(dtype.storage),
        "codecs": codecs_json(dtype, compression),
        "attributes": dict(attributes or {}),
        "storage_transformers": [],
    }


def codecs_json(dtype: DType, compression: str | None) -> list[Json]:
    """The codecs, in the order of encoding; one-byte types have no byte order to state."""
    codecs: list[Json] = [{"name": "bytes"}]
    if dtype.storage.itemsize > 1:
        codecs[0]["configuration"] = {"endian": "little"}
    if compression is not None:
        assert compression == "zstd", "zstd is the one compression of format version 1"
        codecs.append({"name": "zstd", "configuration": {"level": ZSTD_LEVEL, "checksum": False}})
    return [*codecs, {"name": "crc32c"}]


def group_json(attributes: Mapping[str, Any] | None = None, members: Mapping[str, Json] | None = None) -> Json:
    """The `zarr.json` of a group.

    Args:
        attributes: JSON, kept as it is.
        members: path → document of everything below, to be consolidated into this one (see `consolidated`).
    """
    document: Json = {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes or {})}
    if members is not None:
        document["consolidated_metadata"] = consolidated(members)
    return document


def consolidated(members: Mapping[str, Json]) -> Json:
    """Everything below a group in one document, as zarr-python 3.1 writes and reads it.

    zarr-python takes each group's own `consolidated_metadata` to be empty when it is itself a member.
    """
    return {"kind": "inline", "must_understand": False, "metadata": {path: members[path] for path in sorted(members)}}


def parent_groups(array_paths: Iterable[str]) -> list[str]:
    """All groups above those arrays, the root ("") first.

    >>> parent_groups(["model/layers/w", "step"])
    ['', 'model', 'model/layers']
    """
    groups = {""}
    for path in array_paths:
        names = path.split("/")
        groups.update("/".join(names[:i]) for i in range(1, len(names)))
    return sorted(groups)


def chunk_key(index: Sequence[int]) -> str:
    """A chunk's key below its array (default chunk key encoding with "/").

    >>> chunk_key((0, 12)), chunk_key(())
    ('c/0/12', 'c')
    """
    return "/".join(["c", *map(str, index)])


def _fill_value(stored: np.dtype[Any]) -> Any:
    """Zero, as JSON, the way zarr writes that type. Every chunk is stored, so no reader should ever see it."""
    if stored.kind == "b":
        return False
    if stored.kind in "iu" or stored.name in ("int2", "int4"):
        return 0
    if stored.kind == "c":
        return [0.0, 0.0]
    return 0.0
