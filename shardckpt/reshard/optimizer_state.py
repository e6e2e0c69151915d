"""The tensors that `dtype` without a pattern leaves: optimizer state, and parts of others.

Optimizer state is, as far as containers and names show it:

1. Everything below `state` or `param_groups`, in a dict that has both: torch's
   `Optimizer.state_dict`, and what `train_state` makes of it. DCP and Megatron may have flattened
   both into names with dots.
2. Everything below a key such as `optimizer`, `optim` or `opt_state` (optax).
3. Tensors with the names that torch's optimizers use for their moments: `exp_avg`,
   `momentum_buffer`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shardckpt.state.document import Branch, Tensor, Tied, leaves_of, parse

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardckpt.format.structure import Structure, TensorRecord
    from shardckpt.state.document import Node, Tree

_BY_NAME = re.compile(
    r"(?:^|[/.])(?:opt(?:im(?:izer)?)?_states?(?:_dict)?|optim(?:izer)?s?)(?:_?\d+)?[/.]"
    r"|(?:^|[/.])(?:(?:max_)?exp_avg(?:_sq)?(?:_row|_col)?|momentum_buffer|square_avg)$",
    re.IGNORECASE,
)
_GROUPS = re.compile(r"((?:.*\.)?)param_groups(?:\..*)?", re.DOTALL)
"""A key that shows optimizer state beside it, below the same dotted prefix."""


def unrounded(structure: Structure) -> dict[str, str]:
    """Tensor name → reason for which `dtype` without a pattern leaves the tensor."""
    root = structure.nodes
    parts = dict.fromkeys(_parts(root, structure.tensors), "part of a quantized tensor")
    return parts | dict.fromkeys(optimizer_state(root), "optimizer state")


def optimizer_state(tree: Tree) -> frozenset[str]:
    """Names of all tensors that are optimizer state, including the other names of tied tensors."""
    root = parse(tree)
    below = [leaf.name for branch in _optimizers(root) for leaf in leaves_of(branch)]
    return frozenset(below) | {
        leaf.name
        for leaf in leaves_of(root)
        if isinstance(leaf, Tensor | Tied) and _BY_NAME.search(leaf.name)
    }


def _parts(node: Node, tensors: Mapping[str, TensorRecord]) -> Iterator[str]:
    """Yield names of parts of composite tensors: only their class knows what rounding does to them.

    A composite of floating-point tensors of its own shape is a wrapper around plain elements.
    """
    if not isinstance(node, Branch):
        return
    if node.composite is None:
        for below in node.children:
            yield from _parts(below, tensors)
        return
    parts = [leaf for leaf in leaves_of(node) if isinstance(leaf, Tensor | Tied)]
    if any(
        (record := tensors[part.stored]).shape != node.composite.shape
        or not record.dtype.name.startswith(("float", "bfloat"))
        or record.dtype.itemsize == 1
        for part in parts
    ):
        yield from (part.name for part in parts)


def _optimizers(node: Node) -> Iterator[Node]:
    """Yield the nodes below `state` and `param_groups`, where both exist."""
    if not isinstance(node, Branch):
        return
    texts = [key if node.form == "dict" and isinstance(key, str) else "" for key in node.keys]
    for prefix in {match[1] for text in texts if (match := _GROUPS.fullmatch(text))}:
        own = re.compile(re.escape(prefix) + r"(?:state|param_groups)(?:\..*)?", re.DOTALL)
        parts = [
            (text, child)
            for text, child in zip(texts, node.children, strict=True)
            if own.fullmatch(text)
        ]
        if any(text.startswith(f"{prefix}state") for text, _ in parts):
            yield from (child for _, child in parts)
    for child in node.children:
        yield from _optimizers(child)
