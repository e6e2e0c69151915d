"""How are items done by several threads, each of which does them in its own way?

Each thread takes the next item when it is done with one, so that none waits for another. The calling thread is one of them. The
first error ends all, and is raised here. So does Ctrl-C; then, however often it comes, the others still finish what they have taken.

Threads are not waited for by `Thread.join`: one that Ctrl-C interrupts takes the thread for ended (CPython 3.11 and 3.12).
"""

from __future__ import annotations

from threading import Condition, Thread
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["taken"]

T = TypeVar("T")


def taken(items: Iterable[T], takers: Sequence[Callable[[T], None]]) -> None:
    """Have each item taken by one of the takers, whichever is free; each taker has one thread.

    When this returns or raises, nothing is being taken any more.
    """
    rest, changed = iter(items), Condition()
    failures: list[BaseException] = []
    busy = 0  # threads other than this one; only here a signal can come between two lines
    stopped = False

    def work(take: Callable[[T], None], *, other: bool) -> None:
        nonlocal busy, stopped
        while True:
            try:
                with changed:
                    if stopped or (item := next(rest, rest)) is rest:
                        return
                    busy += other
                try:
                    take(item)  # type: ignore[arg-type]  # it is no sentinel
                finally:
                    if other:
                        with changed:
                            busy -= 1
                            changed.notify_all()
            except BaseException as e:  # noqa: BLE001  (raised below, on the thread that called)
                failures.append(e)
                stopped = True

    try:
        for take in takers[1:]:
            Thread(target=work, args=(take,), kwargs={"other": True}, name="shardckpt-write", daemon=True).start()
        work(takers[0], other=False)
    except BaseException as e:  # noqa: BLE001  (as above)
        failures.append(e)
        stopped = True
    failures += _interrupts(changed, lambda: not busy)
    if failures:
        try:
            raise failures[0]
        finally:
            failures.clear()  # else it and its frames, with what they hold, would wait for the garbage collector


def _interrupts(changed: Condition, done: Callable[[], bool]) -> list[BaseException]:
    """Wait until that is so; what signals have raised meanwhile."""
    found: list[BaseException] = []
    while True:
        try:
            with changed:
                changed.wait_for(done)
        except BaseException as e:  # noqa: BLE001  (raised when it is so)
            found.append(e)
        else:
            return found
