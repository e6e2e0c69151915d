"""Commits of attempts that a save has left complete and unpublished.

The process that commits may die after all hosts have finished. The attempt then lacks nothing, and
the host records contain everything that a commit needs. So any process can commit it later from the
records alone. If one place has several attempts, the newest complete one is committed, by the
storage's times of their records. If it has several complete reshards, none is: the user decides. An
attempt is overtaken when the place no longer has the commit record that the save found: another
attempt was committed there since, or the attempt's place was collected. Some attempts may have been
refused publication: an attempt of a run that no longer saves there, and an attempt that would
replace a pinned or tagged checkpoint. Such attempts are not committed (`leftover`). Before the
first save after a rollback is published, the steps that it supersedes are marked (`rollback`).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shardckpt.commit.assemble import (
    HostVersionError,
    assemble,
    finished_hosts,
    read_host_record,
)
from shardckpt.commit.attempts import attempts, is_reshard, places
from shardckpt.commit.base_places import check_bases
from shardckpt.commit.dependants import Dependants
from shardckpt.commit.publish import (
    RECORD,
    data_stays,
    hold_place,
    publish,
    read_prior,
)
from shardckpt.commit.remove import StoredRecord, remove_replaced, remove_strays
from shardckpt.errors import (
    AlreadyExistsError,
    CommitError,
    FormatError,
    NotFoundError,
    ShardckptError,
    StorageError,
    VersionError,
)
from shardckpt.io.ages import last_written
from shardckpt.io.failures import check_fork, is_denied, reading_takes_threads
from shardckpt.io.store import Store
from shardckpt.io.url import parse
from shardckpt.runs.leftover import check_leftover, run_root
from shardckpt.runs.rollback import Rollback, keep_superseded
from shardckpt.state.names import natural_key
from shardckpt.text import numbered

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from shardckpt.commit.publish import Prior
    from shardckpt.io.url import Location

_AT_ONCE = 16
"""Number of places that are handled at a time; on an object store each needs a few round trips."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome for one unpublished attempt."""

    name: str
    """Name of the checkpoint, relative to the root; "." for the root itself."""
    location: Location
    """Place of the checkpoint."""
    attempt: str
    state: Literal["committed", "incomplete", "overtaken", "refused"]
    reason: str = ""
    """Reason for not committing it; "" if it was committed."""


@dataclass(frozen=True, slots=True)
class Deferred(Outcome):
    """The outcome for a complete attempt that may be committed once something else has changed.

    Its base is away, or another version of shardckpt wrote it. A collection keeps it.
    """


def commit(root: str | os.PathLike[str]) -> list[Outcome]:
    """Commit the complete attempts whose committer has died.

    Call it when a job starts, before looking for its latest step.

    A concurrent commit of the same attempt by another process does no harm: one of the two
    publishes it.

    Args:
        root: a checkpoint, or a directory of checkpoints.

    Returns:
        Every attempt that was not published before, and its outcome.

    Raises:
        NotFoundError: the place has no checkpoint and no attempt.
        StorageError: the storage failed, or Python is shutting down and starts no threads to read
            with.
    """
    store = Store.open(parse(root))
    check_fork(store)  # its errors would be reported as refusals
    children = store.list_children()
    if not children:
        raise NotFoundError(f"{store}: no checkpoint and no unfinished save there.")
    return commit_places(store, list(places(store, children)))


class _BaseError(CommitError):
    """A base is not what it was when the attempt was saved, or not there."""


def commit_places(root: Store, named: Sequence[tuple[str, Store]]) -> list[Outcome]:
    """Commit the complete attempts at some named places below one root.

    Raises:
        StorageError: the storage failed at one of them, or Python is shutting down; the others were
            committed.
    """
    with reading_takes_threads(root), ThreadPoolExecutor(_AT_ONCE, "shardckpt-commit") as pool:
        futures = [pool.submit(commit_place, name, place) for name, place in named]
    return [outcome for future in futures for outcome in future.result()]


def commit_place(name: str, store: Store, *, denied_raises: bool = False) -> list[Outcome]:
    """Commit the newest complete attempt at one checkpoint, called `name` in the outcomes.

    A lack of permission is an outcome, or, with `denied_raises`, a StorageError like any other
    failure of the storage.

    Raises:
        StorageError: the storage failed.
    """
    candidates = _unpublished(store)
    if not candidates:
        return []
    try:
        prior = read_prior(store, overwrite=True)
    except StorageError:
        raise
    except ShardckptError as e:
        return [Outcome(name, store.location, attempt, "refused", str(e)) for attempt in candidates]
    candidates = [attempt for attempt in candidates if attempt != prior.attempt]
    outcomes: list[Outcome] = []
    rivals = _rivals(store, candidates, prior)
    for attempt in candidates:
        if len(rivals) > 1 and attempt in rivals:
            reason = (
                "several reshards with different options are complete; to commit one, repeat its "
                "call without worker="
            )
            outcomes.append(Outcome(name, store.location, attempt, "refused", reason))
        elif any(outcome.state == "committed" for outcome in outcomes):
            outcomes.append(
                Outcome(name, store.location, attempt, "overtaken", "a later attempt was committed")
            )
        else:
            outcomes.append(_try_commit(name, store, attempt, prior, denied_raises=denied_raises))
    return outcomes


