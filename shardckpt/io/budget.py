"""Host buffers that stay inside a byte budget, and are used again.

Fresh memory is the slowest part of moving data on a host (the kernel clears every page at its first touch), so a
pool keeps what it has allocated. `take` waits until the request fits; a request larger than the whole
budget is let through alone, because a framework may want all of a tensor's shards in one call.
"""

from __future__ import annotations

import threading
from math import prod
from typing import TYPE_CHECKING, Self

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from numpy.typing import DTypeLike, NDArray

__all__ = ["BufferPool", "Lease"]

ALIGNMENT = 64
"""Buffers start at multiples of this many bytes, as devices' transfer engines like it."""


class Lease:
    """Bytes lent by a pool; a context manager that gives them back."""

    def __init__(self, pool: BufferPool, buffer: NDArray[np.uint8], nbytes: int) -> None:
        self._pool = pool
        self._buffer: NDArray[np.uint8] | None = buffer
        self.nbytes = nbytes
        """Bytes asked for."""
        self._used = 0

    def array(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[np.generic]:
        """The next part of the lease as an array; its contents are whatever was there."""
        assert self._buffer is not None, "the lease was given back"
        kind = np.dtype(dtype)
        size = prod(shape) * kind.itemsize
        begin = self._used
        self._used = begin + round_up(size)
        assert self._used <= self._buffer.nbytes, "more taken from a lease than was asked for"
        array: NDArray[np.generic] = self._buffer[begin : begin + size].view(kind).reshape(shape)
        return array

    def give_back(self) -> None:
        """End the lease; arrays taken from it must no longer be used."""
        if self._buffer is not None:
            self._pool._take_back(self._buffer)  # noqa: SLF001  (pool and lease are one thing)
            self._buffer = None

    def __enter__(self) -> Self:
        """The lease itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Give the bytes back."""
        self.give_back()


class BufferPool:
    """Lends buffers of at most `limit` bytes together (or one larger one, alone)."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        """Bytes."""
        self.high_water = 0
        """Most bytes that existed at once, lent, reserved or kept for later."""
        self._lent = 0
        self._reserved = 0
        self._kept: list[NDArray[np.uint8]] = []
        self._changed = threading.Condition()

    def take(self, nbytes: int) -> Lease:
        """Lend `nbytes`, waiting until what is lent leaves room for it.

        A thread that holds a lease must not wait for another one: take what is needed in one lease, or hand on what
        one holds to a thread that gives it back.
        """
        lease = self.take_unless(nbytes, lambda: False)
        assert lease is not None
        return lease

    def take_unless(self, nbytes: int, given_up: Callable[[], bool]) -> Lease | None:
        """Lend `nbytes`, or nothing where there is no room for it and none is waited for any more.

        Args:
            nbytes: at least so many.
            given_up: asked at once, whenever something is given back, and on `wake`.
        """
        wanted = max(round_up(nbytes), ALIGNMENT)
        with self._changed:
            self._changed.wait_for(lambda: self._fits(wanted) or given_up())
            if not self._fits(wanted):
                return None
            buffer = self._reuse(wanted)
            if buffer is None:
                self._make_room(wanted)
                buffer = _aligned(wanted)
            self._lent += buffer.nbytes
            self.high_water = max(self.high_water, self._allocated())
        return Lease(self, buffer, nbytes)

    def reserve(self, nbytes: int) -> None:
        """Count `nbytes` that others allocate as lent, waiting until there is room for them; `release` ends it."""
        with self._changed:
            self._changed.wait_for(lambda: self._fits(nbytes))
            self._make_room(nbytes)
            self._reserved += nbytes

    def release(self, nbytes: int) -> None:
        """Count no longer what was reserved, or a part of it."""
        with self._changed:
            self._reserved -= nbytes
            self._changed.notify_all()

    def wake(self) -> None:
        """Have those who wait ask whether they have given up."""
        with self._changed:
            self._changed.notify_all()

    def clear(self) -> None:
        """Free what is kept for later; what is lent stays so."""
        with self._changed:
            self._kept.clear()

    @property
    def kept(self) -> list[int]:
        """Addresses of the buffers that are kept for later, ascending."""
        with self._changed:
            return sorted(buffer.ctypes.data for buffer in self._kept)

    def _fits(self, wanted: int) -> bool:
        return not self._lent or self._lent + self._reserved + wanted <= self.limit

    def _make_room(self, wanted: int) -> None:
        while self._kept and self._allocated() + wanted > self.limit:
            self._kept.pop(0)

    def _reuse(self, wanted: int) -> NDArray[np.uint8] | None:
        """The smallest kept buffer that is large enough and not wastefully larger."""
        room = max(self.limit - self._lent - self._reserved, wanted)
        fitting = [i for i, b in enumerate(self._kept) if wanted <= b.nbytes <= min(2 * wanted + (1 << 20), room)]
        return self._kept.pop(min(fitting, key=lambda i: self._kept[i].nbytes)) if fitting else None

    def _allocated(self) -> int:
        return self._lent + self._reserved + sum(b.nbytes for b in self._kept)

    def _take_back(self, buffer: NDArray[np.uint8]) -> None:
        with self._changed:
            self._lent -= buffer.nbytes
            if self._allocated() + buffer.nbytes <= self.limit:
                self._kept.append(buffer)
            self._changed.notify_all()


def round_up(nbytes: int) -> int:
    """To the next multiple of the alignment: what an array of `nbytes` takes from a lease."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _aligned(nbytes: int) -> NDArray[np.uint8]:
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    begin = -raw.ctypes.data % ALIGNMENT
    return raw[begin : begin + nbytes]
