"""The parts of a `CheckpointManager` that work until it is closed, for the processes of a job."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Literal, Self

from shardckpt.errors import OptionError
from shardckpt.frameworks.coordination import Coordinator, coordinator_of
from shardckpt.io.cores import note_local_processes
from shardckpt.io.failures import check_fork
from shardckpt.runs.lineage import RunSteps
from shardckpt.runs.steps import check_step
from shardckpt.training import events
from shardckpt.training.background import Background, noted_on
from shardckpt.training.decisions import LEADER, Decisions
from shardckpt.training.preemption import Notices

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from shardckpt.io.store import Store
    from shardckpt.options import SaveOptions
    from shardckpt.runs.retention import Retention
    from shardckpt.training.events import Callback
    from shardckpt.training.policies import Policy

_managers: Counter[str] = Counter()
"""Number of managers that a run has created in this process: all of its processes create equally
many, in the same order."""


class OpenRun(RunSteps):
    """A training run that saves in the background until it is closed."""

    def __init__(
        self,
        root: Store,
        coordinator: Coordinator | None,
        options: SaveOptions,
        *,
        policy: Policy,
        rule: Retention | None,
        skips: bool,
        lead_time: float,
        on_event: Callback | None,
        on_failure: Callable[[BaseException, int], Literal["raise", "continue"]] | None,
        progress: bool | None,
    ) -> None:
        """Make the parts; for the arguments, which are valid, see `CheckpointManager`."""
        self.options = options
        """The options of every save."""
        self._rule = rule
        self._root = root
        self._on_failure = on_failure
        self._notices = Notices(policy.notices)
        self._policy = policy
        self._skips = skips
        self._lead_time = lead_time
        self._on_event = on_event
        self._progress = progress
        try:
            self._join(coordinator_of(coordinator, self.options.commit_timeout))
        except BaseException:
            self._notices.close()
            raise
        self._joins_later = coordinator is None and self._coordinator.world.processes == 1
        """Whether the processes of the job may meet before the first save, and this manager is to
        join them then."""
        self._closed = False

    def _join(self, coordinator: Coordinator) -> None:
        """Make the parts that depend on the processes of the job.

        Nothing was saved or restored before.
        """
        self._coordinator = coordinator
        note_local_processes(coordinator.world.sharing)
        self._leads = coordinator.world.process == LEADER
        self._line = events.progress_line(self._progress, alone=self._leads)
        self._events = events.Events(
            self._on_event, self._line, events.announcer() if self._leads else None
        )
        self._background = Background(
            self._root, coordinator, self.options, self._rule, self._events
        )
        self._lineage = self._background.lineage
        _managers[coordinator.run_id] += 1
        self._decisions = Decisions(
            coordinator,
            self._policy,
            key=f"decisions/{_managers[coordinator.run_id]}",
            skips=self._skips,
            lead_time=self._lead_time,
            timeout=self.options.commit_timeout,
            in_flight=lambda: self._background.in_flight,
            notice=self._notices.look,
        )

    def _join_late(self) -> None:
        """Join the processes of the job if they met after this manager was made.

        Raises:
            OptionError: they did, and this manager has gone through steps by itself.
        """
        if not self._joins_later:
            return
        coordinator = coordinator_of(None, self.options.commit_timeout)
        if coordinator is self._coordinator:
            return
        if (step := self._decisions.previous) is not None:
            raise OptionError(
                f"{self._root}: this CheckpointManager was made before the processes of the job "
                f"met, and has gone through step {step} by itself; now there are "
                f"{coordinator.world.processes} processes. Make it after "
                "torch.distributed.init_process_group or jax.distributed.initialize; or give it "
                "coordinator=shardckpt.SingleProcess(), if only this process saves here."
            )
        if self._line is not None:
            self._line.close()
        self._background.close()
        self._join(coordinator)
        self._joins_later = False

    def wait(self) -> None:
        """Wait until nothing is in flight.

        Then the last save is committed, and steps that are not kept are deleted.

        Raises:
            ShardckptError: a save failed; or this process was forked while a save may have been in
                flight.
        """
        check_fork(self._root)
        self._background.join()
        self._background.raise_failures(self._on_failure)

    def close(self) -> None:
        """Finish the work in flight, free the buffers, restore signal handlers.

        Closing again does nothing.

        Raises:
            ShardckptError: a save failed; or, as a StorageError, the last deletions failed.
        """
        if self._closed:
            return
        check_fork(self._root)
        try:
            self._background.join()
        finally:
            self._closed = True
            self._notices.close()
            self._background.close()
            if self._line is not None:
                self._line.close()
        self._background.raise_failures(self._on_failure)
        if self._background.cleaner.failure is not None:
            raise self._background.cleaner.failure

    def __enter__(self) -> Self:
        """The manager itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the manager.

        If the block raised an error, an error of closing becomes a note on it.
        """
        with noted_on(error):
            self.close()

    def _check_ascends(self, step: int) -> int:
        self._check_open()
        step = check_step(step)
        self._join_late()
        if (before := self._decisions.previous) is not None and step < before:
            raise OptionError(
                f"{self._root}: step {step} is less than step {before}, the last step given to "
                "should_save, save or restore; steps must ascend. Continue from there, or go "
                "back with restore(step=…)."
            )
        return step

    def _check_open(self) -> None:
        check_fork(self._root)
        if self._closed:
            raise OptionError(f"{self._root}: this CheckpointManager is closed; make another one.")
