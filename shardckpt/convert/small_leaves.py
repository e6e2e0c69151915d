"""Small leaves and dict keys of a state that another format can or cannot hold.

Values that processes owned by themselves, and objects of registered types, belong to no format but ours. Of the others the format
says itself which it takes. What it does not take is left out, and the export says so, by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.errors import NamesMismatchError
from shardckpt.excerpt import excerpt
from shardckpt.state.document import Branch, Custom, Owned, Small, leaves_of, meanings
from shardckpt.state.names import shown
from shardckpt.state.unflatten import decode_leaf

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardckpt.state.document import Node

__all__ = ["check_text_keys", "left_out", "notes_of"]


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


def check_text_keys(node: Node, where: str, library: str, *, tuples: bool = True) -> None:
    """Refuse dicts of which two keys are one text: `1` and `"1"`.

    Args:
        node: the state.
        where: the export's place, for messages.
        library: the format's library, in which all keys are texts.
        tuples: whether that looks into tuples.

    Raises:
        NamesMismatchError: there is such a dict; names it and both keys.
    """
    if not isinstance(node, Branch) or (node.form == "tuple" and not tuples):
        return
    seen: dict[str, object] = {}
    for key in node.keys:
        other = seen.setdefault(str(key), key)
        if other is not key:
            both = f"{excerpt(other)} and {excerpt(key)}"
            raise NamesMismatchError(
                f"{where}: {shown(node.name)} has the keys {both}, which are one text in {library}; rename one, or leave it out (exclude)."
            )
    for child in node.children:
        check_text_keys(child, where, library, tuples=tuples)
