"""How do many arrays get from one place in a host's memory to another as fast as it can?

One core rarely fills the memory's bandwidth. So arrays are cut into parts, and a few threads take one part after another:
numpy lets go of the interpreter's lock while it copies. What is small is copied where it is, since a thread costs more.
"""

from __future__ import annotations

from collections import deque
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeAlias

from shardckpt.io.cores import cores

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

__all__ = ["copy_all"]

_Pair: TypeAlias = "tuple[NDArray[Any], NDArray[Any]]"
"""A target and a source, of one shape and dtype."""

_PART_BYTES = 4 << 20
"""Of what a thread copies at once: a millisecond's work, and hundreds of times what it takes to get the next part."""
_MOST_THREADS = 4
"""More than that hardly helps one process, and others on the host may be saving at the same time."""


def copy_all(pairs: Sequence[_Pair]) -> None:
    """Copy each source to its target, in any order.

    When this returns or raises, no thread touches any of them any more; but after Ctrl-C some may end what they are copying.
    """
    threads = min(_MOST_THREADS, cores(), sum(target.nbytes for target, _ in pairs) // _PART_BYTES)
    parts = deque(part for pair in pairs for part in (_parts(*pair) if threads > 1 else (pair,)))

    failures: list[BaseException] = []

    def work() -> None:
        try:
            while parts:
                target, source = parts.popleft()
                target[...] = source
        except IndexError:  # another thread was quicker
            pass
        except BaseException as e:  # noqa: BLE001  (raised below, on the thread that called)
            failures.append(e)
            parts.clear()

    others = [Thread(target=work, name="shardckpt-copy", daemon=True) for _ in range(threads - 1)]
    started = []
    try:
        for thread in others:
            thread.start()
            started.append(thread)
        work()
    finally:
        parts.clear()
        for thread in started:
            thread.join()
    if failures:
        raise failures[0]


def _parts(target: NDArray[Any], source: NDArray[Any]) -> Iterator[_Pair]:
    """The pair, cut along its first side that is longer than one where it is large."""
    if target.nbytes <= _PART_BYTES:
        yield target, source
        return
    axis = next(d for d, side in enumerate(target.shape) if side > 1)
    side = max(1, target.shape[axis] * _PART_BYTES // target.nbytes)
    for begin in range(0, target.shape[axis], side):
        part = (*(slice(None),) * axis, slice(begin, begin + side))
        yield target[part], source[part]
