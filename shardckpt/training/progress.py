"""A line on the terminal as long as a save or restore goes on: bytes, rate, time that remains.

    saving step 100 ━━━━━━━━━╸━━━━━━━  1.6/2.7 GiB 1.1 GiB/s 0:00:01

It is drawn on standard error, and is gone when the save is over. Where that is no terminal nothing is ever written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from shardckpt.excerpt import file_size
from shardckpt.training.events import (
    Progressed,
    RestoreFailed,
    RestoreFinished,
    RestoreStarted,
    SaveCommitted,
    SaveFailed,
    SaveStaged,
    SaveStarted,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Task, TaskID

    from shardckpt.training.events import Event

__all__ = ["ProgressLine", "transfer_columns"]


class _Rate(ProgressColumn):
    """Bytes per second, in the units of every other size (rich's own column counts in thousands)."""

    def render(self, task: Task) -> Text:
        """Draw it."""
        speed = task.finished_speed or task.speed
        return Text("?" if speed is None else f"{file_size(round(speed))}/s", style="progress.data.speed")


def transfer_columns() -> tuple[ProgressColumn, ...]:
    """Columns of a transfer of bytes: done and in all, rate, and the time that remains."""
    return DownloadColumn(binary_units=True), _Rate(), TimeRemainingColumn()


class ProgressLine:
    """Draws the line: a callback of events. One event comes at a time."""

    def __init__(self, console: Console | None = None) -> None:
        """Nothing is drawn yet.

        Args:
            console: where to; by default standard error, as it is now.
        """
        from rich.console import Console

        self._console = Console(stderr=True) if console is None else console
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        """What goes on now, by url: mostly one thing."""

    def __call__(self, event: Event) -> None:
        """Draw what has changed."""
        if not self._console.is_terminal:
            return
        match event:
            case SaveStarted() | RestoreStarted():
                self._begin(event)
            case SaveStaged(nbytes=total):
                self._update(event.url, total=total)
            case Progressed(done=done, total=total):
                self._update(event.url, completed=done, total=total)
            case SaveCommitted() | SaveFailed() | RestoreFinished() | RestoreFailed():
                self._end(event.url)
            case _:
                pass

    def close(self) -> None:
        """Take away what is still drawn."""
        for url in [*self._tasks]:
            self._end(url)

    def _begin(self, event: SaveStarted | RestoreStarted) -> None:
        self._end(event.url)
        if self._progress is None:
            self._progress = Progress(
                TextColumn("{task.description}"), BarColumn(), *transfer_columns(), console=self._console, transient=True
            )
            self._progress.start()
        doing = "saving" if isinstance(event, SaveStarted) else "restoring"
        what = event.url.rsplit("/", 1)[-1] if event.step is None else f"step {event.step}"
        self._tasks[event.url] = self._progress.add_task(f"{doing} {what}", total=None)

    def _update(self, url: str, **changes: int) -> None:
        if self._progress is not None and url in self._tasks:
            self._progress.update(self._tasks[url], total=changes["total"], completed=changes.get("completed"))

    def _end(self, url: str) -> None:
        task = self._tasks.pop(url, None)
        if self._progress is not None and task is not None:
            self._progress.remove_task(task)
            if not self._tasks:
                self._progress.stop()
                self._progress = None
