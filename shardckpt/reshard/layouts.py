"""How will each tensor be laid out after the reshard, and which rule says so?

1. With rules: by the first whose pattern matches the tensor's name, over the mesh; `shardckpt.rules` decide for themselves.
2. With a mesh alone: by the spec that the source recorded, as far as the mesh has its axes.
3. With neither: as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardckpt.errors import OptionError, ShardingError
from shardckpt.names import matches, shown
from shardckpt.partition_spec import PartitionSpec
from shardckpt.placements import Placements
from shardckpt.rules import Rules
from shardckpt.sharding import Sharding

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardckpt.mesh import Mesh
    from shardckpt.reshard.options import ReshardOptions
    from shardckpt.structure import StoredLayout, TensorRecord

__all__ = ["Decision", "decide"]


@dataclass(frozen=True, slots=True)
class Decision:
    """How one tensor is laid out, and why."""

    layout: StoredLayout | None
    """None: a plain host tensor."""
    rule: str
    """The rule that says so."""
    why: str
    """In words, for people."""
    notices: tuple[str, ...] = ()
    """What they may want to know besides."""


def decide(tensors: Mapping[str, TensorRecord], options: ReshardOptions) -> dict[str, Decision]:
    """The layout of every tensor.

    Args:
        tensors: those of the source that the target has, by their names there.
        options: the job's.

    Raises:
        ShardingError: a spec that does not suit its tensor, by name.
        OptionError: a tensor that no rule matches, where that is an error; or specs without a mesh.
    """
    if isinstance(options.rules, Rules):
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        return {name: Decision(d.layout, d.rule, d.why, d.notices) for name, d in options.rules.decide_all(shapes, options.mesh).items()}
    return {name: _decided(name, tensor, options) for name, tensor in tensors.items()}


def _decided(name: str, tensor: TensorRecord, options: ReshardOptions) -> Decision:
    assert not isinstance(options.rules, Rules)
    if options.rules is None:
        if options.mesh is None:
            return Decision(tensor.layout, "", "no mesh and no rules are given: as it is")
        return _over(options.mesh, tensor)
    pattern = next((p for p in options.rules if matches(p, name)), None)
    if pattern is not None:
        found = options.rules[pattern]
        if not isinstance(found, PartitionSpec):
            layout: StoredLayout | None = found
        elif options.mesh is None:
            raise OptionError(f"reshard(rules=…): {pattern!r} is a spec, whose axes are a mesh's; give mesh= too.")
        else:
            layout = Sharding(options.mesh, found)
        try:
            if layout is not None:
                layout.parts(len(tensor.shape))
        except ShardingError as e:
            raise ShardingError(f"{shown(name)}, by the rule {pattern!r}: {e}") from e
        return Decision(layout, pattern, f"{pattern!r} is the first rule that matches")
    if options.unmatched == "error":
        raise OptionError(f"{shown(name)}: no rule matches it; add one, or have such tensors replicated with unmatched='replicate'.")
    return Decision(_replicated(options.mesh), "", "no rule matches: replicated")


def _over(mesh: Mesh, tensor: TensorRecord) -> Decision:
    """The recorded spec over another mesh."""
    layout = tensor.layout
    if layout is None:
        return Decision(None, "", "a plain tensor stays one")
    found = layout.as_sharding(tensor.shape) if isinstance(layout, Placements) else layout
    if not isinstance(found, Sharding):
        notice = "its recorded layout names no axes, so nothing says how it would be cut over another mesh; give a rule"
        return Decision(_replicated(mesh), "", "replicated", (notice,))
    kept = PartitionSpec(*(tuple(a for a in axes if a in mesh.axis_names) for axes in found.spec.axes))
    lost = [str(a) for axes in found.spec.axes for a in axes if a not in mesh.axis_names]
    notices = (f"the mesh has no axis {', '.join(lost)}: not cut along it",) if lost else ()
    return Decision(Sharding(mesh, kept), "", "its recorded spec, over the given mesh", notices)


def _replicated(mesh: Mesh | None) -> StoredLayout | None:
    return None if mesh is None else Sharding(mesh, PartitionSpec())
