"""The background half of a manager: one save at a time, then deletions, and failures of both.

1. `begin` starts a save (`Saver`), which copies the state, and a thread that waits for its end. The
   interpreter waits for that thread before it shuts down (`shutdown`).
2. Just before a step is published, the committing process checks that no other job owns the root,
   and writes a pending rollback to the storage.
3. When the save has ended, the next one may begin. If the step was committed, the leader deletes
   the steps that are no longer kept.
4. Failures are kept until the training thread asks for them: `raise_failures`.
5. A save may have failed when its data was complete. When the next save begins, the leader tries to
   publish it (`_publish_left`). The first save of a manager that has restored nothing does so for
   the saves of earlier runs, before it claims the root: afterwards they are refused. Both happen
   before any collection.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal

from shardckpt import frameworks
from shardckpt.errors import OtherJobError, ShardckptError
from shardckpt.format.documents import utc_now
from shardckpt.io.failures import saving_takes_threads
from shardckpt.io.shutdown import start_background
from shardckpt.runs.cleaning import Cleaner
from shardckpt.runs.job import JobFence, ProcessClaim, of_other_job
from shardckpt.runs.lineage import Lineage
from shardckpt.runs.steps import StepInfo, step_numbers, steps_among
from shardckpt.training import events
from shardckpt.training.decisions import LEADER
from shardckpt.training.resuming import commit_left
from shardckpt.writing.background import Saver
from shardckpt.writing.handle import SaveHandle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from shardckpt.frameworks.coordination import Coordinator
    from shardckpt.io.store import Store
    from shardckpt.options import SaveOptions
    from shardckpt.runs.retention import Retention
    from shardckpt.writing.save import SaveReport


_log = logging.getLogger("shardckpt")


class Background:
    """Background saves of one run, from this process. One thread at a time begins saves."""

    def __init__(
        self,
        root: Store,
        coordinator: Coordinator,
        options: SaveOptions,
        rule: Retention | None,
        tell: events.Events,
    ) -> None:
        """Nothing runs before `begin`.

        Args:
            root: the root of the run.
            coordinator: the coordinator of the run's processes.
            options: `memory_limit`, `commit_timeout`, `overwrite` and `base` count.
            rule: which steps to keep; None: all.
            tell: receives the events.
        """
        self.lineage = Lineage(root, overwrites=options.overwrite)
        self.last_report: SaveReport | None = None
        self.lost: int | None = None
        """The step whose save failed last."""
        self._root = root
        self._run_id, self._overwrites = coordinator.run_id, options.overwrite
        self._leads = coordinator.world.process == LEADER
        self._tell = tell
        self._saver = Saver(memory_limit=options.budget, coordinator=coordinator)
        self._job = JobFence(root, coordinator.run_id)
        self._claim = ProcessClaim(root, coordinator.run_id, coordinator.world.process)
        # Silence for this long means that every process has given up waiting.
        grace = 2 * options.commit_timeout
        bases = steps_among(root, [] if options.base is None else [options.base])
        self.cleaner = Cleaner(
            root,
            rule,
            grace=grace,
            bases=bases,
            deleted=lambda step: self.emit(events.StepDeleted, step),
        )
        self._ended = threading.Event()
        self._ended.set()
        self._threads: list[threading.Thread] = []
        self._failures: list[tuple[BaseException, int]] = []
        self._left: set[int] | None = None
        """Steps whose save failed, and may be complete. None: the steps of earlier runs have not
        been looked at."""
        self._warmed = False
        """Whether there was a chance to prepare memory for saves."""

    # --- on the training thread

    @property
    def in_flight(self) -> bool:
        """Whether a save is in flight."""
        return not self._ended.is_set()

    def begin(
        self, step: int, state: Any, options: SaveOptions, metrics: Mapping[str, float]
    ) -> int:
        """Begin a save after the previous one has ended; return when the state is copied.

        Returns:
            The number of earlier failures. `raise_failures` takes it as `first`, so that a failure
            of this save waits for the next call.

        Raises:
            OtherJobError: another manager of this process saves to the root.
        """
        self._ended.wait()
        self._warmed = True
        failed, url = len(self._failures), self.url(step)
        self.emit(events.SaveStarted, step)
        began, handle = time.monotonic(), None
        ended, begun = threading.Event(), SimpleQueue[SaveHandle | None]()
        thread = threading.Thread(
            target=self._follow,
            args=(begun, step, metrics, ended),
            name=f"shardckpt-step-{step}",
            daemon=True,
        )
        try:
            self._claim.check()
            # Checked first: if threads cannot be started, nothing would wait for the save.
            with saving_takes_threads(url):
                start_background(thread)
            handle = self._saver.begin(
                url,
                state,
                options,
                before_publish=lambda: self._before_publish(step),
                progress=self._tell.progress("save", url, step),
            )
            self._claim.take()
            self._ended = ended
            self._threads = [*(before for before in self._threads if before.is_alive()), thread]
            self.emit(
                events.SaveStaged, step, seconds=time.monotonic() - began, nbytes=handle.nbytes
            )
        except BaseException as e:
            if handle is None:
                self.emit(events.SaveFailed, step, error=e)
            raise
        finally:
            begun.put(handle)
        return failed

    def warm(self, step: int, state: Any, options: SaveOptions) -> None:
        """Prepare host memory for saves of a state, in the background."""
        self._warmed = True
        self._saver.warm(self.url(step), state, options)

    def warm_once(self, step: int, state: Any, options: SaveOptions) -> None:
        """Do the same at the first chance, if this process uses devices.

        A state that cannot be saved is left to its first save.
        """
        warmed, self._warmed = self._warmed, True
        if not warmed and frameworks.on_accelerator(state):
            with suppress(ShardckptError):
                self._saver.warm(self.url(step), state, options, only_devices=True)

    def resumed(self) -> None:
        """Note that a restore published what was complete, and training continues from there.

        A step that was lost is published, or superseded.
        """
        self._left = set()
        self.lost = None

    def loses(self, step: int, *, waits: bool) -> bool:
        """Whether the save that failed last is of this step; `waits`: after one in flight."""
        if waits:
            self._ended.wait()
        return self.lost == step

    def join(self) -> None:
        """Wait until no save and no deletion is running."""
        for thread in self._threads:
            thread.join()

    def close(self) -> None:
        """Wait for the save in flight, even if it fails, and free the buffers."""
        self._claim.release()
        self._saver.close()

    def raise_failures(
        self,
        decide: Callable[[BaseException, int], Literal["raise", "continue"]] | None,
        first: int | None = None,
    ) -> None:
        """Raise the failures since the last call, except where `decide` says "continue".

        If `first` is given, only the first so many of them are handled.
        """
        failures = self._failures[:first]
        del self._failures[: len(failures)]
        raised = [
            error for error, step in failures if decide is None or decide(error, step) != "continue"
        ]
        for other in raised[1:]:
            raised[0].add_note(f"Besides: {other} {' '.join(getattr(other, '__notes__', []))}")
        if raised:
            raise raised[0]

    def url(self, step: int) -> str:
        """The url of a step's checkpoint, which need not exist."""
        return str(self._root.location.join(str(step)))

    def emit(self, kind: type[Any], step: int, **fields: Any) -> None:
        """Emit an event about a step."""
        self._tell.emit(kind(url=self.url(step), step=step, **fields))

    # --- on background threads

    def _before_publish(self, step: int) -> None:
        """Hold the root and record a pending rollback. Runs on the committing process."""
        if self._left is None:
            self._publish_left(step)
        self._job.hold()
        self.lineage.tell_storage(step)

    def _follow(
        self,
        begun: SimpleQueue[SaveHandle | None],
        step: int,
        metrics: Mapping[str, float],
        ended: threading.Event,
    ) -> None:
        """Wait for the end of a save, then report and clean up."""
        if (handle := begun.get()) is None:
            return
        try:
            if self._leads and self._left:
                self._publish_left(step)
            report = handle.wait()
            assert report is not None
            self.last_report = report
            self.lost = None if self.lost == step else self.lost
            self.lineage.replaced(step, leads=self._leads)
            self.emit(events.SaveCommitted, step, report=report)
        except BaseException as e:  # noqa: BLE001  (the training thread raises it)
            self._note_failure(step, e)
            return
        finally:
            ended.set()  # the next save may begin, even while the deletions below still run
        if self._leads:
            created = utc_now()
            bases = steps_among(self._root, report.bases)
            self._clean(StepInfo(step, "committed", report.attempt, created, metrics, bases=bases))

    def _publish_left(self, step: int) -> None:
        """Publish the complete saves of other steps that were not published when they were made.

        Runs on the leader.

        A step that is being saved again is left out: the new save replaces it. After any failure,
        which is not that of the save in flight, the next save tries again.
        """
        try:
            if self._left is None:
                self._left = {*step_numbers(self._root)}
            due = sorted(self._left - {step})
            self._job.check()
            if commit_left(self._root, due):
                self.cleaner.forget()
            self._left.difference_update(due)
        except Exception as e:  # noqa: BLE001
            _log.warning("%s: earlier saves cannot be published: %s", self._root, e)

    def _clean(self, committed: StepInfo) -> None:
        """Delete the steps that are no longer kept. Runs on the leader."""
        try:
            self._claim.check()
        except OtherJobError as e:  # the other manager deletes
            _log.warning("%s", e)
            return
        try:
            self._job.check()
            self.cleaner.clean(committed)
        except Exception as e:  # noqa: BLE001  (the training thread raises it)
            e.add_note(
                f"Step {committed.step} is committed; steps that need not be kept were being "
                "deleted in the background."
            )
            self._failures.append((e, committed.step))

    def _other_job(self, step: int, error: BaseException) -> OtherJobError | None:
        """The OtherJobError that explains a failed save, if another job saves to the root."""
        if isinstance(error, OtherJobError):
            return None
        with suppress(ShardckptError):
            try:
                if self._leads:
                    self._job.check()
            except OtherJobError as other:
                return other
            if not (self._overwrites or self.lineage.replaces(step)):
                return of_other_job(self._root, step, self._run_id, error)
        return None

    def _note_failure(self, step: int, error: BaseException) -> None:
        other = self._other_job(step, error)
        if other is not None:  # it explains all other failures
            other.__cause__ = error
            error = other
        error.add_note(f"Step {step} was being saved in the background.")
        self.emit(events.SaveFailed, step, error=error)
        self.lost = step
        if self._left is not None:
            self._left.add(step)
        self.cleaner.forget()  # the step may be published all the same
        self._failures.append((error, step))


@contextmanager
def noted_on(error: BaseException | None) -> Iterator[None]:
    """Raise a failure of the block, or add it as a note to an error that is propagating already."""
    try:
        yield
    except Exception as failure:
        if error is None:
            raise
        error.add_note(f"Besides, a checkpoint was not saved: {failure}")
