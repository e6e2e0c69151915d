"""Selecting names: the tree document of the selected part of a state.

Names that are not selected are left out, and so are containers without any selected leaf. All other names stay the same. A
list or tuple that has lost an item becomes a dict from index to item, as in `unflatten`. If the stored name of a tied tensor is left
out, the first selected of its names becomes the tensor.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardckpt.state.document import Branch, Node, Tensor, Tied, leaves_of, parse, write

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardckpt.state.document import Tree
    from shardckpt.state.leaves import JSON


def select(tree: Tree, only: Callable[[str], bool]) -> tuple[JSON, dict[str, str]]:
    """Select a part of a state.

    Args:
        tree: the document of the complete state.
        only: whether a name is selected.

    Returns:
        The document of the selected part, and for each of its tensors the name under which it is stored in the complete state; both
        are empty if nothing is selected.
    """
    root = parse(tree)
    meaning = {leaf.name: leaf.meaning for leaf in leaves_of(root) if isinstance(leaf, Tensor)}
    wanted = [leaf for leaf in leaves_of(root) if isinstance(leaf, Tensor | Tied) and only(leaf.name)]
    first: dict[str, str] = {leaf.stored: leaf.name for leaf in wanted if isinstance(leaf, Tensor)}
    for leaf in wanted:
        first.setdefault(leaf.stored, leaf.name)

    def selected(node: Node) -> Node | None:
        if isinstance(node, Branch) and node.children:
            kept = [(key, child) for key, old in zip(node.keys, node.children, strict=True) if (child := selected(old)) is not None]
            if not kept:
                return None
            form = node.form if len(kept) == len(node.keys) else "dict"
            return replace(node, form=form, keys=[key for key, _ in kept], children=[child for _, child in kept])
        if not only(node.name):
            return None
        if isinstance(node, Tied):
            new = first[node.stored]
            return Tensor(node.name, meaning[node.stored]) if new == node.name else Tied(node.name, new)
        return node

    left = selected(root)
    if left is None:
        return {}, {}
    stored = {name: whole for whole, name in first.items()}
    return write(left), {leaf.name: stored[leaf.name] for leaf in leaves_of(left) if isinstance(leaf, Tensor)}
