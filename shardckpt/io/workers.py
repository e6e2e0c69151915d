"""Threads that several callers in turn, or at a time, have their tasks done by.

Whoever is interrupted meanwhile, at whatever instant, must not leave a thread at work: it may be writing into memory that is the
caller's. So nothing is known from what was handed to the threads, which an interrupt may keep from the caller, but from what they say
of themselves: each is noted before it takes its first task, and until it has done its last. Once there is no task left, and nobody
is noted, nobody will be.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Workers"]

T = TypeVar("T")


class Workers:
    """Some threads, which begin when there is work for them, and are kept with what is local to them."""

    def __init__(self, threads: int, name: str) -> None:
        """So many at the most; `name` is how theirs begin."""
        self.local = threading.local()
        """What is local to each of them, and to who calls."""
        self._most = threads
        self._pool = ThreadPoolExecutor(threads, name)

    def do(self, work: Callable[[T], object], tasks: Iterable[T]) -> None:
        """Do `work` on each of the tasks; the first error stops the rest, and is raised.

        A single task is done by the calling thread, and so are all where there is to be one thread only. When this returns or raises, no
        thread is at work on any of them.
        """
        rest = deque(tasks)
        if len(rest) == 1 or self._most == 1:
            for task in rest:
                work(task)
            return
        at_work: list[None] = []
        left: SimpleQueue[None] = SimpleQueue()
        failures: list[BaseException] = []

        def work_off() -> None:
            at_work.append(None)
            try:
                while (task := _taken(rest)) is not None:
                    work(task[0])
            except BaseException as e:  # noqa: BLE001  (raised below, on the thread that called)
                failures.append(e)
                rest.clear()
            finally:
                at_work.pop()
                left.put(None)

        try:
            for _ in range(min(self._most, len(rest))):
                self._pool.submit(work_off)
            while rest or at_work:
                left.get()
        finally:
            rest.clear()
            while at_work:
                left.get()
        try:
            if failures:
                raise failures[0]
        finally:
            failures.clear()  # an error that is kept would keep itself, and what was read into


def _taken(rest: deque[T]) -> tuple[T] | None:
    """Take the first, if there is one; from several threads."""
    with suppress(IndexError):
        return (rest.popleft(),)
    return None
