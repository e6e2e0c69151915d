"""Rules of retention for runs that have ended, and the deletion of steps by them.

While a run saves, its own `CheckpointManager` decides what to keep. When it has ended and an
operator has marked it (`runs.ended`), the service may delete steps by rules of its own. A dry run
says which; a second call deletes only those among them that are still to be deleted. Each deletion
is that of `commit.remove`: a tombstone first, so a pin or a tag that comes in time wins.
"""

from __future__ import annotations

import tomllib
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shardckpt.commit.attempts import step_of
from shardckpt.commit.markers import Protection
from shardckpt.commit.publish import RECORD
from shardckpt.errors import CommitError, FormatError, NotFoundError, OptionError, StorageError
from shardckpt.format.bases import names_beside
from shardckpt.io.ages import idle_seconds
from shardckpt.options import parse_duration
from shardckpt.runs import cleaning
from shardckpt.runs.catalog import CatalogEntry, catalog
from shardckpt.runs.collecting import GRACE, delete_place
from shardckpt.runs.ended import check_idle
from shardckpt.runs.leases import LEASED, LeasedSteps
from shardckpt.runs.measured import decode_metrics
from shardckpt.runs.retention import (
    Best,
    EveryKth,
    Latest,
    Retention,
    SavedStep,
    Younger,
    any_of,
)
from shardckpt.runs.steps import StepInfo
from shardckpt.state.glob import Glob, compile_glob
from shardckpt.text import few, shorten

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from shardckpt.io.store import Store

_REASON = "not kept by the rules for ended runs"
_NOT_LISTED = "it was not among the steps that the dry run listed"


@dataclass(frozen=True, slots=True)
class RetentionRules:
    """The rules of a file, for runs by their ids."""

    entries: tuple[tuple[Glob, Retention], ...]

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> RetentionRules:
        """Read a TOML file with `[[keep]]` entries.

        Raises:
            OptionError: the file cannot be read, or an entry is invalid; the message names both.
        """
        try:
            document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as e:
            raise OptionError(f"the rules {path} cannot be read: {e}") from None
        entries = document.get("keep")
        if not isinstance(entries, list) or not entries or document.keys() != {"keep"}:
            raise OptionError(f"the rules {path}: write [[keep]] entries, and nothing else.")
        made = []
        for i, entry in enumerate(entries, 1):
            try:
                made.append(_entry(entry))
            except OptionError as e:
                raise OptionError(f"the rules {path}, entry {i}: {e}") from None
        return cls(tuple(made))

    def rule_for(self, run: str) -> Retention | None:
        """The rule of the first entry whose pattern matches the id of a run.

        None: no entry does, and nothing is deleted.
        """
        return next((rule for pattern, rule in self.entries if pattern.fullmatch(run)), None)


@dataclass(frozen=True, slots=True)
class Doomed:
    """A step that is to be deleted, or was."""

    name: str
    """Name relative to the root, the step's number."""
    attempt: str
    nbytes: int
    """Bytes of its chunks as stored."""


@dataclass(frozen=True, slots=True)
class RetentionReport:
    """The outcome of `retain`."""

    deleted: tuple[Doomed, ...]
    """In this order; in a dry run what would be deleted. Steps whose deletion an interrupted call
    had begun are not included."""
    left: Mapping[str, str]
    """Steps that were due for deletion but stay, or left data behind; the value is the reason.
    Those whose deletion failed come first, and those that were not listed last."""

    @property
    def nbytes(self) -> int:
        """Stored bytes that this frees."""
        return sum(one.nbytes for one in self.deleted)


