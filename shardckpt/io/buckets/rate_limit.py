"""A rate limiter for requests that several processes share.

1. Requests begin at least 1 / rate seconds apart, however long none was made before: unused
   capacity is not accumulated. (TensorStore's own rate limiter accumulates 1,000 seconds' worth,
   and releases all of it when a save begins.)
2. If several processes start at the same moment, as all hosts of a save do, each has a share of the
   rate and time slots of its own: process i of n begins requests at i / n of each interval, by the
   system clock. So their first requests are spread like all others, without communication; with
   clocks that differ they are spread too.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class RequestShare:
    """One of several processes that use one bucket at the same time."""

    process: int
    processes: int

    def __post_init__(self) -> None:
        """Refuse a process number out of range."""
        assert 0 <= self.process < self.processes, f"process {self.process} of {self.processes}"


ALONE = RequestShare(0, 1)


class RateLimiter:
    """A rate limiter that makes callers wait.

    Safe to use from several threads; they are served in the order of their calls.
    """

    def __init__(
        self,
        rate: float,
        share: RequestShare = ALONE,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Keep to a share of `rate`, the requests per second of all processes together."""
        self._apart = share.processes / rate
        self._next = clock()
        # The system clock is read only once, so setting it later blocks no request.
        first = self._apart * share.process / share.processes + clock() - wall()
        self._first = None if share == ALONE else first % self._apart
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Return when the caller may begin its request."""
        with self._lock:
            now = self._clock()
            mine = max(now, self._next)
            self._next = mine + self._apart
            if self._first is not None:
                mine = self._first + math.ceil((mine - self._first) / self._apart) * self._apart
                # Half an interval before the next slot, safe against rounding.
                self._next = mine + self._apart / 2
        if mine > now:
            self._sleep(mine - now)
