"""How are items done by several threads, each of which does them in its own way?

Each thread takes the next item when it is done with one, so that none waits for another. The calling thread is one of them. The
first error ends all, and is raised here.
"""

from __future__ import annotations

from threading import Lock, Thread
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["taken"]

T = TypeVar("T")


def taken(items: Iterable[T], takers: Sequence[Callable[[T], None]]) -> None:
    """Have each item taken by one of the takers, whichever is free; each taker has one thread.

    When this returns or raises, no thread is at work any more.
    """
    rest, lock = iter(items), Lock()
    failures: list[BaseException] = []
    stopped = False

    def work(take: Callable[[T], None]) -> None:
        nonlocal stopped
        try:
            while not stopped:
                with lock:
                    item = next(rest, rest)
                if item is rest:
                    return
                take(item)  # type: ignore[arg-type]  # it is no sentinel
        except BaseException as e:  # noqa: BLE001  (raised below, on the thread that called)
            failures.append(e)
            stopped = True

    others = [Thread(target=work, args=(take,), name="shardckpt-write", daemon=True) for take in takers[1:]]
    started = []
    try:
        for thread in others:
            thread.start()
            started.append(thread)
        work(takers[0])
        for thread in started:
            thread.join()
    finally:
        stopped = True
        for thread in started:
            thread.join()
    if failures:
        raise failures[0]
