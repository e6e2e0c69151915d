"""Publishing an attempt: everything or nothing, by one conditional write of one small object.

An attempt is a directory whose name is never reused. Data, then the hosts' records, are written
there. As long as `checkpoint.json` does not name the attempt, it is not a checkpoint. The
committing process

1. makes the commit record from the hosts' records (`assemble`);
2. replaces exactly the version of `checkpoint.json` that was there before any host wrote
   (`replace`, a compare-and-swap). Losing that race publishes nothing. If there is no checkpoint,
   that version is a placeholder, which the save writes first (`hold_place`). Publishing never
   creates the file. So a committer that was asleep publishes nothing after `checkpoint.json` was
   removed.

Several processes may commit one attempt: the process that saved, and others that found it complete.
One of them wins; the others find their own attempt published, which is a success too.

A complete attempt whose publication failed stays: any process may publish it later. It is removed
only when no process can publish it any more, because the record is neither the prior one nor its
own (`publish`, `remove.discard_unfit`), or by a collection (`collect`), which tries to publish it
first. On a local disk, publishers hold a shared lock on its directory, and the process that removes
it an exclusive one.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import fcntl
import hashlib
import os
import secrets
import time
from dataclasses import dataclass, replace
from shlex import quote
from typing import TYPE_CHECKING, Any

from shardckpt.commit.attempts import attempts, same_elements
from shardckpt.commit.markers import MARKERS
from shardckpt.errors import (
    AlreadyExistsError,
    CommitError,
    FormatError,
    MissingDataError,
    StorageError,
    VersionError,
)
from shardckpt.format.documents import check_sizes, seal
from shardckpt.format.record import CheckpointRecord, Tombstone, parse_checkpoint
from shardckpt.io.ages import remove_old_probes
from shardckpt.io.files import LARGEST_WHOLE, OpenFile
from shardckpt.io.threads import collector_paused
from shardckpt.text import Message, named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardckpt.io.store import Store

RECORD = "checkpoint.json"
"""The commit record, relative to the checkpoint."""
_UNREADABLE = Tombstone("unreadable")
_ROUNDS, _DISK_ROUNDS = 10, 200
"""Number of retries because another process has changed the record. On a disk, where a retry takes
a tenth of a millisecond, deletions may also remove the empty directory each time."""
_LEAST_PAUSE, _MOST_PAUSE = 0.1, 1.0
"""Least and most seconds between two checks for another process's placeholder."""


@dataclass(frozen=True, slots=True)
class Prior:
    """The commit record when a save began."""

    record: CheckpointRecord | Tombstone | None
    generation: Any
    """The storage's version of the record, for the conditional write."""
    digest: str | None
    """SHA-256 of its bytes, by which other processes recognise it; None if there is none."""

    @property
    def holds(self) -> bool:
        """Whether the record is a placeholder."""
        return isinstance(self.record, Tombstone) and self.record.begun

    @property
    def is_checkpoint(self) -> bool:
        """Whether there is a checkpoint that a new one would replace.

        The record of this checkpoint may be unreadable.
        """
        return isinstance(self.record, CheckpointRecord) or self.record is _UNREADABLE

    @property
    def attempt(self) -> str | None:
        """The published attempt that a new one would replace; None: there is none."""
        return self.record.attempt if isinstance(self.record, CheckpointRecord) else None


def new_attempt() -> str:
    """A unique name for one save attempt; names sort by time."""
    now = dt.datetime.now(dt.UTC)
    return f"{now:%Y%m%dT%H%M%S}-{secrets.token_hex(4)}"


def read_prior(store: Store, *, overwrite: bool) -> Prior:
    """Read the current commit record, to begin or commit a save there.

    Raises:
        AlreadyExistsError: a checkpoint is committed there and `overwrite` is False.
        VersionError: the checkpoint there comes from a newer version, and is never replaced.
        FormatError: the record there is unreadable and `overwrite` is False.
    """
    data, generation = store.read_versioned(RECORD)
    digest, record = record_digest(data), None
    try:
        known, published = _last_published[0]
        record = published if digest == known else _parse(store, data)
    except VersionError:
        raise
    except FormatError as e:
        if not overwrite:
            advice = " Save elsewhere, or replace it with the option "
            raise FormatError(Message(e.message, advice, named("overwrite", True), ".")) from e
        # The damaged record is of no use to readers. It is not known which attempt it named, so
        # that attempt stays as garbage.
        record = _UNREADABLE
    if isinstance(record, CheckpointRecord) and not overwrite:
        raise AlreadyExistsError(
            f"{store}: a checkpoint is committed there already; save elsewhere, or with "
            "SaveOptions(overwrite=True)."
        )
    return Prior(record, generation, digest)


