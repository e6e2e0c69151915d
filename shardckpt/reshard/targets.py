"""The structure of the new checkpoint, and for each of its tensors the source tensor that it is made of.

Each tensor is stored as a save would store it that finds it laid out like this on devices (`save_plan`). One of a checkpoint of
ours that keeps its layout and the size of its elements keeps its arrays and chunks, too, whatever cut them so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from shardckpt.errors import NamesMismatchError
from shardckpt.format.structure import Structure, TensorRecord
from shardckpt.plan.chunks import smallest_chunk
from shardckpt.reshard.dtype_rules import plan_dtypes
from shardckpt.reshard.layouts import decide
from shardckpt.reshard.optimizer_state import optimizer_state
from shardckpt.state import meanings, per_process_names, select
from shardckpt.state.names import array_path, piece_path, selector
from shardckpt.writing.save_plan import tensor_record

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardckpt.layout.dtypes import DType
    from shardckpt.reshard.dtype_rules import ConvertedSubtree
    from shardckpt.reshard.options import ReshardOptions
    from shardckpt.reshard.rules import Decision

__all__ = ["Targets", "renamed", "targets"]


@dataclass(frozen=True, slots=True)
class Targets:
    """What a reshard makes."""

    structure: Structure
    """Of the new checkpoint."""
    sources: Mapping[str, TensorRecord]
    """By name in the new checkpoint, the tensor of the source."""
    decisions: Mapping[str, Decision]
    """By name in the new checkpoint, how a tensor is laid out, and why."""
    values: frozenset[str]
    """Names of the places where every process has a value of its own."""
    conversions: tuple[ConvertedSubtree, ...]
    """How many tensors `dtype` converts and leaves, by subtree."""


def targets(source: Structure, options: ReshardOptions, where: str, *, files: bool = False, keep_chunks: bool = True) -> Targets:
    """What a reshard makes of a checkpoint with that structure.

    Args:
        source: of the checkpoint.
        options: the job's.
        where: the checkpoint's place, for messages.
        files: whether each chunk becomes a file of its own.
        keep_chunks: whether a tensor that can keep its arrays and chunks does.

    Raises:
        NamesMismatchError: nothing is selected by `only`.
        OptionError, ShardingError: as in `layouts.decide`; or a pattern of `dtype` that matches nothing.
        DtypeMismatchError: a tensor that cannot be converted, by name.
        LeafError: a tensor that cannot be stored.
    """
    tree, stored = select(source.tree, selector(options.only))
    if options.only is not None and not tree:
        raise NamesMismatchError(f"{where}: only={options.only!r} selects none of its names; `shardckpt info` lists them.")
    sources = {name: source.tensors[old] for name, old in stored.items()}
    decisions = decide(sources, options)
    optimizer = optimizer_state(source.tree) if options.dtype else ()
    planned = plan_dtypes(sources, options.dtype, meanings(tree), optimizer)
    types = planned.dtypes
    smallest = smallest_chunk(sum(prod(t.shape) * types[name].itemsize for name, t in sources.items()), files=files)
    tensors = {}
    for name, old in sources.items():
        layout, dtype = decisions[name].layout, types[name]
        if keep_chunks and layout == old.layout and dtype.itemsize == old.dtype.itemsize:
            tensors[name] = renamed(old, name, dtype)
        else:
            tensors[name] = tensor_record(name, old.shape, dtype, layout, smallest)
    return Targets(Structure(tree, tensors), sources, decisions, frozenset(per_process_names(tree)), planned.subtrees)


def renamed(tensor: TensorRecord, name: str, dtype: DType) -> TensorRecord:
    """A tensor that is stored in the same chunks, under the same name or another one."""
    if name == tensor.name:
        return replace(tensor, dtype=dtype, base=None)  # what lies in a base is brought in
    whole = len(tensor.pieces) == 1 and tensor.pieces[0].path == array_path(tensor.name)
    paths = [array_path(name)] if whole else [piece_path(name, tensor.shape, piece.start) for piece in tensor.pieces]
    pieces = tuple(replace(piece, path=path) for piece, path in zip(tensor.pieces, paths, strict=True))
    return TensorRecord(name, tensor.shape, dtype, tensor.layout, pieces)
