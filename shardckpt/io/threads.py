"""Threads: how many there may be, and how work is handed to them.

`run_on_threads` has items done by new threads and the calling one, `Workers` by threads that are kept, `map_on_threads` returns what
small reads return, and `read_ahead` reads one batch while another one is used.

Ctrl-C, at whatever instant it comes, must not leave a thread at work: the thread may be writing into memory that is the caller's. An
interrupt may keep from the caller that a thread has begun, and one that interrupts `Thread.join` makes it take the thread for ended
(CPython 3.11 and 3.12). So each thread notes that it is at work before it takes its first item, and until it has done its last
(`_AtWork`). Once there is nothing left to take, and no thread is noted, none will be.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
    from concurrent.futures import Future

AT_ONCE = 16
"""Small reads under way at a time: on an object store each takes a round trip."""

T = TypeVar("T")
R = TypeVar("R")


def cores() -> int:
    """Cores that the operating system lets this process run on, at least one; a job may have been given a part of a machine's."""
    return len(os.sched_getaffinity(0))


class _AtWork:
    """The threads that are at work for one caller."""

    def __init__(self) -> None:
        self.over = False
        """Whether there is nothing left to begin with, or nothing may be begun any more. A thread looks after it is noted."""
        self._noted: list[None] = []
        self._left: SimpleQueue[None] = SimpleQueue()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note this thread while it is at work."""
        self._noted.append(None)
        try:
            yield
        finally:
            self._noted.pop()
            self._left.put(None)

    def wait(self) -> None:
        """Wait until all is done."""
        while not self.over or self._noted:
            self._left.get()

    def stop(self) -> None:
        """Wait until what has begun is done, however often Ctrl-C comes meanwhile; nothing else is begun."""
        self.over = True
        while self._noted:
            try:  # noqa: SIM105
                self._left.get()
            except BaseException:  # noqa: BLE001, S110  (called where an error is being raised)
                pass


def _run(
    items: Iterable[T],
    start: Callable[[Callable[[], None]], object],
    works: Sequence[Callable[[T], object]],
    own: Callable[[T], object] | None = None,
) -> None:
    """Have each item taken by whoever is free; raise the first error, which ends all, when nobody is at work any more.

    Args:
        items: drawn one by one.
        start: has a function called on another thread.
        works: what each of the other threads does with an item that it takes; at least one, unless there is `own`.
        own: what the calling thread does with an item; None: it takes none.
    """
    rest, drawing, at_work = iter(items), threading.Lock(), _AtWork()
    failures: list[BaseException] = []

    def draw() -> T | Iterator[T]:
        with drawing:
            return rest if at_work.over else next(rest, rest)

    def work_off(work: Callable[[T], object]) -> None:
        try:
            while (item := draw()) is not rest:
                work(item)  # type: ignore[arg-type]  # it is not the sentinel
            at_work.over = True
        except BaseException as e:  # noqa: BLE001  (raised below, on the thread that called)
            failures.append(e)
            at_work.over = True

    def work_off_noted(work: Callable[[T], object]) -> None:
        with at_work.noted():
            work_off(work)

    try:
        try:
            for work in works:
                start(partial(work_off_noted, work))
            if own is not None:
                work_off(own)
            at_work.wait()
        finally:
            at_work.stop()
        if failures:
            raise failures[0]
    finally:
        failures.clear()  # an error that is kept would keep itself, and its frames with the memory that they hold


def run_on_threads(items: Iterable[T], works: Sequence[Callable[[T], object]], name: str) -> None:
    """Do each item by one of several functions, whichever is free; each has a thread, and the first has the calling one.

    The first error, or Ctrl-C, ends all and is raised here. When this returns or raises, no thread is at work on any item.

    Args:
        items: drawn one by one, by one thread at a time.
        works: the functions; at least one.
        name: of the threads.
    """

    def start(work: Callable[[], None]) -> None:
        threading.Thread(target=work, name=name, daemon=True).start()

    _run(items, start, works[1:], works[0])


class Workers:
    """Some threads, which begin when there is work for them, and are kept with what is local to them; for several callers."""

    def __init__(self, threads: int, name: str) -> None:
        """Use at most so many threads, whose names begin with `name`."""
        self.local = threading.local()
        """What is local to each thread, and to each caller."""
        self._most = threads
        self._pool = ThreadPoolExecutor(threads, name)

    def do(self, work: Callable[[T], object], tasks: Iterable[T]) -> None:
        """Do `work` on each of the tasks; the first error stops the rest, and is raised.

        A single task is done by the calling thread, and so are all where there is to be one thread only. When this returns or raises, no
        thread is at work on any of them.
        """
        listed = list(tasks)
        if len(listed) < 2 or self._most == 1:
            for task in listed:
                work(task)
            return
        _run(listed, self._pool.submit, [work] * min(self._most, len(listed)))


def map_on_threads(read: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Return what `read` returns for each item, in order; several small reads are under way at once.

    The first error is raised when all reads that had begun have ended.
    """
    listed = list(items)
    if len(listed) < 2:
        return [read(item) for item in listed]
    with ThreadPoolExecutor(min(AT_ONCE, len(listed)), "shardckpt-together") as pool:
        return list(pool.map(read, listed))


def clocks() -> tuple[float, float]:
    """Seconds that have passed, and seconds of processor time that this process, with all its threads, has used."""
    return time.perf_counter(), time.process_time()


def read_ahead(
    batches: Sequence[T], read: Callable[[T], R], *, copies: bool, now: Callable[[], tuple[float, float]] = clocks
) -> Generator[tuple[T, R], None, None]:
    """Yield each batch when it is read; at most one more is read before the next is asked for.

    The first batch is read alone. Where its reading waited for the storage, the next one is read while one is being placed. Where it
    kept the processors busy, and placing copies on the host, reading and placing take turns: at once, they would keep each other from
    the interpreter and from the processors, and take longer (docs/decisions/0031).

    Close it if it is not used up: nothing is read any more when that returns.

    Args:
        batches: what is read.
        read: reads one; called on one thread, which is not the caller's.
        copies: whether what the caller does between batches is to copy on the host.
        now: tells the time, as `clocks` does.
    """
    at_work = _AtWork()

    def read_noted(batch: T) -> R:
        with at_work.noted():
            if at_work.over:
                raise RuntimeError("closed")  # nobody hears of it
            return read(batch)

    def begin(number: int) -> Future[R]:
        return ahead.submit(read_noted, batches[number])

    with ThreadPoolExecutor(1, "shardckpt-ahead") as ahead:
        try:
            began, used = now()
            coming = begin(0) if batches else None
            at_once = True
            for number, batch in enumerate(batches, 1):
                assert coming is not None
                result = coming.result()
                if number == 1 and copies:
                    ended, used_then = now()
                    at_once = used_then - used < ended - began  # one core that is busy throughout uses as much as passes
                if at_once and number < len(batches):
                    coming = begin(number)
                yield batch, result
                if not at_once and number < len(batches):
                    coming = begin(number)
        finally:
            at_work.stop()
