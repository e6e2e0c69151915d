"""New memory for arrays that somebody keeps, quick to touch.

The kernel clears fresh memory at its first touch, page by page; most of what that costs is the faults, of which a large
page takes one instead of 512. numpy asks for large pages from 4 MiB on, and there are some only where whole ones fit. So
arrays are cut from blocks of many, beginning at such a page. A block lives as long as any of its arrays.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.io.budget import round_up

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

__all__ = ["BLOCK", "Arena"]

BLOCK = 32 << 20
"""Bytes of a block; a larger array has one of its own."""
_LARGE_PAGE = 2 << 20
"""Bytes; the smallest of x86-64 and of arm64 with pages of 4 KiB."""


class Arena:
    """Cuts arrays from blocks; used by one thread."""

    def __init__(self) -> None:
        """Nothing is allocated yet."""
        self._rest: NDArray[np.uint8] = np.empty(0, np.uint8)

    def array(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[np.generic]:
        """A new array, aligned as a pool's buffers are; its contents are whatever was there."""
        kind = np.dtype(dtype)
        size = prod(shape) * kind.itemsize
        if size > BLOCK // 2:  # its own block, and the rest of the one before stays in use
            return _block(size).view(kind).reshape(shape)
        if size > self._rest.nbytes:
            self._rest = _block(BLOCK)
        array: NDArray[np.generic] = self._rest[:size].view(kind).reshape(shape)
        self._rest = self._rest[round_up(size) :]
        return array


def _block(nbytes: int) -> NDArray[np.uint8]:
    """Fresh memory from a large page's first byte on."""
    raw = np.empty(nbytes + _LARGE_PAGE, np.uint8)
    begin = -raw.ctypes.data % _LARGE_PAGE
    return raw[begin : begin + nbytes]