def hold_place(store: Store, prior: Prior, *, overwrite: bool, wait_seconds: float = 0.0) -> Prior:
    """Write a placeholder if there is no checkpoint, before the first byte is written there.

    A process that removes data replaces the commit record first. Publishing replaces exactly the
    version that the save found here, and no version occurs twice. So a late save publishes nothing
    if any of its data was removed.

    Args:
        store: the checkpoint's place.
        prior: the result of a `read_prior` just now.
        overwrite: as for `read_prior`.
        wait_seconds: time to wait for another process of the same save to do it, because one object
            allows few writes per second.

    Returns:
        The version to replace: `prior` if it is a checkpoint, otherwise a placeholder; where
        nothing can be replaced, a missing record.

    Raises:
        AlreadyExistsError, VersionError, FormatError: as for `read_prior`.
        StorageError: the storage failed.
    """
    # Nothing is ever removed there, so the record is created, and no placeholder is needed.
    if not store.replaces:
        if prior.record is not None:
            store.check_replaces("save over what is at")
        if not store.writable:
            raise StorageError(f"cannot save to {store}: the place is read only; save elsewhere.")
        return prior
    began, looks = time.monotonic(), 0
    most = _DISK_ROUNDS if store.near else _ROUNDS
    while not (
        prior.holds or isinstance(prior.record, CheckpointRecord) or prior.record is _UNREADABLE
    ):
        waited = time.monotonic() - began
        if waited < wait_seconds:
            time.sleep(min(max(_LEAST_PAUSE, waited), _MOST_PAUSE))
        elif looks == most:
            why = (
                "the storage refused the write, and nothing is there; check that the bucket exists."
            )
            why = why if prior.record is None else "other processes keep changing it; try again."
            raise StorageError(f"cannot create {store.path_of(RECORD)}: {why}")
        else:
            looks += 1
            _put_placeholder(store, prior, last=looks == most)
        prior = read_prior(store, overwrite=overwrite)
    return prior


def _put_placeholder(store: Store, prior: Prior, *, last: bool) -> None:
    """Write a placeholder in place of a tombstone or a missing record.

    Nothing is written if another process is first.
    """

    def make() -> bytes:
        return seal(
            Tombstone(
                "a save was begun here and is not committed", secrets.token_hex(8), begun=True
            ).to_json()
        )

    try:
        put_tombstone(store, make, prior.generation, absent=prior.record is None)
    except StorageError:
        # On a disk, a deletion may have removed the empty directory at this moment.
        if last or store.has_directory():
            raise


def put_tombstone(
    store: Store, make: Callable[[], bytes], generation: bytes, *, absent: bool
) -> bool:
    """Write a tombstone in place of a version of the commit record, or of a missing one.

    The tombstone's version never occurs again.

    A request whose response was lost is made again. So creating an object may succeed twice, if it
    is removed in between; the two objects have different versions even then (`Store.create_anew`).

    Args:
        store: the checkpoint's place.
        make: makes the tombstone; never the same twice.
        generation: generation of the version to replace.
        absent: whether the record is missing.

    Returns:
        Whether the tombstone was written. False if another object is there, maybe from an earlier
        try.

    Raises:
        StorageError: the storage failed.
    """
    return (
        store.create_anew(RECORD, make, generation)
        if absent
        else store.replace(RECORD, make(), generation)
    )


