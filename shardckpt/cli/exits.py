"""Error reports (one line for people or one JSON document) and exit statuses.

Statuses are part of the interface (docs/cli.md): 0 and 1 are answers (all is well; checkpoints
differ or are damaged); from 2 on there is no answer.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import TYPE_CHECKING, Any

import typer

from shardckpt.cli.options import as_flag
from shardckpt.cli.project import project_url
from shardckpt.cli.screen import OutputError, ReaderGoneError, write_json
from shardckpt.errors import ShardckptError
from shardckpt.text import visible

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STATUS = {
    "usage": 2,
    "url": 2,
    "option": 2,
    "sharding": 2,
    "not-found": 3,
    "uncommitted": 3,
    "replaced": 3,
    "corrupt": 4,
    "missing-data": 4,
    "format": 4,
    "version": 4,
    "mismatch": 5,
    "names": 5,
    "structure": 5,
    "shape": 5,
    "dtype": 5,
    "storage": 6,
    "exists": 7,
    "commit": 7,
    "other-job": 7,
    "coordination": 7,
    "memory": 8,
    "leaf": 9,
    "unsupported-dtype": 9,
    "extra": 10,
    "error": 70,
    "internal": 70,
}
"""Exit status of each error code: the codes of `shardckpt.errors`, and two codes of the command
line (usage, internal)."""

INTERRUPTED = 130
READER_GONE = 141
"""The shell's status for a command that a closed pipe ended: 128 + SIGPIPE."""

_UsageError: Any = typer.BadParameter.__mro__[1]
"""click's class, or typer's own: newer typers include click."""


def run(action: Callable[[], int | None], *, as_json: bool) -> int:
    """Run a command, and report its errors.

    Args:
        action: The command; returns its exit status, None for 0.
        as_json: Whether to write errors as JSON to standard output.

    Returns:
        The exit status.
    """
    try:
        status = _answer(action, as_json=as_json)
        sys.stdout.flush()
    except (ReaderGoneError, BrokenPipeError):
        _forget_stdout()
        return READER_GONE
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except (OutputError, OSError) as e:
        _forget_stdout()
        return _report(
            "storage",
            f"cannot write to standard output: {getattr(e, 'strerror', None) or e}",
            as_json=False,
        )
    return status


def _answer(action: Callable[[], int | None], *, as_json: bool) -> int:
    try:
        return action() or 0
    except (ReaderGoneError, OutputError, BrokenPipeError, typer.Abort):
        raise
    except ShardckptError as e:
        return _report(e.code, e.message.worded(as_flag), as_json=as_json)
    except _UsageError as e:
        return _report("usage", e.format_message(), as_json=as_json)
    except Exception as e:  # noqa: BLE001  (a bug of shardckpt: its report needs the traceback)
        for line in traceback.format_exc().splitlines():
            print(visible(line), file=sys.stderr)
        what = f"{type(e).__name__}: {e}" if str(e) else type(e).__name__
        where = f" at {issues}" if (issues := project_url("Issues")) else ""
        return _report(
            "internal",
            f"{what}. This is a bug in shardckpt; please report it{where}, with the lines above.",
            as_json=as_json,
        )


@contextlib.contextmanager
def going_on_later(how: str) -> Iterator[None]:
    """Print to standard error, when Ctrl-C ends the block, `how` the work can be continued."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"interrupted: {how}", file=sys.stderr)
        raise


def _report(code: str, message: str, *, as_json: bool) -> int:
    """Report an error, and return its exit status."""
    if as_json:
        write_json({"error": {"code": code, "message": message}})
    else:
        print(f"error: {visible(message)}", file=sys.stderr)
    return STATUS.get(code, STATUS["error"])


def _forget_stdout() -> None:
    """Redirect standard output to the null device.

    Buffered text then causes no error when Python exits.
    """
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
