"""Waits for other processes: the log message about a long wait, and the advice in errors.

The advice is in the errors of waits that end in vain.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

NOTICE_SECONDS = 30.0
"""Seconds of waiting after which the log names the processes that are missing."""
ALL_MUST_CALL = (
    "All processes of the job must make the same calls of shardckpt; a process that saves or "
    "restores by itself passes coordinator=shardckpt.SingleProcess()."
)
_log = logging.getLogger("shardckpt")


class WaitNotice:
    """The log message of one wait for other processes.

    It appears once, when the wait takes long.
    """

    def __init__(self, where: str = "") -> None:
        """The wait begins now.

        Args:
            where: the place or the step in question; the message begins with it.
        """
        self._prefix = f"{where}: " if where else ""
        self._began = time.monotonic()
        self._due = True

    def is_due(self) -> bool:
        """Whether the message is to appear now; true once."""
        due = self._due and time.monotonic() - self._began >= NOTICE_SECONDS
        self._due = self._due and not due
        return due

    def look(self, missing: Callable[[], str]) -> None:
        """Log the message if it is due; `missing` names the processes."""
        if self.is_due():
            self.write(missing())

    def write(self, missing: str) -> None:
        """Log the message."""
        seconds = time.monotonic() - self._began
        _log.warning(
            "%sthis process has waited %.0f s for %s, and still waits. %s",
            self._prefix,
            seconds,
            missing,
            ALL_MUST_CALL,
        )
