"""Refusal to delete or to replace a checkpoint that somebody relies on.

Such a checkpoint is pinned or tagged, or is the base of others beside it.

A replacement is checked twice: before the first byte of the new checkpoint is written, and just
before its record replaces the old one. In between a save may take minutes. The second check lists
the neighbours again, but reads only the records that are new or have changed. Bases elsewhere are
not found. A neighbour that is superseded (`markers`) does not prevent a replacement.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from shardckpt.commit.attempts import places, same_elements, step_of, unfolded
from shardckpt.commit.markers import is_superseded, protection
from shardckpt.commit.publish import RECORD
from shardckpt.errors import FormatError, OptionError, StorageError
from shardckpt.format.bases import bases_of, names_beside
from shardckpt.format.documents import Fields, open_envelope
from shardckpt.io.failures import reading_takes_threads
from shardckpt.io.status import status
from shardckpt.io.store import Store
from shardckpt.io.threads import map_on_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence
    from pathlib import Path

    Verb = Literal["deleted", "replaced"]

_NAMED = 10
"""Most checkpoints that a message names."""


def check_unprotected(store: Store, attempt: str | None, verb: Verb) -> None:
    """Refuse a checkpoint that is pinned or tagged; takes one read.

    Args:
        store: the checkpoint's place.
        attempt: the attempt that is the checkpoint; None: it is not known, because the commit
            record is unreadable.
        verb: what is about to happen to it.

    Raises:
        OptionError: it is pinned or tagged.
    """
    protected = protection(store, attempt)
    if protected:
        raise OptionError(
            f"{store} is {protected}, so it is not {verb}; {protected.undo} it first."
        )


@dataclass(frozen=True, slots=True)
class _Neighbour:
    """A place beside the checkpoint."""

    token: object
    """Token of its commit record (`Store.change_token`)."""
    attempt: str = ""
    bases: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Names of its bases in the same directory → the attempts there; "": any attempt with the same
    contents."""
    unread: bytes = b""
    """Its record, if that cannot be read: a record contains the names of the attempts of its
    bases."""
    closed: bool = False
    """Whether this user may not enter it, so that nothing is known of it."""


class Dependants:
    """The checkpoints beside one that store tensors in it.

    Each look reads only what has changed since the last look.
    """

    def __init__(
        self, store: Store, superseded: Mapping[str, str | None] = MappingProxyType({})
    ) -> None:
        """Look beside a place; nothing is read yet.

        Args:
            store: the checkpoint's place.
            superseded: neighbours that a rollback supersedes, perhaps without a marker yet: name →
                attempt.
        """
        self._store = store
        self._location = store.location.resolved
        self._superseded = superseded
        self._known: dict[str, _Neighbour] = {}

    def check_unused(self, attempt: str | None, verb: Verb) -> None:
        """Refuse a checkpoint that is a base of others beside it.

        Args:
            attempt: the attempt that is the checkpoint; None: it is not known, so any attempt
                counts.
            verb: what is about to happen to it.

        Raises:
            OptionError: checkpoints beside it have left tensors in it; the message names them.
            StorageError: the storage failed, or this user may not enter a directory beside it,
                which may be such a checkpoint.
        """
        naming = self._naming(attempt)
        closed = [name for name, neighbour in self._known.items() if neighbour.closed]
        if closed:
            raise StorageError(f"{_may_be_base(str(self._location), closed)} it is not {verb}.")
        if verb == "replaced":
            naming = [name for name in naming if not self._is_superseded(name)]
        if naming:
            raise OptionError(
                f"{self._location} is the base of checkpoints beside it, which read tensors from "
                f"it: {', '.join(naming[:_NAMED])}{', …' if len(naming) > _NAMED else ''}; so it "
                f"is not {verb}. Delete those first; `shardckpt reshard` makes copies that do not "
                "need it."
            )

    def check_replaceable(self, attempt: str | None) -> None:
        """Refuse to replace a checkpoint that is pinned, tagged, or a base of others beside it.

        Raises:
            OptionError, StorageError: as for `check_unprotected` and `check_unused`.
        """
        check_unprotected(self._store, attempt, "replaced")
        self.check_unused(attempt, "replaced")

    def _naming(self, attempt: str | None) -> list[str]:
        if self._location.parent is None:
            return []
        root, own = Store.open(self._location.parent), self._location.name
        others = [name for name, _ in places(root, root.list_children()) if name not in (".", own)]
        with reading_takes_threads(root):
            uses = map_on_threads(lambda name: _look(root.sub(name), self._known.get(name)), others)
        self._known = dict(zip(others, uses, strict=True))
        return [name for name in others if _stores_in(self._known[name], own, attempt)]

    def _is_superseded(self, name: str) -> bool:
        attempt = self._known[name].attempt
        if same_elements(self._superseded.get(name), attempt):
            return True
        assert self._location.parent is not None
        return is_superseded(Store.open(self._location.parent).sub(name), attempt)


