"""Events: what happens to a run's checkpoints, passed to callbacks, the log and the progress line.

A callback is any function of one event; it tells them apart by class, as in

    def on_event(event: shardckpt.training.events.Event) -> None:
        match event:
            case SaveCommitted(step=step, report=report):
                writer.add_scalar("checkpoint/stall_s", report.stall_s, step)
            case SaveFailed(step=step, error=error):
                alert(f"step {step} was not saved: {error}")

1. Every event says where it happened (`url`) and which training step it is about (`step`).
2. `Events` hands each one to the log and then to every callback, one event at a time, in the order of their emission.
   Most come from a background thread: a callback that takes long delays the next save, never the step being trained.
3. A callback that raises is logged, with its traceback, and the save goes on: watching a checkpoint never costs one.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import RLock
from typing import TYPE_CHECKING, ClassVar, Literal

from shardckpt.excerpt import file_size
from shardckpt.options import check_flag

if TYPE_CHECKING:
    from shardckpt.training.progress import ProgressLine
    from shardckpt.writing.save_handle import SaveReport

__all__ = [
    "Callback",
    "Event",
    "Events",
    "FellBack",
    "PreemptionNoticed",
    "Progressed",
    "RestoreFailed",
    "RestoreFinished",
    "RestoreStarted",
    "Retried",
    "SaveCommitted",
    "SaveFailed",
    "SaveSkipped",
    "SaveStaged",
    "SaveStarted",
    "StepDeleted",
]

log = logging.getLogger("shardckpt")
_BETWEEN = 0.1
"""Seconds between two tellings of progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Event:
    """What all events have."""

    level: ClassVar[int] = logging.INFO
    """At which it is logged."""
    url: str
    """The checkpoint it is about; of `PreemptionNoticed` the root of all."""
    step: int | None = None
    """The training step it is about; None outside of a `CheckpointManager`."""

    def __str__(self) -> str:
        """The event as a line of a log."""
        place = self.url if self.step is None else f"{self.url} (step {self.step})"
        return f"{place}: {self.what}"

    @property
    def what(self) -> str:
        """What happened, in words."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStarted(_Event):
    """A save begins: the training loop waits until it is staged."""

    @property
    def what(self) -> str:
        """What happened, in words."""
        return "save begins"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStaged(_Event):
    """What this process saves is copied, and training goes on; storage follows in the background."""

    seconds: float
    """For which the training loop waited."""
    nbytes: int
    """Bytes of tensors that this process writes."""

    @property
    def what(self) -> str:
        """What happened, in words."""
        return f"{file_size(self.nbytes)} copied, training waited {self.seconds:.3f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCommitted(_Event):
    """The checkpoint exists, whole and durable."""

    report: SaveReport
    """How long each part took, and how much was written."""

    @property
    def what(self) -> str:
        """What happened, in words."""
        return f"committed after {self.report.total_s:.2f} s, {file_size(self.report.stored_bytes)} by this process"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed(_Event):
    """The save has failed; no earlier checkpoint is touched. The next `save`, `wait` or `close` raises `error`."""

    level: ClassVar[int] = logging.ERROR
    error: BaseException
    """Why."""

    @property
    def what(self) -> str:
        """What happened, in words."""
        return f"save failed: {type(self.error).__name__}: {self.error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSkipped(_Event):
    """A step that was due is not saved."""

    level: ClassVar[int] = logging.WARNING
    reason: str
    """Why, such as "the save of step 100 is still in flight"."""

    @property
    def what(self) -> str:
        """What happened, in words."""
        return f"save skipped: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDeleted(_Event):
    """A step that nothing keeps was deleted."""

    @property
    def what(self) -> str:
        """What happened, in words."""
        return "deleted"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionNoticed(_Event):
    """This job is about to be stopped; all processes save at the next agreed step."""

    level: ClassVar[int] = logging.WARNING
    source: str
    """What said so: "SIGTERM", a file's path."""

    @property
    def what(self) -> str:
        """What happened, in words."""
        return f"preemption noticed ({self.source})"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreStarted(_Event):
    """A restore begins."""

    @property
    def what(self) -> str:
        """What happened, in words."""
        return "restore begins"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreFinished(_Event):
    """The state is restored."""

    seconds: float
    """That it took."""
    nbytes: int
    """Bytes of tensors in the checkpoint."""

    @property
    def what(self) -> str:
        """What happened, in words."""
        return f"restored in {self.seconds:.2f} s, from a checkpoint of {file_size(self.nbytes)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreFailed(_Event):
    """The restore has failed, and raises `error`; with `fallback`, `FellBack` follows and an earlier step is tried."""

    level: ClassVar[int] = logging.ERROR
    error: BaseException
    """Why."""

    @property
    def what(self) -> str:
        """What happened, in words."""
        return f"restore failed: {type(self.error).__name__}: {self.error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FellBack(_Event):
    """This step could not be restored, so an earlier one is tried."""

    level: ClassVar[int] = logging.WARNING
    reason: str
    """What is wrong with it."""

    @property
    def what(self) -> str:
        """What happened, in words."""
        return f"cannot be restored, an earlier step is tried: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Retried(_Event):
    """Requests to an object store did not succeed at once, in a save or restore that has ended or at the same time elsewhere."""

    level: ClassVar[int] = logging.WARNING
    times: int
    """Requests that were made again."""

    @property
    def what(self) -> str:
        """What happened, in words."""
        return f"{self.times} requests to the storage had to be made again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed(_Event):
    """A save or restore has come this far; told a few times per second at most."""

    level: ClassVar[int] = logging.DEBUG
    doing: Literal["save", "restore"]
    """Which of them."""
    done: int
    """Bytes of tensors that this process has written, or read."""
    total: int
    """Of how many."""

    @property
    def what(self) -> str:
        """What happened, in words."""
        return f"{self.doing}: {file_size(self.done)} of {file_size(self.total)}"