def retain(
    root: Store,
    rule: Retention,
    expected: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> RetentionReport:
    """Delete the steps of an ended run that a rule gives up.

    If a call was interrupted, the same call made again finishes its work.

    The newest step that was not superseded stays, and so do pinned and tagged steps, and all that
    hold tensors of a checkpoint in the root that stays, directly or through others. Checkpoints in
    other directories that have left tensors in a step are not seen: pin such a step. Superseded
    steps go if the newest step is later. If a checkpoint in the root cannot be read, its bases are
    not known, and everything stays. Ages are those of the commit records, by the storage's clock: a
    pin makes a step young again. A step that a reader holds a lease on stays until that ends; a dry
    run does not look. A save that comes meanwhile ends the deletions, unless it replaces a step and
    has not claimed the root in `job.json`.

    Args:
        root: the run's root.
        rule: which steps to keep.
        expected: the steps that may be deleted, name → attempt, of an earlier dry run; None: delete
            nothing, and report.
        progress: called with steps handled so far and in all.

    Raises:
        OptionError, CommitError: the run has not ended (`runs.ended.check_idle`); nothing was
            deleted.
        NotFoundError: there is no such directory.
        FormatError: the mark of the end is damaged.
        StorageError: the storage failed before anything was deleted.
    """
    going, left, entries, users = _survey(root, rule)
    if expected is None:
        return RetentionReport(tuple(going), left)
    # Places beside the steps, such as `best`, are looked at again: a save may replace one.
    known = frozenset(name for name in check_idle(root) if step_of(name) is not None)
    leases = LeasedSteps(root)
    names = {one.name for one in going}
    stays = {
        name: left.get(name, "the rules keep it now")
        for name in expected
        if name in entries and name not in names
    }
    failed: dict[str, str] = {}
    deleted = []
    buried = [
        Doomed(name, attempt, 0)
        for name, attempt in expected.items()
        if name not in entries and step_of(name) is not None
    ]
    due = [*buried, *(one for one in going if one.name in expected)]
    for done, one in enumerate(due):
        if progress is not None:
            progress(done, len(due))
        try:
            check_idle(root, known)
            leased = one not in buried and step_of(one.name) in leases
        except (OptionError, CommitError, FormatError, StorageError) as e:
            failed |= {rest.name: str(e) for rest in due[done:]}
            break
        dependants = [name for name in users[one.name] if name in entries]
        if leased:
            stays[one.name] = LEASED
            continue
        if dependants:
            failed[one.name] = f"{few(dependants)} stayed, and needs it"
            continue
        try:
            why = _delete(root, one, expected[one.name])
        except (OptionError, FormatError, StorageError) as e:  # pinned meanwhile, or damaged
            why = str(e)
        if why is None:
            entries.pop(one.name, None)
            deleted += [] if one in buried else [one]
        else:
            failed[one.name] = why
    else:
        if progress is not None:
            progress(len(due), len(due))
    others = {one.name: _NOT_LISTED for one in going if one.name not in expected}
    return RetentionReport(tuple(deleted), failed | stays | others)


def _delete(root: Store, one: Doomed, attempt: str) -> str | None:
    """Delete a step, or what an interrupted deletion has left of it.

    Return why something stays, None if nothing does.
    """
    place = root.sub(one.name)
    try:
        removals = delete_place(place, reason=_REASON, grace=GRACE, attempt=attempt)
    except NotFoundError as e:
        there, generation = place.read_versioned(RECORD)
        if there is not None:  # another attempt, or a save that has begun
            return str(e)
        if place.has_locks:
            # A process that was killed just here has left the lock of the record.
            place.remove(RECORD, generation)
        place.remove_empty()
        return None
    failed = [data.reason for data in removals if data.outcome == "failed"]
    return f"it is deleted, but its data cannot be removed: {failed[0]}" if failed else None


def _survey(
    root: Store, rule: Retention
) -> tuple[list[Doomed], dict[str, str], dict[str, CatalogEntry], dict[str, list[str]]]:
    """The steps to delete in order, the reasons that keep others, and all checkpoints by name.

    The others stay although the rule gives them up. Also the checkpoints that store tensors in each
    one, by its name.
    """
    entries = {entry.name: entry for entry in catalog(str(root.location)) if entry.name != "."}
    bases = {name: names_beside(entry.bases) - {name} for name, entry in entries.items()}
    users: dict[str, list[str]] = defaultdict(list)
    for name, those in bases.items():
        for base in those:
            users[base].append(name)
    steps = {
        step: _info(step, entry)
        for name, entry in entries.items()
        if (step := step_of(name)) is not None and entry.attempt is not None
    }
    ages: dict[str, float | None] = {}
    if cleaning.has_ages(rule):
        ages = idle_seconds(root, [f"{step}/{RECORD}" for step in steps])

    def saved(info: StepInfo) -> SavedStep:
        return SavedStep(info.step, ages.get(f"{info.step}/{RECORD}") or 0.0, info.metrics)

    given_up = {str(step): steps[step] for step in cleaning.doomed(steps, rule, saved=saved)}
    unreadable = [name for name, entry in entries.items() if entry.state == "unreadable"]
    if unreadable:
        why = (
            f"{few(unreadable)} cannot be read, and may store tensors in it; delete that first, "
            "or replace it with a backup"
        )
        return [], dict.fromkeys(given_up, why), entries, users
    left = {
        name: f"it is {Protection(info.pinned, info.tags)}"
        for name, info in given_up.items()
        if info.protected
    }
    stack = [*(entries.keys() - given_up.keys()), *left]
    while stack:
        name = stack.pop()
        for base in bases[name]:
            if base in given_up and base not in left:
                left[base] = f"{name} stays, and needs it"
                stack.append(base)
    going = given_up.keys() - left.keys()
    order = _users_first(going, bases, users)
    odd = going - {*order}  # only in forged records
    left |= dict.fromkeys(odd, "it and others store tensors in each other")
    return (
        [
            Doomed(name, entries[name].attempt or "", entries[name].stored_bytes or 0)
            for name in order
        ],
        left,
        entries,
        users,
    )


def _users_first(
    going: set[str], bases: Mapping[str, frozenset[str]], users: Mapping[str, Sequence[str]]
) -> list[str]:
    """The steps to delete, each after all that store tensors in it.

    Those that store tensors in each other are left out.
    """
    order: list[str] = []
    left = Counter({name: len(users[name]) for name in going})
    free = [name for name in going if not left[name]]
    while free:
        order += sorted(free, key=int)
        uses = Counter(base for name in free for base in bases[name] if base in going)
        left.subtract(uses)
        free = [name for name in uses if not left[name]]
    return order


def _info(step: int, entry: CatalogEntry) -> StepInfo:
    metrics = decode_metrics(entry.metrics)
    state: Literal["superseded", "committed"] = "superseded" if entry.superseded else "committed"
    return StepInfo(
        step, state, entry.attempt, entry.created or "", metrics, entry.pinned, entry.tags
    )


def _entry(entry: Any) -> tuple[Glob, Retention]:
    """An entry's pattern and rule; raises OptionError."""
    known = ("runs", "latest", "every", "younger", "best")
    if not isinstance(entry, dict) or (odd := [key for key in entry if key not in known]):
        raise OptionError(
            f"there is no key {few(odd)}; there are {', '.join(known)}."
            if isinstance(entry, dict)
            else "write [[keep]]."
        )
    pattern = entry.get("runs")
    if not isinstance(pattern, str) or not pattern:
        raise OptionError(
            'runs is missing, or is not a string: give a pattern of ids of runs, such as "llama/*".'
        )
    rules: list[Retention] = []
    if "latest" in entry:
        rules.append(Latest(entry["latest"]))
    if "every" in entry:
        rules.append(EveryKth(entry["every"]))
    if "younger" in entry:
        if not isinstance(entry["younger"], str):
            raise OptionError(f'younger={shorten(entry["younger"])}: give text such as "7d".')
        rules.append(Younger(parse_duration(entry["younger"], "younger")))
    if "best" in entry:
        best = entry["best"]
        if not isinstance(best, dict) or not {"metric"} <= best.keys() <= {"metric", "n", "mode"}:
            raise OptionError(
                f'best={shorten(best)}: write {{ metric = "loss", n = 2, mode = "min" }}; n and '
                "mode may be left out."
            )
        rules.append(Best(best.get("n", 1), best["metric"], best.get("mode", "min")))
    if not rules:
        raise OptionError(
            f"it keeps nothing of the runs {shorten(pattern)}; give latest, every, younger or best."
        )
    return compile_glob(pattern), any_of(*rules)
