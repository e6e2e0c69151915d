"""A progress line on the terminal during a save or restore: bytes, rate, remaining time.

    saving step 100 ━━━━━━━━━╸━━━━━━━  1.6 GiB of 2.7 GiB 1.1 GiB/s 0:00:01

It is drawn on standard error, and is removed when the save has ended. If standard error is not a
terminal, nothing is written; in a notebook, a bar is shown below the cell.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from shardckpt.io.streams import in_notebook
from shardckpt.text import file_size
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


class _Amount(ProgressColumn):
    """Bytes done and in all; before the first byte, those in all."""

    def render(self, task: Task) -> Text:
        """Draw the column."""
        size = task.fields.get("size")
        done = "" if task.total is None else f"{file_size(int(task.completed))} of "
        return Text(f"{done}{file_size(size)}" if size else "", style="progress.download")


class _Rate(ProgressColumn):
    """Bytes per second, in the same units as all other sizes.

    The column of rich itself uses powers of 1000.
    """

    def render(self, task: Task) -> Text:
        """Draw the column."""
        speed = task.finished_speed or task.speed
        return Text(
            "" if speed is None else f"{file_size(round(speed))}/s", style="progress.data.speed"
        )


def transfer_columns() -> tuple[ProgressColumn, ...]:
    """Columns of a byte transfer: bytes done and total, rate, and remaining time."""
    return _Amount(), _Rate(), TimeRemainingColumn()


def transfer_state(done: int, total: int) -> dict[str, Any]:
    """The state of a transfer's task.

    Until the first byte the bar only moves: its length is not known to be zero.
    """
    return {"completed": done, "total": total if done else None, "size": total}


class NotebookLine:
    """A progress bar below a cell of a notebook: HTML that is replaced, and removed at the end."""

    def __init__(self) -> None:
        import IPython  # noqa: F401  (before a module of it, for other threads that import it)
        from IPython.display import HTML, display

        self._html: Any = HTML
        self._shown: Any = display(HTML(""), display_id=True)

    def update(self, what: str, done: int, total: int | None) -> None:
        """Draw the bar; without a total, one that only moves."""
        size = (
            ""
            if not total
            else file_size(total)
            if not done
            else f"{file_size(done)} of {file_size(total)}"
        )
        known = f' value="{done}" max="{total}"' if done and total else ""
        if self._shown is not None:
            self._shown.update(
                self._html(f"<div>{escape(what)} <progress{known}></progress> {size}</div>")
            )

    def close(self) -> None:
        """Remove the bar."""
        if self._shown is not None:
            self._shown.update(self._html(""))


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
        self._cells: dict[str, tuple[str, NotebookLine]] = {}
        """The same in a notebook: what is done, and its bar."""
        self._in_notebook = console is None and in_notebook()

    def __call__(self, event: Event) -> None:
        """Draw the change."""
        if not self._console.is_terminal and not self._in_notebook:
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
        for url in [*self._tasks, *self._cells]:
            self._end(url)

    def _begin(self, event: SaveStarted | RestoreStarted) -> None:
        self._end(event.url)
        doing = "saving" if isinstance(event, SaveStarted) else "restoring"
        what = event.url.rsplit("/", 1)[-1] if event.step is None else f"step {event.step}"
        if self._in_notebook:
            self._cells[event.url] = f"{doing} {what}", NotebookLine()
            self._update(event.url, total=0)
            return
        if self._progress is None:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                *transfer_columns(),
                console=self._console,
                transient=True,
            )
            self._progress.start()
        self._tasks[event.url] = self._progress.add_task(f"{doing} {what}", total=None)

    def _update(self, url: str, **changes: int) -> None:
        if url in self._cells:
            what, cell = self._cells[url]
            cell.update(what, changes.get("completed", 0), changes["total"])
        if self._progress is not None and url in self._tasks:
            self._progress.update(
                self._tasks[url], **transfer_state(changes.get("completed", 0), changes["total"])
            )

    def _end(self, url: str) -> None:
        if url in self._cells:
            self._cells.pop(url)[1].close()
        task = self._tasks.pop(url, None)
        if self._progress is not None and task is not None:
            self._progress.remove_task(task)
            if not self._tasks:
                self._progress.stop()
                self._progress = None
