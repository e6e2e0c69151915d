"""Rebuilding a state from tensors and a tree document, as plain dicts, lists and tuples.

The state is built from the root down, leaves by their names and containers by their form. Names
that are not selected are left out, and so are containers in which nothing is left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.errors import FormatError, ShardckptError
from shardckpt.state import leaves
from shardckpt.state.document import Branch, Custom, Node, Owned, Small, Tensor, Tied, parse
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardckpt.state.document import Tree
    from shardckpt.state.names import PathKey


def decode_leaf(leaf: Small | Custom) -> object:
    """Decode a leaf that is not a tensor.

    Raises:
        FormatError: the leaf is invalid, its type is not registered, or its registered decode
            function fails on the stored content.
        MissingExtraError: the leaf is torch's, and torch is not installed.
    """
    if isinstance(leaf, Small):
        return leaves.decode(leaf.content, leaf.name)
    registered = leaves.leaf_type_named(leaf.type_name, leaf.name)
    content = assemble(leaf.content, {})
    try:
        return registered.decode(content)
    except ShardckptError:
        raise
    except Exception as error:
        raise FormatError(
            f"{shown(leaf.name)}: the decode function registered as {leaf.type_name!r} failed on "
            f"what is stored ({type(error).__name__}: {error}); register the one that belongs to "
            "the encode function it was saved with."
        ) from error


def unflatten(
    tree: Tree, tensors: Mapping[str, Any], only: Callable[[str], bool] | None = None
) -> Any:
    """Rebuild a state, of plain dicts, lists and tuples.

    Names that `only` does not select are left out, and so are containers with nothing left in them.
    A list or tuple from which an item is missing comes back as a dict from index to item, so that
    every item keeps its key. A container that was stored empty is there if `only` selects its own
    name.

    Args:
        tree: the document.
        tensors: values by name, at least those of `stored_names(tree, only)` and
            `per_process_names(tree, only)`. Tied names share one value. Meanings of tensors are
            ignored.
        only: whether a name is selected; None: all.

    Returns:
        The state; an empty dict if `only` selects nothing in it.

    Raises:
        FormatError: the document is invalid, or names a tensor that `tensors` lacks.
        MissingExtraError: a leaf is torch's, and torch is not installed.
    """
    return assemble(parse(tree), tensors, only)


def assemble(
    node: Node, tensors: Mapping[str, Any], only: Callable[[str], bool] | None = None
) -> Any:
    """`unflatten` for a parsed document."""
    state = _Builder(tensors, only).build(node)
    return {} if state is _LEFT_OUT else state


_LEFT_OUT = object()


class _Builder:
    """Builds plain containers from nodes."""

    def __init__(self, tensors: Mapping[str, Any], only: Callable[[str], bool] | None) -> None:
        self.tensors = tensors
        self.only = only

    def build(self, node: Node) -> object:
        if isinstance(node, Branch) and node.children:
            return self.container(node)
        if self.only is not None and not self.only(node.name):
            return _LEFT_OUT
        if isinstance(node, Tensor | Tied | Owned):
            stored = node.name if isinstance(node, Owned) else node.stored
            if stored not in self.tensors:
                what = "per-process value" if isinstance(node, Owned) else "tensor"
                raise FormatError(
                    f"The tree names a {what} {shown(stored)} that the checkpoint does not have; "
                    "its record is damaged."
                )
            return self.tensors[stored]
        if isinstance(node, Branch):
            return {"dict": dict, "list": list, "tuple": tuple}[node.form]()
        return decode_leaf(node)

    def container(self, node: Branch) -> object:
        items: dict[PathKey, object] = {}
        for key, child in zip(node.keys, node.children, strict=True):
            item = self.build(child)
            if item is not _LEFT_OUT:
                items[key] = item
        if not items:
            return _LEFT_OUT
        if node.form == "dict" or [*items] != [*range(len(node.keys))]:
            return items
        return tuple(items.values()) if node.form == "tuple" else list(items.values())
