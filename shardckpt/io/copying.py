"""Copies of many arrays from one place in a host's memory to another.

One core rarely fills the memory's bandwidth. So arrays are cut into parts, and a few threads take one part after another:
numpy lets go of the interpreter's lock while it copies. Small arrays are copied by the calling thread, since a thread costs more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from shardckpt.io.threads import cores, run_on_threads

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

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
    if threads < 2:
        for pair in pairs:
            _copy(pair)
        return
    parts = (part for pair in pairs for part in _parts(*pair))
    run_on_threads(parts, [_copy] * threads, "shardckpt-copy")


def _copy(pair: _Pair) -> None:
    target, source = pair
    target[...] = source


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