def clear_place(store: Store, generation: bytes) -> None:
    """Remove a tombstone or placeholder that has no attempt beside it, all markers and old probes.

    An empty directory is then removed. On a storage without conditional deletion, all stay.

    Args:
        store: the checkpoint's place.
        generation: generation of the tombstone, or of the missing record; where another version is
            there, it and the markers of its checkpoint stay.

    Raises:
        StorageError: the storage failed.
    """
    children = store.list_children()
    if attempts(store, children):
        return
    markers = {name: store.read_versioned(name)[1] for name in MARKERS.intersection(children)}
    # A checkpoint that has taken the place since that check has changed what it marks.
    if markers and store.read_versioned(RECORD)[1] != generation:
        return
    for marker, of_marker in markers.items():
        store.remove(marker, of_marker)
    remove_old_probes(store, children)
    if RECORD not in children or store.remove(RECORD, generation):
        store.remove_empty()


def publish(
    store: Store,
    record: CheckpointRecord,
    prior: Prior,
    check: Callable[[Prior], None] | None = None,
) -> bool:
    """Make an assembled attempt the checkpoint, or remove it if no process can ever publish it.

    A removed attempt must never be published afterwards. So it is removed only after the storage
    has responded, and has then shown a record that is neither ours nor the prior one. It may be
    ours if the storage loses its own response, retries, and reports that "another" writer was
    first. While the prior record is there, a try whose response was lost may still succeed, and so
    may a later try. So after any failure the attempt stays.

    Args:
        store: the checkpoint's place.
        record: the result of `assemble`.
        prior: the version of the commit record that `hold_place` returned when the save began.
        check: called with a fold of `prior`, before that is replaced, too; None: it is not.

    Returns:
        Whether this call published it; False: another committer has published this same attempt.
        Only the committer that published it knows that its record is durable, so only that one may
        remove the replaced attempt.

    Raises:
        AlreadyExistsError: another attempt was published first, or the place was deleted or
            collected meanwhile.
        CommitError: readers would refuse the record; or another process has removed the attempt.
        StorageError: the storage failed, or contradicts itself.
    """
    place, before = store.sub(record.attempt), prior.record
    if isinstance(before, CheckpointRecord) and same_elements(record.attempt, before.attempt):
        record = replace(record, fence=before.fence)  # a fold: see `_is_fold_of`
    with collector_paused():
        data = record.seal()
        _check_readable(store, record, data)
    try:
        with _lock(place, fcntl.LOCK_SH):
            gone = store.has_locks and not place.exists(record.hosts[0].key)
            published = not gone and store.replace(RECORD, data, prior.generation)
    except StorageError as e:
        if is_published(store, record.attempt):
            raise StorageError(
                f"{store}: the checkpoint is committed, but a crash of the machine now might undo "
                f"that ({e})"
            ) from e
        raise _publication_error(store, e) from e
    if published:
        _last_published[0] = record_digest(data), record
        return True
    with data_stays(store):
        there, generation = store.read_versioned(RECORD)
    now = Prior(_parse(store, there), generation, record_digest(there))
    if now.attempt == record.attempt:
        return False
    if now.digest == prior.digest:
        if gone:
            raise CommitError(f"{place}: another process has removed this save; save again.")
        raise _publication_error(
            store,
            f"cannot write {store.path_of(RECORD)}: the storage refused the write as if another "
            "save had come first, but shows none; check that the bucket exists.",
        )
    if check is not None and _is_fold_of(prior, now):
        check(now)
        return publish(store, record, now, check)
    discard(place)
    raise _overtaken_error(store)


def _is_fold_of(prior: Prior, now: Prior) -> bool:
    """Whether only folds, which keep its fence, have replaced the prior record."""
    return (
        isinstance(now.record, CheckpointRecord)
        and isinstance(prior.record, CheckpointRecord)
        and same_elements(now.attempt, prior.attempt)
        and now.record.fence == prior.record.fence
    )


def _publication_error(store: Store, why: object) -> StorageError:
    return StorageError(
        f"{why} The data of the save is complete and stays there: `shardckpt commit "
        f"{quote(str(store))}` publishes it."
    )


def _overtaken_error(store: Store) -> AlreadyExistsError:
    return AlreadyExistsError(
        f"{store}: another save committed there, or the place was deleted or collected "
        "(`shardckpt gc`), while this one was running; nothing of it was kept."
    )


