"""A part of a tensor's columns, as torch.distributed.checkpoint is asked to load it.

The request uses that library's protocol of tensors that are cut up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Columns"]


class Columns(torch.Tensor):
    """The first columns of a matrix, in memory of its own."""

    def __new__(cls, part: torch.Tensor, size: Sequence[int]) -> Self:
        """All rows of `part`, which are the first columns of a matrix of that size."""
        columns: Self = torch.Tensor._make_wrapper_subclass(cls, size, dtype=part.dtype)  # type: ignore[attr-defined]
        columns.part = part
        columns.chunk = ChunkStorageMetadata(torch.Size([0] * part.ndim), part.shape)
        return columns

    part: torch.Tensor
    chunk: ChunkStorageMetadata

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, _types: Any, _args: Any = (), _kwargs: Any = None
    ) -> Any:
        """Nothing can be done with it."""
        raise TypeError(f"{func} is not for a part of a tensor")

    def __create_write_items__(self, fqn: str, _value: object) -> list[WriteItem]:
        data = TensorWriteData(self.chunk, TensorProperties(dtype=self.dtype), self.size())
        return [
            WriteItem(MetadataIndex(fqn, self.chunk.offsets), WriteItemType.SHARD, tensor_data=data)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self.chunk]

    def __get_tensor_shard__(self, _index: MetadataIndex) -> torch.Tensor:
        return self.part
