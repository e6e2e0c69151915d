"""The decision about the layout of each tensor after a reshard.

1. With rules: the rules decide (`shardckpt.reshard.rules`).
2. With a mesh alone: the spec that the source recorded decides, as far as the mesh has its axes.
3. With neither: the layout stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.layout.partition_spec import PartitionSpec
from shardckpt.layout.placements import Placements
from shardckpt.layout.sharding import Sharding
from shardckpt.reshard.rules import Decision

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardckpt.format.structure import TensorRecord
    from shardckpt.layout.mesh import Mesh
    from shardckpt.reshard.options import ReshardOptions


def decide(tensors: Mapping[str, TensorRecord], options: ReshardOptions) -> dict[str, Decision]:
    """The layout of every tensor.

    Args:
        tensors: the source tensors that the target has, by their names in the target.
        options: the options of the job.

    Raises:
        ShardingError, OptionError: as in `Rules.decide_all`.
    """
    if options.rules is not None:
        return options.rules.decide_all({name: tensor.shape for name, tensor in tensors.items()}, options.mesh)
    if options.mesh is not None:
        return {name: _over(options.mesh, tensor) for name, tensor in tensors.items()}
    return {name: Decision(tensor.layout, "", "It stays as it is: there is neither a mesh nor a rule.") for name, tensor in tensors.items()}


def _over(mesh: Mesh, tensor: TensorRecord) -> Decision:
    """The recorded spec over another mesh."""
    layout = tensor.layout
    if layout is None:
        return Decision(None, "", "It was saved as a plain tensor, and stays one.")
    found = layout.as_sharding(tensor.shape) if isinstance(layout, Placements) else layout
    if not isinstance(found, Sharding):
        notice = "its recorded layout names no axes, so it is replicated; a rule can say how it is cut"
        return Decision(Sharding(mesh, PartitionSpec()), "", "Nothing says how it is cut over another mesh.", (notice,))
    kept = PartitionSpec(*(tuple(a for a in axes if a in mesh.axis_names) for axes in found.spec.axes))
    lost = [str(a) for axes in found.spec.axes for a in axes if a not in mesh.axis_names]
    notices = (f"the mesh has no axis {', '.join(lost)}, along which it was cut",) if lost else ()
    return Decision(Sharding(mesh, kept), "", "It keeps its recorded spec, over the given mesh.", notices)
