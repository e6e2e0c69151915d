"""A progress line on the terminal during a save or restore: bytes, rate, remaining time.

    saving step 100 ━━━━━━━━━╸━━━━━━━  1.6/2.7 GiB 1.1 GiB/s 0:00:01

It is drawn on standard error, and is removed when the save has ended. If standard error is no terminal, nothing is written.
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


class _Rate(ProgressColumn):
    """Bytes per second, in the same units as all other sizes (rich's own column uses powers of 1000)."""

    def render(self, task: Task) -> Text:
        """Draw the column."""
        speed = task.finished_speed or task.speed
        return Text("?" if speed is None else f"{file_size(round(speed))}/s", style="progress.data.speed")


def transfer_columns() -> tuple[ProgressColumn, ...]:
    """Columns of a byte transfer: bytes done and total, rate, and remaining time."""
    return DownloadColumn(binary_units=True), _Rate(), TimeRemainingColumn()


class ProgressLine:
    """An event callback that draws the progress line. It is called with one event at a time."""

    def __init__(self, console: Console | None = None) -> None:
        """Create a line; nothing is drawn yet.

        Args:
            console: the console to draw on; by default standard error at the time of the call.
        """
        import rich  # noqa: F401  (before a module of it, for other threads that import it)
        from rich.console import Console

        self._console = Console(stderr=True) if console is None else console
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        """Transfers in progress, by url; usually one."""

    def __call__(self, event: Event) -> None:
        """Draw the change."""
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
        """Remove the line."""
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
