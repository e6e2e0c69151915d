"""The steps of the current training: the steps that no rollback has superseded.

After a restore of step s, all later steps are superseded: they are replaced when training reaches
them again. The manager knows this at once; the storage records it just before the next save is
published (`rollback`), so that a restore alone changes nothing. A superseded step that is restored
belongs to the training again.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from shardckpt.commit.attempts import same_elements
from shardckpt.commit.dependants import check_unprotected
from shardckpt.commit.markers import SUPERSEDED
from shardckpt.commit.publish import published_attempt
from shardckpt.errors import OptionError, ShardckptError
from shardckpt.format.documents import seal
from shardckpt.io.failures import check_fork
from shardckpt.runs import pinning
from shardckpt.runs.retention import Retention, best
from shardckpt.runs.rollback import ROLLBACK, Rollback
from shardckpt.runs.steps import StepInfo, check_step, latest_step, list_steps

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from shardckpt.io.store import Store


@dataclass(frozen=True, slots=True)
class Resumed:
    """The step that the processes agreed on, and its restored state."""

    step: int | None
    """None: there is none, and training starts from the beginning."""
    state: Any
    metadata: dict[str, Any]
    was_superseded: bool
    """Whether the restored step was superseded until now."""
    later: dict[int, str | None]
    """Steps after it, with the attempt in each one's record (None if unreadable)."""
    kept: frozenset[int]
    """Later steps that are pinned or tagged, or hold tensors of such a step, or of a checkpoint
    that is not superseded."""
    notes: tuple[str, ...] = ()
    """As in `shardckpt.Restored`."""


class Lineage:
    """The effects of the last restore.

    The same on all processes, except that only the leader writes them to the storage.
    """

    def __init__(self, root: Store, *, overwrites: bool = False) -> None:
        """Begin without a restore; `overwrites`: saves may replace any step."""
        self._root = root
        self._overwrites = overwrites
        self.later: dict[int, str | None] = {}
        """Steps after the restored one that have not been replaced yet, with the attempt in each
        one's record (None if unreadable)."""
        self._kept: frozenset[int] = frozenset()
        self._pending: Rollback | None = None
        """The rollback that is not recorded in the storage yet."""

    def resume(self, restored: Resumed) -> None:
        """Continue after a step that was restored, or from the beginning."""
        self.later, self._kept = dict(restored.later), restored.kept
        if restored.step is None:  # all that is later is superseded already, or pending
            return
        self._pending = (
            Rollback(restored.step, restored.was_superseded, restored.later)
            if restored.was_superseded or restored.later
            else None
        )

    def metadata(self) -> dict[str, Any]:
        """Metadata for the next save that records the pending rollback.

        It is for the process that publishes the save.
        """
        pending = self._pending
        return {} if pending is None else {ROLLBACK: pending.to_json()}

    def replaces(self, step: int) -> bool:
        """Whether a save of this step replaces a step from before the rollback."""
        return step in self.later

    def protects(self, step: int) -> bool:
        """Whether, at the restore, the old step was pinned, tagged, or a base of others.

        The save itself finds later changes.
        """
        return step in self._kept

    def tell_storage(self, step: int) -> None:
        """Mark the superseded steps in the storage.

        Runs on the leader just before a step is published.

        Raises:
            OptionError: the step would replace one that is pinned or tagged.
            StorageError: the storage failed.
        """
        place = self._root.sub(str(step))
        if step in self.later or self._overwrites:  # before a rollback is marked
            check_unprotected(
                place,
                self.later[step] if step in self.later else published_attempt(place),
                "replaced",
            )
        if self._pending is not None:
            self._pending.tell(self._root)
            self._pending = None

    def replaced(self, step: int, *, leads: bool) -> None:
        """Note that a step is committed."""
        if step in self.later:
            marker = seal({"attempt": self.later[step] or ""})
            self.later = {later: attempt for later, attempt in self.later.items() if later != step}
            if leads:
                # The marker names the replaced attempt, so it does no harm if it stays.
                with suppress(ShardckptError):
                    place = self._root.sub(str(step))
                    there, generation = place.read_versioned(SUPERSEDED)
                    if there == marker:
                        place.remove(SUPERSEDED, generation)

    def seen(self, steps: Iterable[StepInfo]) -> list[StepInfo]:
        """Steps as listed from the storage, corrected by the rollback not recorded there yet."""
        pending, later = self._pending, self.later

        def now(info: StepInfo) -> StepInfo:
            is_later = info.step in later and same_elements(later[info.step], info.attempt)
            if pending is not None and is_later:
                return replace(info, state="superseded")
            if pending is not None and info.step == pending.step:
                return replace(info, state="committed")
            return info

        return [now(info) for info in steps]


class RunSteps:
    """The steps of a run, as a `CheckpointManager` shows them."""

    _root: Store
    _lineage: Lineage
    _rule: Retention | None

    def url(self, step: int) -> str:
        """The url of a step's checkpoint, which need not exist.

        Raises:
            OptionError: `step` is not a whole number from 0 to 2**63 - 1.
        """
        return str(self._root.location.join(str(check_step(step))))

    def steps(self) -> list[StepInfo]:
        """All steps that hold a checkpoint, ascending, with information about each.

        Read from the storage now.

        Raises:
            StorageError: the storage failed, or the interpreter is shutting down.
        """
        check_fork(self._root)
        return self._lineage.seen(list_steps(self._root))

    def all_steps(self, *, superseded: bool = False) -> list[int]:
        """The steps that hold a checkpoint, ascending; with `superseded`, those too."""
        return [info.step for info in self.steps() if superseded or info.live]

    def latest_step(self) -> int | None:
        """The latest step that is not superseded; None if there is none."""
        check_fork(self._root)
        return latest_step(self._root, lambda info: self._lineage.seen([info])[0].live)

    def best_step(
        self, metric: str | None = None, mode: Literal["min", "max"] | None = None
    ) -> int | None:
        """The step with the best metric; None if no step has the metric.

        Args:
            metric: the name of the metric; None: the metric of the `Best` rule in `keep`.
            mode: whether the smallest or the largest value is best; None: the mode of that rule, or
                the smallest.

        Raises:
            OptionError: neither the argument nor `keep` names a metric.
        """
        rules = (
            []
            if self._rule is None
            else [rule for rule in self._rule.measures if metric in (None, rule.metric)]
        )
        if metric is None and not rules:
            raise OptionError(
                'best_step(): no metric is known; give its name, as in best_step("loss"), or '
                "make the manager with keep=Best(…)."
            )
        metric = metric or rules[0].metric
        mode = mode or (rules[0].mode if rules else "min")
        return best(
            [info.saved() for info in self.steps() if info.state == "committed"], metric, mode
        )

    def pin(self, step: int) -> None:
        """Protect a step from deletion. One process suffices."""
        pinning.pin(self.url(step))

    def unpin(self, step: int) -> None:
        """Remove the pin of a step."""
        pinning.unpin(self.url(step))
