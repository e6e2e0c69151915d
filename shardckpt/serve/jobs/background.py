"""Work that a service does in the background, on a thread of its own."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

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
