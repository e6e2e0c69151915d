"""Deletion of checkpoints and of attempts that no commit record names, such that none can be published afterwards.

A committer may sleep for any time just before the conditional write that would make its attempt the checkpoint. No other
process can see that. The conditional write replaces the version of `checkpoint.json` that was there before any data of the
attempt: a checkpoint or a placeholder (`publish.hold_place`). It never creates the file. So *before* data is removed,
`checkpoint.json` is replaced by a new version (the *fence*). From then on the sleeping committer can publish nothing, even
after the file is deleted.

To collect a checkpoint's orphaned attempts:

1. Read the record with the storage's version of it, and list the attempts that it does not name.
2. Choose the attempts without any write for a grace period, by the storage's clock. If another attempt, or a placeholder,
   is younger, a save may be in progress, and the fence would make it fail: then choose none.
3. Publish the newest attempt that is complete (`committing`): its own committer may have failed, and its data may be the only copy. If
   that succeeds, start again. If the storage fails, the attempt stays. Only an attempt that is incomplete, or was refused just now, is
   collected.
4. Fence, on condition that the record still has that version. A record gets a new mark. A tombstone replaces a placeholder,
   another tombstone or a missing file. Every mark is unique, because some storages derive the version from the
   contents. If the record has changed, start again.
5. List again: remove the attempts that are still orphans and still without a write for the grace period. Host records go
   first, because a commit needs them.
6. If only that tombstone is left, delete it too, on condition that it still has that version: a save that began
   meanwhile has put its placeholder there.

To delete a checkpoint, a tombstone replaces its record under the same condition, unless it is pinned or tagged (`commit.markers`).
Then its attempt is removed, then the tombstone.

If the process stops in between, the checkpoint is either intact or gone, and the next collection removes the remaining attempts
and the tombstone.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from shardckpt.commit.attempts import attempts, is_attempt
from shardckpt.commit.committing import commit_place, publishable
from shardckpt.commit.dependants import check_unprotected
from shardckpt.commit.markers import PINNED, SUPERSEDED, unmark
from shardckpt.commit.publish import RECORD, clear_place, put_tombstone
from shardckpt.errors import FormatError, NotFoundError, ReplacedError, StorageError, VersionError
from shardckpt.format.documents import Fields, open_envelope, seal, utc_now
from shardckpt.format.record import Tombstone
from shardckpt.io.ages import idle_seconds
from shardckpt.io.status import is_link

if TYPE_CHECKING:
    from shardckpt.io.store import Store
    from shardckpt.io.url import Location

_ROUNDS = 10
"""Number of new starts because the record has changed; each change means that another process made progress."""
UNDER_WAY = "it may be a save under way"
_NEIGHBOUR = "another save to this place may be under way, and would fail if this were removed"
_COMPLETE = "a complete save is there, which `shardckpt commit` publishes"
_COLLECTED = "no save here was finished, and what was left of them was removed"
_AGELESS = "its age is not known: the storage keeps no times"
_CONTENDED = "other processes keep changing the commit record"
NO_CHECKPOINT = "{}: no checkpoint there; `shardckpt gc` removes what was never committed."
_FOREIGN = "it contains something that no save has written"


@dataclass(frozen=True, slots=True)
class Collected:
    """The outcome for an attempt that is not a checkpoint."""

    location: Location
    """The checkpoint's directory."""
    attempt: str | None
    """Name of the attempt; None: the outcome is about no particular attempt."""
    outcome: Literal["removed", "published", "kept", "failed"]
    """`removed`: it was removed; `published`: it was complete, and is the checkpoint now; in a dry run: it would be. `failed`: the storage
    refused, and a part of it may be gone."""
    idle: float | None = None
    """Seconds since the last write into it; None: not known."""
    reason: str | None = None
    """Reason for not removing it; None if it was removed."""


