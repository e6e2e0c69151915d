"""Tensors that describe their own shards, by the protocols of torch.distributed.checkpoint.

1. A tensor subclass with `__create_write_items__`, `__create_chunk_list__` and
   `__get_tensor_shard__` lists the boxes of the complete tensor that this process holds, and
   returns a plain tensor for each. Sharded embedding tables do so, and so does a DTensor around
   them.
2. A tensor of any class with the attributes `global_shape`, `global_offsets`, `local_offsets` and
   `local_sizes` holds, for each position of the last three, the box of the complete tensor that
   begins at `global_offsets`, as its own elements from `local_offsets` on. torch 2.15 calls it
   `CheckpointableTensor`; the attributes count in every version of torch.

The tensor does not describe other processes. So each box is stored as an array of its own
(`own_pieces`), by the process that has it; the boxes of all processes must cover the tensor exactly
once.

Shards are fetched as views where they are on the CPU, and restored in place on any device.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from math import prod
from operator import index
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
import torch
from numpy.lib.array_utils import byte_bounds

from shardckpt.errors import LeafError
from shardckpt.frameworks.base import HostSource, InPlace
from shardckpt.frameworks.numpy import near_pairs, share_memory
from shardckpt.frameworks.torch import (
    TensorSink,
    addresses,
    copied_source,
    dtype_of_tensor,
    host_array,
    is_host_memory,
    sink_of,
)
from shardckpt.frameworks.torch_kinds import check_fillable, check_kind, memory_key
from shardckpt.layout.box import Box, BoxArray
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from shardckpt.frameworks.base import Array, Sink, Source, Target
    from shardckpt.layout.dtypes import DType
    from shardckpt.layout.world import World

_PROTOCOL = ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__")
_DESCRIPTION = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


def matches(leaf: object) -> bool:
    """Whether the leaf is a tensor that implements one of the protocols."""
    return isinstance(leaf, torch.Tensor) and (_speaks(type(leaf)) or describes_itself(leaf))


def describes_itself(tensor: object) -> bool:
    """Whether a tensor has all attributes that describe it as shards."""
    return all(hasattr(tensor, attribute) for attribute in _DESCRIPTION)


def described_like(tensor: Any, other: Any) -> Any:
    """The first value, with the description of the other one if it has none of its own.

    Only a tensor of the same local shape gets the description.
    """
    if (
        isinstance(tensor, torch.Tensor)
        and tensor.shape == other.shape
        and not describes_itself(tensor)
    ):
        for attribute in _DESCRIPTION:
            setattr(tensor, attribute, getattr(other, attribute))
    return tensor


def _speaks(kind: type) -> bool:
    return all(hasattr(kind, method) for method in _PROTOCOL)


def accepts(leaf: Target) -> bool:  # noqa: ARG001 - every adapter has the same signatures
    """False: a `Target` never requests such a tensor.

    Only the program knows how to make one.
    """
    return False


def identity(leaf: object) -> Hashable | None:
    """A key that is equal for tensors over the same memory that describe it in the same way.

    The same tensor object always has the same key, too.
    """
    memory = None if _speaks(type(leaf)) else memory_key(leaf)
    # Only the tensor knows what its aliases share; or a process holds nothing of it.
    if memory is None:
        return "dcp_protocol", id(leaf)
    return "dcp_protocol", memory, repr([getattr(leaf, attribute) for attribute in _DESCRIPTION])


@dataclass(frozen=True, slots=True)
class _Shards:
    """The shards that a leaf describes."""

    shape: tuple[int, ...]
    """Shape of the complete tensor."""
    dtype: DType
    boxes: BoxArray
    tensors: tuple[Any, ...]
    """One tensor per box."""


@dataclass(frozen=True, slots=True)
class _ProtocolSource(HostSource):
    """A tensor whose own shards this process knows."""

    name: str
    shards: _Shards
    process: int
    layout: None = None
    own_pieces: ClassVar[bool] = True

    @property
    def shape(self) -> tuple[int, ...]:
        return self.shards.shape

    @property
    def dtype(self) -> DType:
        return self.shards.dtype

    @property
    def boxes(self) -> BoxArray:
        return self.shards.boxes

    @property
    def holders(self) -> list[tuple[int, ...]]:
        return [(self.process,)] * len(self.boxes)

    @property
    def staged_bytes(self) -> int:
        return sum(
            tensor.numel() * tensor.itemsize
            for tensor in self.shards.tensors
            if not is_host_memory(tensor)
        )

    @classmethod
    def fetch(
        cls, sources: Sequence[_ProtocolSource], positions: Sequence[Sequence[int]]
    ) -> list[list[Array]]:
        return [
            [host_array(s.shards.tensors[k], s.dtype) for k in boxes]
            for s, boxes in zip(sources, positions, strict=True)
        ]


def sources(leaves: dict[str, Any], world: World) -> dict[str, Source]:
    """Sources of tensors that implement the protocol, by name.

    Raises:
        LeafError: a tensor's description of its shards contradicts itself, or cannot be stored; by
            name.
        DtypeError: elements that cannot be stored, by name.
    """
    by_name: dict[str, Source] = {}
    for name, leaf in leaves.items():
        shards = _shards(name, leaf)
        by_name[name] = copied_source(
            _ProtocolSource(name, shards, world.process),
            tuple(tensor.detach() for tensor in shards.tensors),
            shards.tensors,
        )
    return by_name


def target(name: str, leaf: Any, shape: tuple[int, ...], dtype: DType) -> Sink:  # noqa: ARG001 - every adapter has the same signatures
    """A sink that fills the shards in place.

    Raises:
        LeafError: as for `sources`; a shard whose elements share memory.
        DtypeError: as for `sources`.
    """
    shards = _shards(name, leaf)
    for tensor in shards.tensors:
        check_fillable(name, tensor)
    views = tuple(tensor.detach() for tensor in shards.tensors)
    return sink_of(
        TensorSink(
            leaf, shards.shape, shards.dtype, shards.boxes, views, InPlace(id(leaf)), shards.tensors
        )
    )


def _shards(name: str, leaf: Any) -> _Shards:
    """Query a leaf's shards."""
    shape, shards = (
        _shards_of_methods(name, leaf) if _speaks(type(leaf)) else _shards_of_attributes(name, leaf)
    )
    for box, tensor in shards:
        if tensor.is_meta:
            raise LeafError(
                f"{shown(name)}: its shard {box} is a meta tensor without data; materialize it "
                "first."
            )
    boxes = BoxArray.of([box for box, _ in shards], len(shape))
    tensors = tuple(tensor for _, tensor in shards)
    if len(tensors) > 1:
        _check_apart(name, boxes, tensors)
    dtypes = {dtype_of_tensor(name, tensor) for tensor in tensors} or {dtype_of_tensor(name, leaf)}
    if len(dtypes) > 1:
        raise LeafError(
            f"{shown(name)}: its shards have the dtypes {sorted(d.name for d in dtypes)}; make "
            "them one."
        )
    return _Shards(shape, dtypes.pop(), boxes, tensors)


