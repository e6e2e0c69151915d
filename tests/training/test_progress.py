"""The line on a terminal."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import numpy as np
import pytest
from rich.console import Console

import shardckpt
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
from shardckpt.training.progress import ProgressLine

AT = {"url": "run/100", "step": 100}
SAVES_AND_SHOWS = """
import sys, numpy as np
from shardckpt.training.events import *
from shardckpt.training.progress import ProgressLine
line = ProgressLine()
line(SaveStarted(url="run/100", step=100))
line(SaveStaged(url="run/100", step=100, seconds=0.1, nbytes=1000))
line(Progressed(url="run/100", step=100, doing="save", done=500, total=1000))
line(SaveFailed(url="run/100", step=100, error=OSError("x")))
"""


class Terminal:
    """A line, drawn into memory."""

    def __init__(self):
        self.file = io.StringIO()
        self.line = ProgressLine(
            Console(file=self.file, force_terminal=True, width=100, legacy_windows=False)
        )

    def drawn(self):
        """Text drawn since the last call; the line is drawn now, not when the clock says."""
        if self.line._progress is not None:
            self.line._progress.refresh()
        text = self.file.getvalue()
        self.file.seek(0)
        self.file.truncate()
        return text


@pytest.fixture
def terminal():
    made = Terminal()
    yield made
    made.line.close()


def test_a_save_is_a_line_with_its_step_bytes_and_rate_until_it_is_over(terminal):
    terminal.line(SaveStarted(**AT))
    assert "saving step 100" in terminal.drawn()
    terminal.line(SaveStaged(**AT, seconds=0.1, nbytes=2 << 20))
    begun = terminal.drawn()
    assert "2 MiB" in begun
    assert "of 2 MiB" not in begun  # nothing is done yet: no bar that stands at zero
    assert "?" not in begun.replace("\x1b[?25l", "")
    terminal.line(Progressed(**AT, doing="save", done=1 << 19, total=2 << 20))
    assert "512 KiB of 2 MiB" in terminal.drawn()
    terminal.line(SaveFailed(**AT, error=OSError("disk full")))
    terminal.drawn()
    assert terminal.line._progress is None
    assert "saving" not in terminal.drawn()


def test_a_save_that_is_committed_leaves_no_line_behind(terminal, tmp_path):
    report = shardckpt.save_async(tmp_path / "c", {"w": np.ones(3)}).wait()
    terminal.line(SaveStarted(**AT))
    terminal.line(SaveCommitted(**AT, report=report))
    assert terminal.line._progress is None


def test_a_restore_is_a_line_too(terminal):
    terminal.line(RestoreStarted(url="gs://bucket/run/7"))
    terminal.line(Progressed(url="gs://bucket/run/7", doing="restore", done=1 << 10, total=4 << 10))
    drawn = terminal.drawn()
    assert "restoring 7" in drawn
    assert "1 KiB of 4 KiB" in drawn
    terminal.line(RestoreFinished(url="gs://bucket/run/7", seconds=1, nbytes=4_000))
    assert terminal.line._progress is None


def test_a_restore_that_fails_leaves_no_line_behind(terminal):
    terminal.line(RestoreStarted(**AT))
    terminal.line(RestoreFailed(**AT, error=OSError("damaged")))
    assert terminal.line._progress is None


def test_two_things_at_once_are_two_lines(terminal):
    terminal.line(SaveStarted(url="run/1", step=1))
    terminal.line(SaveStarted(url="run/2", step=2))
    drawn = terminal.drawn()
    assert "saving step 1 " in drawn
    assert "saving step 2 " in drawn
    terminal.line(SaveFailed(url="run/1", step=1, error=OSError()))
    drawn = terminal.drawn().splitlines()[-1]
    assert "saving step 2 " in drawn


def test_progress_of_what_never_began_is_not_shown(terminal):
    terminal.line(Progressed(**AT, doing="save", done=1, total=2))
    terminal.line(SaveFailed(**AT, error=OSError()))
    assert terminal.drawn() == ""


def test_a_file_or_a_pipe_is_no_terminal_and_nothing_is_written_there():
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in {"FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"}
    }
    done = subprocess.run(
        [sys.executable, "-c", SAVES_AND_SHOWS],
        env=env,
        capture_output=True,
        timeout=200,
        check=True,
    )
    assert (done.stdout, done.stderr) == (b"", b"")


def test_on_a_real_terminal_the_line_is_on_standard_error():
    ours, theirs = os.openpty()
    try:
        env = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
        done = subprocess.run(
            [sys.executable, "-c", SAVES_AND_SHOWS],
            env=env,
            stdout=subprocess.PIPE,
            stderr=theirs,
            timeout=200,
            check=True,
        )
        drawn = os.read(ours, 1 << 16).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert "saving step 100" in drawn
    assert done.stdout == b""
