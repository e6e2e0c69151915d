"""Conversion of torch_xla's layouts, and the part of a layout that this process's devices hold.

torch_xla knows the sharding of a tensor as OpSharding text alone. Where the global mesh (`xs.set_global_mesh`)
explains the text, axis names come back and the layout is a `Sharding`; otherwise the OpSharding itself is it. Device
ids are the mesh's own: global ordinals, of which this process has some.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch_xla import _XLAC

from shardckpt.errors import ShardingError
from shardckpt.layout.box import BoxArray, distinct_boxes
from shardckpt.layout.mesh import Mesh
from shardckpt.layout.op_sharding import Kind, OpSharding
from shardckpt.layout.partition_spec import PartitionSpec
from shardckpt.layout.sharding import Layout, Sharding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = [
    "XlaShards",
    "from_sharding_spec",
    "from_xla_mesh",
    "layouts_of",
    "local_device_ids",
    "local_shards",
    "over_all_devices",
    "replicated",
    "to_xla",
]

_MOST_DIMS = 5
"""Dimensions of a tile assignment that 2.9 reads from Python; of longer ones it logs an error and makes up devices."""


@lru_cache(maxsize=16)
def from_xla_mesh(mesh: Any) -> Mesh:
    """A torch_xla `Mesh` or `HybridMesh` as a shardckpt `Mesh`; axes without names are numbered, "0" first."""
    return Mesh(tuple(int(n) for n in mesh.mesh_shape), mesh.axis_names, np.asarray(mesh.device_ids))


def from_sharding_spec(spec: Any) -> Sharding:
    """A torch_xla `ShardingSpec`, or a pair of its `Mesh` and a partition spec, as a shardckpt `Sharding`.

    Raises:
        ShardingError: the partition spec names an axis that the mesh has not.
    """
    mesh, parts = spec if isinstance(spec, tuple) else (spec.mesh, spec.partition_spec)
    return Sharding(from_xla_mesh(mesh), PartitionSpec(*parts))


def layouts_of(tensors: Sequence[Any]) -> list[Layout]:
    """The layout of each tensor, none of which may be pending.

    Raises:
        ShardingError: a text that is no sharding.
    """
    _XLAC._get_xla_sharding_specs(tensors)
    # Asked once, 2.9 can answer with what a tensor was before its last program; it then corrects itself.
    texts = _XLAC._get_xla_sharding_specs(tensors)
    count, mesh = xr.global_runtime_device_count(), xs.get_global_mesh()
    ours = None if mesh is None else from_xla_mesh(mesh)
    return [_layout(text, tensor.dim(), count, ours) for tensor, text in zip(tensors, texts, strict=True)]


@lru_cache(maxsize=256)
def _layout(text: str, ndim: int, count: int, mesh: Mesh | None) -> Layout:
    # A tensor that nobody marked has no text and is on every device.
    op_sharding = OpSharding.parse(text, count) if text else OpSharding.replicated(count)
    named = None if mesh is None else Sharding.infer(mesh, op_sharding, ndim)
    return op_sharding if named is None else named


def replicated(layout: Layout, ndim: int) -> bool:
    """Whether XLA knows a tensor of that rank as replicated."""
    return layout.kind is Kind.REPLICATED if isinstance(layout, OpSharding) else prod(layout.parts(ndim)) == 1


# --- The other way -------------------------------------------------------------------------------------------------


def over_all_devices(layout: Layout) -> Layout:
    """The layout, if it is over all devices of the job, as torch_xla wants it.

    Raises:
        ShardingError: it is over more, fewer or other devices.
    """
    count = xr.global_runtime_device_count()
    if isinstance(layout, OpSharding) and layout.kind is Kind.REPLICATED and layout.tiles is None:
        return OpSharding.replicated(count)
    if layout.num_devices != count:
        raise ShardingError(
            f"the target is sharded over {layout.num_devices} devices and this torch_xla job has {count}; give a mesh of all {count}."
        )
    ids = np.sort(layout.mesh.device_ids if isinstance(layout, Sharding) else layout.replication_groups.reshape(-1))
    if not np.array_equal(ids, np.arange(count)):
        raise ShardingError(
            f"the target's devices are {ids[0]}…{ids[-1]} and those of this torch_xla job 0…{count - 1}; give a mesh of the job's own."
        )
    return layout


@lru_cache(maxsize=256)
def to_xla(layout: Layout, ndim: int) -> Any:
    """torch_xla's OpSharding of a layout, for tensors of that rank.

    Raises:
        ShardingError: the rank is another one, or more than torch_xla can be told of.
    """
    same = (layout.op_sharding(ndim) if isinstance(layout, Sharding) else layout).canonical()
    parts = same.parts(ndim)
    kinds = xs.ShardingType
    if prod(parts) == 1:
        return _XLAC.OpSharding([], [], [], int(kinds.REPLICATED))
    if ndim > _MOST_DIMS:
        raise ShardingError(f"torch_xla 2.9 takes shardings of at most {_MOST_DIMS} dimensions and the tensor has {ndim}; reshape it.")
    groups = same.replication_groups
    if groups.shape[1] == 1:
        return _XLAC.OpSharding(groups.reshape(parts).tolist(), [], [], int(kinds.TILED))
    return _XLAC.OpSharding([], np.arange(len(groups)).reshape(parts).tolist(), groups.tolist(), int(kinds.PARTIAL))


# --- Shards of this process ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class XlaShards:
    """What this process's devices hold of one shape in one layout."""

    boxes: BoxArray
    """The distinct boxes, none of them empty."""
    box_of: NDArray[np.int64]
    """(local devices,) the box of each device, in the runtime's order; -1 where it holds padding only."""
    tile: tuple[int, ...]
    """The padded shape of every shard."""
    first_holders: list[int] = field(init=False)
    """Per box, the first local device that holds it."""

    def __post_init__(self) -> None:
        """Look for the holders once: each save asks for those of each tensor."""
        boxes, first = np.unique(self.box_of, return_index=True)
        object.__setattr__(self, "first_holders", first[boxes >= 0].tolist())

    @property
    def elements(self) -> int:
        """Of all local shards, padding and replicas included."""
        return len(self.box_of) * prod(self.tile)


def local_device_ids() -> NDArray[np.int64]:
    """This process's devices, in the runtime's order."""
    return np.array([int(device.rpartition(":")[2]) for device in _XLAC._xla_get_runtime_devices()], np.int64)


@lru_cache(maxsize=1024)
def local_shards(layout: Layout, shape: tuple[int, ...]) -> XlaShards:
    """The shards of this process's devices, in the order in which torch_xla takes and returns them.

    Raises:
        ShardingError: the layout is for another rank, or does not say where data is.
    """
    local = local_device_ids()
    held = layout.device_boxes(shape, local)
    boxes, where = distinct_boxes(held.boxes)
    return XlaShards(boxes, where[np.searchsorted(held.device_ids, local)], held.tile)
