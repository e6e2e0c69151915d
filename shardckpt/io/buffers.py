"""Host memory for I/O: a memory-limited buffer pool, and an arena for arrays that stay.

Fresh memory is the slowest part of moving data on a host, because the kernel clears every page at
its first use. So a `BufferPool` keeps the buffers that it has allocated. Leased bytes, and bytes
counted beside them, never exceed the limit, with one exception: a request larger than the limit
succeeds when nothing else is leased, because a framework may need all of a tensor's shards in one
call. Requests are served in the order of their arrival, so none starves. One request covers all
memory that its user needs until the user is done, including memory that others allocate for it. A
thread that holds a lease never waits for another lease. So leases are always given back, and each
request is served in the end. A pool of pinned memory is the same with a function that pins each new
buffer; pinning takes longer than clearing pages, so reuse matters even more.

An `Arena` cuts arrays that the caller keeps from new memory. Most of the cost of fresh memory is
page faults, and a large page needs one fault instead of 512. numpy asks for large pages from 4 MiB
on, and the kernel uses them only where a complete large page fits. So arrays are cut from larger
blocks that begin at a large page. A block lives as long as any of its arrays.

`after` continues a vectored read or write that the system ended early.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from contextlib import closing
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Self
from weakref import WeakSet

import numpy as np

from shardckpt.io.cores import cores
from shardckpt.io.files import check_written
from shardckpt.io.threads import InterruptibleCondition, read_ahead, run_on_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import TracebackType
    from typing import TypeAlias

    from numpy.typing import DTypeLike, NDArray

    Pin: TypeAlias = Callable[
        [NDArray[np.uint8], Callable[[int], Iterable[NDArray[np.uint8]]]], Callable[[], object]
    ]

ALIGNMENT = 64
"""Byte alignment of buffers, which devices' transfer engines prefer."""
BLOCK = 32 << 20
"""Bytes of an arena's block; an array of more than half of this has a block of its own."""
_LARGE_PAGE = 2 << 20
"""Bytes of the smallest large page of x86-64, and of arm64 with 4 KiB pages."""
_TOUCHED = 16 << 20
"""Bytes whose pages a thread touches at a time."""
_LOOK = 1.0
"""Seconds between two looks of a waiting thread whether there is room."""
MOST_VECTORS = 1000
"""Memory pieces per system call, below the kernel's IOV_MAX of 1024."""


