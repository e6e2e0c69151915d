"""Copies of many arrays from one place in a host's memory to another.

One core rarely uses all of the memory bandwidth. So arrays are cut into parts, and several threads
copy the parts: numpy releases the interpreter lock while it copies. The calling thread copies small
arrays itself, because threads cost more.

`copy_summed` also sums what it copies: the extension does both in one pass.
"""

from __future__ import annotations

import ctypes
from collections import deque
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from crc32c import crc32c

from shardckpt.format.crc_algebra import CRC32C, joined
from shardckpt.format.zarr_arrays import CHECKSUM_BYTES
from shardckpt.io import extension
from shardckpt.io.cores import cores
from shardckpt.io.threads import map_on_threads, run_on_threads
from shardckpt.layout.dtypes import with_plain_bools
from shardckpt.plan.pieces import batches, large_parts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

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
_SUMMED_BYTES = 4096
"""Least bytes that the extension copies and sums: its call takes as long as copying so many."""
_SAMPLED, _SAMPLE_EVERY = 4 << 10, 128 << 10
"""Bytes that are compared after they were copied and summed in one pass, of so many."""
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
    groups = _groups(part for pair in pairs for part in _parts(*pair, _most(nbytes, threads)))
    run_on_threads(groups, [_copy] * threads, "shardckpt-copy")


def copy_summed(pairs: Sequence[_Pair]) -> list[int | None]:
    """Copy each source to its target, and return the CRC-32C of its elements in C order.

    None for a source that is seen to have changed meanwhile: a part of what was summed and copied
    in one pass is compared at the end.
    """
    most = _most(sum(target.nbytes for target, _ in pairs), cores())
    parts = [[*_parts(*pair, most)] for pair in pairs]
    groups = [*_groups(chain.from_iterable(parts))]
    crcs = chain.from_iterable(map_on_threads(_copy_summed, groups))
    totals: list[int | None] = []
    for pair, own in zip(pairs, parts, strict=True):
        total = 0
        for target, _ in own:
            total = joined(total, target.nbytes, next(crcs), CRC32C)
        totals.append(total if _seem_equal(*pair) else None)
    return totals


def _copy_summed(pairs: Sequence[_Pair]) -> list[int]:
    return [_copy_one_summed(target, source) for target, source in pairs]


def _copy_one_summed(target: NDArray[Any], source: NDArray[Any]) -> int:
    if not _is_one_pass(target, source):
        total = checksum(source)
        target[...] = source
        return total
    to, data = _bytes(target), _bytes(source)
    # The extension writes the checksum after the elements, where the last of them belong.
    inner, part = len(data) - CHECKSUM_BYTES, np.empty(CHECKSUM_BYTES, np.uint8)
    extension.moving.write_chunks(
        -1, 0, 0, (data[:inner],), (inner,), 0, 1, part, to, extension.LONGEST_S
    )
    to[inner:] = data[inner:]
    crc: int = crc32c(data[inner:], int.from_bytes(part.tobytes(), "little"))
    return crc


def _is_one_pass(target: NDArray[Any], source: NDArray[Any]) -> bool:
    return (
        extension.moving is not None
        and source.nbytes >= _SUMMED_BYTES
        and source.flags.c_contiguous
        and target.flags.c_contiguous
        and source.dtype != np.bool_
    )


def _seem_equal(target: NDArray[Any], source: NDArray[Any]) -> bool:
    if not _is_one_pass(target, source):
        return True
    samples = []
    for data in (_bytes(target), _bytes(source)):
        whole = len(data) // _SAMPLE_EVERY * _SAMPLE_EVERY
        rows = data[:whole].reshape(-1, _SAMPLE_EVERY)[:, :_SAMPLED]
        samples.append((rows, data[whole : whole + _SAMPLED]))
    return all(map(np.array_equal, *samples))


def _bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)


def _most(nbytes: int, threads: int) -> int:
    """Most bytes of a part."""
    return max(_PART_BYTES, min(_LARGEST_PART, nbytes // (4 * threads)))


def _groups(parts: Iterable[_Pair]) -> Iterator[list[_Pair]]:
    """Parts to draw at a time: drawing 10 KB takes as long as copying them."""
    return batches(parts, lambda part: (part[0].nbytes,), (_PART_BYTES,))


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
