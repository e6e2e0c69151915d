"""Events of a run's checkpoints, passed to callbacks, the log and the progress line.

A callback is any function of one event; it distinguishes events by class, as in

    def on_event(event: shardckpt.training.events.Event) -> None:
        match event:
            case SaveCommitted(step=step, report=report):
                writer.add_scalar("checkpoint/stall_s", report.stall_s, step)
            case SaveFailed(step=step, error=error):
                alert(f"step {step} was not saved: {error}")

1. Every event has the checkpoint's location (`url`) and the training step (`step`).
2. `Events` passes each event to the log and then to every callback, one event at a time, in the
   order of emission. Most events come from a background thread, where a slow callback delays the
   next save. Training waits for the callbacks of its own events, such as `SaveStarted` and
   `SaveSkipped`, and for a callback that is running then.
3. An exception in a callback is logged with its traceback, and the save goes on: observing a
   checkpoint never loses one.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import RLock, current_thread
from typing import TYPE_CHECKING, ClassVar, Literal

from shardckpt.io.streams import in_notebook, is_open, is_terminal
from shardckpt.options import check_flag
from shardckpt.runs.announcing import Announcer, server
from shardckpt.text import file_size

if TYPE_CHECKING:
    from shardckpt.training.progress import ProgressLine
    from shardckpt.writing.save import SaveReport

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
"""Seconds between two `Progressed` events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Event:
    """The fields of all events."""

    level: ClassVar[int] = logging.INFO
    """The log level of the event."""
    url: str
    """The checkpoint's url; for `PreemptionNoticed` the root of the run."""
    step: int | None = None
    """The training step; None outside of a `CheckpointManager`."""

    def __str__(self) -> str:
        """The event as a log line."""
        place = self.url if self.step is None else f"{self.url} (step {self.step})"
        return f"{place}: {self.what}"

    @property
    def what(self) -> str:
        """A description of the event for the log."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStarted(_Event):
    """A save begins: the training loop waits until it is staged."""

    @property
    def what(self) -> str:
        """A description of the event for the log."""
        return "save begins"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStaged(_Event):
    """This process has copied its share, and training goes on.

    The writes to storage follow in the background.
    """

    seconds: float
    """Seconds that the training loop waited."""
    nbytes: int
    """Bytes of tensors that this process writes."""

    @property
    def what(self) -> str:
        """A description of the event for the log."""
        return f"{file_size(self.nbytes)} copied, training waited {self.seconds:.3f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCommitted(_Event):
    """The checkpoint exists, complete and durable."""

    report: SaveReport
    """Duration of each phase, and the bytes written."""

    @property
    def what(self) -> str:
        """A description of the event for the log."""
        return (
            f"committed after {self.report.total_s:.2f} s, {file_size(self.report.stored_bytes)} "
            "by this process"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed(_Event):
    """The save has failed; no earlier checkpoint is touched.

    The next `save`, `wait` or `close` raises `error`.
    """

    level: ClassVar[int] = logging.ERROR
    error: BaseException
    """The exception that made the save fail."""

    @property
    def what(self) -> str:
        """A description of the event for the log."""
        return f"save failed: {type(self.error).__name__}: {self.error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSkipped(_Event):
    """A step that was due is not saved."""

    level: ClassVar[int] = logging.WARNING
    reason: str
    """The reason, such as "the save of step 100 is still in flight"."""

    @property
    def what(self) -> str:
        """A description of the event for the log."""
        return f"save skipped: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDeleted(_Event):
    """A step that no rule keeps was deleted."""

    @property
    def what(self) -> str:
        """A description of the event for the log."""
        return "deleted"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionNoticed(_Event):
    """The job is about to be stopped; all processes save at the next agreed step."""

    level: ClassVar[int] = logging.WARNING
    source: str
    """The source of the notice: a signal's name, the path of a file, or a function's name.

    If another process than the first one got it, its number follows: "SIGTERM, process 3".
    """

    @property
    def what(self) -> str:
        """A description of the event for the log."""
        return f"preemption noticed ({self.source})"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreStarted(_Event):
    """A restore begins."""

    @property
    def what(self) -> str:
        """A description of the event for the log."""
        return "restore begins"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreFinished(_Event):
    """The state is restored."""

    seconds: float
    """Wall-clock seconds of the restore."""
    nbytes: int
    """Bytes of tensors in the checkpoint."""

    @property
    def what(self) -> str:
        """A description of the event for the log."""
        return f"restored in {self.seconds:.2f} s, from a checkpoint of {file_size(self.nbytes)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreFailed(_Event):
    """The restore has failed, and raises `error`.

    With `fallback`, `FellBack` follows and an earlier step is tried.
    """

    level: ClassVar[int] = logging.ERROR
    error: BaseException
    """The exception that made the restore fail."""

    @property
    def what(self) -> str:
        """A description of the event for the log."""
        return f"restore failed: {type(self.error).__name__}: {self.error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FellBack(_Event):
    """This step could not be restored, so an earlier one is tried."""

    level: ClassVar[int] = logging.WARNING
    reason: str
    """Description of the damage."""

    @property
    def what(self) -> str:
        """A description of the event for the log."""
        return f"cannot be restored, an earlier step is tried: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Retried(_Event):
    """Requests to an object store were retried.

    They may belong to another save or restore that ran at the same time.
    """

    level: ClassVar[int] = logging.WARNING
    times: int
    """Number of retried requests."""

    @property
    def what(self) -> str:
        """A description of the event for the log."""
        return f"{self.times} requests to the storage were retried"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed(_Event):
    """Progress of a save or restore; emitted a few times per second at most."""

    level: ClassVar[int] = logging.DEBUG
    doing: Literal["save", "restore"]
    """Whether a save or a restore makes the progress."""
    done: int
    """Tensor bytes that this process has written or read so far."""
    total: int
    """Tensor bytes that this process writes or reads in all."""

    @property
    def what(self) -> str:
        """A description of the event for the log."""
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
"""Every kind of event that a callback receives."""
Callback = Callable[[Event], object]
"""A function that receives events; its return value is ignored."""


def announcer() -> Callback | None:
    """A callback that announces committed steps to the service.

    None: the environment names no service.
    """
    service = server()
    if service is None:
        return None
    announcing = Announcer(service)
    return lambda event: (
        announcing.announce(event.url) if isinstance(event, SaveCommitted) else None
    )


class Events:
    """Passes events to the log and to callbacks. Safe to use from several threads."""

    def __init__(self, *callbacks: Callback | None) -> None:
        """Set the callbacks, in the order in which they are called; None entries are dropped."""
        self._callbacks = [callback for callback in callbacks if callback is not None]
        self._retries = _storage_retries()
        self._one_at_a_time = RLock()  # reentrant: a callback may cause another event

    def emit(self, event: Event) -> None:
        """Pass an event to the log and all callbacks; never raises an exception of a callback.

        On a thread of the program, such as the one that trains, sys.exit() in a callback still
        raises SystemExit.
        """
        if isinstance(event, SaveCommitted | SaveFailed | RestoreFinished | RestoreFailed):
            self._tell_of_retries(event)
        log.log(event.level, "%s", event)
        with self._one_at_a_time:
            for callback in self._callbacks:
                try:
                    callback(event)
                except BaseException as e:
                    ours = current_thread().name.startswith("shardckpt-")
                    if not isinstance(e, Exception) and not ours:
                        raise
                    log.exception(
                        "%s: the callback %r raised an exception; the save goes on.",
                        event,
                        callback,
                    )

    def _tell_of_retries(self, event: Event) -> None:
        with self._one_at_a_time:
            before, self._retries = self._retries, _storage_retries()
            if self._retries > before:
                self.emit(Retried(url=event.url, step=event.step, times=self._retries - before))

    def progress(
        self, doing: Literal["save", "restore"], url: str, step: int | None = None
    ) -> Callable[[int, int], None]:
        """A function of bytes done and bytes in total that emits `Progressed`.

        It does so at its first and last call, and at some calls in between.
        """
        due = 0.0

        def tell(done: int, total: int) -> None:
            nonlocal due
            now = time.monotonic()
            if now >= due or (done == total and due < math.inf):
                due = math.inf if done == total else now + _BETWEEN
                self.emit(Progressed(url=url, step=step, doing=doing, done=done, total=total))

        return tell


def _storage_retries() -> int:
    """Number of retried requests so far; 0 while TensorStore has not been imported."""
    if "tensorstore" not in sys.modules:
        return 0
    from shardckpt.io.buckets.retry import storage_retries

    return storage_retries()


def progress_line(progress: bool | None, *, alone: bool) -> ProgressLine | None:
    """The terminal's progress line, or None.

    Args:
        progress: whether to show it; None: show it on a terminal or in a notebook, on one process.
        alone: whether this process is the one that may show it.

    Raises:
        OptionError: `progress` is neither a bool nor None.
    """
    if progress is not None:
        check_flag(progress, "progress")
    shown = is_terminal(sys.stderr) or in_notebook()
    if not (alone and shown if progress is None else progress and is_open(sys.stderr)):
        return None
    from shardckpt.training.progress import ProgressLine

    return ProgressLine()
