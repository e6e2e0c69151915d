"""Selecting names: the tree document of the part of a state that they make up.

What is left out is not there, and neither are containers in which nothing is left. All other names stay what they are. A
list or tuple that has lost an item is a dict from index to item, as `unflatten` has it. Of tied names of which the first is
left out, the first that is left becomes the tensor itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardckpt.state.document import Branch, Node, Tensor, Tied, leaves_of, parse, write

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardckpt.state.document import Tree
    from shardckpt.state.leaves import JSON

__all__ = ["select"]


def select(tree: Tree, only: Callable[[str], bool]) -> tuple[JSON, dict[str, str]]:
    """The part of a state that some names are.

    Args:
        tree: the document of the whole state.
        only: which names are wanted.

    Returns:
        The document of that part, and for each of its tensors the name that it is stored under in the whole; both are empty
        where nothing is wanted.
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
