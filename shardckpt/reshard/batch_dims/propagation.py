"""The layouts of all nodes of a graph, derived from the inputs in one pass in execution order.

Each node's rule computes its layout. If the rule cannot decide, the layout becomes Unknown with the
node's name. A node that depends on an Unknown is Unknown for the same reason. Every layout is
compared with the node's shape: the batch's size must appear where the layout says, and nowhere
else. In a graph with dynamic shapes this detects false results of a wrong rule.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from shardckpt.reshard.batch_dims.call import Call, Result, Unresolved, op_name
from shardckpt.reshard.batch_dims.layouts import (
    Layout,
    Numbered,
    Partial,
    Replicate,
    Shard,
    Unknown,
)
from shardckpt.reshard.batch_dims.rules import rule_of
from shardckpt.reshard.batch_dims.rules.views import MOVES
from shardckpt.reshard.batch_dims.sizes import Undecided, is_number

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardckpt.reshard.batch_dims.call import Assumptions
    from shardckpt.reshard.batch_dims.sizes import BatchSize

_SIZES_OF = {"sym_size", "sym_numel", "sym_stride", "sym_storage_offset"}
"""Operators that use a tensor's shape but not its elements."""


def propagate(
    graph: Any, inputs: Mapping[Any, Layout], batch: BatchSize, assume: Assumptions
) -> dict[Any, Result]:
    """Compute the layout of every node.

    Args:
        graph: a `torch.fx.Graph` of ATen operators whose nodes have `meta["val"]`.
        inputs: layouts of the placeholders; the others are replicated.
        batch: the size of the batch.
        assume: the caller's assumptions.
    """
    known: dict[Any, Result] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        called = node.op == "call_function"
        known[node] = _check(
            node,
            _of_call(node, known, batch, assume) if called else inputs.get(node, Replicate()),
            batch,
        )
    return known


def _of_call(
    node: Any, known: Mapping[Any, Result], batch: BatchSize, assume: Assumptions
) -> Result:
    if node.target is operator.getitem:
        source, key = known[node.args[0]], node.args[1]
        return source[key] if isinstance(source, tuple) else source
    try:
        if _is_number(node):
            return _of_number(node, known, batch)
        rule = rule_of(node)
        if rule is None:
            unknown = next(
                (known[n] for n in node.all_input_nodes if isinstance(known[n], Unknown)), None
            )
            return unknown or _without_rule(node)
        return _with_numbers(node, known, lambda seen: rule(Call(node, batch, seen, assume)))
    except Undecided as reason:
        return Unknown(f"{op_name(node)}: {reason}", node.name)
    except Unresolved as operand:
        return operand.unknown


def _with_numbers(
    node: Any, known: Mapping[Any, Result], rule: Callable[[Mapping[Any, Result]], Result]
) -> Result:
    """Apply a rule to sample numbers, which move like a cut tensor.

    Only operations that move elements keep the numbers.
    """
    if op_name(node) not in MOVES:
        return rule(known)
    source = node.all_input_nodes[0]
    numbers = known[source]
    if not isinstance(numbers, Numbered):
        return rule(known)
    moved = rule({**known, source: Shard(numbers.dim, numbers.outer)})
    return Numbered(moved.dim, moved.outer) if isinstance(moved, Shard) else moved


def _without_rule(node: Any) -> Result:
    """Result of an operation without a rule: Unknown with its name, unless it returns nothing."""
    if node.meta.get("val") is None:
        return Replicate()
    return Unknown(f"there is no rule for the operation {node.target}", node.name)


def _is_number(node: Any) -> bool:
    """Whether a node is computed from sizes and numbers alone."""
    value = node.meta.get("val")
    return is_number(value) and (
        op_name(node) in _SIZES_OF
        or not any(hasattr(n.meta.get("val"), "shape") for n in node.all_input_nodes)
    )


def _of_number(node: Any, known: Mapping[Any, Result], batch: BatchSize) -> Layout:
    if op_name(node) not in _SIZES_OF:
        unknown = next(
            (layout for n in node.all_input_nodes if isinstance(layout := known[n], Unknown)), None
        )
        if unknown is not None:
            return unknown
    return Replicate(batch.power(node.meta["val"]))


def _check(node: Any, result: Result, batch: BatchSize) -> Result:
    """The layout if the shape agrees with it, else Unknown."""
    value = node.meta.get("val")
    if isinstance(result, tuple):
        values = value if isinstance(value, tuple | list) else [value] * len(result)
        return tuple(
            _compare(node, layout, v, batch) for layout, v in zip(result, values, strict=False)
        )
    return _compare(node, result, value, batch)


def _compare(node: Any, layout: Layout, value: Any, batch: BatchSize) -> Layout:
    if isinstance(layout, Unknown) or not hasattr(value, "shape"):
        return layout
    try:
        shape = batch.shape(value.shape)
    except Undecided as reason:
        return Unknown(str(reason), node.name)
    cut = {layout.dim} if isinstance(layout, Shard | Numbered) else set()
    if isinstance(layout, Shard | Numbered) and (
        layout.dim >= len(shape) or shape[layout.dim] % (layout.outer * batch.value)
    ):
        return Unknown(f"{layout} does not fit its shape {tuple(value.shape)}", node.name)
    stray = _stray_size(
        node,
        layout,
        value.shape,
        [size for d, size in enumerate(shape) if d not in cut and batch.divides(size)],
        batch,
    )
    return Unknown(stray, node.name) if stray else layout


def _stray_size(
    node: Any, layout: Layout, shape: Any, others: list[int], batch: BatchSize
) -> str | None:
    """The reason why sizes that contain the batch outside of the cut dimension refute a layout.

    None if they do not.
    """
    if not others:
        return None
    if not batch.literal_sizes:
        kind = (
            "partial"
            if isinstance(layout, Partial)
            else "cut"
            if isinstance(layout, Shard | Numbered)
            else "replicated"
        )
        return (
            f"it is {kind}, and another dimension of its shape {tuple(shape)} has the batch's "
            "size: samples mix"
        )
    known = {
        int(size) for n in node.all_input_nodes for size in getattr(n.meta.get("val"), "shape", ())
    }
    if node.op != "call_function" or node.target is operator.getitem or known.issuperset(others):
        return None
    return (
        f"its shape {tuple(shape)} has a new size that may have been derived from the batch of "
        f"{batch.value}; export with a dynamic batch dimension, or with a batch that divides no "
        "other size"
    )
