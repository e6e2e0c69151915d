"""Parser of `.metadata`, the metadata file of torch.distributed.checkpoint.

It is a pickle of a `Metadata` (torch/distributed/checkpoint/metadata.py, torch 2.1 to 2.13). It has
for each name either a tensor's dtype, shape and chunks, or the mark of a value stored as bytes; the
file and offset of each of these; and, from the planner, the keys that lead to each name in the
nested state.

A pickle can run code, and DCP itself loads this one without a check. Here `unpickle` reads it,
which runs nothing, and it may name only `CLASSES`, the classes of such a file. Python's own
unpickler is never used, even if the user trusts the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from shardckpt.convert.formats.torch.objects import TABLE, Dtype
from shardckpt.convert.formats.torch.unpickling import Instance, unpickle
from shardckpt.errors import FormatError
from shardckpt.format.documents import LARGEST_DIMENSION, MOST_DIMENSIONS
from shardckpt.text import clip, shorten

if TYPE_CHECKING:
    from collections.abc import Mapping

_METADATA = "torch.distributed.checkpoint.metadata."
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch."
_STORED = "torch.distributed.checkpoint.filesystem._StorageInfo"
CLASSES = frozenset(
    (
        *TABLE,
        *(
            _METADATA + name
            for name in (
                *(
                    "Metadata",
                    "MetadataIndex",
                    "TensorStorageMetadata",
                    "BytesStorageMetadata",
                    "ChunkStorageMetadata",
                ),
                *("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
            )
        ),
        "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
        "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
        _STORED,
        # Python 3.13.
        *(
            f"{module}.{name}"
            for module in ("pathlib", "pathlib._local")
            for name in ("PosixPath", "PurePosixPath")
        ),
        *(
            "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata",
            "megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlan",
        ),
        # `all_local_plans`, which Megatron-Core keeps in the metadata and nothing here reads
        *(
            f"torch.distributed.checkpoint.planner.{name}"
            for name in (
                "SavePlan",
                "WriteItem",
                "WriteItemType",
                "TensorWriteData",
                "BytesIOWriteData",
            )
        ),
    )
)
"""All names that such a pickle may contain."""


LARGEST_ITEM = 16
"""Most bytes of an element."""


@dataclass(frozen=True, slots=True)
class DcpItem:
    """The place of one stored item."""

    file: str
    """Name of the file, relative to the directory."""
    offset: int
    length: int
    """Bytes."""
    transforms: tuple[str, ...] = ()
    """Transformations of the bytes, e.g. `stream.zstd/1`."""


@dataclass(frozen=True, slots=True)
class DcpChunk:
    """A box of a tensor that is stored as one item."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    item: DcpItem


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor in the metadata."""

    shape: tuple[int, ...]
    dtype: str
    """Name of the dtype in torch."""
    chunks: tuple[DcpChunk, ...]
    """Each box once, without empty boxes."""


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """The contents of a `.metadata` file."""

    tensors: dict[str, DcpTensor]
    bytes: dict[str, DcpItem]
    """Values that are not tensors, by name."""
    paths: dict[str, tuple[str | int, ...]] | None
    """Name → keys that lead to it, an int in a list; None: the state was flat. Some names may have
    nothing stored."""
    flattened: dict[str, tuple[int, ...]]
    """Megatron-Core up to 0.13: name → the tensor's own shape, if it is stored as flat runs of its
    tiles."""


def parse_metadata(data: bytes, where: str) -> DcpMetadata:
    """Parse a `.metadata` file.

    Args:
        data: all bytes of the file.
        where: the file, for messages.

    Raises:
        FormatError: it is not such a file, or names other classes.
    """
    root = unpickle(data, where, TABLE, only=CLASSES)
    try:
        return _metadata(root)
    except (TypeError, ValueError, KeyError, AttributeError) as e:
        reason = clip(str(e), 300)
        raise FormatError(
            f"{where}: this is not metadata of torch.distributed.checkpoint ({reason}); replace "
            "it with a backup."
        ) from e


def _metadata(root: object) -> DcpMetadata:
    if isinstance(root, Instance) and root.name == _MEGATRON + "MCoreMetadata":
        root = Instance(_METADATA + "Metadata", (), root.state)
    state = _state(root, "Metadata")
    items = {
        _index(index): _item(info)
        for index, info in _mapping(state["storage_data"], "storage_data").items()
    }
    tensors: dict[str, DcpTensor] = {}
    blobs: dict[str, DcpItem] = {}
    for name, entry in _mapping(state["state_dict_metadata"], "state_dict_metadata").items():
        if type(name) is not str:
            raise TypeError(f"expected a text as name, found a {type(name).__name__}")
        if isinstance(entry, Instance) and entry.name == _METADATA + "BytesStorageMetadata":
            item = items.get((name, None))
            if item is None:
                raise ValueError(f"{name!r} has no entry in storage_data")
            blobs[name] = item
            continue
        tensors[name] = _tensor(name, _state(entry, "TensorStorageMetadata"), items)
    planned = state.get("planner_data")
    paths = (
        None
        if not planned
        else {_text(name): _path(path) for name, path in _mapping(planned, "planner_data").items()}
    )
    # https://github.com/NVIDIA/Megatron-LM/blob/core_r0.13.0/megatron/core/dist_checkpointing/strategies/torch.py,
    # `mcore_data`
    megatron = state.get("mcore_data")
    flattened = {
        name: entry["nd_reformulated_orig_global_shape"]
        for name, entry in (megatron if type(megatron) is dict else {}).items()
        if type(entry) is dict and "nd_reformulated_orig_global_shape" in entry
    }
    return DcpMetadata(
        tensors, blobs, paths, {_text(name): _extents(shape) for name, shape in flattened.items()}
    )


def _tensor(
    name: str, state: Mapping[str, Any], items: Mapping[tuple[str, tuple[int, ...] | None], DcpItem]
) -> DcpTensor:
    properties = state["properties"]
    # The state of a TensorProperties is a tuple in newer versions, and a dict in the oldest.
    values = properties.state if isinstance(properties, Instance) else None
    dtype = (
        values[0]
        if type(values) is tuple and values
        else values.get("dtype")
        if type(values) is dict
        else None
    )
    if type(dtype) is not Dtype:
        raise TypeError(f"{name!r} has no dtype")
    shape = _extents(state["size"])
    if len(shape) > MOST_DIMENSIONS:
        raise ValueError(f"{name!r} has {len(shape)} dimensions, more than {MOST_DIMENSIONS}")
    if prod(max(n, 1) for n in shape) * LARGEST_ITEM > LARGEST_DIMENSION:
        raise ValueError(f"{name!r} of shape {shape} has more bytes than can be addressed")
    chunks: dict[tuple[tuple[int, ...], tuple[int, ...]], DcpChunk] = {}
    for chunk in state["chunks"]:
        box = _state(chunk, "ChunkStorageMetadata")
        start, extent = _extents(box["offsets"]), _extents(box["sizes"])
        if len(start) != len(shape) or len(extent) != len(shape):
            raise ValueError(
                f"{name!r} of shape {shape} has a chunk of another rank, of shape {extent} at "
                f"{start}"
            )
        if prod(extent) == 0:
            continue  # written by a process without a part of the tensor
        item = items.get((name, start))
        if item is None:
            raise ValueError(f"{name!r}: its chunk at {start} has no entry in storage_data")
        chunks[start, extent] = DcpChunk(start, extent, item)
    return DcpTensor(shape, dtype.name, tuple(chunks.values()))


def _state(instance: object, kind: str) -> Mapping[str, Any]:
    if (
        not isinstance(instance, Instance)
        or instance.name != _METADATA + kind
        or type(instance.state) is not dict
    ):
        actual = instance.name if isinstance(instance, Instance) else type(instance).__name__
        raise TypeError(f"expected a {kind}, found a {actual}")
    return instance.state


def _mapping(value: object, what: str) -> dict[Any, Any]:
    if type(value) is not dict:
        raise TypeError(f"expected a dict as {what}, found a {type(value).__name__}")
    return value


def _index(index: object) -> tuple[str, tuple[int, ...] | None]:
    state = _state(index, "MetadataIndex")
    offset = state.get("offset")
    return _text(state["fqn"]), None if offset is None else _extents(offset)


def _item(info: object) -> DcpItem:
    if not isinstance(info, Instance) or info.name != _STORED or type(info.state) is not dict:
        raise TypeError("an entry of storage_data has an unknown type")
    state = info.state
    offset, length = state["offset"], state["length"]
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
        raise ValueError(f"an entry of storage_data has {length} bytes at byte {offset}")
    return DcpItem(
        _text(state["relative_path"]),
        offset,
        length,
        tuple(map(_text, state.get("transform_descriptors") or ())),
    )


def _text(value: object) -> str:
    if type(value) is not str:
        raise TypeError(f"expected a text, found a {type(value).__name__}")
    return value


def _extents(value: object) -> tuple[int, ...]:
    if type(value) is not tuple or not all(
        type(n) is int and 0 <= n <= LARGEST_DIMENSION for n in value
    ):
        raise ValueError(f"{shorten(value)} is neither a shape nor an offset")
    return value


def _path(path: object) -> tuple[str | int, ...]:
    if type(path) is not tuple or not path or not all(type(key) in (str, int) for key in path):
        raise TypeError(f"{shorten(path)} is not a path to a leaf")
    return path
