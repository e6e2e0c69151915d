"""Work that a service does in the background, on a thread of its own."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from shardckpt.errors import ShardckptError

if TYPE_CHECKING:
    from collections.abc import Callable
    from logging import Logger

_END_SECONDS = 10.0


class BackgroundWork(ABC):
    """A daemon thread that runs from `start` to `stop`."""

    def __init__(self, name: str) -> None:
        """Nothing runs before `start`; `name` is that of the thread."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"shardckpt-{name}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End, after at most some seconds; what is left is done when the service is started again."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(_END_SECONDS)

    @abstractmethod
    def _run(self) -> None:
        """Work until `_stopped` is set."""

    def _repeat(self, look: Callable[[], None], seconds: float, log: Logger, failed: str) -> None:
        """Call `look` at intervals until `_stopped` is set; errors are logged, a bug with the words `failed`."""
        while not self._stopped.wait(seconds):
            try:
                look()
            except ShardckptError as e:
                log.warning("%s", e)
            except Exception:  # a bug must not end the thread
                log.exception(failed)
