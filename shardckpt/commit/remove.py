"""Removal of checkpoints and of attempts that no commit record names.

None of them can be published afterwards.

A committer may sleep for any time just before the conditional write that would make its attempt the
checkpoint. No other process can see that. The conditional write replaces the version of
`checkpoint.json` that was there before any data of the attempt: a checkpoint or a placeholder
(`publish.hold_place`). It never creates the file. So *before* data is removed, `checkpoint.json` is
replaced by a new version (the *fence*). From then on the sleeping committer can publish nothing,
even after the file is deleted.

To delete a checkpoint, a tombstone replaces its record under the same condition (`bury`), unless it
is pinned or tagged (`commit.markers`). Then its attempt is removed, then the tombstone. If the
process stops in between, the checkpoint is either intact or gone, and the next collection removes
the remaining attempts and the tombstone. On a disk without room for a tombstone an empty file takes
the record's place for a moment; a collection keeps what is beside such a file, and another deletion
removes it. `runs.collecting` says in which order a collection calls
these functions, and publishes what is complete.
"""

from __future__ import annotations

import logging
import secrets
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from shardckpt.commit.assemble import finished_hosts, read_host_record
from shardckpt.commit.attempts import attempts, is_attempt, same_elements
from shardckpt.commit.dependants import check_unprotected
from shardckpt.commit.markers import MARKERS
from shardckpt.commit.publish import RECORD, clear_place, discard, put_tombstone, record_digest
from shardckpt.commit.small_tensors import SMALL_TABLE
from shardckpt.errors import (
    FormatError,
    NotFoundError,
    ReplacedError,
    ShardckptError,
    StorageError,
    VersionError,
)
from shardckpt.format.documents import Fields, open_envelope, seal, utc_now
from shardckpt.format.record import Tombstone
from shardckpt.io.ages import idle_seconds, is_probe
from shardckpt.io.failures import is_full
from shardckpt.io.status import is_link
from shardckpt.io.threads import map_on_threads

if TYPE_CHECKING:
    from shardckpt.commit.publish import Prior
    from shardckpt.io.store import Store
    from shardckpt.io.url import Location

ROUNDS = 10
"""Number of new starts because the record has changed; each change means that another process made
progress."""
UNDER_WAY = "it may be a save under way"
_NEIGHBOUR = "another save to this place may be under way, and would fail if this were removed"
_COLLECTED = "no save here was finished, and what was left of them was removed"
_AGELESS = "its age is not known: the storage keeps no times"
CONTENDED = "other processes keep changing the commit record"
NO_CHECKPOINT = "{}: no checkpoint there; `shardckpt gc` removes what was never committed."
_log = logging.getLogger("shardckpt")


@dataclass(frozen=True, slots=True)
class Collected:
    """The outcome for an attempt that is not a checkpoint."""

    location: Location
    """The checkpoint's directory."""
    attempt: str | None
    """Name of the attempt; None: the outcome is about no particular attempt."""
    outcome: Literal["removed", "published", "kept", "failed"]
    """`removed`: it was removed; `published`: it was complete, and is the checkpoint now; in a dry
    run: it would be. `failed`: the storage refused, and a part of it may be gone."""
    idle: float | None = None
    """Seconds since the last write into it; None: not known."""
    reason: str | None = None
    """Reason for not removing it; None if it was removed."""


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """`checkpoint.json` at one moment."""

    data: bytes | None
    generation: bytes
    doc: dict[str, Any] | None
    """Its contents; None if there is no record."""

    @classmethod
    def of(cls, store: Store, data: bytes | None, generation: bytes) -> StoredRecord:
        """Parse the result of `store.read_versioned`. Raises FormatError if it is not a record."""
        return cls(
            data, generation, None if data is None else open_envelope(data, store.path_of(RECORD))
        )

    def attempt(self, store: Store) -> str | None:
        """The attempt that the record names; None for a tombstone. Raises FormatError."""
        if self.doc is None or "tombstone" in self.doc:
            return None
        read = Fields(self.doc, store.path_of(RECORD))
        read.mapping("totals")  # a host's record names an attempt, too
        return read.attempt()

    @property
    def is_tombstone(self) -> bool:
        """Whether it is a tombstone or a placeholder, so that there is no checkpoint."""
        return self.doc is not None and "tombstone" in self.doc

    @property
    def is_placeholder(self) -> bool:
        """Whether a save wrote it when it began."""
        return self.doc is not None and self.doc.get("begun") is True

    def fence(self, store: Store) -> bool:
        """Replace the record by a new version, unless it has changed.

        A placeholder becomes a tombstone. The result says whether the replacement succeeded.
        """
        if self.data is None or self.doc is None:
            make = partial(_tombstone, _COLLECTED)
            return put_tombstone(store, make, self.generation, absent=True)
        if self.is_tombstone:
            unique = {**self.doc, "nonce": secrets.token_hex(8)}
            sealed = _tombstone(_COLLECTED) if self.is_placeholder else seal(unique)
            return _replace_by_tombstone(store, sealed, self.data, self.generation)
        sealed = seal({**self.doc, "fence": secrets.token_hex(8)})
        # All fields stay, even unknown ones of newer versions. The format version stays too,
        # because the host records have it.
        head = self.data[: self.data.index(b'"sha256"')]
        return store.replace(RECORD, head + sealed[sealed.index(b'"sha256"') :], self.generation)


