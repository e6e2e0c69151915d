"""Standard streams, which need not be there.

Daemons have none, and log collectors put objects of their own in the streams' place.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress

_STREAMS = ("stdin", "stdout", "stderr")


def is_open(stream: object) -> bool:
    """Whether a stream is there and not closed."""
    return stream is not None and not getattr(stream, "closed", False)


def is_terminal(stream: object) -> bool:
    """Whether a stream is there and is a terminal."""
    asked = getattr(stream, "isatty", None)
    try:
        return asked is not None and bool(asked())
    except (ValueError, OSError):  # it is closed
        return False


class _GuardedLogger(logging.Logger):
    """A logger whose messages raise nothing while standard error is closed.

    A closed stream must not end a save.
    """

    def handle(self, record: logging.LogRecord) -> None:
        """Pass a record to the handlers, which report their own failures on standard error."""
        with suppress(*(() if is_open(sys.stderr) else (ValueError,))):
            super().handle(record)


logging.getLogger("shardckpt").__class__ = _GuardedLogger


def replace_missing_streams() -> None:
    """Replace missing or closed standard streams by the null device, as in `shardckpt ls >&-`.

    Otherwise the next file that is opened would get a standard stream's number, and libraries would
    print into it.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) < len(_STREAMS):
        os.set_inheritable(fd, True)
    os.close(fd)
    for number, name in enumerate(_STREAMS):
        if not is_open(getattr(sys, name)):
            setattr(
                sys,
                name,
                open(number, "w" if number else "r", encoding="utf-8", closefd=False),  # noqa: SIM115
            )


def in_notebook() -> bool:
    """Whether this is the process of a notebook, where output is shown below cells."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None
