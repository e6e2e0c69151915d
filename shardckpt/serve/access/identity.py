"""Users of the service, and their rights at its roots.

A root that a user may not read does not exist for that user.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from shardckpt.errors import OptionError
from shardckpt.text import shorten

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

T = TypeVar("T")
SCOPES = ("read", "operate", "admin")
"""Each includes those before it."""
EVERY = "*"
_RIGHT = re.compile(r"(?:([A-Za-z0-9][A-Za-z0-9._-]{0,95}|\*)=)?(read|operate|admin)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Identity:
    """User of a request."""

    name: str
    rights: Mapping[str, str]
    """Scope by the name of a root; `*` stands for every root."""
    by_proxy: bool = False
    """Whether a proxy has signed the user in."""

    def may(self, scope: str, root: str | None = None) -> bool:
        """Whether a scope is included at a root; None: at any root."""
        rights = self.rights
        given = rights.values() if root is None else (rights.get(root), rights.get(EVERY))
        return any(one is not None and SCOPES.index(one) >= SCOPES.index(scope) for one in given)

    @property
    def roots(self) -> list[str] | None:
        """Names of the roots that the user may read; None: every root."""
        return None if EVERY in self.rights else sorted(self.rights)


UNKNOWN = "-"
"""Name of users without a token."""
NOBODY = Identity(UNKNOWN, {})
ANYBODY = Identity(UNKNOWN, {EVERY: "read"})
"""Everybody on this machine, if there are no tokens."""
_SERVICE = Identity(UNKNOWN, {EVERY: "admin"})
WHO: ContextVar[Identity] = ContextVar("shardckpt-who", default=_SERVICE)
"""User of the request at work. Outside of requests it is the service itself."""
_NOTES: ContextVar[dict[str, Any] | None] = ContextVar("shardckpt-notes", default=None)


@contextmanager
def as_service() -> Iterator[None]:
    """Look at every root in this block, for what several users get."""
    token = WHO.set(_SERVICE)
    try:
        yield
    finally:
        WHO.reset(token)


def begin_request(who: Identity) -> dict[str, Any]:
    """Set the user of this request; return the notes that `note` will fill."""
    WHO.set(who)
    notes: dict[str, Any] = {}
    _NOTES.set(notes)
    return notes


def note(**fields: Any) -> None:
    """Note something about this request for the audit log."""
    notes = _NOTES.get()
    if notes is not None:
        notes.update(fields)


def may_read(ident: str) -> bool:
    """Whether the user may read the root of an id."""
    return WHO.get().may("read", ident.partition("/")[0])


def only_readable(values: Mapping[str, T]) -> dict[str, T]:
    """Entries whose keys are names of roots, or ids, that the user may read."""
    return {ident: value for ident, value in list(values.items()) if may_read(ident)}


def readable(column: str) -> tuple[str, list[str]]:
    """SQL that selects rows whose id is in a root that the user may read, and its values."""
    roots = WHO.get().roots
    if roots is None:
        return "1", []
    one = f"({column} = ? OR ({column} >= ? AND {column} < ?))"
    values = [text for root in roots for text in (root, f"{root}/", f"{root}0")]
    return f"({' OR '.join([one] * len(roots)) or '0'})", values


def parse_rights(texts: Iterator[str] | list[str]) -> dict[str, str]:
    """Rights such as "read", which is for every root, or "llama=operate".

    Raises:
        OptionError: a text is none.
    """
    rights: dict[str, str] = {}
    for text in texts:
        right = _RIGHT.fullmatch(text)
        if right is None:
            raise OptionError(
                f"right {shorten(text)}: give {', '.join(SCOPES)} for every root, or NAME=SCOPE "
                "for one, as in llama=operate."
            )
        name = right[1] or EVERY
        rights[name] = max(rights.get(name, right[2]), right[2], key=SCOPES.index)
    return rights