def renew(store: Store, attempt: str) -> bool:
    """Rewrite a commit record as a new version of itself.

    A process that is about to delete or replace the record must then read it again.

    Returns:
        Whether the record still names that attempt, or one that holds its elements anew.

    Raises:
        FormatError: the record cannot be read.
        StorageError: the storage failed, or the record changes all the time.
    """
    for _ in range(ROUNDS):
        record = StoredRecord.of(store, *store.read_versioned(RECORD))
        if not same_elements(record.attempt(store), attempt):
            return False
        if record.fence(store):
            return True
    raise StorageError(f"cannot mark {store}: {CONTENDED}; try again.")


def bury(store: Store, reason: str, first: str | None, digest: str | None = None) -> str | None:
    """Put a tombstone in place of the record.

    Return the attempt that the record named, None if that is not known.

    If `first` is an attempt, a record that names another one with other elements stays. If there is
    a `digest`, a record with another one stays, unless it is empty.
    """
    for _ in range(ROUNDS):
        data, generation = store.read_versioned(RECORD)
        if data is None:
            raise NotFoundError(NO_CHECKPOINT.format(store))
        try:
            record = StoredRecord.of(store, data, generation)
            named = record.attempt(store)
        except VersionError:
            raise
        except FormatError:
            record = StoredRecord(data, generation, {})
            named = None if data else first  # what an unreadable record named becomes an orphan
        if record.is_placeholder:
            raise NotFoundError(NO_CHECKPOINT.format(store))
        if record.is_tombstone:
            return first
        another = data and digest is not None and record_digest(data) != digest
        if another or (first is not None and not same_elements(first, named)):
            raise ReplacedError(
                f"{store}: another checkpoint has taken its place; nothing was deleted."
            )
        check_unprotected(store, named, "deleted")
        first = named
        if _replace_by_tombstone(store, _tombstone(reason), data, generation):
            return first
    raise StorageError(f"cannot delete {store}: {CONTENDED}; try again.")


def _replace_by_tombstone(store: Store, tombstone: bytes, data: bytes, generation: bytes) -> bool:
    """Replace a record of that generation by a tombstone; False: read the record again.

    On a full disk an empty file, which takes no room, replaces it first. Then there is as much room
    as the record took.
    """
    try:
        return store.replace(RECORD, tombstone, generation)
    except StorageError as e:
        if not data or not is_full(e):
            raise
    if not store.replace(RECORD, b"", generation):
        return False
    there, generation = store.read_versioned(RECORD)
    return there == b"" and store.replace(RECORD, tombstone, generation)


def list_orphans(store: Store, grace: float) -> tuple[list[Collected], StoredRecord | None]:
    """The attempts that the record does not name, whether each may be removed, and the record.

    The record is None if there is nothing to collect.

    A tombstone without attempts counts as something to collect, and so do markers or probes alone.
    If the record names an attempt that is not there, all are kept.
    """
    children = store.list_children()
    names = attempts(store, children)
    known = {RECORD, *MARKERS}.intersection(children) or any(map(is_probe, children))
    if not names and not known:
        return [], None
    record = StoredRecord.of(store, *store.read_versioned(RECORD))
    named = record.attempt(store)
    orphans = [name for name in names if name != named]
    if not orphans:
        return [], record if record.doc is None or record.is_tombstone else None
    if named is not None and named not in names and not store.list_children(f"{named}/"):
        why = (
            f"the commit record names {named}, which is not there: put the right {RECORD} back, or "
            "delete the checkpoint with `shardckpt rm`"
        )
        return [Collected(store.location, name, "kept", reason=why) for name in orphans], record
    listing = []
    times = idle_seconds(
        store, [*(f"{name}/" for name in orphans), *([RECORD] if record.is_placeholder else [])]
    )
    begun = times.pop(RECORD, None)
    for prefix, idle in times.items():
        young = None if is_idle(idle, grace) else _AGELESS if idle is None else UNDER_WAY
        listing.append(
            Collected(
                store.location,
                prefix.removesuffix("/"),
                "removed" if young is None else "kept",
                idle,
                young,
            )
        )
    if any(one.outcome == "kept" for one in listing) or (
        record.is_placeholder and not is_idle(begun, grace)
    ):
        listing = [replace(one, outcome="kept", reason=one.reason or _NEIGHBOUR) for one in listing]
    return listing, record


