"""Copies of many arrays from one place in a host's memory to another.

One core rarely uses all of the memory bandwidth. So arrays are cut into parts, and several threads
copy the parts: numpy releases the interpreter lock while it copies. The calling thread copies small
arrays itself, because threads cost more.
"""

from __future__ import annotations

import ctypes
from collections import deque
from typing import TYPE_CHECKING, Any, TypeAlias

from shardckpt.io.cores import cores
from shardckpt.io.threads import run_on_threads
from shardckpt.plan.pieces import batches, large_parts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

_Pair: TypeAlias = "tuple[NDArray[Any], NDArray[Any]]"
"""A target and a source, of one shape and dtype."""

_PART_BYTES = 4 << 20
"""Least bytes per part: takes a millisecond to copy, hundreds of times as long as getting the next
part."""
_LARGEST_PART = 32 << 20
"""Most bytes per part: numpy gives the interpreter lock up once for each, and a thread may wait
long to have it back."""
_SMALL_AT_A_TIME = 256
"""Small copies between two looks of the interpreter for Ctrl-C and for threads that wait."""
_memmove = ctypes.PyDLL(None).memmove
"""It keeps the interpreter lock: to give it up takes longer than a small copy."""
_memmove.argtypes, _memmove.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], None


def copy_small(
    target: NDArray[Any], begins: list[int], addresses: list[int], sizes: list[int]
) -> None:
    """Copy memory at many addresses, a few KB each.

    Args:
        target: where to; it has room for everything.
        begins: the positions in it, in bytes, ascending.
        addresses: where from. The memory must stay allocated.
        sizes: bytes at each address.
    """
    assert len(begins) == len(addresses) == len(sizes)
    assert all(addresses)
    assert not begins or begins[-1] + sizes[-1] <= target.nbytes
    start = target.ctypes.data
    for i in range(0, len(begins), _SMALL_AT_A_TIME):
        part = slice(i, i + _SMALL_AT_A_TIME)
        copies = map(_memmove, [start + n for n in begins[part]], addresses[part], sizes[part])
        deque(copies, maxlen=0)


def copy_all(pairs: Sequence[_Pair]) -> None:
    """Copy each source to its target, in any order.

    No thread uses the arrays when this returns or raises; after Ctrl-C it first waits for the parts
    in progress.
    """
    nbytes = sum(target.nbytes for target, _ in pairs)
    threads = min(cores(), nbytes // _PART_BYTES)
    if threads < 2:
        _copy(pairs)
        return
    most = max(_PART_BYTES, min(_LARGEST_PART, nbytes // (4 * threads)))
    parts = (part for pair in pairs for part in _parts(*pair, most))
    # Drawing 10 KB takes as long as copying them, so threads draw many small parts at a time.
    run_on_threads(
        batches(parts, lambda part: (part[0].nbytes,), (_PART_BYTES,)),
        [_copy] * threads,
        "shardckpt-copy",
    )


def _copy(pairs: Sequence[_Pair]) -> None:
    for target, source in pairs:
        target[...] = source


def _parts(target: NDArray[Any], source: NDArray[Any], most: int) -> Iterator[_Pair]:
    """Cut a large pair into parts along its first dimension that is longer than one.

    Yield a small pair unchanged.
    """
    if target.nbytes <= most:
        yield target, source
        return
    for part in large_parts(target.shape, target.nbytes, most):
        yield target[part], source[part]
