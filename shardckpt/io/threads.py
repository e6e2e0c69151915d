"""Threads, and how work is handed to them.

`run_on_threads` processes items on new threads and the calling one, `Workers` on threads that are
kept, `map_on_threads` returns the results of small reads (`Store.read_together` of requests, which
Ctrl-C abandons), and `read_ahead` reads batches while another one is used.

Ctrl-C, at whatever instant it comes, must not leave a thread at work, because the thread may be
writing into the caller's memory. An interrupt may hide from the caller that a thread has started.
An interrupt of `Thread.join` makes it report a running thread as ended (CPython 3.11 and 3.12). So
each thread registers itself before it draws its first item, and until it has finished its last
(`_AtWork`). Once nothing is left to draw, and no thread is registered, no thread will be.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain, islice
from queue import SimpleQueue
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

SWITCH_SECONDS = 0.0005
"""Seconds for which a thread that is busy in Python may keep the interpreter from a thread of ours.
Python's own value is ten times as long."""
SHORT_READ = 2 << 30
"""Most bytes that are read from a disk in a matter of seconds. The collector may pause during all
of it; after each of several pauses, it would visit all objects that were created meanwhile."""
AT_ONCE = 16
"""Small reads in flight at a time; on an object store each needs a round trip."""

T = TypeVar("T")
R = TypeVar("R")


class _Setting(Generic[T]):
    """A process-wide setting that has a temporary value while any thread needs it.

    Nothing is locked: a signal handler may save amid a save, and wait for threads that need this,
    too. Single steps on a set or a dict are atomic. Whatever happens between two steps, the
    program's value comes back; at worst a thread does without the temporary one.
    """

    def __init__(
        self, read: Callable[[], T], write: Callable[[T], object], change: Callable[[T], T]
    ) -> None:
        """A setting that `read` and `write` access.

        `change` makes the temporary value from the program's.
        """
        self._read, self._write, self._change = read, write, change
        self._users: set[object] = set()
        """An object for each block that needs the temporary value."""
        self._replaced: dict[object, T] = {}
        """The values of the program that were replaced, the newest last, each with the block that
        replaced it."""
        os.register_at_fork(after_in_child=self._after_fork)

    @contextmanager
    def changed(self) -> Iterator[None]:
        """Change the setting during a block."""
        user = object()
        try:
            try:
                self._users.add(user)
                value = self._read()
                if (temporary := self._change(value)) != value:
                    self._replaced[user] = value
                    self._write(temporary)
                yield
            finally:
                self._leave(user)
        finally:
            self._leave(user)  # Ctrl-C may have kept the first call from its end

    def _leave(self, user: object) -> None:
        """Restore the program's value if this was the last user.

        Nothing is restored if the program has chosen another value meanwhile.
        """
        self._users.discard(user)
        if not self._users and (replaced := [*self._replaced.items()]):
            _, value = replaced[-1]
            if self._read() == self._change(value):
                self._write(value)
            for key, _ in replaced:
                self._replaced.pop(key, None)  # perhaps another thread has done so

    def _after_fork(self) -> None:
        """In a fork, other threads and what they need do not exist."""
        self._users.clear()
        self._leave(None)


_collector = _Setting(
    gc.isenabled, lambda enabled: gc.enable() if enabled else gc.disable(), lambda _: False
)
_switching = _Setting(
    sys.getswitchinterval,
    # It cuts to whole microseconds, and what was read may be just below one.
    lambda seconds: sys.setswitchinterval(seconds + 5e-7),
    lambda seconds: min(seconds, SWITCH_SECONDS),
)


