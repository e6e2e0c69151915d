"""Errors and messages about a `like` that does not fit a stored tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.errors import NamesMismatchError, StructureMismatchError
from shardckpt.state import leaves, names
from shardckpt.state.document import Branch, Custom, Owned, Tensor, Tied
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardckpt.state.document import Node
    from shardckpt.state.names import PathKey

_LISTED = 10
"""Most names of each sort in a message."""
WRAP = "wrap it there: shardckpt.PerProcess(…)"
"""The advice where every process has stored a value of its own."""


def description(value: object) -> str:
    """A text for the kind of a leaf of `like`."""
    return "None" if value is None else f"a leaf of type {type(value).__qualname__}"


def _stored_as(node: Node) -> str:
    if isinstance(node, Tensor | Tied):
        return "a tensor"
    if isinstance(node, Branch) and node.composite is not None:
        of = node.composite
        return (
            f"a composite tensor ({of.type_name}) of shape {of.shape} and {parts_text(node.keys)}"
        )
    if isinstance(node, Branch):
        return f"a {node.form} of {len(node.keys)} items"
    if isinstance(node, Owned):
        return "a value of each process's own"
    kind = (
        node.type_name if isinstance(node, Custom) else leaves.describe(node.content, node.name)[0]
    )
    return f"a leaf of type {kind}"


def parts_text(keys: Iterable[PathKey]) -> str:
    """The parts of a composite tensor, by their names."""
    return f"the parts {', '.join(map(str, keys))}"


def _meant(meaning: str | None) -> str:
    return "plain numbers" if meaning is None else repr(meaning)


def structure_mismatch(node: Node, what: str) -> StructureMismatchError:
    """The error of a place where `like` has something of another kind, with what to do."""
    return StructureMismatchError(
        f"{shown(node.name)} is {_stored_as(node)} in the checkpoint, and in `like` {what}."
    )


def meaning_mismatch(
    name: str, stored: str | None, own: str | None, kind: str
) -> StructureMismatchError:
    """The error of a tensor of class `kind` whose elements mean something else in `like`."""
    return StructureMismatchError(
        f"{shown(name)} holds {_meant(stored)} in the checkpoint, and in `like` {_meant(own)} "
        f"({kind}); pass a tensor of the same meaning there, or a shardckpt.Target."
    )


def names_mismatch(missing: list[str], unexpected: list[str], advice: str) -> NamesMismatchError:
    """The error of names that only one side has: those only in `like`, and those only stored."""
    parts = []
    in_like, stored = names.Candidates(missing), names.Candidates(unexpected)
    if missing:
        parts.append(
            f"{_count(missing)} in `like` but not in the checkpoint: "
            f"{_list_names(missing, _hints(missing, in_like, unexpected, stored))}"
        )
    if unexpected:
        parts.append(
            f"{_count(unexpected)} in the checkpoint but not in `like`: "
            f"{_list_names(unexpected, _hints(unexpected, stored, missing, in_like))}"
        )
    return NamesMismatchError(f"{'; '.join(parts)}. {advice}")


def skipped_names(missing: list[str], unexpected: list[str]) -> str:
    """A text about names that only one side has, and that were skipped."""
    kept = (
        f"; {_count(missing)} only in `like`, left unchanged: {_list_names(missing)}"
        if missing
        else ""
    )
    left = (
        f"; {_count(unexpected)} only in the checkpoint, not read: {_list_names(unexpected)}"
        if unexpected
        else ""
    )
    return f"{kept}{left}".removeprefix("; ") + "."


def _count(missing: list[str]) -> str:
    return "1 name is" if len(missing) == 1 else f"{len(missing)} names are"


def _list_names(missing: list[str], hints: Iterable[str] = ("",) * _LISTED) -> str:
    listed = [shown(name) + hint for name, hint in zip(missing, hints, strict=False)]
    return ", ".join(listed) + (", …" if len(missing) > _LISTED else "")


def _hints(
    missing: list[str], own: names.Candidates, others: list[str], candidates: names.Candidates
) -> list[str]:
    """Texts that follow the listed names in a message, one per name.

    Suggestions come from the names that only the other side has: a name that both have is not a
    candidate. A name is suggested for the most similar one only.
    """
    same_text = set(others)
    hints = []
    for name in missing[:_LISTED]:
        near = candidates.nearest(name)
        if name in same_text:
            hints.append(" (there it is a key of another type)")
        else:
            is_mutual = near is not None and own.nearest(near) == name
            hints.append(names.suggested(near if is_mutual else None))
    return hints