def _stores_in(neighbour: _Neighbour, name: str, attempt: str | None) -> bool:
    """Whether a neighbour stores tensors in the checkpoint of this name and attempt.

    None: in any attempt there.
    """
    if neighbour.unread:
        return (unfolded(attempt or "") or f"../{name}").encode() in neighbour.unread
    return any(
        attempt is None or base == "" or same_elements(base, attempt)
        for base in neighbour.bases.get(name, ())
    )


def _may_be_base(which: str, closed: Sequence[str]) -> str:
    return (
        f"{which} may be the base of "
        f"{', '.join(closed[:_NAMED])}{', …' if len(closed) > _NAMED else ''} beside it, which "
        "this user may not enter: allow this user to enter that directory (chmod +x), or move it "
        "elsewhere. Until then"
    )


def users_beside(
    root: Store,
    known: Container[int] | None = None,
    children: Sequence[str] | None = None,
    *,
    deletes: bool = False,
) -> Callable[[int, str | None], bool]:
    """A function that says whether a checkpoint beside the steps of a run stores tensors in a step.

    It is called with the step, and its attempt, or None if that is not known: then any counts.

    Args:
        root: the place of the steps.
        known: the steps whose bases the caller knows; the others count as such checkpoints, too.
            None: all.
        children: the names directly below the root, if the caller has just listed them.
        deletes: whether steps that none uses are deleted; StorageError if this user may not enter
            a directory that may be such a checkpoint.
    """
    names = [
        name
        for name, _ in places(root, root.list_children() if children is None else children)
        if name != "."
        and ((step := step_of(name)) is None or (known is not None and step not in known))
    ]
    with reading_takes_threads(root):
        users = map_on_threads(lambda name: _look(root.sub(name), None), names)
    closed = [name for name, user in zip(names, users, strict=True) if user.closed]
    if closed and deletes:
        raise StorageError(f"{_may_be_base(f'a step at {root}', closed)} no step is deleted.")
    return lambda step, attempt: any(_stores_in(user, str(step), attempt) for user in users)


def _look(place: Store, known: _Neighbour | None) -> _Neighbour:
    """A neighbour as it is now; `known` is its state at the last look."""
    if (path := place.local_path("")) is not None and not os.access(path, os.X_OK):
        return _Neighbour(None, closed=not _is_foreign(path))
    where = place.path_of(RECORD)
    token = place.change_token(RECORD) if place.near or known is not None else None
    if known is not None and token == known.token:
        return known
    try:
        data, generation = place.read_versioned(RECORD)
    except FormatError:  # too large to be a record
        return _Neighbour(token)
    token = token if place.near else generation
    if data is None:
        return _Neighbour(token)
    try:
        document = open_envelope(data, where)
        bases: dict[str, frozenset[str]] = {}
        for base in bases_of(document, where):
            for name in names_beside([base.url]):
                bases[name] = bases.get(name, frozenset()) | {base.attempt}
        attempt = Fields(document, where).string("attempt") if bases else ""
    except FormatError:  # damaged, or of a newer version
        return _Neighbour(token, unread=data)
    return _Neighbour(token, attempt, bases)


def _is_foreign(path: Path) -> bool:
    """Whether a directory belongs to the system, or to another user of a public directory.

    For example, `lost+found` belongs to the system, and `/tmp` is a public directory.
    """
    own, above = status(path), status(path.parent)
    if own is None or above is None:
        return True
    return own.st_uid != os.geteuid() and (own.st_uid == 0 or bool(above.st_mode & stat.S_ISVTX))
