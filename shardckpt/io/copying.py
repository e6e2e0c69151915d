"""Copies of many arrays from one place in a host's memory to another.

One core rarely uses all of the memory bandwidth. So arrays are cut into parts, and several threads
copy the parts: numpy releases the interpreter lock while it copies. The calling thread copies small
arrays itself, because threads cost more.

`copy_summed` also sums what it copies: the extension does both in one pass.
"""

from __future__ import annotations

import ctypes
from collections import deque
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from crc32c import crc32c

from shardckpt.format.crc_algebra import CRC32C, joined
from shardckpt.format.zarr_arrays import CHECKSUM_BYTES
from shardckpt.io import extension
from shardckpt.io.cores import cores
from shardckpt.io.threads import run_on_threads
from shardckpt.layout.dtypes import with_plain_bools
from shardckpt.plan.pieces import batches, large_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

T = TypeVar("T")
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
_SUMMED_BYTES = 512 << 10
"""Least bytes that are summed while they are copied: for fewer, its calls take longer than a pass
of its own over memory that stays in the cache."""
_SAMPLED, _SAMPLE_EVERY = 4 << 10, 128 << 10
"""Of what was summed while it was copied, so many bytes of so many are compared afterwards."""
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
    most, threads = _division(pairs)
    if threads < 2:
        _copy(pairs)
        return
    parts = (part for pair in pairs for part in _parts(*pair, most))
    run_on_threads(_groups(parts, lambda part: part[0]), [_copy] * threads, "shardckpt-copy")


def copy_summed(pairs: Sequence[_Pair]) -> list[int | None]:
    """Copy each source to its target, and return the CRC-32C of its elements in C order.

    None for a source that is seen to have changed meanwhile: a part of what was summed and copied
    in one pass is compared at the end. Threads as in `copy_all`.
    """
    most, threads = _division(pairs)
    parts = [[_Summed(*part) for part in _parts(*_flat(*pair), most)] for pair in pairs]
    groups = _groups(chain.from_iterable(parts), lambda part: part.target)
    run_on_threads(groups, [_copy_summed] * max(1, threads), "shardckpt-copy")
    totals: list[int | None] = []
    for own in parts:
        total = 0
        for part in own:
            total = joined(total, part.target.nbytes, part.crc, CRC32C)
        totals.append(total if all(part.seems_unchanged() for part in own) else None)
    return totals


@dataclass(slots=True)
class _Summed:
    """A part that is copied and summed."""

    target: NDArray[Any]
    source: NDArray[Any]
    crc: int = 0
    in_one_pass: bool = False
    """Whether it was summed while it was copied, and not before."""

    def copy(self) -> None:
        """Copy and sum it."""
        target, source = self.target, self.source
        self.in_one_pass = (
            extension.moving is not None
            and source.nbytes >= _SUMMED_BYTES
            and source.flags.c_contiguous
            and target.flags.c_contiguous
            and source.dtype != np.bool_
        )
        if self.in_one_pass:
            self.crc = _copy_in_one_pass(_bytes(target), _bytes(source))
        else:
            self.crc = checksum(source)
            target[...] = source

    def seems_unchanged(self) -> bool:
        """Whether a sample of what was summed and copied in one pass is equal now."""
        return not self.in_one_pass or np.array_equal(_sample(self.target), _sample(self.source))


def _copy_summed(parts: Sequence[_Summed]) -> None:
    for part in parts:
        part.copy()


def _copy_in_one_pass(target: NDArray[np.uint8], source: NDArray[np.uint8]) -> int:
    # The extension writes the checksum over the last bytes, which are copied afterwards.
    inner, sums = len(source) - CHECKSUM_BYTES, np.empty(CHECKSUM_BYTES, np.uint8)
    answer = extension.moving.write_chunks(
        -1, 0, 0, (source[:inner],), (inner,), 0, 1, sums, target, extension.LONGEST_S
    )
    assert answer == (0, 1, 0)
    target[inner:] = source[inner:]
    crc: int = crc32c(source[inner:], int.from_bytes(sums.tobytes(), "little"))
    return crc


def _sample(array: NDArray[Any]) -> NDArray[np.uint8]:
    """`_SAMPLED` of each `_SAMPLE_EVERY` bytes, at changing places: changes may have a period."""
    data = _bytes(array)
    count = len(data) // _SAMPLE_EVERY
    of_each = _SAMPLE_EVERY // _SAMPLED
    places = data[: count * _SAMPLE_EVERY].reshape(count, of_each, _SAMPLED)
    number = np.arange(count)
    sample: NDArray[np.uint8] = places[number, 9 * number % of_each]
    return sample


def _bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)


def _flat(target: NDArray[Any], source: NDArray[Any]) -> _Pair:
    """Both with one dimension, which can be cut anywhere, if their elements are consecutive."""
    if target.flags.c_contiguous and source.flags.c_contiguous:
        return target.reshape(-1), source.reshape(-1)
    return target, source


def _division(pairs: Sequence[_Pair]) -> tuple[int, int]:
    """Most bytes of a part, and the number of threads."""
    nbytes = sum(target.nbytes for target, _ in pairs)
    threads = min(cores(), nbytes // _PART_BYTES)
    return max(_PART_BYTES, min(_LARGEST_PART, nbytes // (4 * max(1, threads)))), threads


def _groups(parts: Iterable[T], target_of: Callable[[T], NDArray[Any]]) -> Iterator[list[T]]:
    """Parts to draw at a time: drawing 10 KB takes as long as copying them."""
    return batches(parts, lambda part: (target_of(part).nbytes,), (_PART_BYTES,))


def checksum(array: NDArray[Any]) -> int:
    """CRC-32C of an array's elements in C order.

    An array with gaps is made contiguous part by part.
    """
    crc = 0
    for part in _consecutive(array):
        crc = crc32c(_bytes(np.ascontiguousarray(with_plain_bools(part))).data, crc)
    return crc


def _consecutive(array: NDArray[Any]) -> Sequence[NDArray[Any]]:
    if array.flags.c_contiguous or array.nbytes <= _PART_BYTES or array.ndim == 0:
        return [array]
    if len(array) == 1:
        return [part for row in array for part in _consecutive(row)]
    half = len(array) // 2
    return [*_consecutive(array[:half]), *_consecutive(array[half:])]


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
