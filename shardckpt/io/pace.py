"""When may the next request begin, if a process is to begin no more than so many per second?

Requests begin at least 1 / rate seconds apart, however long none was made before: what is not used is not saved up.
(TensorStore's own rate limiter saves up 1,000 seconds' worth, and lets all of it go when a save begins.)
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Pace"]


class Pace:
    """Tells callers to wait. Safe to use from several threads; they are served in the order in which they come."""

    def __init__(self, rate: float, *, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep) -> None:
        """Keep to `rate`, beginnings per second."""
        self._apart = 1 / rate
        self._next = clock()
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Return when the caller may begin."""
        with self._lock:
            now = self._clock()
            mine = max(now, self._next)
            self._next = mine + self._apart
        if mine > now:
            self._sleep(mine - now)