@dataclass(frozen=True, slots=True)
class _Record:
    """`checkpoint.json` at one moment."""

    data: bytes | None
    generation: bytes
    doc: dict[str, Any] | None
    """Its contents; None if there is no record."""

    @classmethod
    def of(cls, store: Store, data: bytes | None, generation: bytes) -> _Record:
        """Parse the result of `store.read_versioned`. Raises FormatError if it is not a record."""
        return cls(data, generation, None if data is None else open_envelope(data, store.path_of(RECORD)))

    def attempt(self, store: Store) -> str | None:
        """The attempt that the record names; None for a tombstone. Raises FormatError."""
        return None if self.doc is None or "tombstone" in self.doc else Fields(self.doc, store.path_of(RECORD)).string("attempt")

    @property
    def is_tombstone(self) -> bool:
        """Whether it is a tombstone or a placeholder, so that there is no checkpoint."""
        return self.doc is not None and "tombstone" in self.doc

    @property
    def is_placeholder(self) -> bool:
        """Whether a save wrote it when it began."""
        return self.doc is not None and self.doc.get("begun") is True

    def fence(self, store: Store) -> bool:
        """Replace the record by a new version (a placeholder becomes a tombstone) unless it has changed; return whether that succeeded."""
        if self.data is None or self.doc is None or self.is_placeholder:
            return put_tombstone(store, partial(_tombstone, _COLLECTED), self.generation, absent=self.data is None)
        sealed = seal({**self.doc, "nonce" if self.is_tombstone else "fence": secrets.token_hex(8)})
        # All fields stay, even unknown ones of newer versions. The format version stays too, because the host records have it.
        head = self.data[: self.data.index(b'"sha256"')]
        return store.replace(RECORD, head + sealed[sealed.index(b'"sha256"') :], self.generation)


def collect(store: Store, *, grace: float, dry_run: bool = False, publishes: bool = True) -> list[Collected]:
    """Publish the complete attempt at one place, if there is one; remove the attempts that no process will commit any more.

    Args:
        store: the checkpoint's place.
        grace: seconds without any write that make an attempt removable. 0 removes all, even those of saves in progress.
        dry_run: only report what would be done.
        publishes: whether to publish a complete attempt; otherwise all stay if there is one.

    Returns:
        The outcome for each attempt that the commit record does not name.

    Raises:
        FormatError: the commit record cannot be read, so it is not known which attempt it names; nothing was removed.
        StorageError: the storage failed, perhaps while a complete attempt was published; nothing was removed.
    """
    published: list[Collected] = []
    for _ in range(_ROUNDS):
        found, record = _orphans(store, grace)
        if record is None or any(one.outcome == "kept" for one in found):
            return published + found
        complete = publishable(store) if found and (dry_run or not publishes) else None
        if complete is not None and not publishes:
            return [replace(one, outcome="kept", reason=_COMPLETE) for one in found]
        if dry_run:
            return [replace(one, outcome="published" if one.attempt == complete else one.outcome) for one in found]
        if not found:
            _clear(store, record, grace)
            return published
        ages = {one.attempt: one.idle for one in found}
        committed = [one.attempt for one in commit_place("", store, denied_raises=True) if one.state == "committed"]
        published += [Collected(store.location, attempt, "published", ages.get(attempt)) for attempt in committed]
        if not committed and record.fence(store):
            break
    else:
        return published + [replace(one, outcome="kept", reason=_CONTENDED) for one in found]
    fenced = {one.attempt for one in found}
    left, record = _orphans(store, grace)
    done = [_remove(store, one) if _idle_enough(one.idle, grace) else one for one in left if one.attempt in fenced]
    if record is not None:
        _clear(store, record, grace)
    return published + done


def delete(store: Store, *, reason: str, grace: float, attempt: str | None = None) -> list[Collected]:
    """Delete the checkpoint at one place; then collect everything else there.

    If the deletion of a checkpoint was interrupted, this finishes it.

    Args:
        store: the checkpoint's place.
        reason: for people who look for the checkpoint later.
        grace: as for `collect`; the checkpoint itself is deleted whatever its age.
        attempt: the attempt that is to be deleted; None: whichever the record names.

    Returns:
        The outcome for all attempts there except the checkpoint's own; that one is included if it could not be removed.

    Raises:
        NotFoundError: there is no checkpoint.
        ReplacedError: another checkpoint has just replaced it, or `attempt` is not there; nothing was deleted.
        VersionError: the checkpoint there comes from a newer version.
        OptionError: it is pinned or tagged.
        StorageError: the storage failed.
    """
    named = _bury(store, reason, attempt)
    for marker in (PINNED, SUPERSEDED):
        unmark(store, marker)
    left = []
    if named is not None and f"{named}/" in store.list_children():
        data = Collected(store.location, named, "removed")
        data = _remove(store, data) if is_attempt(store, named) else replace(data, outcome="kept", reason=_FOREIGN)
        left = [data] if data.outcome != "removed" else []
    return left + [one for one in collect(store, grace=grace) if one.attempt != named]


