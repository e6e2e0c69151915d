"""The entries of rules: a rule, the preset of a family, or another checkpoint's layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from shardckpt.reshard.rules.like import Like
from shardckpt.reshard.rules.preset import Preset
from shardckpt.reshard.rules.rule import Rule

if TYPE_CHECKING:
    from shardckpt.layout.mesh import Mesh
    from shardckpt.reshard.rules.deciding import Step

Entry: TypeAlias = Rule | Preset | Like


def steps_of(entry: Entry, mesh: Mesh | None) -> tuple[Step, ...]:
    """The steps that an entry stands for over a mesh.

    Raises:
        ShardingError: the mesh lacks an axis, or there is no mesh; the message names the rule.
    """
    if isinstance(entry, Preset):
        return entry.rules(mesh)
    if isinstance(entry, Rule):
        entry.check_axes(mesh)
    return (entry,)
