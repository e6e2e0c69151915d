"""The contents of a checkpoint under torch.distributed.checkpoint's names.

1. A placeholder stands in the stored tree for each tensor, and for each value that every process
   has separately.
2. DCP's own function flattens the tree: dicts by their keys as text, and lists that contain a
   tensor or a dict. Anything that it does not split is a plain value.
3. DCP sees every tensor as one chunk, whatever its stored chunks are. A box of it is read into a
   sink.
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

from shardckpt.errors import (
    DtypeError,
    NamesMismatchError,
    ShapeMismatchError,
    StructureMismatchError,
)
from shardckpt.frameworks.base import InPlace
from shardckpt.frameworks.torch import TensorSink, dtype_of_tensor, tensor_of
from shardckpt.frameworks.torch_kinds import check_fillable, check_kind
from shardckpt.layout.box import Box, BoxArray
from shardckpt.state import meanings, per_process_names, unflatten
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.checkpoint.planner import ReadItem

    from shardckpt.frameworks.base import Sink
    from shardckpt.reading.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class _Stored:
    """Placeholder for a tensor."""

    name: str
    """The stored name."""


@dataclass(frozen=True, slots=True)
class DcpOwned:
    """Placeholder for a value that every process has separately."""

    name: str
    """The stored name."""


class DcpContents:
    """A checkpoint whose contents have DCP's names."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Name the contents of an open checkpoint.

        Raises:
            StructureMismatchError: the checkpoint holds no dict.
            NamesMismatchError: two values in it get the same name.
        """
        self.checkpoint = checkpoint
        self.flat: dict[str, Any] = {}
        """Plain values, and placeholders for the other values, by DCP's name."""
        self.paths: dict[str, tuple[str | int, ...]] = {}
        """Path of each value in the state, in DCP's form."""
        tree = checkpoint.parsed_tree
        stand_ins: dict[str, Any] = {
            name: _Stored(name) for name in checkpoint.record.structure.tensors
        }
        stand_ins |= {name: DcpOwned(name) for name in per_process_names(tree)}
        self.meanings = meanings(tree)
        state = unflatten(tree, stand_ins)
        if not isinstance(state, dict):
            raise StructureMismatchError(
                f"{checkpoint.location} holds a {type(state).__name__}, and DCP loads dicts; use "
                "shardckpt.restore."
            )
        traverse_state_dict(state, self._add, lambda value: isinstance(value, _Stored))

    def _add(self, path: tuple[str | int, ...], value: object) -> None:
        name = ".".join(map(str, path))
        if name in self.flat:
            raise NamesMismatchError(
                f"{self.checkpoint.location}: two of its values have the DCP name {name!r}; use "
                "shardckpt.restore."
            )
        self.flat[name], self.paths[name] = value, path

    def metadata(self) -> Metadata:
        """DCP's metadata of the checkpoint.

        Raises:
            DtypeError: a tensor of a dtype that torch lacks, by name.
        """
        storages = {name: self._storage(value) for name, value in self.flat.items()}
        return Metadata(storages, planner_data=self.paths)

    def _storage(self, value: object) -> TensorStorageMetadata | BytesStorageMetadata:
        if not isinstance(value, _Stored):
            return BytesStorageMetadata()
        tensor = self.checkpoint.tensor(value.name)
        size = torch.Size(tensor.shape)
        try:
            dtype = tensor_of(np.empty(0, tensor.dtype.numpy), tensor.dtype).dtype
        except DtypeError as e:
            raise DtypeError(f"{shown(value.name)} in {self.checkpoint.location}: {e}") from None
        return TensorStorageMetadata(
            TensorProperties(dtype=dtype),
            size,
            [ChunkStorageMetadata(torch.Size([0] * len(size)), size)],
        )

    def value(self, name: str) -> object:
        """A plain value, or the placeholder of a per-process value.

        Raises:
            StructureMismatchError: the value contains tensors.
        """
        value = self.flat[name]
        if any(isinstance(inner, _Stored | DcpOwned) for inner in _inside(value)):
            raise StructureMismatchError(
                f"{shown(name)} in {self.checkpoint.location} is a tuple that holds tensors or "
                "per-process values, which DCP does not find there; use shardckpt.restore."
            )
        return value

    def sink(self, item: ReadItem, tensor: Any, *, key: int) -> tuple[str, Sink | None]:
        """The stored name of a requested tensor, and the sink that receives it.

        None as the sink if the box is empty.

        Args:
            item: the requested box.
            tensor: the destination.
            key: a key that differs for each item.

        Raises:
            LeafError: a tensor that cannot be filled.
            ShapeMismatchError: a box outside the stored tensor, or of another shape than the given
                tensor.
            StructureMismatchError: a tensor whose elements are more than numbers.
        """
        name = item.dest_index.fqn
        stored = self.flat[item.storage_index.fqn]
        check_kind(name, tensor)
        check_fillable(name, tensor)
        record = self.checkpoint.tensor(stored.name)
        if stored.name in self.meanings:
            raise StructureMismatchError(
                f"{shown(name)} in {self.checkpoint.location} has the meaning "
                f"{self.meanings[stored.name]!r}, which a torch.Tensor cannot hold; leave it out."
            )
        offset = item.storage_index.offset or (0,) * len(record.shape)
        start = tuple(a + b for a, b in zip(offset, item.storage_offsets, strict=True))
        box = Box(start, tuple(a + n for a, n in zip(start, item.lengths, strict=True)))
        if tuple(tensor.shape) != box.shape or not Box.full(record.shape).contains(box):
            raise ShapeMismatchError(
                f"{shown(name)}: the planner asks for {box} of shape {record.shape} in "
                f"{self.checkpoint.location}, but gives a tensor of shape {tuple(tensor.shape)} "
                "for it."
            )
        if tensor.numel() == 0:
            return stored.name, None
        view = tensor.detach()
        boxes = BoxArray.of([box], box.ndim)
        return stored.name, TensorSink(
            view, record.shape, dtype_of_tensor(name, view), boxes, (view,), InPlace(key), (view,)
        )


def _inside(value: object) -> Iterator[object]:
    """The values inside a list, tuple or dict, at every depth; none for other values."""
    if isinstance(value, list | tuple | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield inner
            yield from _inside(inner)
