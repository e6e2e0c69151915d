"""Is the next batch read while one is being placed, or after it?

The first batch is read alone, and tells. Where its reading waited for the storage, the next one is read while one is being
placed. Where it kept the processors busy, and placing copies on the host, the two at once keep each other from the
interpreter and from the processors: they take longer than in turn (docs/decisions/0031).

Whoever is interrupted must not leave the thread reading: it may be writing into memory that is the caller's. An interrupt may keep
from the caller, and from the pool, that a thread has begun, so it is known from the thread itself, as in `io.workers`.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from concurrent.futures import Future

__all__ = ["clocks", "read_ahead"]

Batch = TypeVar("Batch")
Result = TypeVar("Result")


def clocks() -> tuple[float, float]:
    """Seconds that have passed, and seconds of processor time that this process, with all its threads, has used."""
    return time.perf_counter(), time.process_time()


def read_ahead(
    some: Sequence[Batch], read: Callable[[Batch], Result], *, copies: bool, now: Callable[[], tuple[float, float]] = clocks
) -> Generator[tuple[Batch, Result], None, None]:
    """Each batch, when it is read; at most one more is read before the next is asked for.

    Close it if it is not used up: nothing is read any more when that returns.

    Args:
        some: the batches.
        read: reads one; called on one thread, which is not the caller's.
        copies: whether what the caller does between batches is to copy on the host.
        now: tells the time, as `clocks` does.
    """
    to_read: deque[Batch] = deque()
    at_work: list[None] = []
    left: SimpleQueue[None] = SimpleQueue()

    def read_next() -> Result:
        at_work.append(None)
        try:
            return read(to_read.popleft())  # an error where it was given up meanwhile, of which nobody hears
        finally:
            at_work.pop()
            left.put(None)

    def begin(number: int) -> Future[Result]:
        to_read.append(some[number])
        return ahead.submit(read_next)

    with ThreadPoolExecutor(1, "shardckpt-ahead") as ahead:
        try:
            began, used = now()
            coming = begin(0) if some else None
            at_once = True
            for number, batch in enumerate(some, 1):
                assert coming is not None
                result = coming.result()
                if number == 1 and copies:
                    ended, used_then = now()
                    at_once = used_then - used < ended - began  # one core that is busy throughout uses as much as passes
                if at_once and number < len(some):
                    coming = begin(number)
                yield batch, result
                if not at_once and number < len(some):
                    coming = begin(number)
        finally:
            to_read.clear()
            while at_work:
                left.get()
