"""The decision for one tensor: its layout, the rule behind it, and notices for the user."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

from shardckpt.layout.sharding import Sharding

if TYPE_CHECKING:
    from shardckpt.format.structure import StoredLayout
    from shardckpt.layout.mesh import Mesh
    from shardckpt.layout.partition_spec import PartitionSpec
    from shardckpt.reshard.rules.rule import Rule


@dataclass(frozen=True, slots=True)
class Decision:
    """The layout of one tensor, and why."""

    layout: StoredLayout | None
    """The layout; None: a plain host tensor, outside any mesh."""
    rule: str
    """The text of the rule that decided; empty if none did."""
    why: str
    """The reason as a sentence, for people."""
    notices: tuple[str, ...] = ()
    """Possible surprises, without the tensor's name, so that equal notices are shown once."""


@lru_cache(maxsize=256)
def sharding(mesh: Mesh | None, spec: PartitionSpec) -> Sharding | None:
    """The spec over the mesh; None without a mesh. Equal shardings are one object, so that comparing them is cheap."""
    return None if mesh is None else Sharding(mesh, spec)


def notices_of(layout: StoredLayout | None, shape: tuple[int, ...], rule: Rule | None = None) -> tuple[str, ...]:
    """Notices about a tensor of a shape in a layout; `rule` may know the units of a dimension."""
    notices: list[str] = []
    if not isinstance(layout, Sharding):
        return ()
    for dim, (size, parts) in enumerate(zip(shape, layout.parts(len(shape)), strict=True)):
        if parts == 1 or size == 0:
            continue
        over = "×".join(f"{axis}={layout.mesh.axis_sizes[str(axis)]}" for axis in layout.spec.axes[dim])
        if size % parts:
            notices.append(_uneven(dim, size, parts, over))
        if rule is not None and rule.units is not None and rule.units.dim == dim and rule.units.count % parts:
            notices.append(f"dimension {dim}: {rule.units.count} {rule.units.what} do not divide into {parts} parts ({over}): some are cut")
        if rule is not None and rule.packed is not None and rule.packed[0] == dim:
            notices.append(
                f"dimension {dim} holds {rule.packed[1]} one behind the other: a part ({over}) is a run of them, and not a run of each"
            )
    return tuple(notices)


def _uneven(dim: int, size: int, parts: int, over: str) -> str:
    tile = -(-size // parts)
    full, last = divmod(size, tile)
    ends = f"{full} of {tile}" + (f", one of {last}" if last else "")
    empty = parts - full - bool(last)
    return f"dimension {dim} is uneven: {size} in {parts} parts ({over}) are {ends}" + (f", {empty} empty" if empty else "")


def one_element(shape: tuple[int, ...]) -> bool:
    """Whether a shape has at most one element, so that nothing can be cut."""
    return prod(shape) <= 1
