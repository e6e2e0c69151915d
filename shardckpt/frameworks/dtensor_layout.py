"""Conversion of DTensor's meshes and placements, and meshes that are slices of larger ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import compress
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardckpt.errors import ShardingError
from shardckpt.layout.mesh import Mesh
from shardckpt.layout.placements import Placement, Placements
from shardckpt.text import shorten

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed.device_mesh import DeviceMesh


SHARDED = (Shard, _StridedShard)
"""Placements that shard a dimension; in newer versions of torch the latter is not a `Shard`."""


@lru_cache(maxsize=256)
def from_device_mesh(mesh: DeviceMesh) -> Mesh:
    """The mesh of ranks, with torch's dimension names, or dim0, dim1, … if it has none."""
    names = mesh.mesh_dim_names or [f"dim{d}" for d in range(mesh.ndim)]
    return Mesh(tuple(mesh.shape), tuple(names), mesh.mesh.reshape(-1).tolist())


def from_placements(mesh: DeviceMesh, placements: Sequence[Any], ndim: int) -> Placements:
    """The shardckpt `Placements` of torch's placements.

    Args:
        mesh: the mesh of the tensor.
        placements: torch's placements, one per mesh dimension.
        ndim: number of dimensions of the tensor, for placements with negative dimensions.

    Raises:
        ShardingError: the placements do not determine where data is.
    """
    if not isinstance(placements, Sequence):
        raise ShardingError(
            f"its placements are {shorten(placements)}; give one for each of the {mesh.ndim} "
            "dimensions of the mesh, as in [Shard(0)]."
        )
    names = from_device_mesh(mesh).axis_names
    converted = []
    for placement, name in zip(placements, names, strict=False):
        if isinstance(placement, Partial):
            raise ShardingError(
                f"over mesh dimension {name!r} it holds partial values ({placement!r}), which "
                "have yet to be reduced; pass leaf.redistribute(placements=…) without Partial, "
                "or save with SaveOptions(reduce_partial=True)."
            )
        if type(placement) is Replicate:
            converted.append(Placement())
        elif type(placement) in SHARDED:
            _check_ascending(mesh, name)
            if placement.dim < -ndim:
                raise ShardingError(
                    f"over mesh dimension {name!r} its placement is {placement!r}, and it has "
                    f"{ndim} dimensions; shard one of these."
                )
            dim = placement.dim + ndim if placement.dim < 0 else placement.dim
            converted.append(Placement(dim, getattr(placement, "split_factor", 1)))
        else:
            raise ShardingError(
                f"over mesh dimension {name!r} its placement is {placement!r}, which is not "
                "known; use Shard or Replicate."
            )
    if len(placements) != mesh.ndim:
        raise ShardingError(
            f"it has {len(placements)} placements for a mesh of {mesh.ndim} dimensions; give one "
            "for each."
        )
    return _cached_placements(from_device_mesh(mesh), tuple(converted))


_cached_placements = lru_cache(maxsize=1024)(Placements)


def _check_ascending(mesh: DeviceMesh, name: str) -> None:
    """Raise ShardingError for a dimension along which torch has two orders of the shards.

    FSDP2 and torch's collectives go by the sorted ranks of its process group, and
    `distribute_tensor` without a source rank by the position in the mesh.
    """
    ranks = _first_unordered(mesh).get(name)
    if ranks is not None:
        raise ShardingError(
            f"along its sharded dimension {name!r} the mesh has ranks {shorten(ranks)}, which do "
            "not ascend, so torch does not say in one way which rank has which shard; make the "
            "mesh with ascending ranks along this dimension."
        )


@lru_cache(maxsize=256)
def _first_unordered(mesh: DeviceMesh) -> dict[str, list[int]]:
    """Ranks that do not ascend along a mesh dimension, by the name of the dimension."""
    whole = from_device_mesh(mesh)
    unordered = {}
    for dim, name in enumerate(whole.axis_names):
        lines = np.moveaxis(whole.devices, dim, -1).reshape(-1, whole.shape[dim])
        descends = (np.diff(lines) < 0).any(axis=1)
        if descends.any():
            unordered[name] = lines[descends][0].tolist()
    return unordered


def widest_meshes(meshes: Iterable[DeviceMesh]) -> dict[DeviceMesh, DeviceMesh]:
    """For each mesh the largest mesh that it is a slice of, or itself.

    A slice means torch's `mesh["dp"]`: every rank has one, with its own ranks in it. A mesh of some
    ranks that was created independently is not a slice: all ranks know it, and the ranks outside it
    hold nothing.
    """
    distinct = sorted(set(meshes), key=lambda mesh: (-mesh.size(), mesh.mesh_dim_names or ()))
    return {
        mesh: next((wide for wide in distinct if _is_slice(mesh, wide)), mesh) for mesh in distinct
    }


def _is_slice(mesh: DeviceMesh, wide: DeviceMesh) -> bool:
    narrow, whole, coordinate = (
        from_device_mesh(mesh),
        from_device_mesh(wide),
        wide.get_coordinate(),
    )
    if coordinate is None or not _have_one_origin(mesh, wide):
        return False
    kept = [name in narrow.axis_names for name in whole.axis_names]
    if all(kept) or tuple(compress(whole.axis_names, kept)) != narrow.axis_names:
        return False
    through_us = tuple(
        slice(None) if keep else place for keep, place in zip(kept, coordinate, strict=True)
    )
    return bool(np.array_equal(whole.devices[through_us], narrow.devices))


def _have_one_origin(mesh: DeviceMesh, wide: DeviceMesh) -> bool:
    """Whether torch made a mesh of another one, or both of a third.

    Before 2.10 torch knows that on the thread alone that made them, so their process groups tell:
    a slice has those of the mesh that it was made of.
    """
    if hasattr(mesh, "_get_root_mesh"):  # torch 2.10
        return bool(mesh._get_root_mesh() == wide._get_root_mesh())
    return set(_group_names(mesh)) <= set(_group_names(wide))


def _group_names(mesh: Any) -> list[str]:
    """Names of the process groups of a mesh's dimensions."""
    if hasattr(mesh, "_dim_group_infos"):  # up to torch 2.7
        return [name for _, _, name in mesh._dim_group_infos]
    return list(getattr(mesh, "_dim_group_names", ()))


def over(wide: DeviceMesh, mesh: DeviceMesh, placements: Sequence[Any]) -> list[Any]:
    """Placements on the wide mesh, from the placements on a slice of it."""
    own = dict(zip(from_device_mesh(mesh).axis_names, placements, strict=True))
    return [own.get(name, Replicate()) for name in from_device_mesh(wide).axis_names]