def _check_apart(name: str, boxes: BoxArray, tensors: Sequence[Any]) -> None:
    """Raise LeafError if two shards share elements, of the complete tensor or in memory."""
    for i in range(1, len(boxes)):
        if len(boxes.overlapping(boxes[i])) > 1:  # the box itself, and another one
            raise LeafError(
                f"{shown(name)}: its shard {boxes[i]} overlaps another one; each element must be "
                "in one shard."
            )
    if not all(tensor.data_ptr() for tensor in tensors):
        return  # XLA's tensors tell no address
    memory = [addresses(tensor) for tensor in tensors]
    for i, j in near_pairs(memory, np.array([byte_bounds(array) for array in memory])):
        if tensors[i].device == tensors[j].device and share_memory(memory[i], memory[j]):
            raise LeafError(
                f"{shown(name)}: its shards {boxes[j]} and {boxes[i]} share memory, so both cannot "
                "be restored; give each its own."
            )


_Listed: TypeAlias = "tuple[tuple[int, ...], list[tuple[Box, Any]]]"
"""Shape of the complete tensor; each shard with elements as its box and a tensor."""


def _shards_of_methods(name: str, leaf: Any) -> _Listed:
    """The shards that the methods of a tensor's class return."""
    # A program with such tensors has imported it already.
    from torch.distributed.checkpoint.metadata import MetadataIndex

    sizes = {tuple(item.tensor_data.size) for item in leaf.__create_write_items__(name, leaf)} or {
        tuple(leaf.shape)
    }
    if len(sizes) > 1:
        raise LeafError(
            f"{shown(name)}: its write items give the whole tensor different shapes, "
            f"{sorted(sizes)}; they must agree."
        )
    (shape,) = sizes
    shards = []
    for i, chunk in enumerate(leaf.__create_chunk_list__()):
        if prod(chunk.sizes) == 0:
            continue
        tensor = leaf.__get_tensor_shard__(MetadataIndex(name, torch.Size(chunk.offsets), i))
        check_kind(name, tensor)
        if not _is_inside(chunk.offsets, chunk.sizes, shape) or tuple(tensor.shape) != tuple(
            chunk.sizes
        ):
            raise LeafError(
                f"{shown(name)}: by its chunk list, shard {i} begins at {tuple(chunk.offsets)} of "
                f"shape {shape} and has shape {tuple(chunk.sizes)}, but its data has shape "
                f"{tuple(tensor.shape)}; chunk list, write items and shards must agree."
            )
        shards.append((_box(chunk.offsets, chunk.sizes), tensor))
    return shape, shards


def _shards_of_attributes(name: str, leaf: Any) -> _Listed:
    """The shards that a tensor's attributes describe."""
    check_kind(name, leaf)
    values = [getattr(leaf, attribute) for attribute in _DESCRIPTION]
    why = "not whole numbers in equally many places"
    shape: tuple[int, ...] | None = None
    shards: list[tuple[tuple[int, ...], ...]] = []
    with suppress(TypeError, ValueError):
        starts, begins, sizes = ([tuple(map(index, row)) for row in rows] for rows in values[1:])
        shards = list(zip(starts, begins, sizes, strict=True))
        shape = tuple(map(index, values[0]))
    if shape is not None:
        why = "a shard lies outside of a shape"
        if not all(
            _is_inside(start, size, shape) and _is_inside(begin, size, tuple(leaf.shape))
            for start, begin, size in shards
        ):
            shape = None
    if shape is None:
        words = ", ".join(
            f"{attribute}={value!r:.200}"
            for attribute, value in zip(_DESCRIPTION, values, strict=True)
        )
        raise LeafError(
            f"{shown(name)}: this tensor of shape {tuple(leaf.shape)} describes itself as shards "
            f"by {words}, which contradicts itself ({why}); give equally many offsets and sizes, "
            "each inside the complete and the local shape, or delete the attributes."
        )
    return shape, [
        (_box(start, size), leaf.detach()[(*_box(begin, size).slices, ...)])
        for start, begin, size in shards
        if prod(size)
    ]


def _is_inside(start: Sequence[int], size: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a box lies in a tensor."""
    return len(start) == len(size) == len(shape) and all(
        0 <= a <= a + n <= whole for a, n, whole in zip(start, size, shape, strict=True)
    )


def _box(start: Sequence[int], size: Sequence[int]) -> Box:
    return Box(tuple(start), tuple(a + n for a, n in zip(start, size, strict=True)))