@contextlib.contextmanager
def data_stays(store: Store, prior: Prior | None = None) -> Iterator[None]:
    """Add to the block's storage error that a save's data is complete, and what publishes it.

    Args:
        store: the checkpoint's place.
        prior: the version of the commit record that a running save replaces. If data is missing and
            another version is there, the save was overtaken or collected: that is the error.
    """
    try:
        yield
    except MissingDataError as e:
        if prior and record_digest(store.read_versioned(RECORD)[0]) != prior.digest:
            raise _overtaken_error(store) from e
        raise
    except StorageError as e:
        raise _publication_error(store, e) from e


def is_published(store: Store, attempt: str) -> bool:
    """Whether the commit record is known to name an attempt; False also if it cannot be read."""
    try:
        return published_attempt(store) == attempt
    except (StorageError, FormatError):
        return False


def _check_readable(store: Store, record: CheckpointRecord, data: bytes) -> None:
    """Parse a commit record as every reader will, before it replaces a readable one.

    Its tensors once for all saves of the same ones.
    """
    why = f"{store}: nothing was published, because it could not be read again"
    if len(data) > LARGEST_WHOLE:
        raise CommitError(
            f"{why}: its record would have {len(data)} bytes, and readers take at most "
            f"{LARGEST_WHOLE}."
        )
    try:
        known = record.structure.known_to_be_readable and not record.structure.chain
        if known and record.structure.tree_is_known_to_be_readable:
            parse_checkpoint(record.seal_without_tensors(tree=False), store.path_of(RECORD), {})
        else:
            if known:
                parse_checkpoint(
                    record.seal_without_tensors(tree=True),
                    store.path_of(RECORD),
                    record.structure.tensors,
                )
            else:
                parse_checkpoint(data, store.path_of(RECORD))
            record.structure.note_readable()
        for table in (record.table, record.small_table):
            if table is not None:
                check_sizes(table, f"{store.path_of(record.attempt)}/{table.key}")
    except FormatError as e:
        raise CommitError(f"{why}: {e}") from e


_last_published: list[tuple[str | None, CheckpointRecord | None]] = [(None, None)]
"""The digest of the last record that this process has published, and the record: the next save to
the place need not parse it."""


def _parse(store: Store, data: bytes | None) -> CheckpointRecord | Tombstone | None:
    if data is None:
        return None
    with collector_paused():
        return parse_checkpoint(data, f"{store}/{RECORD}")


def published_attempt(store: Store) -> str | None:
    """The attempt that the commit record names now; None if there is none."""
    record = _parse(store, store.read_versioned(RECORD)[0])
    return record.attempt if isinstance(record, CheckpointRecord) else None


def record_digest(data: bytes | None) -> str | None:
    """The digest of a commit record as it is stored, for one that cannot be read, too.

    None: there is none.
    """
    return None if data is None else hashlib.sha256(data).hexdigest()


def discard(place: Store) -> None:
    """Remove an attempt that this process does not publish.

    Files that cannot be removed stay as garbage.

    On a local disk, an attempt that another process is publishing stays. On an object store that
    cannot be seen: the caller must know.
    """
    with (
        contextlib.suppress(StorageError, OSError),
        _lock(place, fcntl.LOCK_EX | fcntl.LOCK_NB) as locked,
    ):
        if locked or not place.list_children("records/"):
            # First: a restarted reshard trusts a record that its data is there.
            place.delete_prefix("records/")
            place.delete_prefix("")


@contextlib.contextmanager
def _lock(place: Store, how: int) -> Iterator[bool]:
    """Hold a lock on an attempt's directory on a local disk.

    Yield whether it was acquired, and always True on an object store.

    Raises:
        BlockingIOError: another process holds it, and `how` says not to wait.
    """
    path = place.local_path("") if place.has_locks else None
    if path is None:
        yield True
        return
    try:
        opened = OpenFile(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield False
        return
    with opened as directory:
        try:
            fcntl.flock(directory, how)
            locked = True
        except BlockingIOError:
            raise
        except OSError:  # a file system without locks, or without locks on directories: NFS
            locked = False
        yield locked
