"""Publishing an attempt: everything or nothing, by one conditional write of one small object.

An attempt is a directory that is never used again. Data, then the hosts' records, go there; as long as
`checkpoint.json` does not name it, it is no checkpoint. Whoever commits it

1. makes the commit record out of the hosts' records (`assemble`);
2. writes `checkpoint.json` in place of the very version that was there before any host wrote (`replace`, a
   compare-and-swap). Losing that race publishes nothing. Where there is no checkpoint, that version is a placeholder,
   which the save puts there first (`hold_place`): nothing is ever published by creating the file, so a committer that
   has been asleep publishes nothing where `checkpoint.json` was removed.

Several may commit one attempt: the process that saved, and others that found it complete. One of them wins; the
others find their own attempt published, which is what they wanted. On a local disk, where an attempt that could not
be published is removed at once, they hold a shared lock of its directory meanwhile, and who removes it an exclusive one.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import fcntl
import hashlib
import os
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardckpt.commit.attempts import attempts, is_attempt
from shardckpt.commit.markers import PINNED, SUPERSEDED, unmark
from shardckpt.errors import AlreadyExistsError, CommitError, FormatError, StorageError, VersionError
from shardckpt.format.documents import seal
from shardckpt.format.record import CheckpointRecord, Tombstone, parse_checkpoint
from shardckpt.format.table import check_sizes
from shardckpt.io.failures import storage_errors
from shardckpt.io.store import LARGEST_WHOLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardckpt.io.store import Store

__all__ = [
    "RECORD",
    "Prior",
    "clear_place",
    "discard",
    "hold_place",
    "new_attempt",
    "publish",
    "published_attempt",
    "put_tombstone",
    "read_prior",
    "remove_replaced",
]

RECORD = "checkpoint.json"
"""The commit record, relative to the checkpoint."""
_UNREADABLE = Tombstone("unreadable")
_ROUNDS, _DISK_ROUNDS = 10, 200
"""How often to look again because somebody else has changed the record; on a disk, where a look takes a tenth of a millisecond, deletions
may also remove the empty directory each time."""
_LEAST_PAUSE, _MOST_PAUSE = 0.1, 1.0
"""Seconds between two looks for the placeholder of another process."""


@dataclass(frozen=True, slots=True)
class Prior:
    """What the commit record was when a save began."""

    record: CheckpointRecord | Tombstone | None
    generation: Any
    """The storage's version of it, for the conditional write."""
    digest: str | None
    """SHA-256 of its bytes, by which another process recognises it; None where there is none."""

    @property
    def holds(self) -> bool:
        """Whether it is a placeholder."""
        return isinstance(self.record, Tombstone) and self.record.begun

    @property
    def attempt(self) -> str | None:
        """The attempt that was published, whose place a new one takes; None: none was."""
        return self.record.attempt if isinstance(self.record, CheckpointRecord) else None


def new_attempt() -> str:
    """A name for one save attempt, never given twice; it sorts by time."""
    now = dt.datetime.now(dt.UTC)
    return f"{now:%Y%m%dT%H%M%S}-{secrets.token_hex(4)}"


def read_prior(store: Store, *, overwrite: bool) -> Prior:
    """The present commit record, for who begins a save there or commits one.

    Raises:
        AlreadyExistsError: a checkpoint is committed there and `overwrite` is False.
        VersionError: a newer version's checkpoint is there, which is never replaced.
        FormatError: what is there is unreadable and `overwrite` is False.
    """
    data, generation = store.read_versioned(RECORD)
    record: CheckpointRecord | Tombstone | None = None
    try:
        record = None if data is None else parse_checkpoint(data, f"{store}/{RECORD}")
    except VersionError:
        raise
    except FormatError as e:
        if not overwrite:
            raise FormatError(f"{e} Save elsewhere, or replace it with SaveOptions(overwrite=True).") from e
        # Nothing can be read through it. Which attempt it named is unknown, so that stays as garbage.
        record = _UNREADABLE
    if isinstance(record, CheckpointRecord) and not overwrite:
        raise AlreadyExistsError(f"{store}: a checkpoint is committed there already; save elsewhere, or with SaveOptions(overwrite=True).")
    return Prior(record, generation, _digest(data))