class InterruptibleCondition(threading.Condition):
    """A condition in whose waits Ctrl-C does no harm.

    Enter its `lock`: entering the condition itself runs Python code, in which Ctrl-C would leave
    the lock locked.
    """

    def __init__(self) -> None:
        """Make its lock."""
        self.lock = threading.RLock()
        super().__init__(self.lock)

    def wait(self, timeout: float | None = None) -> bool:
        """See `threading.Condition`.

        After Ctrl-C the lock is held, too, as the `with` around this call expects.
        """
        try:
            return super().wait(timeout)
        except BaseException:
            if not self._is_owned():  # type: ignore[attr-defined]  # as CPython itself asks
                self.lock.acquire()
            raise


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's collector of reference cycles.

    This is for short code that creates objects per tensor, and does not wait for others.

    The plans of 2,000 tensors start the collector several times, and each time it visits all
    objects of the program: 0.1 s with torch and JAX imported, and half of a restore of small
    tensors in all.

    On the main thread only: beside a thread in the background, the program may call `gc.disable()`
    itself, and must find that so.
    """
    with (
        _collector.changed()
        if threading.current_thread() is threading.main_thread()
        else nullcontext()
    ):
        yield


@contextmanager
def prompt_turns() -> Iterator[None]:
    """Limit the time for which a thread busy in Python keeps the interpreter's lock.

    A save releases the lock at every system call, some 300 times whatever its size; by default, a
    busy thread may then keep it for 5 ms each time, not `SWITCH_SECONDS` (docs/decisions/0043).
    """
    with _switching.changed():
        yield


class _AtWork:
    """The threads that are working for one caller."""

    def __init__(self) -> None:
        self.over = False
        """Whether no further work may begin, or none is left. A thread checks this after it has
        registered."""
        self._noted: list[None] = []
        self._left: SimpleQueue[None] = SimpleQueue()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Register this thread while it works."""
        self._noted.append(None)
        try:
            yield
        finally:
            self._noted.pop()
            self._left.put(None)

    def wait(self) -> None:
        """Wait until all work is finished."""
        while not self.over or self._noted:
            self._left.get()

    def stop(self) -> None:
        """Begin no further work, and wait until all work in progress is finished.

        The wait goes on, however often Ctrl-C is pressed meanwhile.
        """
        self.over = True
        while self._noted:
            try:  # noqa: SIM105
                self._left.get()
            except BaseException:  # noqa: BLE001, S110  (the caller is already raising an error)
                pass


def _run(
    items: Iterable[T],
    start: Callable[[Callable[[], None]], object],
    works: Sequence[Callable[[T], object]],
    own: Callable[[T], object] | None = None,
) -> None:
    """Process each item on whichever thread is free.

    Raise the first error, which stops all, when no thread is working any more.

    Args:
        items: drawn one by one.
        start: calls a function on another thread.
        works: the functions with which the other threads process an item; at least one, unless
            there is `own`.
        own: the function with which the calling thread processes an item; None: it draws none.
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
        # A reference cycle would keep the error, and its frames with the memory that they hold.
        failures.clear()


def run_on_threads(items: Iterable[T], works: Sequence[Callable[[T], object]], name: str) -> None:
    """Process each item with whichever of several functions is free.

    Each has a thread, and the first has the calling one.

    The first error, or Ctrl-C, ends all and is raised here. When this returns or raises, no thread
    is at work on any item.

    Args:
        items: drawn one by one, by one thread at a time.
        works: the functions; at least one.
        name: name of the threads.
    """
    _run(items, _starter(name), works[1:], works[0])


def call_aside(work: Callable[[], R], name: str) -> R:
    """The result of a call on another thread, where Ctrl-C raises nothing.

    The caller waits for its end however often Ctrl-C is pressed.

    For C++ code that calls Python functions which must not raise, such as torch's writer when it is
    destroyed.

    Args:
        work: the call.
        name: name of the thread.
    """
    results: list[R] = []
    _run([None], _starter(name), [lambda _: results.append(work())])
    return results[0]


def _starter(name: str) -> Callable[[Callable[[], None]], None]:
    """A function that calls another one on a new thread of that name."""
    return lambda work: threading.Thread(target=work, name=name, daemon=True).start()


class PoolCall(Generic[R]):
    """A call on a thread of a pool, for whose end one waits in C code alone.

    Ctrl-C in a future's Python code may leave it locked, and then its thread waits for good.
    """

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


class Workers:
    """A thread pool for several callers, started on demand and kept, with thread-local data."""

    def __init__(self, threads: int, name: str) -> None:
        """Use at most `threads` threads, whose names begin with `name`."""
        self.local = threading.local()
        """Data local to each pool thread, and to each calling thread."""
        self.at_once = threads
        """Most threads that work for one caller."""
        self._pool = ThreadPoolExecutor(threads, name)
        self._callers: set[int] = set()
        """One for each caller whose tasks the pool's threads do now."""

    def do(self, work: Callable[[T], object], tasks: Iterable[T], *, joins: bool = False) -> None:
        """Call `work` for each task; the first error stops the rest, and is raised.

        Tasks are drawn as threads get free.

        The calling thread does the work itself if there is only one task, or if only one thread
        works at a time. With `joins` it also works while other callers keep the threads busy. When
        this returns or raises, no thread is at work on any of the tasks.
        """
        rest = iter(tasks)
        first = list(islice(rest, self.at_once))
        if len(first) < 2:
            for task in chain(first, rest):
                work(task)
            return
        try:
            self._callers.add(id(rest))
            own = work if joins and len(self._callers) > 1 else None
            _run(chain(first, rest), self._pool.submit, [work] * len(first), own)
        finally:
            self._callers.discard(id(rest))


