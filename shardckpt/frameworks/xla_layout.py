"""Conversion of torch_xla's layouts, and this process's part of a layout.

torch_xla has the sharding of a tensor only as OpSharding text. If the global mesh
(`xs.set_global_mesh`) explains the text, the layout is a `Sharding` with axis names; otherwise it
is the OpSharding itself. Device ids are the mesh's own: global ordinals, some of which belong to
this process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
from shardckpt.layout.hlo_text import Kind
from shardckpt.layout.mesh import Mesh
from shardckpt.layout.op_sharding import OpSharding
from shardckpt.layout.partition_spec import PartitionSpec
from shardckpt.layout.sharding import Layout, Sharding
from shardckpt.plan.writers import box_holders
from shardckpt.state.names import shown
from shardckpt.text import shorten

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardckpt.layout.world import World

_MOST_DIMS = 5
"""Most dimensions of a tile assignment that 2.9 reads from Python; for more it logs an error and
uses wrong devices."""


@lru_cache(maxsize=16)
def from_xla_mesh(mesh: Any) -> Mesh:
    """A torch_xla `Mesh` or `HybridMesh` as a shardckpt `Mesh`.

    Axes without names are numbered, "0" first.
    """
    return Mesh(
        tuple(int(n) for n in mesh.mesh_shape), mesh.axis_names, np.asarray(mesh.device_ids)
    )


def from_sharding_spec(spec: Any) -> Sharding:
    """A torch_xla `ShardingSpec` as a shardckpt `Sharding`.

    A pair of torch_xla's `Mesh` and a partition spec is accepted, too.

    Raises:
        ShardingError: the partition spec is none, or names an axis that the mesh lacks.
    """
    mesh, parts = spec if isinstance(spec, tuple) else (spec.mesh, spec.partition_spec)
    if not isinstance(parts, Iterable):
        raise ShardingError(
            f"its partition spec is {shorten(parts)}; give a tuple with one axis or None for each "
            "dimension."
        )
    return Sharding(from_xla_mesh(mesh), PartitionSpec(*parts))


def layouts_of(tensors: Sequence[Any]) -> list[Layout]:
    """The layout of each tensor. No tensor may be pending.

    Raises:
        ShardingError: a text is not a valid sharding.
    """
    _XLAC._get_xla_sharding_specs(tensors)
    # The first answer of 2.9 can be the sharding before the tensor's last program; the second one
    # is correct.
    texts = _XLAC._get_xla_sharding_specs(tensors)
    count, mesh = xr.global_runtime_device_count(), xs.get_global_mesh()
    global_mesh = None if mesh is None else from_xla_mesh(mesh)
    return [
        _layout(text, tensor.dim(), count, global_mesh)
        for tensor, text in zip(tensors, texts, strict=True)
    ]


@lru_cache(maxsize=256)
def _layout(text: str, ndim: int, count: int, mesh: Mesh | None) -> Layout:
    # An unmarked tensor has no text and is on every device.
    op_sharding = OpSharding.parse(text, count) if text else OpSharding.replicated(count)
    named = None if mesh is None else Sharding.infer(mesh, op_sharding, ndim)
    return op_sharding if named is None else named


def replicated(layout: Layout, ndim: int) -> bool:
    """Whether a tensor of rank `ndim` is replicated for XLA."""
    return (
        layout.kind is Kind.REPLICATED
        if isinstance(layout, OpSharding)
        else prod(layout.parts(ndim)) == 1
    )


# --- Layouts for torch_xla ------------------------------------------------------------------------


def over_all_devices(layout: Layout) -> Layout:
    """The layout, checked to cover exactly the devices of the job, as torch_xla requires.

    Raises:
        ShardingError: it covers more, fewer or other devices.
    """
    count = xr.global_runtime_device_count()
    if isinstance(layout, OpSharding) and layout.kind is Kind.REPLICATED and layout.tiles is None:
        return OpSharding.replicated(count)
    if layout.num_devices != count:
        raise ShardingError(
            f"the target is sharded over {layout.num_devices} devices and this torch_xla job has "
            f"{count}; give a mesh of all {count}."
        )
    ids = np.sort(
        layout.mesh.device_ids
        if isinstance(layout, Sharding)
        else layout.replication_groups.reshape(-1)
    )
    if not np.array_equal(ids, np.arange(count)):
        raise ShardingError(
            f"the target's devices are {ids[0]}…{ids[-1]} and those of this torch_xla job "
            f"0…{count - 1}; give a mesh of the job's own."
        )
    return layout


@lru_cache(maxsize=256)
def to_xla(layout: Layout, ndim: int) -> Any:
    """torch_xla's OpSharding of a layout, for tensors of rank `ndim`.

    Raises:
        ShardingError: the layout is for another rank, or the rank is larger than torch_xla
            supports.
    """
    same = (layout.op_sharding(ndim) if isinstance(layout, Sharding) else layout).canonical()
    parts = same.parts(ndim)
    kinds = xs.ShardingType
    if prod(parts) == 1:
        return _XLAC.OpSharding([], [], [], int(kinds.REPLICATED))
    if ndim > _MOST_DIMS:
        raise ShardingError(
            f"torch_xla 2.9 takes shardings of at most {_MOST_DIMS} dimensions and the tensor has "
            f"{ndim}; reshape it."
        )
    groups = same.replication_groups
    if groups.shape[1] == 1:
        return _XLAC.OpSharding(groups.reshape(parts).tolist(), [], [], int(kinds.TILED))
    return _XLAC.OpSharding(
        [], np.arange(len(groups)).reshape(parts).tolist(), groups.tolist(), int(kinds.PARTIAL)
    )


# --- Shards of this process -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class XlaShards:
    """This process's shards for one shape and layout."""

    boxes: BoxArray
    """The distinct, non-empty boxes."""
    box_of: NDArray[np.int64]
    """(local devices,) the box of each device, in the runtime's order; -1 for a device with padding
    only."""
    tile: tuple[int, ...]
    """The padded shape of every shard."""
    first_holders: list[int] = field(init=False)
    """For each box, the first local device that holds it."""

    def __post_init__(self) -> None:
        """Compute the holders once: each save needs them for each tensor."""
        boxes, first = np.unique(self.box_of, return_index=True)
        object.__setattr__(self, "first_holders", first[boxes >= 0].tolist())

    @property
    def elements(self) -> int:
        """Number of elements of all local shards, padding and replicas included."""
        return len(self.box_of) * prod(self.tile)


