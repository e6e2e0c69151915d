"""The output of commands: text on a terminal, or JSON for programs.

rich detects the terminal: its width, its colours, NO_COLOR and FORCE_COLOR. Lines are not written
with rich's own printing, which would lay out and wrap each of them again and take minutes for a
checkpoint of 100,000 tensors. rich is imported when text is shown: help, completion and JSON do not
need it.
"""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from shardckpt.io.streams import is_terminal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from rich.progress import ProgressColumn
    from rich.style import Style

_ASCII = str.maketrans(
    {
        **dict.fromkeys("┌┬┐├┼┤└┴┘", "+"),
        **dict.fromkeys("─–", "-"),
        "│": "|",
        "×": "x",
        "…": "...",
        "→": "->",
        "⋮": ":",
        "⋯": "...",
        "░": ".",
        "▒": "o",
        "▓": "O",
        "█": "#",
        **dict(zip("▁▂▃▄▅▆▇", "_.-:=+*", strict=True)),
        **dict.fromkeys("▏▎▍▌", ""),
        **dict.fromkeys("▋▊▉", "#"),
    }
)
"""ASCII replacements of our own signs, for terminals without Unicode; all other characters are
escaped there."""

_COLORS = {"standard": "STANDARD", "256": "EIGHT_BIT", "truecolor": "TRUECOLOR"}
"""The name of rich's ColorSystem for each colour system of a Console."""

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
"""The flag of commands that print JSON instead of text."""


class ReaderGoneError(Exception):
    """The reader of our output has closed it."""


class OutputError(Exception):
    """Our output cannot be written: a disk is full, for example."""


class Cell(NamedTuple):
    """A text in one style."""

    text: str
    """Printable text on one line."""
    style: str = ""
    """A rich style: "bold", "dim", "green"; empty for plain."""
    right: bool = False
    """Whether the text is aligned to the right of its column."""


class Screen:
    """Standard output with its width and colours."""

    def __init__(self) -> None:
        from rich.color import ColorSystem
        from rich.console import Console

        console = Console()
        self.width = console.width
        """Width in columns; 80 if unknown."""
        colors = (
            _COLORS.get(console.color_system or "")
            if console.is_terminal and not console.no_color
            else None
        )
        self._colors = None if colors is None else ColorSystem[colors]
        self._ascii = not console.encoding.lower().startswith("utf")

    def paint(self, text: str, style: str) -> str:
        """The text in a style, if there are colours."""
        return (
            _style(style).render(text, color_system=self._colors)
            if style and self._colors is not None
            else text
        )

    def show(self, lines: Iterable[str]) -> None:
        """Write painted lines, and flush."""
        for line in lines:
            write_text(
                (
                    line.translate(_ASCII).encode("ascii", "backslashreplace").decode()
                    if self._ascii
                    else line
                )
                + "\n"
            )
        write_text("", flush=True)

    def rows(
        self, rows: Iterable[Sequence[Cell]], widths: Sequence[int], gap: int = 2
    ) -> Iterator[str]:
        """Rows of cells in columns of these widths.

        The cells after a too long one start on a new line.
        """
        from rich.cells import cell_len

        for row in rows:
            line: list[str] = []
            at = begin = 0
            for cell, width in zip(row, widths, strict=True):
                if cell.text:
                    if at > begin:
                        yield "".join(line)
                        line, at = [], 0
                    length = cell_len(cell.text)
                    left = begin + (max(0, width - length) if cell.right else 0)
                    line.append(" " * (left - at) + self.paint(cell.text, cell.style))
                    at = left + length
                begin += width + gap
            yield "".join(line)

    def table(self, rows: Sequence[Sequence[Cell]], gap: int = 2, margin: int = 0) -> Iterator[str]:
        """Rows of cells in columns as wide as their widest cell, after a margin.

        Only the first column may be narrower.
        """
        widths = column_widths(rows)
        others = margin + sum(widths[1:]) + gap * len(widths[1:])
        widths[0] = min(widths[0], max(self.width - others, self.width // 3))
        yield from (" " * margin + line for line in self.rows(rows, widths, gap))


def column_widths(rows: Sequence[Sequence[Cell]]) -> list[int]:
    """The width of every column. A cell without cells after it in its row may be wider."""
    from rich.cells import cell_len

    widths = [0] * len(rows[0])
    for row in rows:
        end = max((i for i, cell in enumerate(row) if cell.text), default=-1)
        for i, cell in enumerate(row):
            if i < end or cell.right or end == len(row) - 1:
                widths[i] = max(widths[i], cell_len(cell.text))
    return widths


def pad(text: str, width: int) -> str:
    """The text centred in `width` columns."""
    from rich.cells import cell_len

    left = max(0, width - cell_len(text)) // 2
    return " " * left + text + " " * max(0, width - cell_len(text) - left)


def write_json(document: dict[str, Any]) -> None:
    """Write the JSON document of a command, in ASCII.

    The document is on one line for a program, and indented on a terminal.
    """
    write_text(
        json.dumps(document, indent=2 if is_terminal(sys.stdout) else None, allow_nan=False) + "\n"
    )


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show a progress bar on standard error during the block.

    None if standard error is not a terminal.

    Yields:
        A function to call with the amount done and the total amount.
    """
    from rich.progress import TaskProgressColumn, TimeRemainingColumn

    with _bar(what, TaskProgressColumn(), TimeRemainingColumn()) as progress:
        yield progress


@contextmanager
def transfer_bar(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show a progress bar for bytes, with the rate, like `progress_bar`."""
    from shardckpt.training.progress import transfer_columns, transfer_state

    with _bar(what, *transfer_columns(), state=transfer_state) as progress:
        yield progress


@contextmanager
def _bar(
    what: str, *columns: ProgressColumn, state: Callable[[int, int], dict[str, Any]] | None = None
) -> Iterator[Callable[[int, int], None] | None]:
    if not is_terminal(sys.stderr):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    shown = TextColumn("{task.description}", markup=False), BarColumn(), *columns
    progress = Progress(*shown, console=Console(stderr=True), transient=True)
    task = progress.add_task(what, total=None)

    def show(done: int, total: int) -> None:
        # Not earlier: while the bar is shown, rich captures text written to standard output.
        progress.start()
        progress.update(
            task, **({"completed": done, "total": total} if state is None else state(done, total))
        )

    try:
        yield show
    finally:
        progress.stop()


@cache
def _style(style: str) -> Style:
    from rich.style import Style

    return Style.parse(style)


def write_text(text: str, *, flush: bool = False) -> None:
    """Write to standard output.

    Raises:
        ReaderGoneError: its reader has closed it.
        OutputError: it cannot be written.
    """
    try:
        sys.stdout.write(text)
        if flush:
            sys.stdout.flush()
    except BrokenPipeError as e:
        # Not an OSError: typer would handle it and end with status 1, which has another meaning
        # here.
        raise ReaderGoneError from e
    except OSError as e:
        raise OutputError(str(e.strerror or e)) from e
