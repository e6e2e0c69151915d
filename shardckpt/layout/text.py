"""Meshes, specs and layouts as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.layout.device_list import device_list
from shardckpt.text import clip, visible

if TYPE_CHECKING:
    from shardckpt.layout.mesh import Mesh
    from shardckpt.layout.placements import Placements
    from shardckpt.layout.sharding import Layout

LONGEST_OP_SHARDING = 200
"""Most characters: the listed OpSharding of a large mesh would fill pages."""


def layout_text(layout: Layout | Placements | None) -> str:
    """A layout: its spec and mesh, or its OpSharding if it has no spec; "plain" for None."""
    from shardckpt.layout.op_sharding import OpSharding

    if layout is None:
        return "plain"
    return (
        spec_text(layout)
        if isinstance(layout, OpSharding)
        else f"{spec_text(layout)} over {mesh_text(layout.mesh)}"
    )


def spec_text(layout: Layout | Placements | None) -> str:
    """The spec, or its substitute: placements, an OpSharding, or "plain"."""
    from shardckpt.layout.placements import Placements
    from shardckpt.layout.sharding import Sharding

    if layout is None:
        return "plain"
    if isinstance(layout, Placements):
        return visible(", ".join(map(str, layout.placements)))
    if not isinstance(layout, Sharding):
        return op_sharding_text(layout, len(layout.tiles.dims) if layout.tiles else 0)
    parts = ["+".join(map(str, axes)) or "–" for axes in layout.spec.axes]
    while parts and parts[-1] == "–":
        parts.pop()
    return visible(", ".join(parts)) if parts else "replicated"


def mesh_text(mesh: Mesh) -> str:
    """A mesh: its axes with their sizes, and its devices unless they count from 0."""
    axes = (
        visible(" × ".join(f"{name}={size}" for name, size in mesh.axis_sizes.items()))
        or "one device"
    )
    if mesh.is_arange:
        return axes
    ids = mesh.device_ids
    ordered = bool((ids[1:] > ids[:-1]).all())
    return f"{axes}, devices {device_list(ids, most=24)}" + ("" if ordered else " in another order")


def op_sharding_text(layout: Layout, ndim: int) -> str:
    """The OpSharding in XLA's notation, truncated if it is very long."""
    from shardckpt.layout.sharding import Sharding

    return clip(
        (layout.op_sharding(ndim) if isinstance(layout, Sharding) else layout).to_hlo(),
        LONGEST_OP_SHARDING,
    )
