"""Small leaves and dict keys of a state that another format can or cannot hold.

Per-process values and objects of registered types exist only in shardckpt's own format. Each format
decides which other small leaves it accepts. A leaf that it does not accept is left out, and a note
of the export names it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.errors import NamesMismatchError
from shardckpt.state.document import Branch, Custom, Owned, Small, leaves_of
from shardckpt.state.listing import meanings
from shardckpt.state.names import shown
from shardckpt.state.unflatten import decode_leaf
from shardckpt.text import shorten

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardckpt.state.document import Node


def find_unsupported(tree: Node, refuses: Callable[[object], str | None]) -> dict[str, str]:
    """Name → reason, for the leaves that are left out.

    Args:
        tree: the state.
        refuses: returns the reason why a format does not accept a small leaf; None: it accepts the
            leaf.
    """
    unsupported: dict[str, str] = {}
    for leaf in leaves_of(tree):
        reason = None
        if isinstance(leaf, Owned):
            reason = "every process has a value of its own there"
        elif isinstance(leaf, Custom):
            reason = f"it is an object of the registered type {leaf.type_name!r}"
        elif isinstance(leaf, Small):
            reason = refuses(decode_leaf(leaf))
        if reason is not None:
            unsupported[leaf.name] = reason
    return unsupported


def describe_losses(tree: Node, unsupported: dict[str, str], *, keys: bool = False) -> list[str]:
    """Notes of an export about a state's leaves, a line each.

    Args:
        tree: the state.
        unsupported: name → reason, for the leaves that are left out.
        keys: whether the format keeps the meaning of tensors (random keys of JAX).
    """
    notes = [f"{shown(name)} is left out: {reason}." for name, reason in unsupported.items()]
    meaning = {} if keys else meanings(tree)
    return [
        *notes,
        *(
            f"{shown(name)} means {what!r}; its elements are exported as numbers."
            for name, what in meaning.items()
        ),
    ]


def check_text_keys(node: Node, where: str, library: str, *, tuples: bool = True) -> None:
    """Refuse dicts with two keys of the same text: `1` and `"1"`.

    Args:
        node: the state.
        where: location of the export, for messages.
        library: the format's library, in which all keys are texts.
        tuples: whether the library looks into tuples.

    Raises:
        NamesMismatchError: there is such a dict; the message names it and both keys.
    """
    if not isinstance(node, Branch) or (node.form == "tuple" and not tuples):
        return
    seen: dict[str, object] = {}
    for key in node.keys:
        other = seen.setdefault(str(key), key)
        if other is not key:
            both = f"{shorten(other)} and {shorten(key)}"
            raise NamesMismatchError(
                f"{where}: {shown(node.name)} has the keys {both}, which become the same text in "
                f"{library}; rename one, or leave it out (exclude)."
            )
    for child in node.children:
        check_text_keys(child, where, library, tuples=tuples)
