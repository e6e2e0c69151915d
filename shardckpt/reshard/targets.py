"""The structure of the new checkpoint, and the source tensor of each of its tensors.

The layout of each tensor is decided first. With rules, the rules decide; with a mesh alone, the
spec that the source recorded, as far as the mesh has its axes; with neither, the layout stays. Each
tensor is stored as a save would store it if devices had it in the new layout (`tensor_storage`). A
tensor of a shardckpt checkpoint that keeps its layout and element size also keeps its arrays and
chunks, whatever their shapes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from shardckpt.format.structure import Structure, TensorRecord
from shardckpt.layout.partition_spec import PartitionSpec
from shardckpt.layout.placements import Placements
from shardckpt.layout.sharding import Sharding
from shardckpt.plan.chunks import smallest_chunk
from shardckpt.reshard.dtype_rules import plan_dtypes
from shardckpt.reshard.optimizer_state import unrounded
from shardckpt.reshard.rules import Decision
from shardckpt.state import meanings, per_process_names, select
from shardckpt.state.select import check_selection, selector
from shardckpt.writing.tensor_storage import tensor_record

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardckpt.layout.dtypes import DType
    from shardckpt.layout.mesh import Mesh
    from shardckpt.reshard.dtype_rules import ConvertedSubtree
    from shardckpt.reshard.options import ReshardOptions


@dataclass(frozen=True, slots=True)
class Targets:
    """The tensors that a reshard makes."""

    target: Structure
    """Structure of the new checkpoint."""
    sources: Mapping[str, TensorRecord]
    """Name in the target → source tensor."""
    decisions: Mapping[str, Decision]
    """Name in the target → layout of the tensor, and its reason."""
    values: frozenset[str]
    """Names under which every process that saved had its own value."""
    conversions: tuple[ConvertedSubtree, ...]
    """Tensors that `dtype` converts and leaves, by subtree."""


def targets(
    source: Structure,
    options: ReshardOptions,
    where: str,
    *,
    files: bool = False,
    keep_chunks: bool = True,
) -> Targets:
    """Work out the new checkpoint from the structure of the source.

    Args:
        source: structure of the source checkpoint.
        options: options of the job.
        where: place of the source, for messages.
        files: whether each chunk becomes a separate file.
        keep_chunks: whether a tensor that can keep its arrays and chunks does so.

    Raises:
        NamesMismatchError, OptionError, ShardingError, DtypeMismatchError, LeafError: the request
        does not fit the source.
    """
    check_selection(options.only, source.tree, where)
    tree, stored = select(source.tree, selector(options.only))
    sources = {name: source.tensors[old] for name, old in stored.items()}
    decisions = _decide_layouts(sources, options)
    left = unrounded(source) if options.dtype else {}
    planned = plan_dtypes(sources, options.dtype, meanings(tree), left)
    types = planned.dtypes
    smallest = smallest_chunk(
        sum(prod(t.shape) * types[name].itemsize for name, t in sources.items()), files=files
    )
    tensors = {}
    for name, old in sources.items():
        layout, dtype = decisions[name].layout, types[name]
        if keep_chunks and layout == old.layout and dtype.itemsize == old.dtype.itemsize:
            tensors[name] = renamed(old, name, dtype)
        else:
            new = tensor_record(name, old.shape, dtype, layout, smallest)
            tensors[name] = replace(new, array=old.array)
    return Targets(
        Structure(tree, tensors),
        sources,
        decisions,
        frozenset(per_process_names(tree)),
        planned.subtrees,
    )


def renamed(tensor: TensorRecord, name: str, dtype: DType) -> TensorRecord:
    """The record of a tensor that keeps its chunks, under the same name or another one."""
    if name == tensor.name:
        # The new checkpoint has all elements.
        return replace(tensor, dtype=dtype, base=None, difference=False)
    pieces = tensor.pieces_called(name)
    return TensorRecord(name, tensor.shape, dtype, tensor.layout, pieces, array=tensor.array)


def _decide_layouts(
    tensors: Mapping[str, TensorRecord], options: ReshardOptions
) -> dict[str, Decision]:
    """The layout of every tensor; `tensors` are source tensors by their names in the target."""
    if options.decided is not None:
        return options.decided.decide_all(
            {name: tensor.shape for name, tensor in tensors.items()}, options.mesh
        )
    if options.mesh is not None:
        plain = all(tensor.layout is None for tensor in tensors.values())
        notices = (
            (
                (
                    "no tensor has a sharding that the mesh could apply to; a rule says which "
                    "dimensions to cut"
                ),
            )
            if plain
            else ()
        )
        return {name: _over(options.mesh, tensor, notices) for name, tensor in tensors.items()}
    return {
        name: Decision(tensor.layout, "", "The layout stays: neither a mesh nor a rule is given.")
        for name, tensor in tensors.items()
    }


def _over(mesh: Mesh, tensor: TensorRecord, of_plain: tuple[str, ...]) -> Decision:
    """The recorded spec over another mesh; `of_plain` are the notices about a plain tensor."""
    layout = tensor.layout
    if layout is None:
        return Decision(
            None, "", "The tensor was saved as a plain tensor, and stays one.", of_plain
        )
    sharding = layout.as_sharding(tensor.shape) if isinstance(layout, Placements) else layout
    if not isinstance(sharding, Sharding):
        notice = "its recorded layout names no axes, so it is replicated; a rule can cut it"
        return Decision(
            Sharding(mesh, PartitionSpec()),
            "",
            "The recorded layout cannot be applied to another mesh.",
            (notice,),
        )
    kept = PartitionSpec(
        *(tuple(a for a in axes if a in mesh.axis_names) for axes in sharding.spec.axes)
    )
    lost = [str(a) for axes in sharding.spec.axes for a in axes if a not in mesh.axis_names]
    notices = (
        (f"the mesh has no axis {', '.join(lost)}, which cut the tensor in the source",)
        if lost
        else ()
    )
    return Decision(
        Sharding(mesh, kept),
        "",
        "The tensor keeps its recorded spec, over the given mesh.",
        notices,
    )