def hold_place(store: Store, prior: Prior, *, overwrite: bool, patience: float = 0.0) -> Prior:
    """Put a placeholder where there is no checkpoint, before the first byte is written there.

    Whoever removes data changes the commit record first. What the save finds here is replaced when it is published, and
    every version of it is there only once; so a save publishes nothing of which anything was removed, however late it is.

    Args:
        store: the checkpoint's place.
        prior: what `read_prior` has just returned.
        overwrite: as for `read_prior`.
        patience: seconds to wait for another process of the same save to do it: one object bears few writes per second.

    Returns:
        The version to replace: the prior one where that is a checkpoint, or a placeholder.

    Raises:
        AlreadyExistsError, VersionError, FormatError: as for `read_prior`.
        StorageError: the storage failed.
    """
    began, looks = time.monotonic(), 0
    most = _ROUNDS if store.location.local is None else _DISK_ROUNDS
    while not (prior.holds or isinstance(prior.record, CheckpointRecord) or prior.record is _UNREADABLE):
        waited = time.monotonic() - began
        if waited < patience:
            time.sleep(min(max(_LEAST_PAUSE, waited), _MOST_PAUSE))
        elif looks == most:
            why = "the storage refuses, and nothing is there; is the bucket there?" if prior.record is None else "it changes all the time."
            raise StorageError(f"cannot create {store.path_of(RECORD)}: {why}")
        else:
            looks += 1
            _put_placeholder(store, prior, last=looks == most)
        prior = read_prior(store, overwrite=overwrite)
    return prior


def _put_placeholder(store: Store, prior: Prior, *, last: bool) -> None:
    """Put a placeholder in place of nothing, or of a tombstone, unless somebody else is first."""

    def make() -> bytes:
        return seal(Tombstone("a save was begun here and is not committed", secrets.token_hex(8), begun=True).to_json())

    try:
        put_tombstone(store, make, prior.generation, absent=prior.record is None)
    except StorageError:
        # On a disk a deletion may remove the empty directory just now.
        if last or store.location.local is None or store.location.local.is_dir():
            raise


def put_tombstone(store: Store, make: Callable[[], bytes], generation: bytes, *, absent: bool) -> bool:
    """Put a tombstone in place of a version of the commit record, or of nothing, that will never be there a second time.

    TensorStore repeats a request whose answer was lost. To create an object may succeed twice, if it is removed in between; elsewhere than
    on S3 the two are different versions even so.

    Args:
        store: the checkpoint's place.
        make: the tombstone; never the same twice.
        generation: of what it replaces.
        absent: whether that is nothing.

    Returns:
        Whether it is there. False where something else is, which may be an earlier try's.

    Raises:
        StorageError: the storage failed.
    """
    if not absent or store.location.scheme != "s3":
        return store.replace(RECORD, make(), generation)
    from shardckpt.io.buckets.s3_client import create_anew  # botocore is there where the extra is

    with storage_errors("write", store.path_of(RECORD)):
        return create_anew(store.location, RECORD, make)


def clear_place(store: Store, generation: bytes) -> None:
    """Remove a tombstone or placeholder that has no attempt beside it, and then the directory if it is empty.

    Where the storage cannot delete on condition, it stays.

    Args:
        store: the checkpoint's place.
        generation: of the tombstone; another version stays.

    Raises:
        StorageError: the storage failed.
    """
    children = store.list_children()
    if attempts(store, children):
        return
    for marker in {PINNED, SUPERSEDED}.intersection(children):
        unmark(store, marker)
    if store.remove(RECORD, generation):
        store.remove_empty()


