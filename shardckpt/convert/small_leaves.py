"""Which small leaves of a state can another format hold?

Values that processes owned by themselves, and objects of registered types, belong to no format but ours. Of the others the format
says itself which it takes. What it does not take is left out, and the export says so, by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.names import shown
from shardckpt.tree.document import Custom, Owned, Small, leaves_of, meanings
from shardckpt.tree.unflatten import decode_leaf

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardckpt.tree.document import Node

__all__ = ["left_out", "notes_of"]


def left_out(tree: Node, refuses: Callable[[object], str | None]) -> dict[str, str]:
    """The leaves that are left out, by name, with the reason.

    Args:
        tree: the state.
        refuses: why a format does not take a small leaf; None: it does.
    """
    found: dict[str, str] = {}
    for leaf in leaves_of(tree):
        reason = None
        if isinstance(leaf, Owned):
            reason = "every process has a value of its own there"
        elif isinstance(leaf, Custom):
            reason = f"it is an object of the registered type {leaf.type_name!r}"
        elif isinstance(leaf, Small):
            reason = refuses(decode_leaf(leaf))
        if reason is not None:
            found[leaf.name] = reason
    return found


def notes_of(tree: Node, left: dict[str, str], *, keys: bool = False) -> list[str]:
    """What an export has to say of a state's leaves, a line each.

    Args:
        tree: the state.
        left: what is left out.
        keys: whether the format keeps what tensors mean (random keys of JAX).
    """
    notes = [f"{shown(name)} is left out: {reason}." for name, reason in left.items()]
    meant = {} if keys else meanings(tree)
    return [*notes, *(f"{shown(name)} means {meaning!r}; its elements are exported as numbers." for name, meaning in meant.items())]
