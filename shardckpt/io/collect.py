"""Removing what no commit record names, and deleting checkpoints: how, so that nothing can publish it afterwards.

A committer may be asleep just before the conditional write that would make its attempt the checkpoint, for any time.
Nobody can see that. It publishes only if `checkpoint.json` is what it was when the save began; so *before* data is
removed, `checkpoint.json` is changed (the *fence*), and from then on it can publish nothing. That a file is absent
would fence nothing off: who found none may create it at any time.

To collect a checkpoint's orphaned attempts:

1. Read the record, with the storage's version of it, and list the attempts that it does not name.
2. Choose those into which nothing has been written for a grace period, by the storage's clock. If another one is
   younger, a save may be under way, which the fence would foil: choose none.
3. Fence, on condition that the record is still that version: a record or tombstone gets a new mark, and where there
   is none a tombstone comes to be. Every mark is another, because some storages know a version by its contents. If the
   record has changed, begin anew.
4. Look once more: what is still an orphan, and still untouched for the grace period, is removed. Host records go
   first, as it is they from which an attempt is committed.

To delete a checkpoint, a tombstone takes the place of its record on the same condition, unless it is pinned (`io.markers`);
then its attempt goes.

Whoever is stopped on the way leaves a checkpoint that is whole, or none, and attempts that the next collection takes.
Tombstones stay for ever: no time is long enough for a committer that sleeps. `deleted` sums them up, so that nobody need read them.
"""

from __future__ import annotations

import datetime as dt
import secrets
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from shardckpt.errors import FormatError, NotFoundError, OptionError, ReplacedError, StorageError, VersionError
from shardckpt.fields import Fields
from shardckpt.io.ages import idle_seconds
from shardckpt.io.attempts import attempts, is_attempt
from shardckpt.io.commit import RECORD
from shardckpt.io.markers import PINNED, SUPERSEDED, is_marked, unmark
from shardckpt.record import Tombstone, open_envelope, seal

if TYPE_CHECKING:
    from shardckpt.io.store import Store
    from shardckpt.io.url import Location

__all__ = ["Collected", "collect", "delete", "fence_tombstone", "renew"]

_ROUNDS = 10
"""How often to begin anew because the record has changed; each time somebody else has got something done."""
_UNDER_WAY = "it may be a save under way"
_NEIGHBOUR = "a save may be under way beside it, which removing it would foil"
_AGELESS = "its age is not known: the storage keeps no times"
_CONTENDED = "the commit record changes all the time"
_FOREIGN = "something lies in it that no save has written"


@dataclass(frozen=True, slots=True)
class Collected:
    """What became of an attempt that is no checkpoint."""

    location: Location
    """The checkpoint's directory."""
    attempt: str | None
    """Its name; None: of none in particular."""
    outcome: Literal["removed", "kept", "failed"]
    """`removed` also where it only would be; `failed`: the storage refused, and a part of it may be gone."""
    idle: float | None = None
    """Seconds since anything was written into it; None: not known."""
    reason: str | None = None
    """Why it was not removed."""


@dataclass(frozen=True, slots=True)
class _Record:
    """`checkpoint.json` at one moment."""

    data: bytes | None
    generation: bytes
    doc: dict[str, Any] | None
    """Its contents; None where there is none."""

    @classmethod
    def of(cls, store: Store, data: bytes | None, generation: bytes) -> _Record:
        """What `store.read_versioned` has read. Raises FormatError for what is no record."""
        return cls(data, generation, None if data is None else open_envelope(data, store.path_of(RECORD)))

    def attempt(self, store: Store) -> str | None:
        """The attempt that it names; a tombstone names none. Raises FormatError."""
        return None if self.doc is None or "tombstone" in self.doc else Fields(self.doc, store.path_of(RECORD)).string("attempt")

    def fence(self, store: Store) -> bool:
        """Make it another version of itself; whether it was still this one."""
        mark = secrets.token_hex(8)
        if self.data is None or self.doc is None:
            return store.create(RECORD, _tombstone("no save here was finished, and what was left of them was removed", mark))
        sealed = seal({**self.doc, "nonce" if "tombstone" in self.doc else "fence": mark})
        # All of it stays, be it newer than this reader, and the format version with it, which the host records have, too.
        head = self.data[: self.data.index(b'"sha256"')]
        return store.replace(RECORD, head + sealed[sealed.index(b'"sha256"') :], self.generation)


def collect(store: Store, *, grace: float, dry_run: bool = False) -> list[Collected]:
    """Remove the attempts at one place that nobody commits any more.

    Args:
        store: the checkpoint's place.
        grace: seconds for which nothing may have been written into an attempt. 0 takes all, of saves under way, too.
        dry_run: only tell what would be done.

    Returns:
        What became of each attempt that the commit record does not name.

    Raises:
        FormatError: the commit record cannot be read, so that what it names is not known; nothing was removed.
        StorageError: the storage failed; nothing was removed.
    """
    for _ in range(_ROUNDS):
        found, record = _orphans(store, grace)
        if dry_run or record is None or any(one.outcome == "kept" for one in found):
            return found
        if record.fence(store):
            break
    else:
        return [replace(one, outcome="kept", reason=_CONTENDED) for one in found]
    fenced = {one.attempt for one in found}
    return [_remove(store, one) if _idle_enough(one.idle, grace) else one for one in _orphans(store, grace)[0] if one.attempt in fenced]