def renew(store: Store, attempt: str) -> bool:
    """Rewrite a commit record as a new version of itself, so that a process that is about to delete or replace it must read it again.

    Returns:
        Whether the record still names that attempt.

    Raises:
        FormatError: the record cannot be read.
        StorageError: the storage failed, or the record changes all the time.
    """
    for _ in range(_ROUNDS):
        record = _Record.of(store, *store.read_versioned(RECORD))
        if record.attempt(store) != attempt:
            return False
        if record.fence(store):
            return True
    raise StorageError(f"cannot mark {store}: {_CONTENDED}; try again.")


def _bury(store: Store, reason: str, first: str | None) -> str | None:
    """Put a tombstone in place of the record; return the attempt that the record named, None if that is not known.

    If `first` is an attempt, a record that names another one stays.
    """
    for _ in range(_ROUNDS):
        data, generation = store.read_versioned(RECORD)
        if data is None:
            raise NotFoundError(NO_CHECKPOINT.format(store))
        try:
            record = _Record.of(store, data, generation)
            named = record.attempt(store)
        except VersionError:
            raise
        except FormatError:
            record, named = _Record(data, generation, {}), None  # its data becomes an orphan
        if record.is_placeholder:
            raise NotFoundError(NO_CHECKPOINT.format(store))
        if record.is_tombstone:
            return first
        if first not in (None, named):
            raise ReplacedError(f"{store}: another checkpoint has taken its place; nothing was deleted.")
        check_unprotected(store, named, "deleted")
        first = named
        if store.replace(RECORD, _tombstone(reason), generation):
            return first
    raise StorageError(f"cannot delete {store}: {_CONTENDED}; try again.")


def _orphans(store: Store, grace: float) -> tuple[list[Collected], _Record | None]:
    """The attempts that the record does not name, whether each may be removed, and the record (None if there is nothing to collect).

    A tombstone without attempts counts as something to collect.
    """
    children = store.list_children()
    names = attempts(store, children)
    if not names and RECORD not in children:
        return [], None
    record = _Record.of(store, *store.read_versioned(RECORD))
    orphans = [name for name in names if name != record.attempt(store)]
    if not orphans:
        return [], record if record.is_tombstone else None
    found = []
    times = idle_seconds(store, [*(f"{name}/" for name in orphans), *([RECORD] if record.is_placeholder else [])])
    begun = times.pop(RECORD, None)
    for prefix, idle in times.items():
        young = None if _idle_enough(idle, grace) else _AGELESS if idle is None else UNDER_WAY
        found.append(Collected(store.location, prefix.removesuffix("/"), "removed" if young is None else "kept", idle, young))
    if any(one.outcome == "kept" for one in found) or (record.is_placeholder and not _idle_enough(begun, grace)):
        found = [replace(one, outcome="kept", reason=one.reason or _NEIGHBOUR) for one in found]
    return found, record


def _clear(store: Store, record: _Record, grace: float) -> None:
    """Delete a tombstone, or a placeholder older than `grace`, that has no attempts beside it; on a storage error it stays for later."""
    old = record.is_tombstone and (not record.is_placeholder or _idle_enough(idle_seconds(store, [RECORD])[RECORD], grace))
    if old:
        with suppress(StorageError):
            clear_place(store, record.generation)


def _idle_enough(idle: float | None, grace: float) -> bool:
    return grace == 0 or (idle is not None and idle >= grace)


def _remove(store: Store, orphan: Collected) -> Collected:
    """Remove a fenced attempt."""
    try:
        path = store.local_path(f"{orphan.attempt}/")
        if path is None or not is_link(path):  # never delete in the target of a link
            store.delete_prefix(f"{orphan.attempt}/records/")
        store.delete_prefix(f"{orphan.attempt}/")
    except StorageError as e:
        return replace(orphan, outcome="failed", reason=str(e))
    return replace(orphan, outcome="removed", reason=None)


def _tombstone(reason: str) -> bytes:
    """A unique tombstone with the time by this machine's clock and the reason."""
    now = utc_now()
    return seal(Tombstone(f"{now}: {reason}", secrets.token_hex(8)).to_json())