def publishable(store: Store) -> tuple[str | None, str]:
    """The attempt that `commit_place` would publish, or the reason for which a complete one stays.

    None and "": no attempt there is complete. Nothing is written.

    Raises:
        StorageError: the storage failed.
    """
    candidates = _unpublished(store)
    if not candidates:
        return None, ""
    try:
        prior = read_prior(store, overwrite=True)
    except StorageError:
        raise
    except ShardckptError:
        return None, ""
    rivals = _rivals(store, candidates, prior)
    refused = {prior.attempt, *(rivals if len(rivals) > 1 else [])}
    stays = ""
    for attempt in candidates:
        if attempt not in refused:
            complete, why_not = _complete(store.sub(attempt), prior)
            if complete and not why_not:
                return attempt, ""
            stays = stays or why_not
    return None, stays


def _unpublished(store: Store) -> list[str]:
    """The attempts that the record does not name, by the storage's time of theirs, then by name.

    The newest comes first. Names alone do not sort by time: those of one run have its time, and
    after a failed save the processes agree on a new series of them. No tensors are parsed.
    """
    children = store.list_children()
    if RECORD in children:
        with suppress(FormatError):
            named = StoredRecord.of(store, *store.read_versioned(RECORD)).attempt(store)
            children = [child for child in children if child != f"{named}/"]
    names = sorted(attempts(store, children), key=natural_key, reverse=True)
    if len(names) > 1:
        times = {name: last_written(store, f"{name}/records/") or 0.0 for name in names}
        names.sort(key=times.__getitem__, reverse=True)
    return names


def _rivals(store: Store, candidates: Sequence[str], prior: Prior) -> list[str]:
    """The complete reshards among some attempts."""
    return [
        attempt
        for attempt in candidates
        if is_reshard(attempt) and _complete(store.sub(attempt), prior)[0]
    ]


def _lacks(place: Store, prior: Prior) -> tuple[Literal["incomplete", "overtaken"], str] | None:
    """The reason why an attempt cannot be committed; None: its host records lack nothing."""
    present = finished_hosts(place)
    if not present:
        return "incomplete", "no host has finished"
    first, _ = read_host_record(place, present[0])
    missing = sorted(set(range(first.hosts)) - set(present))
    if missing:
        return "incomplete", f"{numbered('host', missing)} (of {first.hosts}) did not finish"
    # By an earlier version, which left no placeholder.
    begun_free = first.prior is None and (prior.digest is None or prior.holds)
    if first.prior != prior.digest and not begun_free:
        return (
            "overtaken",
            (
                "another save was committed there since, or the place was deleted or collected, or "
                "its record is damaged"
            ),
        )
    return None


def _complete(place: Store, prior: Prior) -> tuple[bool, str]:
    """Whether an attempt lacks nothing that this version can know of.

    The second value is the reason for which this version cannot publish such an attempt, or "".
    """
    try:
        return _lacks(place, prior) is None, ""
    except StorageError:
        raise
    except (VersionError, HostVersionError) as e:
        return True, str(e)
    except ShardckptError:
        return False, ""


def _try_commit(
    name: str, store: Store, attempt: str, prior: Prior, *, denied_raises: bool
) -> Outcome:
    """Commit one attempt, if possible."""

    def outcome(
        state: Literal["committed", "incomplete", "overtaken", "refused"], reason: str = ""
    ) -> Outcome:
        return Outcome(name, store.location, attempt, state, reason)

    place = store.sub(attempt)
    try:
        lacks = _lacks(place, prior)
        if lacks is None and prior.digest is None:
            # Before the check, so that it notices a removal since then.
            prior = hold_place(store, prior, overwrite=True)
            lacks = _lacks(place, prior)
        if lacks is not None:
            return outcome(*lacks)
        denied, published = _publish(store, attempt, prior, denied_raises=denied_raises)
        if denied is not None:
            return outcome("refused", denied)
    except AlreadyExistsError as e:
        return outcome("overtaken", str(e))
    except StorageError:
        raise
    except (VersionError, HostVersionError, _BaseError) as e:
        return Deferred(name, store.location, attempt, "refused", str(e))
    except ShardckptError as e:
        return outcome("refused", str(e))
    if published and prior.attempt is not None:
        remove_replaced(store, prior.attempt)
    return outcome("committed")


def _publish(
    store: Store, attempt: str, prior: Prior, *, denied_raises: bool
) -> tuple[str | None, bool]:
    """Publish an attempt that lacks nothing else.

    Returns:
        The reason if this process has no permission to write there, and whether this process
        published the attempt.
    """
    place = store.sub(attempt)
    try:
        with data_stays(store):
            record = assemble(place)
            check_leftover(store, attempt, record.metadata, prior.attempt)
            rollback = Rollback.of(record.metadata)
            dependants = Dependants(store, {} if rollback is None else rollback.neighbours)
            if prior.is_checkpoint:
                dependants.check_replaceable(prior.attempt)
        if record.structure.bases:
            try:
                check_bases(store.location, record, prior.attempt)
            except CommitError as e:
                raise _BaseError(e.message) from e
        with data_stays(store):
            root = run_root(store, attempt, record.metadata)
            if root is not None and rollback is not None:
                rollback.tell(root)
                if prior.is_checkpoint:
                    dependants.check_replaceable(prior.attempt)
        keep_superseded(store, record, prior)
        published = publish(store, record, prior)
    except StorageError as e:
        if denied_raises or not is_denied(e):
            raise
        return str(e), False
    with suppress(ShardckptError):  # a file that cannot be removed only takes space
        remove_strays(place)
    return None, published