Event = (
    SaveStarted
    | SaveStaged
    | SaveCommitted
    | SaveFailed
    | SaveSkipped
    | StepDeleted
    | PreemptionNoticed
    | RestoreStarted
    | RestoreFinished
    | RestoreFailed
    | FellBack
    | Retried
    | Progressed
)
"""Everything that a callback is called with."""
Callback = Callable[[Event], object]
"""Who listens; what it returns is not looked at."""


class Events:
    """Hands events to the log and to callbacks. Safe to use from several threads."""

    def __init__(self, *callbacks: Callback | None) -> None:
        """Callbacks are called in this order; None is none."""
        self._callbacks = [callback for callback in callbacks if callback is not None]
        self._retries = _storage_retries()
        self._one_at_a_time = RLock()  # a callback may do what is an event itself

    def emit(self, event: Event) -> None:
        """Tell everybody; never raises what a callback raises."""
        if isinstance(event, SaveCommitted | SaveFailed | RestoreFinished | RestoreFailed):
            self._tell_of_retries(event)
        log.log(event.level, "%s", event)
        with self._one_at_a_time:
            for callback in self._callbacks:
                try:
                    callback(event)
                except Exception:
                    log.exception("%s: the callback %r failed on it; the save goes on.", event, callback)

    def _tell_of_retries(self, event: Event) -> None:
        with self._one_at_a_time:
            before, self._retries = self._retries, _storage_retries()
            if self._retries > before:
                self.emit(Retried(url=event.url, step=event.step, times=self._retries - before))

    def progress(self, doing: Literal["save", "restore"], url: str, step: int | None = None) -> Callable[[int, int], None]:
        """A function of bytes done, and in all, that tells of them: the first and the last time it is called, and some in between."""
        due = 0.0

        def tell(done: int, total: int) -> None:
            nonlocal due
            now = time.monotonic()
            if now >= due or (done == total and due < math.inf):
                due = math.inf if done == total else now + _BETWEEN
                self.emit(Progressed(url=url, step=step, doing=doing, done=done, total=total))

        return tell


def _storage_retries() -> int:
    """Requests that were made again so far. Where TensorStore has not been imported yet there were none."""
    if "tensorstore" not in sys.modules:
        return 0
    from shardckpt.io.buckets.retries import storage_retries

    return storage_retries()


def progress_line(progress: bool | None, *, alone: bool) -> ProgressLine | None:
    """What shows progress on the terminal, or None.

    Args:
        progress: whether to show it; None: on a terminal, by one process.
        alone: whether this process is that one.

    Raises:
        OptionError: `progress` is none of these.
    """
    if progress is not None:
        check_flag(progress, "progress")
    if not (alone and sys.stderr.isatty() if progress is None else progress):
        return None
    from shardckpt.training.progress import ProgressLine

    return ProgressLine()
