"""Committing what a save has left complete and unpublished.

The process that commits may die after all hosts have finished. What they wrote lacks nothing, and their records say
all that there is to say; so any process can commit it, later, from the records alone. Of several attempts at one place
the newest complete one counts. An attempt is overtaken once the place no longer has the commit record that the
save found: something else was committed there since, or the attempt's place was collected. What a run has left that no longer
saves there (`io.job`), or what would replace a pinned checkpoint, may be what was refused publication: that is not committed.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shardckpt.errors import AlreadyExistsError, CommitError, NotFoundError, OtherJobError, ShardckptError, StorageError
from shardckpt.excerpt import numbered
from shardckpt.io.assemble import assemble, finished_hosts, read_host_record
from shardckpt.io.attempts import attempts, places
from shardckpt.io.commit import publish, read_prior, remove_replaced
from shardckpt.io.job import RUN, holder
from shardckpt.io.markers import PINNED, is_marked
from shardckpt.io.store import Store
from shardckpt.io.strays import remove_strays
from shardckpt.io.url import parse
from shardckpt.names import natural_key
from shardckpt.record import CheckpointRecord

if TYPE_CHECKING:
    import os

    from shardckpt.io.commit import Prior
    from shardckpt.io.url import Location

__all__ = ["Outcome", "commit"]

_AT_ONCE = 16
"""Places that are looked at together: on an object store each takes a few round trips."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one unpublished attempt."""

    name: str
    """Of the checkpoint, relative to the root; "." for the root itself."""
    location: Location
    """Of the checkpoint."""
    attempt: str
    state: Literal["committed", "incomplete", "overtaken", "refused"]
    reason: str = ""
    """Why it was not committed."""


def commit(root: str | os.PathLike[str]) -> list[Outcome]:
    """Commit the complete attempts whose committer has died. Call it when a job starts, before looking for its latest step.

    Committing what another process is committing at this moment does no harm: one of the two publishes it.

    Args:
        root: a checkpoint, or a directory of checkpoints.

    Returns:
        Every attempt that was not published before, and what became of it.

    Raises:
        NotFoundError: there is nothing at that place.
        StorageError: the storage failed.
    """
    store = Store.open(parse(root))
    children = store.list_children()
    if not children:
        raise NotFoundError(f"{store}: no checkpoint and no attempt at one there.")
    with ThreadPoolExecutor(_AT_ONCE, "shardckpt-commit") as pool:
        run_id = holder(store)
        futures = [pool.submit(_commit_one, name, place, run_id) for name, place in places(store, children)]
    return [outcome for future in futures for outcome in future.result()]  # one that failed keeps none of the others from it


def _commit_one(name: str, store: Store, run_id: str | None = None) -> list[Outcome]:
    """Commit the newest complete attempt at one checkpoint, where `run_id` is the run that saves now, if one does."""
    found = sorted(attempts(store, store.list_children()), key=natural_key, reverse=True)
    if not found:
        return []
    try:
        prior = read_prior(store, overwrite=True)
    except ShardckptError as e:
        return [Outcome(name, store.location, attempt, "refused", str(e)) for attempt in found]
    if isinstance(prior.record, CheckpointRecord):
        found = [attempt for attempt in found if attempt != prior.record.attempt]
    outcomes: list[Outcome] = []
    for attempt in found:
        if any(outcome.state == "committed" for outcome in outcomes):
            outcomes.append(Outcome(name, store.location, attempt, "overtaken", "a later attempt was committed"))
        else:
            outcomes.append(_attempted(name, store, attempt, prior, run_id))
    return outcomes


def _attempted(name: str, store: Store, attempt: str, prior: Prior, run_id: str | None) -> Outcome:
    """Commit one attempt, if that can be."""

    def outcome(state: Literal["committed", "incomplete", "overtaken", "refused"], reason: str = "") -> Outcome:
        return Outcome(name, store.location, attempt, state, reason)

    place = store.sub(attempt)
    present = finished_hosts(place)
    if not present:
        return outcome("incomplete", "no host has finished")
    try:
        first, _ = read_host_record(place, present[0])
        missing = sorted(set(range(first.hosts)) - set(present))
        if missing:
            return outcome("incomplete", f"{numbered('host', missing)} (of {first.hosts}) did not finish")
        if first.prior != prior.digest:
            return outcome(
                "overtaken", "another save was committed there since, or the place was deleted or collected, or its record is damaged"
            )
        record = assemble(place)
        _check_may_be_published(store, record, prior, run_id)
        publish(store, record, prior)
        with suppress(ShardckptError):  # what cannot be removed costs room, no more
            remove_strays(place)
    except AlreadyExistsError as e:
        return outcome("overtaken", str(e))
    except StorageError:
        raise
    except ShardckptError as e:
        return outcome("refused", str(e))
    if isinstance(prior.record, CheckpointRecord):
        remove_replaced(store, prior.record.attempt)
    return outcome("committed")


def _check_may_be_published(store: Store, record: CheckpointRecord, prior: Prior, run_id: str | None) -> None:
    """Refuse what its own committer may have been refused.

    Raises:
        OtherJobError: it is of a run that no longer saves there.
        CommitError: it would replace a checkpoint that is pinned.
    """
    saved_by = record.metadata.get(RUN)
    if run_id is not None and saved_by not in (None, run_id):
        raise OtherJobError(f"{store}: run {saved_by} has left the attempt {record.attempt}, and run {run_id} saves there since.")
    if isinstance(prior.record, CheckpointRecord) and is_marked(store, PINNED, prior.record.attempt):
        raise CommitError(f"{store}: the attempt {record.attempt} would replace a checkpoint that is pinned; `shardckpt unpin` it first.")
