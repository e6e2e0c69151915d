"""Work that a service does in the background, on a thread of its own."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from shardckpt.errors import ShardckptError

if TYPE_CHECKING:
    from logging import Logger

_END_SECONDS = 10.0


class BackgroundWork(ABC):
    """A daemon thread that looks at something again and again, from `start` to `stop`."""

    def __init__(
        self, name: str, log: Logger, failed: str, *, first: float = 0.0, again: float
    ) -> None:
        """Nothing runs before `start`.

        Args:
            name: name of the thread.
            log: gets errors.
            failed: what is logged about a bug.
            first: seconds before the first look.
            again: seconds after a look that failed.
        """
        self._log, self._failed, self._first, self._again = log, failed, first, again
        self._stopped, self._wake = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"shardckpt-{name}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End, after at most some seconds.

        The next start of the service does the remaining work.
        """
        self._stopped.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_END_SECONDS)

    @abstractmethod
    def look(self) -> float:
        """Look once, and return the seconds until the next look.

        The next look comes sooner when `_wake` is set.
        """

    def _run(self) -> None:
        pause = self._first
        while not self._stopped.is_set():
            if self._wake.wait(pause) and self._stopped.is_set():
                return
            self._wake.clear()
            pause = self._again
            try:
                pause = self.look()
            except ShardckptError as e:
                self._log.warning("%s", e)
            except Exception:  # noqa: BLE001  (a bug must not end the thread)
                self._log.exception(self._failed)