def clear_tombstone(store: Store, record: StoredRecord, grace: float) -> None:
    """Clear a place that has a tombstone, a placeholder older than `grace`, or no record.

    On a storage error all stays for later.
    """
    old = record.doc is None or (
        record.is_tombstone
        and (not record.is_placeholder or is_idle(idle_seconds(store, [RECORD])[RECORD], grace))
    )
    if old:
        with suppress(StorageError):
            clear_place(store, record.generation)


def is_idle(idle: float | None, grace: float) -> bool:
    """Whether nothing was written for the grace period; 0 is not a period at all."""
    return grace == 0 or (idle is not None and idle >= grace)


def remove_attempt(store: Store, orphan: Collected) -> Collected:
    """Remove a fenced attempt."""
    try:
        # Never delete in the target of a link.
        if not is_link(store.local_path(f"{orphan.attempt}/")):
            store.delete_prefix(f"{orphan.attempt}/records/")
        store.delete_prefix(f"{orphan.attempt}/")
    except StorageError as e:
        return replace(orphan, outcome="failed", reason=str(e))
    return replace(orphan, outcome="removed", reason=None)


def discard_unfit(store: Store, attempt: str, prior: Prior, *, complete: bool) -> None:
    """Remove an attempt that no process can publish; if that is not certain, it stays.

    Args:
        store: the checkpoint's place.
        attempt: the attempt.
        prior: the version of the commit record that it may replace.
        complete: whether its data may be complete and durable, so that another process may publish
            it.
    """
    with suppress(ShardckptError):  # an unreadable record may name this attempt
        record = StoredRecord.of(store, *store.read_versioned(RECORD))
        is_prior = record_digest(record.data) == prior.digest
        if record.attempt(store) == attempt or (complete and is_prior):
            return
        discard(store.sub(attempt))
        if prior.holds:
            clear_place(store, prior.generation)


def _tombstone(reason: str) -> bytes:
    """A unique tombstone with the time by this machine's clock and the reason."""
    now = utc_now()
    return seal(Tombstone(f"{now}: {reason}", secrets.token_hex(8)).to_json())


def remove_strays(place: Store) -> None:
    """Remove the folders of a complete attempt that no host's record names.

    Several writers may have worked as one host, each in a folder of its own below `hosts/`. One of
    them wrote the host's record. Another may have been killed, and its folder is left.

    Raises:
        StorageError: the storage failed.
    """
    folders = {name for name in place.list_children("hosts/") if name.endswith("/")} - {
        _folder(SMALL_TABLE)
    }
    hosts = finished_hosts(place)
    if len(folders) <= len(hosts):  # every host has a folder
        return
    records = map_on_threads(lambda host: read_host_record(place, host)[0], hosts)
    for stray in sorted(folders - {_folder(record.files.table.key) for record in records}):
        place.delete_prefix(f"hosts/{stray}")


def _folder(key: str) -> str:
    """The folder of a file below `hosts/`, with a slash at its end."""
    return f"{key.split('/')[1]}/"


def remove_replaced(store: Store, attempt: str) -> None:
    """Remove the attempt that a new one has replaced.

    If the storage refuses, that is in the log, and a collection removes it later.
    """
    try:
        # Otherwise a foreign program wrote the record and the directory.
        if is_attempt(store, attempt):
            store.sub(attempt).delete_prefix("")
    except StorageError as e:
        _log.warning(
            "%s: the new checkpoint is committed; the one that it replaces cannot be removed now, "
            "so `shardckpt gc` removes it later (%s)",
            store,
            e,
        )