def map_on_threads(read: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Call `read` for each item and return the results in order; several small reads run at once.

    The first error is raised when all reads that had begun have ended.
    """
    listed = list(items)
    if len(listed) < 2:
        return [read(item) for item in listed]
    with ThreadPoolExecutor(min(AT_ONCE, len(listed)), "shardckpt-together") as pool:
        try:
            calls = [PoolCall(pool, read, item) for item in listed]
            return [call.result() for call in calls]
        finally:
            pool.shutdown(cancel_futures=True)


def clocks() -> tuple[float, float]:
    """Seconds of wall-clock time, and of processor time of this process with all its threads."""
    return time.perf_counter(), time.process_time()


def read_ahead(
    batches: Iterable[T],
    lend: Callable[[T, bool], R | None],
    read: Callable[[T], object],
    *,
    ahead: int,
    copies: bool,
    threads: int | None = None,
    now: Callable[[], tuple[float, float]] = clocks,
) -> Generator[tuple[T, R], None, None]:
    """Yield each batch when it is read, in order.

    Up to `ahead` more are read meanwhile, so that no thread waits for a batch to end.

    If the caller copies on the host, the first batch is read alone. If its reading waited for the
    storage, more are read while one is being placed. If it kept the processors busy, reading and
    placing take turns: together they would compete for the interpreter and the processors, and take
    longer (docs/decisions/0031).

    Close the generator if it is not used up: when that returns, no read is in progress.

    Args:
        batches: the batches to read; drawn as they are needed. A single one is read by the calling
            thread.
        lend: returns what a batch needs, such as memory, which the generator yields with the batch.
            Called by the calling thread. None: there is no room before an earlier batch has been
            placed; not if its second argument is True, as it is then the only one.
        read: reads one; called on other threads.
        ahead: most batches that are read, or wait for a thread, at a time; 1: one after another, in
            order.
        copies: whether the caller copies on the host between batches.
        threads: threads that read; None: one per batch that is read ahead. With 1, a read begins
            when the one before it has ended.
        now: returns times as `clocks` does.
    """
    ahead_of = _Ahead(batches, lend, read)
    if len(ahead_of.waiting) == 1:
        yield ahead_of.read_here()
        return
    with ThreadPoolExecutor(threads or ahead, "shardckpt-ahead") as pool:
        try:
            began, used = now()
            most, first, together = 1 if copies else ahead, copies, True
            ahead_of.begin(pool, most, alone=True)
            while ahead_of.under_way:
                batch, lent, reading = ahead_of.under_way[0]
                reading.result()
                ahead_of.under_way.popleft()
                if first:
                    ended, used_then = now()
                    # One busy core: as much processor time as wall-clock time.
                    first, together = False, used_then - used < ended - began
                    most = ahead if together else 1
                if together:
                    ahead_of.begin(pool, most, alone=False)
                yield batch, lent
                ahead_of.begin(pool, most, alone=True)
        finally:
            ahead_of.at_work.stop()


class _Ahead(Generic[T, R]):
    """The batches of `read_ahead` that are not placed yet."""

    def __init__(
        self, batches: Iterable[T], lend: Callable[[T, bool], R | None], read: Callable[[T], object]
    ) -> None:
        self.at_work = _AtWork()
        self.under_way: deque[tuple[T, R, PoolCall[None]]] = deque()
        self._rest = iter(batches)
        self.waiting = deque(islice(self._rest, 2))
        self._lend = lend
        self._read = read

    def begin(self, pool: ThreadPoolExecutor, most: int, *, alone: bool) -> None:
        """Begin to read, until so many batches are under way, or there is no room.

        `alone`: no batch is being placed.
        """
        while len(self.under_way) < most:
            self.waiting.extend(islice(self._rest, 0 if self.waiting else 1))
            lent = (
                self._lend(self.waiting[0], alone and not self.under_way) if self.waiting else None
            )
            if lent is None:
                break
            batch = self.waiting.popleft()
            self.under_way.append((batch, lent, PoolCall(pool, self._read_noted, batch)))

    def read_here(self) -> tuple[T, R]:
        """Read a batch on this thread."""
        batch = self.waiting.popleft()
        lent = self._lend(batch, True)
        assert lent is not None, "there is room for one batch"
        self._read(batch)
        return batch, lent

    def _read_noted(self, batch: T) -> None:
        with self.at_work.noted():
            if self.at_work.over:
                raise RuntimeError("closed")  # no caller sees this error
            self._read(batch)
