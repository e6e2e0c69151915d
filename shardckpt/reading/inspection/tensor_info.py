"""The description of one stored tensor, as `Checkpoint.info` gives it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardckpt.format.structure import StoredLayout
    from shardckpt.layout.dtypes import DType


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Description of one stored tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    layout: StoredLayout | None
    """Layout at the save: a `Sharding` with mesh and spec, or an `OpSharding`, or DTensor
    `Placements` that neither can express. None for a plain tensor."""
    chunks: tuple[int, ...]
    """Shape of one chunk, in elements; of the first piece, if the tensor has several."""
    num_chunks: int
    nbytes: int
    """Bytes of all elements."""
    tied_names: tuple[str, ...]
    """Other names of the same tensor."""
    base: str | None = None
    """Path or url of the base that holds the elements; None if this checkpoint holds them."""
