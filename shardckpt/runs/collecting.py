"""Removal of unfinished attempts and of checkpoints, and publication of attempts that are complete.

`commit.remove` explains why removed data can never be published afterwards. To collect a
checkpoint's orphaned attempts (`collect_place`):

1. Read the record with the storage's version of it, and list the attempts that it does not name.
2. Choose the attempts without any write for a grace period, by the storage's clock. If another
   attempt, or a placeholder, is younger, a save may be in progress, and the fence would make it
   fail: then choose none.
3. Publish the newest attempt that is complete (`committing`): its own committer may have failed,
   and its data may be the only copy. If that succeeds, start again. If the storage fails, or it
   might be published later (`committing.Deferred`), all stay. Only an attempt that is incomplete,
   or was refused for good just now, is collected.
4. Fence, on condition that the record still has that version. A record gets a new mark. A tombstone
   replaces a placeholder, another tombstone or a missing file. Every mark is unique, because some
   storages derive the version from the contents. If the record has changed, start again.
5. List again: remove the attempts that are still orphans and still without a write for the grace
   period. Host records go first, because a commit needs them.
6. If only that tombstone is left, delete it too, on condition that it still has that version: a
   save that began meanwhile has put its placeholder there.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from shardckpt.commit.attempts import is_attempt, places, step_of
from shardckpt.commit.dependants import Dependants
from shardckpt.commit.publish import RECORD, published_attempt
from shardckpt.commit.remove import (
    CONTENDED,
    NO_CHECKPOINT,
    ROUNDS,
    Collected,
    bury,
    clear_tombstone,
    is_idle,
    list_orphans,
    remove_attempt,
)
from shardckpt.errors import FormatError, NotFoundError, OptionError, StorageError
from shardckpt.io.failures import check_fork, reading_takes_threads
from shardckpt.io.status import exists
from shardckpt.io.store import Store
from shardckpt.io.threads import map_on_threads
from shardckpt.io.url import parse
from shardckpt.runs.committing import Deferred, commit_place, publishable
from shardckpt.runs.leases import LEASED, LeasedSteps
from shardckpt.text import Message, named

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

GRACE = 24 * 3600.0
"""Default for the seconds without any write after which an attempt may be collected."""
_COMPLETE = "a complete save is there, which `shardckpt commit` publishes"
_FOREIGN = "it contains something that no save has written"


def collect(
    root: str | os.PathLike[str], *, grace: float = GRACE, dry_run: bool = False
) -> list[Collected]:
    """Remove the attempts at `root` and directly below it that no save will finish.

    Publish those that are complete.

    An attempt is removed if no commit record names it and nothing has been written into it for the
    grace period, by the storage's own clock. If another attempt of the same checkpoint is younger,
    a save may be in progress, and all stay.

    Args:
        root: a checkpoint, or a directory of them: a path or url.
        grace: seconds; longer than any pause between the writes of a save. 0 removes all attempts,
            even those of saves in progress.
        dry_run: only report what would be done.

    Returns:
        The outcome for each attempt that is not a checkpoint. A place that could not be read is one
        entry without an attempt, and does not stop the collection of the others.

    Raises:
        UrlError: `root` is not a valid path or url.
        NotFoundError: there is no such directory.
        OptionError: `grace` is not a valid number of seconds.
    """
    _check_seconds(grace)
    location = parse(root)
    check_fork(location)  # its errors would be reported place by place
    store = Store.open(location)
    if not dry_run:
        store.check_replaces("collect what unfinished saves left at")
    children = store.list_children()
    if not children and not exists(store.local_path("")):
        raise NotFoundError(f"{location}: no such directory.")

    below, own = LeasedSteps(store), location.resolved
    beside = below if own.parent is None else LeasedSteps(Store.open(own.parent))

    def at(place: Store) -> list[Collected]:
        leases, name = (beside, own.name) if place is store else (below, place.location.name)
        step = step_of(name)

        def held() -> bool:
            return step is not None and step in leases

        try:
            return collect_place(place, grace=grace, dry_run=dry_run, held=held)
        except FormatError as e:
            return [Collected(place.location, None, "kept", reason=str(e))]
        except StorageError as e:
            return [Collected(place.location, None, "failed", reason=str(e))]
        finally:
            if not dry_run and step is not None and place is not store:
                place.remove_empty()  # a deletion was killed just before it removed the directory

    with reading_takes_threads(store):
        return [
            one
            for outcomes in map_on_threads(at, (place for _, place in places(store, children)))
            for one in outcomes
        ]


def delete(
    url: str | os.PathLike[str],
    *,
    reason: str = "on request",
    grace: float = GRACE,
    attempt: str | None = None,
) -> list[Collected]:
    """Delete a checkpoint.

    Saves to the same place that began before it can publish nothing any more.

    Also collects the attempts there that are older than the grace period; if none is younger,
    nothing stays.

    Args:
        url: location of the checkpoint.
        reason: for people who look for it later; the time is put before it.
        grace: as for `collect`; the checkpoint itself is deleted whatever its age.
        attempt: the attempt that is to be deleted; None: whichever is there.

    Returns:
        The outcome for other attempts there; and for the checkpoint's own data, if it could not be
        removed.

    Raises:
        NotFoundError: no checkpoint there.
        OptionError: it is pinned or tagged, or checkpoints beside it have left tensors in it; the
            message names them.
        ReplacedError: another checkpoint has replaced it; nothing was deleted.
        VersionError: it was written by a newer version.
        StorageError: the storage failed; unless the message is about deleting the record, the
            record is deleted and data may be left.
    """
    _check_seconds(grace)
    store = Store.open(parse(url))
    store.check_replaces("delete")
    check_no_base(store)
    return delete_place(store, reason=reason, grace=grace, attempt=attempt)


def collect_place(
    store: Store,
    *,
    grace: float,
    dry_run: bool = False,
    publishes: bool = True,
    held: Callable[[], bool] = lambda: False,
) -> list[Collected]:
    """Publish the complete attempt at one place, if there is one.

    Remove the attempts that no process will commit any more.

    Args:
        store: the checkpoint's place.
        grace: seconds without any write that make an attempt removable. 0 removes all, even those
            of saves in progress.
        dry_run: only report what would be done.
        publishes: whether to publish a complete attempt; otherwise all stay if there is one.
        held: says whether a reader holds a lease on the step now (`leases`); then all stay.

    Returns:
        The outcome for each attempt that the commit record does not name.

    Raises:
        FormatError: the commit record cannot be read, so it is not known which attempt it names;
            nothing was removed.
        StorageError: the storage failed, perhaps while a complete attempt was published; nothing
            was removed.
    """
    published: list[Collected] = []
    for _ in range(ROUNDS):
        orphans, record = list_orphans(store, grace)
        if record is not None and not orphans and not dry_run:
            clear_tombstone(store, record, grace)
        if record is None or not orphans or any(one.outcome == "kept" for one in orphans):
            return published + orphans
        complete, stays = None, LEASED if held() else ""
        if not stays and (dry_run or not publishes):
            complete, stays = publishable(store)
        if stays or (complete is not None and not publishes):
            return published + _kept(orphans, stays or _COMPLETE)
        if dry_run:
            return [
                replace(one, outcome="published" if one.attempt == complete else one.outcome)
                for one in orphans
            ]
        ages = {one.attempt: one.idle for one in orphans}
        outcomes = commit_place("", store, denied_raises=True)
        committed = [one.attempt for one in outcomes if one.state == "committed"]
        published += [
            Collected(store.location, attempt, "published", ages.get(attempt))
            for attempt in committed
        ]
        deferred = [one.reason for one in outcomes if isinstance(one, Deferred)]
        if deferred and not committed:  # the fence would keep it from being published later
            return published + _kept(orphans, deferred[0])
        if not committed and record.fence(store):
            return published + _remove_fenced(store, orphans, grace, held)
    return published + _kept(orphans, CONTENDED)


def _remove_fenced(
    store: Store, orphans: Sequence[Collected], grace: float, held: Callable[[], bool]
) -> list[Collected]:
    """Remove the attempts that no process can publish any more."""
    fenced = {one.attempt for one in orphans}
    listed, record = list_orphans(store, grace)
    done = []
    for one in listed:
        if one.attempt in fenced and is_idle(one.idle, grace):
            done += _kept([one], LEASED) if held() else [remove_attempt(store, one)]
        elif one.attempt in fenced:
            done.append(one)
    if record is not None:
        clear_tombstone(store, record, grace)
    return done


def _kept(orphans: Sequence[Collected], reason: str) -> list[Collected]:
    return [replace(one, outcome="kept", reason=reason) for one in orphans]


def delete_place(
    store: Store,
    *,
    reason: str,
    grace: float,
    attempt: str | None = None,
    record: str | None = None,
) -> list[Collected]:
    """Delete the checkpoint at one place; then collect everything else there.

    If the deletion of a checkpoint was interrupted, this finishes it.

    Args:
        store: the checkpoint's place.
        reason: for people who look for the checkpoint later.
        grace: as for `collect_place`; the checkpoint itself is deleted whatever its age.
        attempt: the attempt that is to be deleted; None: whichever the record names.
        record: digest of the record that is to be deleted; None: any record.

    Returns:
        The outcome for all attempts there except the checkpoint's own; that one is included if it
        could not be removed.

    Raises:
        NotFoundError: there is no checkpoint.
        ReplacedError: another checkpoint has just replaced it, or `attempt` or `record` is
            not there; nothing was deleted.
        VersionError: the checkpoint there comes from a newer version.
        OptionError: it is pinned or tagged.
        StorageError: the storage failed.
    """
    named = bury(store, reason, attempt, record)
    left = []
    if named is not None and f"{named}/" in store.list_children():
        data = Collected(store.location, named, "removed")
        data = (
            remove_attempt(store, data)
            if is_attempt(store, named)
            else replace(data, outcome="kept", reason=_FOREIGN)
        )
        left = [data] if data.outcome != "removed" else []
    return left + [one for one in collect_place(store, grace=grace) if one.attempt != named]


def check_exists(url: str | os.PathLike[str]) -> None:
    """Refuse a place without a commit record, before somebody is asked whether it may be deleted.

    Raises:
        NotFoundError: no checkpoint there.
    """
    store = Store.open(parse(url))
    if not store.exists(RECORD):
        raise NotFoundError(NO_CHECKPOINT.format(store))


def check_no_base(store: Store) -> None:
    """Refuse to delete a checkpoint that others in the same directory name as their base.

    Others elsewhere are not found.
    """
    try:
        attempt = published_attempt(store)
        if attempt is None:
            return
    except FormatError:
        attempt = None  # not known: any checkpoint that names this place counts
    Dependants(store).check_unused(attempt, "deleted")


def _check_seconds(grace: object) -> None:
    if isinstance(grace, bool) or not isinstance(grace, int | float) or not 0 <= grace < math.inf:
        raise OptionError(Message(named("grace", grace), ": give seconds, 0 or more."))
