"""Calls on other threads, which Ctrl-C does not disturb while one waits for them.

A future guards itself by a condition, which is Python code. Ctrl-C there may leave it locked: the
thread that sets the result then waits for good, and so does whoever joins it. Or RuntimeError
("release unlocked lock") is raised in place of KeyboardInterrupt.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import ThreadPoolExecutor

R = TypeVar("R")


class PoolCall(Generic[R]):
    """A call on a thread of a pool, for whose end one waits in C code alone."""

    def __init__(self, pool: ThreadPoolExecutor, work: Callable[..., R], *args: object) -> None:
        """Begin to call `work` once a thread is free."""
        self._results: list[R] = []
        self._errors: list[BaseException] = []
        self._under_way = threading.Lock()
        self._under_way.acquire()
        pool.submit(self._run, [(self, partial(work, *args))])

    @staticmethod
    def _run(calls: list[tuple[PoolCall[R], Callable[[], R]]]) -> None:
        self, work = calls.pop()  # a reference cycle would keep an error, and its frames' memory
        try:
            self._results.append(work())
        except BaseException as e:  # noqa: BLE001  (raised by `result`)
            self._errors.append(e)
        finally:
            self._under_way.release()
            del self

    def done(self) -> bool:
        """Whether the call has ended."""
        return not self._under_way.locked()

    def result(self) -> R:
        """Wait for the end, and return or raise what it did; not if the pool cancelled it."""
        with self._under_way:
            pass
        try:
            if self._errors:
                raise self._errors[0]
            return self._results[0]
        finally:
            del self  # as above
