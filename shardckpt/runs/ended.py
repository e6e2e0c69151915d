"""Ended runs: an operator's mark that nobody saves to a root any more.

The service deletes steps by rules only in runs with this mark (`serve.jobs.retention`). The mark is
`ended.json` in the root. It names the run that `job.json` named when the mark was set, and the
checkpoints that were there. So whatever is saved later is detected without a comparison of clocks,
and a pin or a tag, which rewrites a commit record, is not taken for a save.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardckpt.commit.attempts import attempts, places, same_elements, unfolded
from shardckpt.commit.markers import read_sealed
from shardckpt.commit.publish import RECORD
from shardckpt.errors import CommitError, FormatError, NotFoundError, OptionError, StorageError
from shardckpt.format.documents import seal, utc_now
from shardckpt.io.ages import idle_seconds
from shardckpt.io.failures import reading_takes_threads
from shardckpt.io.threads import map_on_threads
from shardckpt.runs.collecting import GRACE
from shardckpt.runs.job import holder
from shardckpt.text import duration_text, shorten

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardckpt.io.store import Store

ENDED = "ended.json"
"""Key relative to the root."""
_ROUNDS = 10
_LONGEST_NAME = 200
_UNREADABLE = ""
"""Stands for the attempt of a commit record that cannot be read."""


@dataclass(frozen=True, slots=True)
class EndedMark:
    """The mark of an ended run."""

    run: str | None
    """Run id in `job.json` when the mark was set; None if there was no `job.json`."""
    by: str
    """Name of the operator."""
    when: str
    """UTC, ISO 8601, by the clock of the machine that set the mark."""
    checkpoints: Mapping[str, str]
    """The checkpoints that were there: name relative to the root → attempt."""


@dataclass(frozen=True, slots=True)
class _Place:
    """State of a place that may hold a checkpoint."""

    name: str
    attempt: str | None
    """The attempt that is the checkpoint; `_UNREADABLE` if the record cannot be read; None: there
    is no checkpoint."""
    others: tuple[str, ...]
    """Keys, relative to the root, of other attempts (ending in a slash) and of the placeholder of a
    save."""


def mark_ended(root: Store, by: str) -> None:
    """Mark a run as ended; an earlier mark is replaced.

    Args:
        root: the run's root.
        by: name of the operator, at most 200 characters.

    Raises:
        OptionError: `by` is empty or too long.
        NotFoundError: there is nothing at the root.
        StorageError: the storage failed.
    """
    if not isinstance(by, str) or not 0 < len(by) <= _LONGEST_NAME:
        raise OptionError(
            f"by={shorten(by)}: give the name of the operator, 1 to {_LONGEST_NAME} characters."
        )
    root.check_replaces("end the run at")
    for _ in range(_ROUNDS):
        data, generation = root.read_versioned(ENDED)
        run = holder(root)
        names = _names(root)
        if not names and data is None and run is None:
            raise NotFoundError(f"{root}: there is no run here; give the root of a run.")
        there = {
            place.name: place.attempt for place in _look(root, names) if place.attempt is not None
        }
        when = utc_now()
        document = seal({"run": run, "by": by, "when": when, "checkpoints": there})
        if (
            root.create(ENDED, document)
            if data is None
            else root.replace(ENDED, document, generation)
        ):
            return
    raise StorageError(
        f"cannot write {root.path_of(ENDED)}: other processes keep changing it; try again."
    )


def unmark_ended(root: Store) -> bool:
    """Remove the mark; return whether there was one. Raises StorageError."""
    there = root.exists(ENDED)
    root.delete(ENDED)
    return there


def ended(root: Store) -> EndedMark | None:
    """The mark of a run; None if it has none.

    Raises:
        FormatError: the mark is damaged; `mark_ended` replaces it.
        StorageError: the storage failed.
    """
    read = read_sealed(root, ENDED)
    if read is None:
        return None
    checkpoints = read.mapping("checkpoints")
    run = read.value("run")
    if not all(isinstance(attempt, str) for attempt in checkpoints.values()) or not (
        run is None or isinstance(run, str)
    ):
        read.fail("it does not say which run and which checkpoints were there")
    return EndedMark(run, read.string("by"), read.string("when"), checkpoints)


def check_idle(root: Store, known: frozenset[str] = frozenset()) -> frozenset[str]:
    """Check that a run is marked as ended, and that nobody saves there or has saved since.

    A save that has written nothing yet cannot be seen.

    Args:
        root: the run's root.
        known: what an earlier call returned; only `job.json`, the mark and places with other names
            are read again.

    Returns:
        The names of all places in the root.

    Raises:
        OptionError: the run is not marked as ended.
        CommitError: another run claimed the root, a checkpoint was saved after the mark, or a save
            may be in flight.
        FormatError: the mark is damaged.
        StorageError: the storage failed.
    """
    mark = ended(root)
    if mark is None:
        raise OptionError(
            f"{root}: the run is not marked as ended, so no rule deletes its steps; mark it when "
            "it has ended."
        )
    since = f"marked as ended by {shorten(mark.by)} at {shorten(mark.when)}"
    run = holder(root)
    if run != mark.run:
        raise CommitError(
            f"{root}: {_run(run)} saves there now, but {_run(mark.run)} did when the run was "
            f"{since}; mark it again."
        )
    names = _names(root)
    listing = _look(root, names - known)
    for place in listing:
        if place.attempt is not None and not same_elements(
            mark.checkpoints.get(place.name), place.attempt
        ):
            raise CommitError(
                f"{root}: {place.name} was saved after the run was {since}; mark it again when it "
                "has ended."
            )
    of_the_run = {*map(unfolded, mark.checkpoints.values())}
    unfinished = [
        key
        for place in listing
        for key in place.others
        if unfolded(key.rstrip("/").rpartition("/")[2]) not in of_the_run
    ]
    for key, idle in (idle_seconds(root, unfinished) if unfinished else {}).items():
        if idle is None or idle < GRACE:
            age = "at an unknown time" if idle is None else f"{duration_text(idle)} ago"
            raise CommitError(
                f"{root}: an unfinished save wrote to {key} {age} and may still be running, so "
                "nothing is deleted; try again when it has ended. `shardckpt gc` removes "
                "abandoned saves."
            )
    return names


def _names(root: Store) -> frozenset[str]:
    return frozenset(name for name, _ in places(root, root.list_children()) if name != ".")


def _look(root: Store, names: frozenset[str]) -> list[_Place]:
    with reading_takes_threads(root):
        return map_on_threads(lambda name: _look_at(root, name), sorted(names))


def _look_at(root: Store, name: str) -> _Place:
    place = root.sub(name)
    children = place.list_children()
    begun = False
    attempt: str | None = None
    if RECORD in children:
        try:
            record = read_sealed(place, RECORD)
            if record is not None and "tombstone" in record.doc:
                begun = record.doc.get("begun") is True
            elif record is not None:
                attempt = record.string("attempt")
        except FormatError:
            attempt = _UNREADABLE
    others = tuple(f"{name}/{one}/" for one in attempts(place, children) if one != attempt)
    return _Place(name, attempt, (*others, *([f"{name}/{RECORD}"] if begun else [])))


def _run(run: str | None) -> str:
    return "no job" if run is None else f"run {run}"
