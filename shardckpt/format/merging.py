"""The structure of a complete checkpoint, merged from those of the processes that saved it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardckpt.errors import CommitError
from shardckpt.format.structure import Structure, TensorRecord
from shardckpt.plan.pieces import coverage_gap
from shardckpt.state import tensor_names
from shardckpt.state.names import shown
from shardckpt.state.union import union

if TYPE_CHECKING:
    from collections.abc import Sequence


def merge_structures(parts: Sequence[tuple[Sequence[int], Structure]]) -> Structure:
    """Merge the structures of several processes.

    Args:
        parts: distinct structures, each with the processes that have it, ascending; sorted by
            lowest process.

    Raises:
        CommitError: they contradict each other; the message names the leaf or tensor, and the
            processes.
    """
    if len(parts) == 1 and not parts[0][1].is_partial:
        return parts[0][1]
    for processes, part in parts[1:]:
        if part.chain != parts[0][1].chain:
            raise CommitError(
                f"Processes {parts[0][0][0]} and {processes[0]} have written differences from "
                "different checkpoints. Nothing was published."
            )
    tree = union([(processes, part.tree) for processes, part in parts])
    tensors: dict[str, TensorRecord] = {}
    said_by: dict[str, Sequence[int]] = {}
    for processes, part in parts:
        for name, tensor in part.tensors.items():
            known = tensors.get(name)
            if known is None:
                tensors[name], said_by[name] = tensor, processes
            elif known != tensor:
                tensors[name] = _join(known, tensor, said_by[name], processes)
    return Structure(
        tree, {name: _complete(tensors[name]) for name in tensor_names(tree)}, parts[0][1].chain
    )


def _join(
    one: TensorRecord, other: TensorRecord, processes: Sequence[int], others: Sequence[int]
) -> TensorRecord:
    """Merge two processes' records of one tensor; a partial record without pieces adds nothing."""
    for what, a, b in (
        ("shape", one.shape, other.shape),
        ("dtype", one.dtype.name, other.dtype.name),
        ("layout", one.layout, other.layout),
        ("base", _whereabouts(one), _whereabouts(other)),
        ("form", one.difference, other.difference),
        ("chunks", one.partial or one.pieces, other.partial or other.pieces),
    ):
        if a != b:
            advice = "give tensors that differ names of their own"
            if what == "layout" and one.layout is not None and other.layout is not None:
                advice = (
                    "lay it out over one mesh of all its processes, replicated where they have "
                    "the same"
                )
            if what == "base":
                advice = (
                    "save with the same base= and skip= on all processes, and do not replace the "
                    "base meanwhile"
                )
            raise CommitError(
                f"{shown(one.name)}: its {what} is {str(a)[:200]} on process {processes[0]} and "
                f"{str(b)[:200]} on process {others[0]}; {advice}. Nothing was published."
            )
    return replace(one, pieces=tuple(dict.fromkeys([*one.pieces, *other.pieces])))


def _whereabouts(tensor: TensorRecord) -> str:
    """A tensor's place in a base as text; the same for the same base, whichever url is used."""
    return (
        "none"
        if tensor.base is None
        else f"attempt {tensor.base.base.attempt}, {shown(tensor.base.name)}"
    )


def _complete(tensor: TensorRecord) -> TensorRecord:
    """Complete the record of a tensor after the pieces of all processes are merged."""
    if not tensor.partial:
        return tensor
    gap = coverage_gap(tensor.shape, tensor.pieces)
    if gap is not None:
        raise CommitError(
            f"{shown(tensor.name)}: the processes' shards do not form the tensor of shape "
            f"{tensor.shape}: {gap}. Nothing was published."
        )
    pieces = sorted(tensor.pieces, key=lambda piece: piece.start)
    return replace(tensor, pieces=tuple(pieces), partial=False)