def local_device_ids() -> NDArray[np.int64]:
    """Ids of this process's devices, in the runtime's order."""
    return np.array(
        [int(device.rpartition(":")[2]) for device in _XLAC._xla_get_runtime_devices()], np.int64
    )


@lru_cache(maxsize=1024)
def local_shards(layout: Layout, shape: tuple[int, ...]) -> XlaShards:
    """The shards of this process's devices, in torch_xla's order.

    Raises:
        ShardingError: the layout is for another rank, or does not determine where data is.
    """
    local = local_device_ids()
    held = layout.device_boxes(shape, local)
    boxes, where = distinct_boxes(held.boxes)
    return XlaShards(boxes, where[np.searchsorted(held.device_ids, local)], held.tile)


def holders_of(
    name: str, layout: Layout, ndim: int, shards: XlaShards | None, world: World
) -> list[tuple[int, ...]] | None:
    """The processes that hold each of a tensor's boxes.

    None where each process has its own devices.

    Raises:
        ShardingError: the owners of the devices are not known, or the layout does not fit them.
    """
    owners = world.devices.get("torch_xla")
    if owners is None:
        if xr.process_count() > 1:
            raise ShardingError(
                f"{shown(name)}: {xr.process_count()} torch_xla processes hold parts of it, and "
                "it is not known which process owns which device; call "
                "torch_xla.runtime.use_spmd() before anything of shardckpt's, on all processes, "
                "and save with their coordinator, shardckpt.Coordinator.current()."
            )
        return None
    local = local_device_ids()
    try:
        return box_holders(
            layout, ndim, local[:1] if shards is None else local[shards.first_holders], owners
        )
    except ShardingError as e:
        raise ShardingError(f"{shown(name)}: {e}") from e
