"""Deletion of steps that no rule keeps: on the leader, in the background.

1. Check that no other job has taken over the root (`job`).
2. Ask the retention rule which live steps to keep. Seven kinds of step stay in any case: the
   newest live step, steps with a complete save that could not be published yet, and pinned and
   tagged steps (the deletion itself finds both kinds), the steps that this process is reading,
   steps with a lease (`leases`), the steps that running saves name as their base, and the bases of
   all existing steps, and of checkpoints beside them (`skipping`). A base is deleted after the
   steps that name it.
3. Superseded steps are deleted once training has passed them: until then a rollback can be undone.
4. Each deletion replaces the commit record with a tombstone before it removes data, and removes the
   tombstone at the end (`commit.remove`). Leftovers of a killed process or of an earlier version
   (attempts without a checkpoint, tombstones) are collected once nothing has been written into them
   for a grace period; a complete one is published instead.

A step whose deletion failed is tried again after each save.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from shardckpt.commit.dependants import users_beside
from shardckpt.commit.publish import RECORD
from shardckpt.errors import FormatError, NotFoundError, OptionError, StorageError
from shardckpt.io.ages import idle_seconds
from shardckpt.reading.checkpoint import open_in_this_process
from shardckpt.runs.collecting import collect_place, delete_place
from shardckpt.runs.committing import publishable
from shardckpt.runs.leases import LeasedSteps
from shardckpt.runs.retention import Best, EveryKth, KeepAnyOf, Latest, Younger
from shardckpt.runs.steps import (
    StepInfo,
    list_steps,
    read_record,
    read_step,
    step_numbers,
    steps_named,
)
from shardckpt.text import few

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from shardckpt.io.store import Store
    from shardckpt.runs.retention import Retention, SavedStep

_log = logging.getLogger("shardckpt")
_DELETED = "deleted.json"
"""A file in the run's root on object stores: earlier versions list the deleted steps in it, and
skip the steps that it names."""


class Cleaner:
    """Deletes the steps of one run that are not kept. Safe to use from several threads."""

    def __init__(
        self,
        root: Store,
        rule: Retention | None,
        *,
        grace: float,
        deleted: Callable[[int], None],
        bases: frozenset[int] = frozenset(),
    ) -> None:
        """Nothing is deleted before `clean`.

        Args:
            root: the root of the run.
            rule: which steps to keep; None: all, so that only the leftovers of unfinished saves are
                removed.
            grace: seconds without a write after which the leftovers of an unfinished save may be
                removed.
            deleted: called with each deleted step.
            bases: steps that the run's saves name as their base, the running save included; they
                stay.
        """
        self._root = root
        self._rule = rule
        self._grace = grace
        self._deleted = deleted
        self._bases = bases
        self._steps: dict[int, StepInfo] = {}
        """The steps as far as this object knows; empty: they are listed first."""
        self._reading: Counter[int] = Counter()
        self._guard = threading.Lock()
        self._one_at_a_time = threading.Lock()
        self._collected: float | None = None
        self._warned = self._missed = False
        self._uncollected: set[str] = set()
        """Places whose leftovers could not be collected; each is named in the log once."""
        self.failure: StorageError | None = None
        """The last error that kept the latest round from deleting everything due."""

    @contextmanager
    def reading(self, step: int) -> Iterator[None]:
        """Protect a step from deletion while the context lasts."""
        with self._guard:
            self._reading[step] += 1
        try:
            yield
        finally:
            with self._guard:
                self._reading[step] -= 1

    def forget(self) -> None:
        """List the steps again before the next round, as another process may have changed them."""
        self._steps = {}

    def clean(self, committed: StepInfo) -> None:
        """Delete the steps that are no longer kept, after `committed` was saved.

        Refused deletions are tried again in the next round.
        """
        with self._one_at_a_time:
            self.failure = None
            steps = self._steps  # a round uses it to its end, even if it is forgotten meanwhile
            try:
                if not steps:
                    steps |= {info.step: info for info in list_steps(self._root)}
            except StorageError as e:
                self._note_failure(e)
                return
            steps[committed.step] = committed
            later = max(
                (info.step for info in steps.values() if info.state == "committed"),
                default=committed.step,
            )
            if later > committed.step and not self._warned:
                self._warned = True
                _log.warning(
                    "%s: step %d is saved, but a restart would resume from the later step %d of "
                    "an earlier run. Call restore(step=…) first to go back, or give a new "
                    "training another root.",
                    self._root,
                    committed.step,
                    later,
                )
            if self._rule is not None:
                try:
                    self._delete_due(self._rule, steps, committed.step)
                except StorageError as e:
                    self._note_failure(StorageError(f"no step can be deleted now: {e}"))
            if self._collected is None or time.monotonic() >= self._collected + self._grace:
                self._collected = time.monotonic()
                self._collect(committed.step)

    def _miss_metrics(self, rule: Retention, steps: Collection[StepInfo]) -> None:
        """Warn once if the rule asks for a metric that no step has.

        The rule then deletes all steps but the newest.
        """
        recorded = {metric for info in steps for metric in info.metrics}
        unknown = sorted({best.metric for best in rule.measures} - recorded)
        if unknown and not self._missed:
            self._missed = True
            _log.warning(
                "%s: keep= ranks steps by %s, and no step has that metric%s; pass "
                "save(metrics={%r: …}), or steps are deleted unranked.",
                self._root,
                few([repr(name) for name in unknown], 3),
                f", only {few(sorted(recorded), 3)}" if recorded else "",
                unknown[0],
            )

    def _delete_due(self, rule: Retention, steps: dict[int, StepInfo], committed: int) -> None:
        """Delete the steps that are given up, that no reader holds and no checkpoint needs."""
        due = doomed(steps, rule, committed)
        if not due:
            return
        self._miss_metrics(rule, steps.values())
        # This machine's clock may have jumped.
        keys = [f"{step}/{RECORD}" for step in due] if has_ages(rule) else []
        idle = idle_seconds(self._root, keys) if keys else {}

        def saved(info: StepInfo) -> SavedStep:
            one, stored = info.saved(), idle.get(f"{info.step}/{RECORD}")
            return one if stored is None else replace(one, age=min(one.age, stored))

        # Another program may have deleted or saved some since the steps were listed.
        children = self._root.list_children()
        there = steps_named(child[:-1] for child in children if child.endswith("/"))
        for step in {*steps}.difference(there):
            del steps[step]
        # An unfinished save, for example, may have kept the directory of a removed one.
        read = {committed}
        while counted := (_counted(rule, _live(steps, saved)) & steps.keys()) - read:
            for step in filter(partial(_is_removed, self._root), counted):
                del steps[step]
            read |= counted
        due = sorted({*due}.intersection(doomed(steps, rule, committed, saved=saved)))
        held = LeasedSteps(self._root)
        known = {info.step for info in steps.values() if info.state != "unreadable"}
        is_used = users_beside(self._root, known, children, deletes=True)
        for step in sorted(due, key=self._names_needed(steps).__contains__):
            if not (
                step in self._names_needed(steps)
                or is_used(step, steps[step].attempt)
                or step in held
            ):
                self._delete(step, steps)

    def _names_needed(self, steps: dict[int, StepInfo]) -> frozenset[int]:
        """The steps that hold tensors of other steps, existing or being saved."""
        return self._bases.union(*(info.bases for info in steps.values()))

    def _delete(self, step: int, steps: dict[int, StepInfo]) -> None:
        place = self._root.sub(str(step))
        with self._guard:
            if self._reading[step] or open_in_this_process(place.location):
                return
        try:
            if any(publishable(place)):
                return  # a tombstone would forbid the publication of a complete save for ever
            left = delete_place(
                place, reason="not kept any more", grace=self._grace, attempt=steps[step].attempt
            )
        except OptionError:
            return  # pinned or tagged
        except (NotFoundError, FormatError):
            # Another process deleted or replaced it first. The next round looks for checkpoints
            # that need the new one.
            now = read_step(self._root, step)
            del steps[step]
            if now is not None:
                steps[step] = now
            return
        except StorageError as e:
            self._note_failure(e)
            return
        steps.pop(step, None)
        for one in left:
            if one.outcome == "failed":
                self._note_failure(
                    StorageError(f"{place}: deleted, but its data cannot be removed: {one.reason}")
                )
        self._deleted(step)

    def _note_failure(self, error: StorageError) -> None:
        self.failure = error
        _log.warning("%s", error)

    def _collect(self, newest: int) -> None:
        """Publish or remove the leftovers of unfinished saves and deletions.

        Steps after the newest are from before a rollback. If a complete one was published now, a
        restart would continue from it, so it stays as it is.
        """
        try:
            if not self._root.has_paths:
                self._root.delete(_DELETED)
            held = LeasedSteps(self._root)
            for step in step_numbers(self._root):
                self._collect_step(step, held, publishes=step <= newest)
        except StorageError as e:
            self._warn_once(self._root, str(e))

    def _collect_step(self, step: int, held: LeasedSteps, *, publishes: bool) -> None:
        place = self._root.sub(str(step))
        try:
            collected = collect_place(
                place, grace=self._grace, publishes=publishes, held=lambda: step in held
            )
        except FormatError as e:
            self._warn_once(place, str(e))
            collected = []
        for failed in (one.reason for one in collected if one.outcome == "failed"):
            self._warn_once(place, str(failed))
        removed, published = (
            sum(one.outcome == outcome for one in collected) for outcome in ("removed", "published")
        )
        if removed or published:
            _log.info("%s: unfinished saves: %d removed, %d published", place, removed, published)
        if published:
            self.forget()
        place.remove_empty()  # a deletion was killed just before it removed the directory

    def _warn_once(self, place: Store, why: str) -> None:
        """Say once that leftovers at a place cannot be collected; the next rounds try again."""
        if str(place) not in self._uncollected:
            self._uncollected.add(str(place))
            _log.warning(
                "%s: the leftovers of unfinished saves there cannot be collected, and take "
                "space: %s",
                place,
                why,
            )


def doomed(
    steps: Mapping[int, StepInfo],
    rule: Retention,
    committed: int | None = None,
    *,
    saved: Callable[[StepInfo], SavedStep] = StepInfo.saved,
) -> list[int]:
    """The steps to delete, ascending.

    Args:
        steps: all steps that hold a checkpoint.
        rule: which of the live steps to keep.
        committed: the step that was saved last, which stays.
        saved: makes what the rule sees of a step.
    """
    live = _live(steps, saved)
    if not live:
        return []
    newest = live[-1].step
    kept = {newest, *rule.kept(live)}
    passed = {
        info.step for info in steps.values() if info.state == "superseded" and info.step < newest
    }
    return sorted(({one.step for one in live} - kept | passed) - {committed})


def _live(steps: Mapping[int, StepInfo], saved: Callable[[StepInfo], SavedStep]) -> list[SavedStep]:
    """The live steps as a rule sees them, ascending."""
    return [saved(steps[step]) for step in sorted(steps) if steps[step].state == "committed"]


def _counted(rule: Retention, live: Sequence[SavedStep]) -> set[int]:
    """The steps that a rule keeps in place of others, which it would keep if these were gone."""
    if isinstance(rule, KeepAnyOf):
        return set().union(*(_counted(one, live) for one in rule.rules))
    return set() if isinstance(rule, EveryKth | Younger) else {*rule.kept(live)}


def _is_removed(root: Store, step: int) -> bool:
    """Whether a step's directory holds no checkpoint; a damaged record counts as one."""
    try:
        return read_record(root, step) is None
    except FormatError:
        return False


def has_ages(rule: Retention) -> bool:
    """Whether a rule may look at ages, which take a request per step."""
    return (
        any(map(has_ages, rule.rules))
        if isinstance(rule, KeepAnyOf)
        else not isinstance(rule, Latest | EveryKth | Best)
    )