class KeptBuffers:
    """Buffers that are kept for their next users, so that the kernel need not clear fresh memory.

    Safe to use from several threads.
    """

    def __init__(self, most: int) -> None:
        """Keep at most `most` bytes that nobody uses."""
        self._most = most
        self._free: list[NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """A buffer of exactly that many bytes, with undefined contents."""
        with self._lock:
            for i, buffer in enumerate(self._free):
                if buffer.nbytes == nbytes:
                    return self._free.pop(i)
            # Others were for a save with another memory limit, and are not counted in this one's.
            self._free.clear()
        return np.empty(nbytes, np.uint8)

    def give_back(self, buffer: NDArray[np.uint8]) -> None:
        """Keep a buffer that its user no longer needs, unless enough are kept.

        Those that were kept before have been filled, so the kernel has given them all pages; a new
        one may have few.
        """
        with self._lock:
            if buffer.nbytes + sum(free.nbytes for free in self._free) <= self._most:
                self._free.append(buffer)

    def clear(self) -> None:
        """Free all buffers that nobody uses."""
        with self._lock:
            self._free.clear()


class Lease:
    """Bytes leased from a pool; a context manager that gives them back."""

    def __init__(
        self, pool: BufferPool, buffer: NDArray[np.uint8], nbytes: int, beside: int
    ) -> None:
        self._pool = pool
        self._pin = pool.pin
        self._buffer: NDArray[np.uint8] | None = buffer
        self.nbytes = nbytes
        """Bytes of the buffer that may be used."""
        self.leased = buffer.nbytes + beside
        """Bytes of the pool's limit that it takes."""
        self._beside = beside
        self._used = 0

    def array(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[np.generic]:
        """The next part of the lease as an array, with undefined contents."""
        assert self._buffer is not None, "the lease was given back"
        kind = np.dtype(dtype)
        size = prod(shape) * kind.itemsize
        begin = self._used
        self._used = begin + round_up(size)
        assert self._used <= self._buffer.nbytes, "more taken from a lease than was asked for"
        array: NDArray[np.generic] = self._buffer[begin : begin + size].view(kind).reshape(shape)
        return array

    def touch(self) -> None:
        """Have the kernel provide all pages of the buffer now."""
        assert self._buffer is not None, "the lease was given back"
        if self._pin is None:  # pinning touches the memory
            touch(self._buffer)

    def release(self, nbytes: int) -> None:
        """Record that `nbytes` of the bytes counted beside the buffer have been freed."""
        assert nbytes <= self._beside, "more released than was counted"
        self._beside -= nbytes
        self._pool._take_back(self, None, nbytes)  # noqa: SLF001  (pool and lease are one thing)

    def give_back(self, *, keep: bool = True) -> None:
        """End the lease; its arrays must no longer be used.

        With `keep=False` the pool does not reuse the buffer.
        """
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            keep = keep and self._pin is self._pool.pin
            self._pool._take_back(self, buffer, self.leased, keep=keep)  # noqa: SLF001

    def __enter__(self) -> Self:
        """The lease itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give the bytes back."""
        self.give_back()


class BufferPool:
    """Leases buffers of at most `limit` bytes in total (or one larger buffer, alone)."""

    def __init__(self, limit: int, pin: Pin | None = None) -> None:
        """Allocate nothing yet; see `pin_with` for `pin`."""
        self.limit = limit
        """Most bytes of all leases together."""
        self.pin = pin
        self.high_water = 0
        """Most bytes that existed at once: leased, counted beside leases, or kept for reuse."""
        self.copying: set[int] = set()
        """Threads that are filling a lease, by their identifiers: a signal handler on such a thread
        must not wait for another lease."""
        self._leases: WeakSet[Lease] = WeakSet()
        """Those that exist. One that Ctrl-C keeps from its user takes nothing any more."""
        self._kept: list[NDArray[np.uint8]] = []
        self._unpin: dict[int, Callable[[], object]] = {}
        """For each pinned buffer, by its address, the function that unpins it."""
        self._waiting: deque[object] = deque()
        self._changed = InterruptibleCondition()

    def take(self, nbytes: int, *, most: int = 0, beside: int = 0) -> Lease:
        """Lease a buffer; wait until there is room for it and all earlier requests are served.

        A thread that holds a lease must not wait for another one.

        Args:
            nbytes: least bytes of the buffer.
            most: preferred bytes, granted as far as there is room without a longer wait.
            beside: bytes that others allocate during the lease. They count like leased bytes until
                the lease ends or `Lease.release` is called.
        """
        turn = object()
        with self._changed.lock:
            try:
                try:
                    self._waiting.append(turn)
                    while not self._changed.wait_for(
                        lambda: self._waiting[0] is turn and self._fits(_size(nbytes) + beside),
                        _LOOK,
                    ):
                        pass  # a lease that was lost notifies nobody
                    room = (self.limit - self._leased - beside) // ALIGNMENT * ALIGNMENT
                    return self._lend(max(nbytes, min(most, room)), beside)
                finally:
                    self._end_turn(turn)
            finally:
                self._end_turn(turn)  # Ctrl-C may have kept the first call from its end

    def take_at_once(self, nbytes: int, *, beside: int = 0) -> Lease | None:
        """Like `take`, but return None instead of waiting."""
        with self._changed.lock:
            fits = not self._waiting and self._fits(_size(nbytes) + beside)
            return self._lend(nbytes, beside) if fits else None

    def clear(self) -> None:
        """Free the buffers that are kept for reuse; leased ones stay."""
        with self._changed.lock:
            while self._kept:
                self._free(self._kept.pop())

    def resize(self, limit: int) -> None:
        """Change the limit. Leases stay; kept buffers above the limit are freed."""
        with self._changed.lock:
            self.limit = limit
            while self._kept and self._allocated_bytes() > limit:
                self._free(self._kept.pop(0))
            self._changed.notify_all()

    def pin_with(self, pin: Pin) -> None:
        """Pin all buffers from now on.

        Buffers that are not pinned are freed, leased ones at the end of their lease.

        Args:
            pin: pins the memory of a buffer, in parts of a size that it chooses, and returns the
                function that unpins it.
        """
        with self._changed.lock:
            if self.pin is not pin:
                self.pin = pin
                self._kept.clear()

    @property
    def is_used(self) -> bool:
        """Whether anything is leased, or asked for."""
        with self._changed.lock:
            return bool(self._leased or self._waiting)

    @property
    def kept(self) -> list[int]:
        """Addresses of the buffers that are kept for reuse, ascending."""
        with self._changed.lock:
            return sorted(buffer.ctypes.data for buffer in self._kept)

    @property
    def _leased(self) -> int:
        """Bytes that are leased, or counted beside leases."""
        return sum([lease.leased for lease in self._leases])

    def _fits(self, nbytes: int) -> bool:
        return not self._leased or self._leased + nbytes <= self.limit

    def _lend(self, nbytes: int, beside: int) -> Lease:
        size = _size(nbytes)
        buffer = self._reuse(size, self.limit - self._leased - beside)
        total = beside + (size if buffer is None else buffer.nbytes)
        while self._kept and self._allocated_bytes() + total > self.limit:
            self._free(self._kept.pop(0))
        if buffer is None:
            buffer = _align(size, ALIGNMENT if self.pin is None else _LARGE_PAGE)
            if self.pin is not None:
                self._unpin[buffer.ctypes.data] = self.pin(buffer, partial(touched, buffer))
        lease = Lease(self, buffer, nbytes, beside)
        try:
            self._leases.add(lease)
            self.high_water = max(self.high_water, self._allocated_bytes())
            return lease  # noqa: TRY300  (an interrupt of it counts, too)
        except BaseException:  # whose traceback keeps the lease
            lease.leased = 0
            raise

    def _end_turn(self, turn: object) -> None:
        if turn in self._waiting:
            self._waiting.remove(turn)
        self._changed.notify_all()

    def _reuse(self, size: int, room: int) -> NDArray[np.uint8] | None:
        """The smallest kept buffer that is large enough and not wastefully larger.

        None if there is none.
        """
        most = max(size, min(2 * size + (1 << 20), room))
        fitting = [i for i, b in enumerate(self._kept) if size <= b.nbytes <= most]
        return self._kept.pop(min(fitting, key=lambda i: self._kept[i].nbytes)) if fitting else None

    def _free(self, buffer: NDArray[np.uint8]) -> None:
        """Unpin a buffer that the pool drops.

        Arrays over it may still exist, in the traceback of an error for example.
        """
        if (unpin := self._unpin.pop(buffer.ctypes.data, None)) is not None:
            unpin()

    def _allocated_bytes(self) -> int:
        return self._leased + sum(b.nbytes for b in self._kept)

    def _take_back(
        self, lease: Lease, buffer: NDArray[np.uint8] | None, nbytes: int, *, keep: bool = True
    ) -> None:
        with self._changed.lock:
            lease.leased -= nbytes
            if buffer is not None:
                if keep and self._allocated_bytes() + buffer.nbytes <= self.limit:
                    self._kept.append(buffer)
                else:
                    self._free(buffer)
            self._changed.notify_all()


class Arena:
    """Cuts arrays from blocks; for one thread at a time."""

    def __init__(self) -> None:
        """Nothing is allocated yet."""
        self._rest: NDArray[np.uint8] = np.empty(0, np.uint8)

    def array(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[np.generic]:
        """A new array, aligned like a pool's buffers, with undefined contents."""
        kind = np.dtype(dtype)
        size = prod(shape) * kind.itemsize
        if not self.shares_block(size):  # the rest of the current block stays in use
            return _align(size, _LARGE_PAGE).view(kind).reshape(shape)
        if size > self._rest.nbytes:
            self._rest = _align(BLOCK, _LARGE_PAGE)
        array: NDArray[np.generic] = self._rest[:size].view(kind).reshape(shape)
        self._rest = self._rest[round_up(size) :]
        return array

    @staticmethod
    def shares_block(nbytes: int) -> bool:
        """Whether an array of so many bytes lies in a block with others, and lives as long."""
        return nbytes <= BLOCK // 2


def touch(buffer: NDArray[np.uint8]) -> None:
    """Write to every page of new memory, on several threads.

    The kernel clears the pages then, and pinning them takes a fifth as long.
    """
    parts = [
        buffer[begin : begin + _TOUCHED : mmap.PAGESIZE]
        for begin in range(0, buffer.nbytes, _TOUCHED)
    ]
    parts.append(buffer[-1:])  # it may begin amid a page
    run_on_threads(parts, [_clear] * max(1, min(cores(), len(parts))), "shardckpt-touch")


def touched(buffer: NDArray[np.uint8], nbytes: int) -> Iterator[NDArray[np.uint8]]:
    """Yield parts of new memory after a `touch`.

    While the caller has one, the next one is touched.
    """
    parts = (buffer[begin : begin + nbytes] for begin in range(0, buffer.nbytes, nbytes))
    with closing(read_ahead(parts, lambda *_: (), touch, ahead=1, copies=False)) as coming:
        for part, _ in coming:
            yield part


def _clear(pages: NDArray[np.uint8]) -> None:
    pages[...] = 0


def after(vectors: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """The remaining vectors after the first `nbytes` bytes.

    >>> [bytes(rest) for rest in after([memoryview(b"abc"), memoryview(b"de")], 2)]
    [b'c', b'de']
    """
    for i, vector in enumerate(vectors):
        if nbytes < len(vector):
            return [vector[nbytes:], *vectors[i + 1 :]]
        nbytes -= len(vector)
    return []


def gather_write(fd: int, offset: int, vectors: Sequence[memoryview]) -> None:
    """Write all vectors, one after another, to a place in a file."""
    while vectors:
        part = vectors[:MOST_VECTORS]
        written = os.pwritev(fd, part, offset)
        if any(part):
            check_written(written)
        offset += written
        vectors = after(vectors, written)


def round_up(nbytes: int) -> int:
    """Round up to the next multiple of the alignment.

    The result is the number of bytes of a lease that an array of `nbytes` uses.
    """
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _size(nbytes: int) -> int:
    """Bytes of the buffer that is leased for a request of `nbytes`."""
    return max(round_up(nbytes), ALIGNMENT)


def _align(nbytes: int, alignment: int = ALIGNMENT) -> NDArray[np.uint8]:
    """Fresh memory that begins at a multiple of `alignment`."""
    raw = np.empty(nbytes + alignment, np.uint8)
    begin = -raw.ctypes.data % alignment
    return raw[begin : begin + nbytes]
