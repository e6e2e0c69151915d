"""The contents of a checkpoint under torch.distributed.checkpoint's names.

1. Something stands in the stored tree for each tensor, and for each value that processes own by themselves.
2. DCP's own function flattens that: dicts by their keys as text, and lists in which there is a tensor or a dict. What it
   leaves whole is a plain value.
3. A tensor is one chunk to DCP, whatever it is stored in. A box of it is a sink.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.checkpoint._traverse import traverse_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from shardckpt.errors import DtypeError, NamesMismatchError, ShapeMismatchError, StructureMismatchError
from shardckpt.frameworks.torch import TensorSink, check_fillable, check_kind, dtype_of_tensor, tensor_of
from shardckpt.layout.box import Box, BoxArray
from shardckpt.state import meanings, per_process_names, unflatten
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.checkpoint.planner import ReadItem

    from shardckpt.frameworks.base import Sink
    from shardckpt.reading.checkpoint import Checkpoint

__all__ = ["DcpContents", "DcpOwned"]


@dataclass(frozen=True, slots=True)
class _Stored:
    """Stands for a tensor."""

    name: str
    """What it is stored under."""


@dataclass(frozen=True, slots=True)
class DcpOwned:
    """Stands for a value that processes own by themselves."""

    name: str
    """What it is stored under."""


class DcpContents:
    """A checkpoint, by the names that DCP has for what is in it."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Name what is in an open checkpoint.

        Raises:
            StructureMismatchError: it holds no dict.
            NamesMismatchError: two things in it have one name.
        """
        self.checkpoint = checkpoint
        self.flat: dict[str, Any] = {}
        """Plain values, and what stands for the others."""
        self.paths: dict[str, tuple[str | int, ...]] = {}
        """Where each is in the state, as DCP says it."""
        tree = checkpoint.parsed_tree
        stand_ins: dict[str, Any] = {name: _Stored(name) for name in checkpoint.record.structure.tensors}
        stand_ins |= {name: DcpOwned(name) for name in per_process_names(tree)}
        self.meanings = meanings(tree)
        state = unflatten(tree, stand_ins)
        if not isinstance(state, dict):
            raise StructureMismatchError(
                f"{checkpoint.location} holds a {type(state).__name__}, and DCP loads dicts; use shardckpt.restore."
            )
        traverse_state_dict(state, self._add, lambda value: isinstance(value, _Stored))

    def _add(self, path: tuple[str | int, ...], value: object) -> None:
        name = ".".join(map(str, path))
        if name in self.flat:
            raise NamesMismatchError(f"{self.checkpoint.location}: DCP calls two of its values {name!r}; use shardckpt.restore.")
        self.flat[name], self.paths[name] = value, path

    def metadata(self) -> Metadata:
        """The same in DCP's words.

        Raises:
            DtypeError: a tensor of a dtype that torch has not, by name.
        """
        found = {name: self._storage(value) for name, value in self.flat.items()}
        return Metadata(found, planner_data=self.paths)

    def _storage(self, value: object) -> TensorStorageMetadata | BytesStorageMetadata:
        if not isinstance(value, _Stored):
            return BytesStorageMetadata()
        tensor = self.checkpoint.tensor(value.name)
        size = torch.Size(tensor.shape)
        try:
            dtype = tensor_of(np.empty(0, tensor.dtype.numpy), tensor.dtype).dtype
        except DtypeError as e:
            raise DtypeError(f"{shown(value.name)} in {self.checkpoint.location}: {e}") from None
        return TensorStorageMetadata(TensorProperties(dtype=dtype), size, [ChunkStorageMetadata(torch.Size([0] * len(size)), size)])

    def value(self, name: str) -> object:
        """A plain value, or what stands for a process's own.

        Raises:
            StructureMismatchError: it has tensors in it.
        """
        value = self.flat[name]
        if any(isinstance(inner, _Stored | DcpOwned) for inner in _inside(value)):
            raise StructureMismatchError(
                f"{shown(name)} in {self.checkpoint.location} is a tuple with tensors or per-process values in it, where DCP does not look "
                f"for any; use shardckpt.restore."
            )
        return value

    def sink(self, item: ReadItem, tensor: Any, *, key: int) -> tuple[str, Sink | None]:
        """The stored name of what a read item asks for, and where it goes; None where there is nothing to read.

        Args:
            item: the box that is wanted.
            tensor: where it goes.
            key: another one for each item.

        Raises:
            LeafError: a tensor that cannot be filled.
            ShapeMismatchError: a box that is none of the stored tensor's, or not of the given one's shape.
            StructureMismatchError: a tensor whose elements are more than numbers.
        """
        name = item.dest_index.fqn
        stored = self.flat[item.storage_index.fqn]
        check_kind(name, tensor)
        check_fillable(name, tensor)
        record = self.checkpoint.tensor(stored.name)
        if stored.name in self.meanings:
            raise StructureMismatchError(
                f"{shown(name)} in {self.checkpoint.location} means {self.meanings[stored.name]!r}, and a torch.Tensor holds just numbers; "
                f"leave it out."
            )
        offset = item.storage_index.offset or (0,) * len(record.shape)
        start = tuple(a + b for a, b in zip(offset, item.storage_offsets, strict=True))
        box = Box(start, tuple(a + n for a, n in zip(start, item.lengths, strict=True)))
        if tuple(tensor.shape) != box.shape or not Box.full(record.shape).contains(box):
            raise ShapeMismatchError(
                f"{shown(name)}: the planner asks for {box} of shape {record.shape} in {self.checkpoint.location}, and has a tensor of "
                f"{tuple(tensor.shape)} for it."
            )
        if tensor.numel() == 0:
            return stored.name, None
        view = tensor.detach()
        boxes = BoxArray.of([box], box.ndim)
        return stored.name, TensorSink(view, record.shape, dtype_of_tensor(name, view), boxes, (view,), ("dcp", key), (view,))


def _inside(value: object) -> Iterator[object]:
    """The leaves of a tuple or list, and of dicts in it; nothing for what is none."""
    if isinstance(value, list | tuple | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield inner
            yield from _inside(inner)