def publish(store: Store, record: CheckpointRecord, prior: Prior) -> bool:
    """Make an assembled attempt the checkpoint, or remove it.

    What is removed must never be published afterwards. So it is removed only when the storage has answered, and has
    then shown a record that is neither ours (a storage may lose its own answer, try again and find that "somebody" was
    first) nor the one of before: as long as that stands, a try whose answer was lost may still land. A process that is
    interrupted while it waits for the answer leaves the attempt as garbage, and so does one that gets none from an
    object store.

    Args:
        store: the checkpoint's place.
        record: what `assemble` returned.
        prior: the version of the commit record that `hold_place` found when the save began.

    Returns:
        Whether this call published it; otherwise another committer has published this same attempt.

    Raises:
        AlreadyExistsError: another attempt was published first, or the place was deleted or collected meanwhile.
        CommitError: readers would refuse it; or another process could not publish it, and has removed it.
        StorageError: the storage failed, or contradicts itself.
    """
    data, place = seal(record.to_json(), record.version), store.sub(record.attempt)
    try:
        _check_readable(store, record, data)
    except CommitError:
        discard(place)
        raise
    try:
        with _locked(place, fcntl.LOCK_SH):
            gone = store.location.local is not None and not place.exists(record.hosts[0].key)
            published = not gone and store.replace(RECORD, data, prior.generation)
    except StorageError as e:
        if published_attempt(store) == record.attempt:
            raise StorageError(f"{store}: the checkpoint is committed, but a crash of the machine now might undo that ({e})") from e
        if store.location.local is not None:
            discard(place)
        raise
    if published:
        return True
    there, _ = store.read_versioned(RECORD)
    if _attempt(store, there) == record.attempt:
        return False
    if _digest(there) == prior.digest:
        if gone:
            raise CommitError(f"{place}: it was removed before it could be published, because publishing it failed elsewhere.")
        raise StorageError(
            f"cannot write {store.path_of(RECORD)}: the storage refuses, as if another save had been first, and shows none; "
            f"check that the bucket is there, then save again."
        )
    discard(place)
    raise AlreadyExistsError(
        f"{store}: another save committed there, or the place was deleted, while this one was running; nothing of it was kept."
    )


def _check_readable(store: Store, record: CheckpointRecord, data: bytes) -> None:
    """Read a commit record as every reader will, before it takes the place of one that can be read."""
    why = f"{store}: nothing was published, because it could not be read again"
    if len(data) > LARGEST_WHOLE:
        raise CommitError(f"{why}: its record would have {len(data)} bytes, and readers take at most {LARGEST_WHOLE}.")
    try:
        parse_checkpoint(data, store.path_of(RECORD))
        for table in (record.table, record.small_table):
            if table is not None:
                check_sizes(table, f"{store.path_of(record.attempt)}/{table.key}")
    except FormatError as e:
        raise CommitError(f"{why}: {e}") from e


def published_attempt(store: Store) -> str | None:
    """The attempt that the commit record names now."""
    return _attempt(store, store.read_versioned(RECORD)[0])


def _attempt(store: Store, data: bytes | None) -> str | None:
    record = None if data is None else parse_checkpoint(data, f"{store}/{RECORD}")
    return record.attempt if isinstance(record, CheckpointRecord) else None


def _digest(data: bytes | None) -> str | None:
    return None if data is None else hashlib.sha256(data).hexdigest()


def discard(place: Store) -> None:
    """Remove an attempt that this process does not publish; what cannot be removed stays as garbage.

    On a local disk, one that somebody else is just publishing stays. On an object store nobody knows: the caller must.
    """
    with contextlib.suppress(StorageError, OSError), _locked(place, fcntl.LOCK_EX | fcntl.LOCK_NB) as locked:
        if locked or not place.list_children("records/"):
            place.delete_prefix("records/")  # first: a reshard that is started again takes a record's word that its data is there
            place.delete_prefix("")


@contextlib.contextmanager
def _locked(place: Store, how: int) -> Iterator[bool]:
    """Hold a lock of an attempt's directory on a local disk; whether that can be had, and always on an object store.

    Raises:
        BlockingIOError: somebody else has it, and `how` says not to wait.
    """
    path = place.location.local
    if path is None:
        yield True
        return
    try:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(directory, how)
            locked = True
        except BlockingIOError:
            raise
        except OSError:  # a file system without locks, or without such of directories: NFS
            locked = False
        yield locked
    finally:
        os.close(directory)


def remove_replaced(store: Store, attempt: str) -> None:
    """Remove the attempt whose place a new one has taken.

    Raises:
        StorageError: it cannot be removed; the new checkpoint is committed all the same.
    """
    replaced = store.sub(attempt)
    try:
        if is_attempt(store, attempt):  # else the record was somebody else's, and the directory is, too
            replaced.delete_prefix("")
    except StorageError as e:
        raise StorageError(f"{store}: the new checkpoint is committed; the one that it replaces cannot be removed ({e})") from e
