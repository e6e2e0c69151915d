"""Layouts over a mesh for the state of a data-parallel program.

Cut tensors are laid out over the mesh axis of data parallelism, replicated tensors over no axis. A
tensor of which every process has one term has no layout that could be saved: it must be reduced
first, and is replicated then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.errors import NamesMismatchError, ShardingError
from shardckpt.layout.partition_spec import PartitionSpec
from shardckpt.layout.placements import Placement, Placements
from shardckpt.layout.sharding import Sharding
from shardckpt.reshard.batch_dims.inference import BatchDims, batch_dims
from shardckpt.reshard.batch_dims.layouts import Layout, Partial, Replicate, Shard
from shardckpt.state.names import shown
from shardckpt.state.select import matches, unused_patterns
from shardckpt.text import Message, few, named

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardckpt.layout.mesh import Mesh


def batch_shardings(
    exported: Any,
    batch: Mapping[str, int] | None = None,
    *,
    mesh: Mesh,
    axis: str = "data",
    replicated: str | Sequence[str] = (),
    prefix: str = "",
    even_counts: bool = False,
    local_batch_norm: bool = False,
) -> dict[str, Sharding | Placements]:
    """Layouts of a program's parameters, buffers and changed inputs over a mesh, by name.

    `SaveOptions(shardings=…)` and `Rules.by_name` accept the result. Buffers that are not
    persistent, and constants, are left out, as in `state_dict()`.

    Args:
        exported: a program, or the result of `batch_dims`.
        batch: as for `batch_dims`.
        mesh: the devices.
        axis: the axis of the mesh that the batch is cut over.
        replicated: patterns of names that the training keeps equal by means outside the graph: it
            reduces them, as SyncBatchNorm does, or copies them from one process, as
            DistributedDataParallel does with buffers.
        prefix: put before each name, such as "model/" for a state {"model": module.state_dict()}.
        even_counts: as for `batch_dims`; ignored if its result is given.
        local_batch_norm: as for `batch_dims`; ignored if its result is given.

    Raises:
        OptionError: as for `batch_dims`.
        NamesMismatchError: a pattern of `replicated` selects nothing.
        ShardingError: the mesh has no such axis, or state that is partial or unknown is not in
            `replicated`.
    """
    if axis not in mesh.axis_names:
        raise ShardingError(
            f"batch_shardings: the mesh has no axis {axis!r}; its axes are "
            f"{', '.join(mesh.axis_names)}."
        )
    inferred = (
        exported
        if isinstance(exported, BatchDims)
        else batch_dims(exported, batch, even_counts=even_counts, local_batch_norm=local_batch_norm)
    )
    program = inferred.program
    inputs = {name: node for name, node in program.inputs.items() if node in program.changed}
    both = [name for name in inputs if name in program.kept]
    if both:
        raise ShardingError(
            f"batch_shardings: a state and a changed input are both named {shown(both[0])}; rename "
            "one of them."
        )
    names = [*program.kept, *inputs]
    unused = unused_patterns(replicated, names) if replicated else None
    if unused is not None:
        advice = f" selects none of the program's state, which is {few(names, 5)}."
        raise NamesMismatchError(Message("batch_shardings: ", named("replicated", unused), advice))
    layouts = {
        name: _check_savable(name, group[name], replicated)
        for group, own in ((inferred.states, program.kept), (inferred.inputs, inputs))
        for name in own
    }
    nodes = {**program.states, **inputs}
    return {
        prefix + name: _over(mesh, axis, layout, len(nodes[name].meta["val"].shape))
        for name, layout in layouts.items()
    }


def _check_savable(name: str, layout: Layout, replicated: str | Sequence[str]) -> Replicate | Shard:
    """The layout, if it can be saved."""
    if isinstance(layout, Replicate | Shard) and not layout.power:
        return layout
    if matches(replicated, name):
        return Replicate()
    if isinstance(layout, Partial):
        raise ShardingError(
            f"{shown(name)}: every process has one term of it, {layout}; all-reduce it with op "
            f"{layout.op} before it is saved, and name it in replicated=…, or keep its terms with "
            "shardckpt.PerProcess."
        )
    raise ShardingError(
        f"{shown(name)}: its layout cannot be determined ({layout}); if the training keeps it "
        "equal in all processes, name it in replicated=…, or keep each with shardckpt.PerProcess."
    )


def _over(mesh: Mesh, axis: str, layout: Replicate | Shard, ndim: int) -> Sharding | Placements:
    if isinstance(layout, Replicate):
        return Sharding(mesh, PartitionSpec(*[None] * ndim))
    if layout.outer == 1:
        return Sharding(
            mesh, PartitionSpec(*(axis if d == layout.dim else None for d in range(ndim)))
        )
    strided = Placement(layout.dim, layout.outer)
    return Placements(
        mesh, tuple(strided if name == axis else Placement() for name in mesh.axis_names)
    )
