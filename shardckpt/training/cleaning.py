"""Deleting what nothing keeps; on the leader, in the background.

1. See that the root is still this run's (`job`).
2. Ask the rule of retention which live steps to keep. Besides those stay: the newest live step, what this process reads
   now, what is pinned, which the deletion itself finds out, and the bases of all that is there (`skipping`): a base goes
   after those that name it.
3. Superseded steps go once training has got past them: until then a rollback can be taken back.
4. Each deletion puts a tombstone in place of the commit record before data goes, and removes it at the end (`commit.collect`).
   What a killed process, or an earlier version, has left is collected later: attempts of no checkpoint, and tombstones, into
   which nothing has been written for a grace period.

A step whose deletion failed is tried again after each save.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from shardckpt.commit import collect as at_one_place
from shardckpt.errors import FormatError, NotFoundError, OptionError, StorageError
from shardckpt.reading.checkpoint import open_in_this_process
from shardckpt.training.steps import StepInfo, list_steps, step_numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardckpt.io.store import Store
    from shardckpt.training.retention import Retention

__all__ = ["Cleaner", "doomed"]

_log = logging.getLogger("shardckpt")
_DELETED = "deleted.json"
"""In the run's root on an object store: the deleted steps, as earlier versions sum them up, which look at no step named there."""


class Cleaner:
    """Deletes the steps of one run that are not kept. Safe to use from several threads."""

    def __init__(
        self, root: Store, rule: Retention | None, *, grace: float, deleted: Callable[[int], None], bases: frozenset[int] = frozenset()
    ) -> None:
        """Nothing is deleted before `clean`.

        Args:
            root: of the run.
            rule: what to keep; None: everything but what unfinished saves have left.
            grace: seconds for which nothing may have been written into what an unfinished save has left.
            deleted: told of each step.
            bases: steps that the run's saves name as their base, the one that is under way, too; they stay.
        """
        self._root = root
        self._rule = rule
        self._grace = grace
        self._deleted = deleted
        self._bases = bases
        self._steps: dict[int, StepInfo] | None = None
        self._reading: Counter[int] = Counter()
        self._guard = threading.Lock()
        self._one_at_a_time = threading.Lock()
        self._collected: float | None = None
        self._warned = False
        self.failure: StorageError | None = None
        """What kept the last round from deleting all that it should have."""

    @contextmanager
    def reading(self, step: int) -> Iterator[None]:
        """Keep a step as long as this lasts."""
        with self._guard:
            self._reading[step] += 1
        try:
            yield
        finally:
            with self._guard:
                self._reading[step] -= 1

    def forget(self) -> None:
        """List the steps anew before the next round: somebody may have changed them."""
        with self._guard:
            self._steps = None

    def clean(self, committed: StepInfo) -> None:
        """Delete what need not be kept any more, now that a step is committed. What the storage refuses is tried again next time."""
        with self._one_at_a_time:
            self.failure = None
            with self._guard:
                steps = self._steps
            try:
                if steps is None:
                    steps = {info.step: info for info in list_steps(self._root)}
            except StorageError as e:
                self._failed(e)
                return
            steps[committed.step] = committed
            later = max((info.step for info in steps.values() if info.state == "committed"), default=committed.step)
            if later > committed.step and not self._warned:
                self._warned = True
                _log.warning(
                    "%s: step %d is saved, and a restart resumes from step %d, which an earlier run has left; restore(step=…) goes back "
                    "first, and a new training takes another root.",
                    self._root,
                    committed.step,
                    later,
                )
            if self._rule is not None:
                named = self._named(steps)
                for step in sorted(doomed(steps, self._rule, committed.step), key=named.__contains__):
                    if step not in self._named(steps):
                        self._delete(step, steps)
            with self._guard:
                self._steps = steps
            if self._collected is None or time.monotonic() >= self._collected + self._grace:
                self._collected = time.monotonic()
                self._collect()

    def _named(self, steps: dict[int, StepInfo]) -> frozenset[int]:
        """The steps in which tensors of others lie that are there, or that are being saved."""
        return self._bases.union(*(info.bases for info in steps.values()))

    def _delete(self, step: int, steps: dict[int, StepInfo]) -> None:
        place = self._root.sub(str(step))
        with self._guard:
            if self._reading[step] or open_in_this_process(place.location):
                return
        try:
            left = at_one_place.delete(place, reason="not kept any more", grace=self._grace)
        except OptionError:
            return  # pinned
        except (NotFoundError, FormatError):  # somebody else was first: deleted it, replaced it
            steps.pop(step, None)
            return
        except StorageError as e:
            self._failed(e)
            return
        steps.pop(step, None)
        for one in left:
            if one.outcome == "failed":
                self._failed(StorageError(f"{place}: deleted, but its data cannot be removed: {one.reason}"))
        self._deleted(step)

    def _failed(self, error: StorageError) -> None:
        self.failure = error
        _log.warning("%s", error)

    def _collect(self) -> None:
        """Remove what unfinished saves and deletions have left."""
        with suppress(StorageError):
            if self._root.location.local is None:
                self._root.delete(_DELETED)
            for step in step_numbers(self._root):
                place = self._root.sub(str(step))
                with suppress(FormatError):
                    found = at_one_place.collect(place, grace=self._grace)
                    removed = sum(one.outcome == "removed" for one in found)
                    if removed:
                        _log.info("%s: %d unfinished saves removed", place, removed)
                place.remove_empty()  # a deletion was killed just before


def doomed(steps: dict[int, StepInfo], rule: Retention, committed: int | None = None) -> list[int]:
    """The steps to delete, ascending.

    Args:
        steps: all that hold a checkpoint.
        rule: what to keep of those that are live.
        committed: the step that was saved last, which stays.
    """
    live = [steps[step] for step in sorted(steps) if steps[step].state == "committed"]
    if not live:
        return []
    newest = live[-1].step
    kept = {newest, *rule.kept([info.saved() for info in live])}
    passed = {info.step for info in steps.values() if info.state == "superseded" and info.step < newest}
    return sorted(({info.step for info in live} - kept | passed) - {committed})
