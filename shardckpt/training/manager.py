"""`CheckpointManager`: the checkpoints of one training run, over all its restarts."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from shardckpt.errors import OptionError
from shardckpt.format.documents import is_choice
from shardckpt.frameworks.coordination import Coordinator, check_coordinator
from shardckpt.io.store import Store
from shardckpt.io.url import parse
from shardckpt.options import check_flag, check_function, checked_options
from shardckpt.reading.restore import adaptation_of, restore_adapted
from shardckpt.runs.job import RUN, check_root
from shardckpt.runs.measured import METRICS, decode_metrics, encode_metrics
from shardckpt.runs.retention import Retention, as_retention
from shardckpt.runs.rollback import ROLLBACK
from shardckpt.runs.steps import check_step
from shardckpt.text import shorten, visible
from shardckpt.training import events
from shardckpt.training.open_run import OpenRun
from shardckpt.training.policies import EveryCall, Policy, any_of, as_policy
from shardckpt.training.resuming import Restored, newest_step, raise_together, resume

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from shardckpt.frameworks.coordination.names import Agreement
    from shardckpt.options import SaveOptions
    from shardckpt.reading.checkpoint import Checkpoint
    from shardckpt.reading.cooperative import Choice
    from shardckpt.reading.naming.adapt import Adaptation, Fit
    from shardckpt.reading.naming.mapping import TensorMapping
    from shardckpt.state.select import Only
    from shardckpt.training.events import Callback
    from shardckpt.training.policies import OnPreemption
    from shardckpt.writing.save import SaveReport

_log = logging.getLogger("shardckpt")
_DEFAULT_EVERY = EveryCall()
"""The `every` of a manager that was created without one."""
_PROTECTED = (
    "at the restore, the step from before the rollback was pinned or tagged, or a base that others "
    "need; to replace it, unpin, untag or delete those, and restore again"
)


class CheckpointManager(OpenRun):
    """Saves the steps of a training run, and resumes the run from its latest step.

    Each step is a checkpoint at `<root>/<step>`.

        with shardckpt.CheckpointManager("gs://bucket/run", every=500, keep=3) as mgr:
            restored = mgr.restore(state)
            for step in range(restored.step + 1 if restored else 0, steps):
                state = train(state)
                mgr.save(step, state)

    In a job of several processes, each process creates a manager at the same point of the program;
    if the processes meet later (`init_process_group`), the manager joins them at its first call. It
    calls `restore`, `should_save` and `save` for the same steps in the same, ascending order. All
    processes save the same steps. Policies that depend only on step numbers need no communication.
    For the others (`EverySeconds`, `Continuous`, `OnPreemption`, and `in_flight="skip"`), process 0
    decides some steps ahead. The other processes read its decisions at most once per two steps, or
    once per 32 steps if a step takes 10 ms. A process that reaches an undecided step waits for
    process 0, at most `SaveOptions.commit_timeout` seconds.

    If a background save fails, the next due `save`, `wait` or `close` raises its error, once.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        every: Policy | int | None = _DEFAULT_EVERY,
        keep: Retention | int | None = None,
        options: SaveOptions | None = None,
        coordinator: Coordinator | None = None,
        in_flight: Literal["wait", "skip"] = "wait",
        preemption: OnPreemption | None = None,
        on_event: Callback | None = None,
        on_failure: Callable[[BaseException, int], Literal["raise", "continue"]] | None = None,
        progress: bool | None = None,
        fallback: bool = False,
        lead_time: float = 1.0,
    ) -> None:
        """Create a manager; nothing is read or written yet.

        Args:
            root: the run's directory, a path or url; it need not exist.
            every: when to save: a number of steps, or a policy (`shardckpt.training.policies`).
                None saves only with `force`. The default saves at every call of `save`; with
                `preemption`, only before the job is stopped.
            keep: which steps to keep: a number of latest steps, or a rule
                (`shardckpt.training.retention`). None keeps all.
            options: options of every save. Restores use its `memory_limit`, too.
            coordinator: connects the processes of the job; detected by default.
            in_flight: how to treat a step that is due while a save is in flight. "wait" waits for
                that save; "skip" skips the step, with an event.
            preemption: a policy that saves before the job is stopped, in addition to `every`.
            on_event: called with each event (`shardckpt.training.events`), mostly in a background
                thread.
            on_failure: called with an error and its step, on the thread that would raise it;
                "continue" suppresses the error.
            progress: whether to show a progress line. None shows it on a terminal, and in a
                notebook.
            fallback: the default of `restore(fallback=…)`: whether to go back to an earlier step if
                one is damaged.
            lead_time: seconds that process 0 decides ahead, at least two steps. Policies that
                depend on a clock, a signal or a save in flight take effect this much later.

        Raises:
            OptionError: an invalid option, by name.
            UrlError: `root` is not a valid place.
        """
        check_coordinator(coordinator)
        if not is_choice(in_flight, ("wait", "skip")):
            raise OptionError(
                f'CheckpointManager(in_flight={shorten(in_flight)}): use "wait" or "skip".'
            )
        check_flag(fallback, "fallback")
        check_function(on_event, "on_event")
        check_function(on_failure, "on_failure")
        if (
            isinstance(lead_time, bool)
            or not isinstance(lead_time, int | float)
            or not 0 <= lead_time < math.inf
        ):
            raise OptionError(
                f"CheckpointManager(lead_time={shorten(lead_time)}): give seconds, 0 or more, "
                "and not infinitely many."
            )
        checked = checked_options(options)
        if used := {RUN, METRICS, ROLLBACK} & checked.metadata.keys():
            raise OptionError(
                f"SaveOptions(metadata=…): {min(used)!r} is a key that a CheckpointManager sets "
                "itself; choose another key."
            )
        when = None if every is _DEFAULT_EVERY and preemption is not None else every
        policy = as_policy(when) if preemption is None else any_of(as_policy(when), preemption)
        rule = as_retention(keep)
        place = Store.open(parse(root))
        if rule is not None:
            place.check_replaces("keep only some steps of")
        super().__init__(
            place,
            coordinator,
            checked,
            policy=policy,
            rule=rule,
            skips=in_flight == "skip",
            lead_time=lead_time,
            on_event=on_event,
            on_failure=on_failure,
            progress=progress,
        )
        self._fallback = fallback
        self._last: int | None = None
        """The step that was saved or restored last."""
        self._preempted = False
        self._skipped: int | None = None
        """The step that was skipped last."""
        self._owed = False
        """Whether a due step could not be saved, so that the next step is saved instead."""
        self._saves = when is not _DEFAULT_EVERY and not (when is None and preemption is None)
        """Whether the caller has said when to save."""
        self._warns = when is _DEFAULT_EVERY and keep is None
        """Whether the first save warns that every call saves and every step is kept."""

    # --- saving

    def should_save(self, step: int) -> bool:
        """Whether `save` would save this step; `save` checks this itself.

        Raises:
            OptionError: the step is smaller than the last one given to `should_save`, `save` or
                `restore`.
            CoordinationError: process 0 does not answer in time.
        """
        return self._due(self._check_ascends(step))

    def save(
        self,
        step: int,
        state: Any,
        metrics: Mapping[str, Any] | None = None,
        *,
        force: bool = False,
        skip: str | Sequence[str] | None = None,
    ) -> bool:
        """Save a step in the background, if it is due.

        The call returns when this process's share is copied to host buffers; then the state may
        change. One save is in flight at a time: the call waits for the previous one. All processes
        call it with the same step.

        Args:
            step: the completed step, from 0 to 2**63 - 1; not smaller than the last one given to a
                method of the manager.
            state: as for `shardckpt.save`, or the result of `shardckpt.train_state`.
            metrics: numbers by name, for `best_step` and retention rules; only process 0's are
                used.
            force: save although the step is not due. If its save is in flight, the call waits
                for its end, and saves the step again if that save fails.
            skip: replaces `SaveOptions(skip=…)`: name patterns of tensors that stay in
                `SaveOptions(base=…)`. `()` skips no tensor, for example to save the base itself.

        Returns:
            Whether the step is being saved. If a due or forced step is not saved, a `SaveSkipped`
            event gives the reason: the step is saved already; the previous save is in flight, with
            `in_flight="skip"`; or, after a rollback, the old step of this number is pinned, tagged,
            or the base of a checkpoint that stays. In the last case the next step is saved instead,
            if this one was due.

        Raises:
            OptionError: the step is smaller than the last one given to `should_save`, `save` or
                `restore`.
            ShardckptError: an earlier save failed. This save has begun all the same, because all
                processes save the same steps.
            LeafError, ShardingError, OptionError: the state cannot be saved; nothing was begun.
            OtherJobError: another job, or another open manager of this process, has begun to save
                to this root.
        """
        step = self._check_ascends(step)
        if not (self._due(step) or force):
            self._warm_once(step, state)
            return False
        if step == self._last and not self._background.loses(step, waits=force):
            self._skip(step, "it is saved already")
            return False
        if self._lineage.protects(step):  # a forced save
            self._skip(step, _PROTECTED)
            return False
        if self._warns:
            self._warns = False
            _log.warning(
                "%s: every call of save() saves and every step is kept; to change this, give "
                "every= or keep=.",
                self._root,
            )
        options = checked_options(self.options, skip)
        measured = {} if metrics is None else encode_metrics(metrics)
        measured = measured if self._leads else {}
        metadata = {
            **self.options.metadata,
            RUN: self._coordinator.run_id,
            **({METRICS: measured} if measured else {}),
        }
        if self._leads:
            metadata |= self._lineage.metadata()
        options = dataclasses.replace(
            options,
            overwrite=self.options.overwrite or self._lineage.replaces(step),
            metadata=metadata,
        )
        self._joins_later = False
        failed = self._background.begin(step, state, options, decode_metrics(measured))
        self._decisions.saved(step)
        self._last, self._owed = step, False
        self._background.raise_failures(self._on_failure, failed)
        return True

    def warm(self, state: Any) -> None:
        """Prepare host memory for saves of a state, in the background.

        The first save is then as fast as later ones.

        Threads touch and pin the memory that a save needs: at most `memory_limit`, and nothing if
        this is more than half of the memory that is free. The first save waits for them. A manager
        whose `every` or `preemption` is given does this by itself, for states on devices, after a
        `restore` that has found a step, or else at the first step that is not due.

        Args:
            state: as for `save`; nothing of it is kept.

        Raises:
            LeafError, ShardingError: the state cannot be saved.
        """
        self._check_open()
        self._join_late()
        self._background.warm(self._last or 0, state, self.options)

    def _warm_once(self, step: int, state: Any) -> None:
        if self._saves:
            self._background.warm_once(step, state, self.options)

    def _due(self, step: int) -> bool:
        """Whether a step is saved without `force`; the same on all processes."""
        decision = self._decisions.at(step)
        if decision.skipped:
            self._skip(step, "the save before it is still in flight")
        if self._lineage.protects(step):
            if decision.save or self._owed:
                self._skip(step, f"{_PROTECTED}; the next step is saved in its place")
                self._owed = True
            return False
        if decision.notice is not None and not self._preempted:
            self._preempted = True
            self._events.emit(
                events.PreemptionNoticed(url=str(self._root), step=step, source=decision.notice)
            )
        return decision.save or self._owed

    def _skip(self, step: int, reason: str) -> None:
        """Report, once, that a step is not saved."""
        if step != self._skipped:
            self._skipped = step
            self._background.emit(events.SaveSkipped, step, reason=reason)

    # --- restoring

    def restore(
        self,
        like: Any = None,
        step: int | None = None,
        *,
        only: Only | None = None,
        rename: str | Sequence[str] = (),
        mapping: str | os.PathLike[str] | TensorMapping | None = None,
        invert_mapping: bool = False,
        fit: Mapping[str, Fit] | None = None,
        strict: bool | Literal["like"] = True,
        cast: bool = False,
        cooperative: Choice = False,
        fallback: bool | None = None,
        check: bool = False,
    ) -> Restored | None:
        """Restore the latest step, or a given one; training continues after it.

        All processes call it and restore the same step; their number may differ from the save.
        Complete but unpublished saves of earlier runs are committed first. From the next save on,
        steps after the restored one are superseded: they no longer count as the latest, and are
        replaced when training reaches them again. With any `keep`, superseded steps are deleted
        once a later step is saved: pin those that you want to compare.

        Args:
            like: the restore target, as for `shardckpt.restore`.
            step: the step to restore. None restores the latest.
            only: as for `shardckpt.restore`; for example, `"model/**"` restores only the weights.
            rename: as for `shardckpt.restore`. This and the next three are the same on all
                processes.
            mapping: as for `shardckpt.restore`.
            invert_mapping: as for `shardckpt.restore`.
            fit: as for `shardckpt.restore`.
            strict: as for `shardckpt.restore`. If several processes restore with True, it is an
                error if only the checkpoint has a name and no process's `like` has it.
            cast: as for `shardckpt.restore`.
            cooperative: as for `shardckpt.restore`; the same on all processes.
            fallback: whether to try earlier steps, one by one and on all processes, until one is
                not damaged. An event names each damaged step. A StorageError, and a difference that
                `check` finds, are errors all the same. None uses the manager's `fallback`.
            check: compare the restored tensors, in their final memory, with the fingerprint of
                `SaveOptions(fingerprint=True)`; not those that `fit` or `mapping` has changed.

        Returns:
            The restored state and its step; None if no step is saved, so that training starts from
            the beginning.

        Raises:
            NotFoundError: there is no such step. OptionError: `check` is set, and no fingerprint
                was recorded.
            CorruptionError, FormatError: a process found the step damaged; with `fallback`, also
                all earlier steps.
            MismatchError, LeafError, ReplacedError, StorageError: as for `shardckpt.restore`.
            CoordinationError: another process failed with another error, or does not answer.
        """
        step = None if step is None else check_step(step)
        self._settle()

        def read(
            checkpoint: Checkpoint, agreement: Agreement, filling: Callable[[list[str]], None]
        ) -> tuple[Any, Adaptation | None]:
            read_step = int(checkpoint.location.name)
            with self._background.cleaner.reading(read_step):
                self._background.emit(events.RestoreStarted, read_step)
                began = time.monotonic()
                progress = self._events.progress("restore", self.url(read_step), read_step)
                try:
                    with agreement:  # also where this process has no need of it: the others may
                        adaptation = adaptation_of(
                            rename=rename, mapping=mapping, invert_mapping=invert_mapping, fit=fit
                        )
                        state = restore_adapted(
                            checkpoint,
                            like,
                            adaptation,
                            only=only,
                            strict=agreement if strict is True else strict,
                            cast=cast,
                            cooperative=cooperative,
                            progress=progress,
                            filling=filling,
                            memory_limit=self.options.budget,
                            coordinator=self._coordinator,
                        )
                except BaseException as e:
                    self._background.emit(events.RestoreFailed, read_step, error=e)
                    raise
                nbytes = checkpoint.record.totals["bytes"]
                self._background.emit(
                    events.RestoreFinished,
                    read_step,
                    seconds=time.monotonic() - began,
                    nbytes=nbytes,
                )
                return state, adaptation

        restored = resume(
            self._root,
            self._coordinator,
            read,
            step=step,
            together=cooperative is not False,
            rolled_back=self._lineage.later,
            fallback=(self._fallback or None) if fallback is None else fallback,
            check=check,
            only=only,
            fell_back=lambda damaged, reason: self._background.emit(
                events.FellBack, damaged, reason=reason
            ),
        )
        self._background.resumed()
        self._lineage.resume(restored)
        if restored.step is None:
            check_root(self._root)
        self._last, self._owed = restored.step, False
        self._background.cleaner.forget()
        self._decisions.restart(restored.step)
        if restored.step is None:
            return None
        self._warm_once(restored.step, restored.state)
        return Restored(restored.state, restored.step, restored.metadata, restored.notes)

    def _settle(self) -> None:
        """Wait for the work in flight before a step is chosen, and raise its failures on all.

        Also for deletions: they do not know yet where training continues.
        """
        self._check_open()
        self._join_late()
        self._background.join()
        raise_together(
            self._coordinator, partial(self._background.raise_failures, self._on_failure)
        )

    def _newest_step(self) -> int | None:
        """The step that `restore` takes by itself, for integrations that look at it before.

        The step is published, and the same on all processes; all of them call this.
        """
        self._settle()
        return newest_step(self._root, self._coordinator, self._lineage.later)

    @property
    def last_report(self) -> SaveReport | None:
        """The report of this process's last successful save; None before the first."""
        return self._background.last_report

    @property
    def reached_preemption(self) -> bool:
        """Whether the current step was saved because a notice of preemption came.

        End the loop when this is true.

        All processes see the same value at the same step.
        """
        return self._preempted

    def __repr__(self) -> str:
        """The run's place, and when it saves and what it keeps; nothing is read."""
        kept = "all steps" if self._rule is None else repr(self._rule)
        return visible(
            f"<shardckpt.CheckpointManager {self._root}: saves {self._policy!r}, keeps {kept}>"
        )