def delete(store: Store, *, reason: str, grace: float) -> list[Collected]:
    """Delete the checkpoint at one place; then collect what else is there.

    A place whose checkpoint is deleted already stays so, and what an interrupted deletion has left is collected.

    Args:
        store: the checkpoint's place.
        reason: for people who look for the checkpoint later.
        grace: as for `collect`; the checkpoint itself goes whatever its age.

    Returns:
        What became of all attempts there but the checkpoint's; and of that, if it could not be removed.

    Raises:
        NotFoundError: there is no checkpoint and never was one.
        ReplacedError: another one took its place just now; nothing was deleted.
        VersionError: a newer version's checkpoint is there.
        OptionError: it is pinned.
        StorageError: the storage failed.
    """
    named = _bury(store, reason)
    for marker in (PINNED, SUPERSEDED):
        unmark(store, marker)
    left = []
    if named is not None and f"{named}/" in store.list_children():
        data = Collected(store.location, named, "removed")
        data = _remove(store, data) if is_attempt(store, named) else replace(data, outcome="kept", reason=_FOREIGN)
        left = [data] if data.outcome != "removed" else []
    return left + [one for one in collect(store, grace=grace) if one.attempt != named]


def renew(store: Store, attempt: str) -> bool:
    """Make a commit record another version of itself, so that who is about to delete or replace it has to look again.

    Returns:
        Whether it still names that attempt.

    Raises:
        FormatError: it cannot be read.
        StorageError: the storage failed, or the record changes all the time.
    """
    for _ in range(_ROUNDS):
        record = _Record.of(store, *store.read_versioned(RECORD))
        if record.attempt(store) != attempt:
            return False
        if record.fence(store):
            return True
    raise StorageError(f"cannot mark {store}: {_CONTENDED}; try again.")


def fence_tombstone(store: Store) -> bool:
    """Make a tombstone another version of itself, so that no save that began before can publish anything there.

    Returns:
        Whether there is one, and no attempt beside it.

    Raises:
        StorageError: the storage failed.
    """
    if any(child.endswith("/") for child in store.list_children()):
        return False
    try:
        record = _Record.of(store, *store.read_versioned(RECORD))
    except FormatError:
        return False
    return record.doc is not None and "tombstone" in record.doc and record.fence(store)


def _bury(store: Store, reason: str) -> str | None:
    """Put a tombstone in place of the record; returns the attempt that it named, None where that is not known."""
    first: str | None = None
    for _ in range(_ROUNDS):
        data, generation = store.read_versioned(RECORD)
        if data is None:
            raise NotFoundError(f"{store}: no checkpoint there; `shardckpt gc` removes what was never committed.")
        try:
            record = _Record.of(store, data, generation)
            named = record.attempt(store)
        except VersionError:
            raise
        except FormatError:
            record, named = _Record(data, generation, {}), None  # its data becomes an orphan
        if record.doc is not None and "tombstone" in record.doc:
            return first
        if first not in (None, named):
            raise ReplacedError(f"{store}: another checkpoint took its place while it was being deleted; nothing was deleted.")
        if is_marked(store, PINNED, named):
            raise OptionError(f"{store} is pinned, so it is not deleted; `shardckpt unpin` it first.")
        first = named
        if store.replace(RECORD, _tombstone(reason, secrets.token_hex(8)), generation):
            return first
    raise StorageError(f"cannot delete {store}: {_CONTENDED}; try again.")


def _orphans(store: Store, grace: float) -> tuple[list[Collected], _Record | None]:
    """The attempts that the record does not name, and whether they may go; and the record, None where there are no such attempts."""
    names = attempts(store, store.list_children())
    if not names:
        return [], None
    record = _Record.of(store, *store.read_versioned(RECORD))
    orphans = [name for name in names if name != record.attempt(store)]
    if not orphans:
        return [], None
    found = []
    for prefix, idle in idle_seconds(store, [f"{name}/" for name in orphans]).items():
        young = None if _idle_enough(idle, grace) else _AGELESS if idle is None else _UNDER_WAY
        found.append(Collected(store.location, prefix.removesuffix("/"), "removed" if young is None else "kept", idle, young))
    if any(one.outcome == "kept" for one in found):
        found = [replace(one, outcome="kept", reason=one.reason or _NEIGHBOUR) for one in found]
    return found, record


def _idle_enough(idle: float | None, grace: float) -> bool:
    return grace == 0 or (idle is not None and idle >= grace)


def _remove(store: Store, orphan: Collected) -> Collected:
    """Remove a fenced attempt."""
    try:
        path = store.local_path(f"{orphan.attempt}/")
        if path is None or not path.is_symlink():  # what a link leads to is not ours
            store.delete_prefix(f"{orphan.attempt}/records/")
        store.delete_prefix(f"{orphan.attempt}/")
    except StorageError as e:
        return replace(orphan, outcome="failed", reason=str(e))
    return replace(orphan, outcome="removed", reason=None)


def _tombstone(reason: str, nonce: str) -> bytes:
    """A tombstone like no other; it says when, by this machine's clock, and why."""
    now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    return seal(Tombstone(f"{now}: {reason}", nonce).to_json())
