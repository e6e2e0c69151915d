"""Lists of the leaves of a tree document: names, meanings, kinds and short texts.

An invalid document is a FormatError. The names of tensors are in `shardckpt.state.document`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.state import leaves
from shardckpt.state.document import Custom, Owned, Tensor, Tied, leaves_of, parse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardckpt.state.document import Tree


def leaf_names(tree: Tree) -> list[str]:
    """The names of the leaves that are not tensors, in order."""
    return [leaf.name for leaf in leaves_of(parse(tree)) if not isinstance(leaf, Tensor | Tied)]


def per_process_names(tree: Tree, only: Callable[[str], bool] | None = None) -> list[str]:
    """The names of the per-process leaves that `only` selects, in order."""
    return [
        leaf.name
        for leaf in leaves_of(parse(tree))
        if isinstance(leaf, Owned) and (only is None or only(leaf.name))
    ]


def meanings(tree: Tree) -> dict[str, str]:
    """Tensor name → meaning of its elements, for tensors with a meaning.

    A tied name has its tensor's meaning.
    """
    ends_of_tree = list(leaves_of(parse(tree)))
    stored = {
        leaf.name: leaf.meaning
        for leaf in ends_of_tree
        if isinstance(leaf, Tensor) and leaf.meaning is not None
    }
    return {
        leaf.name: stored[leaf.stored]
        for leaf in ends_of_tree
        if isinstance(leaf, Tensor | Tied) and leaf.stored in stored
    }


def iter_leaves(tree: Tree) -> Iterator[tuple[str, str, str]]:
    """Every leaf as (name, kind, short text of its value), for display.

    The kind is `tensor` (its value is the meaning of its elements, if there is one), `tied`, `per
    process`, the leaf's type, or the name of its registered type. No type needs to be registered
    and no framework installed.
    """
    for leaf in leaves_of(parse(tree)):
        if isinstance(leaf, Tensor):
            yield leaf.name, "tensor", leaf.meaning or ""
        elif isinstance(leaf, Tied):
            yield leaf.name, "tied", leaf.stored
        elif isinstance(leaf, Owned):
            yield leaf.name, "per process", ""
        elif isinstance(leaf, Custom):
            yield leaf.name, leaf.type_name, ""
        else:
            yield leaf.name, *leaves.describe(leaf.content, leaf.name)
