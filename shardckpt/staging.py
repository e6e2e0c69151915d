"""How do the elements of a save get out of the trained tensors' way?

1. `read` goes through this process's blocks (`blocks`) in grid order: batch after batch of tensors, whose copies
   (where a framework makes some) stay within a limit.
2. A `Stage` takes them on the thread that saves, and copies each into pooled buffers, of one block many bytes at once.
3. Another thread takes them off, in the same order, and cuts them into chunks. A buffer is free again when its last
   block is written.

That thread starts when everything is copied, because until then the two would share the machine's memory bandwidth,
and it is the first one that training waits for. Then there is one buffer, of the size of all blocks together, the same
from save to save. Only where the pool has no room for that there are small ones, the second thread starts at once,
and the first one waits for what it frees: the save streams.

Either side that fails wakes the other one.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from dataclasses import dataclass, field
from threading import Condition
from typing import TYPE_CHECKING

from shardckpt import frameworks
from shardckpt.batches import batches
from shardckpt.blocks import chunks_of, smaller
from shardckpt.io.budget import round_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from shardckpt.blocks import Block
    from shardckpt.frameworks.base import Source
    from shardckpt.io.budget import BufferPool, Lease
    from shardckpt.io.host import HostWriter
    from shardckpt.save_plan import SavePlan
    from shardckpt.structure import TensorRecord

__all__ = ["MOST_COPIES", "Stage", "read", "stored", "write_chunks"]

MOST_COPIES = 32 << 20
"""Bytes of copies that frameworks are asked for at a time. So few an allocator hands out again and again, where more is fresh
memory each time, which the kernel has to clear: from torch_xla, reading takes four times as long."""

_BUFFER_BYTES = 32 << 20
"""Of a buffer, where one does not hold all."""
_LEAST_BUFFERS = 8
"""The pool has room for so many, where they are smaller: what the last block leaves of each is lost, and both sides work on one at a
time."""


def stored(array: NDArray[np.generic], tensor: TensorRecord) -> NDArray[np.generic]:
    """Elements in the dtype as which they are stored, without a copy."""
    return array.view(tensor.dtype.storage) if array.dtype != tensor.dtype.storage else array


def read(
    plan: SavePlan, sources: Mapping[str, Source], room: int, *, most: int = sys.maxsize
) -> Iterator[tuple[Block, NDArray[np.generic]]]:
    """All blocks of this process, with their elements as they are stored.

    These may be views of the tensors, and are to be used up before the next block is asked for.

    Args:
        plan: what this process writes.
        sources: its tensors.
        room: bytes of copies that may be made at a time; a tensor that takes more goes alone.
        most: bytes of a block, where one chunk does not take more.
    """
    for batch in batches(plan.blocks, lambda name: (sources[name].staged_bytes,), (room,)):
        wanted = [sorted({block.held for block in plan.blocks[name]}) for name in batch]
        fetched = frameworks.fetch([sources[name] for name in batch], wanted)
        for name, boxes, arrays in zip(batch, wanted, fetched, strict=True):
            of_box = {i: stored(array, plan.tensors[name]) for i, array in zip(boxes, arrays, strict=True)}
            for block in plan.blocks[name]:
                for part in smaller(block, most):
                    yield part, of_box[part.held][part.inside]
        fetched, arrays, of_box = [], [], {}  # before the next batch is fetched, which then finds this memory free


def write_chunks(writer: HostWriter, block: Block, elements: NDArray[np.generic]) -> Iterator[int]:
    """Write the chunks of a block one after another; the bytes of elements of each, when it is written."""
    for position, index in chunks_of(block):
        chunk = elements[index]
        writer.put(block.piece, position, chunk)
        yield chunk.nbytes


@dataclass(slots=True)
class _Buffer:
    """A lease with blocks in it, one after another."""

    lease: Lease
    left: int
    """Bytes that are still free in it."""
    blocks: list[tuple[Block, NDArray[np.generic]]] = field(default_factory=list)


class Stage:
    """Blocks on their way from the thread that saves to the one that writes."""

    def __init__(self, pool: BufferPool, start: Callable[[], None]) -> None:
        """Nothing is taken from the pool before the first block.

        Args:
            pool: where buffers come from, and go back to.
            start: starts the thread that takes the blocks off; called once, on the thread that saves.
        """
        self.streamed = False
        """Whether the buffers did not suffice."""
        self.blocked = 0.0
        """Seconds for which the thread that saves has waited for a buffer."""
        self.started = False
        """Whether the writing thread was started."""
        self._pool = pool
        self._start = start
        self._buffer_bytes = 0
        self._filling: _Buffer | None = None
        self._ready: deque[_Buffer] = deque()
        self._closed = False
        self._failure: BaseException | None = None
        self._changed = Condition()

    # --- the thread that saves

    def reserve(self, nbytes: int) -> None:
        """Wait until the pool has room for what others allocate (`BufferPool.reserve`)."""
        began = time.monotonic()
        self._pool.reserve(nbytes)
        self.blocked += time.monotonic() - began

    def fit(self, blocks: Iterable[Block], room: int) -> int:
        """Prepare for these blocks, of which the pool has room for so many bytes.

        Returns:
            How large a block may be, in bytes.
        """
        total = sum(round_up(block.nbytes) for block in blocks)
        if total <= room:
            self._buffer_bytes = total
            return sys.maxsize
        self._buffer_bytes = min(_BUFFER_BYTES, max(1, room // _LEAST_BUFFERS))
        self._stream()
        return self._buffer_bytes

    def put(self, block: Block, elements: NDArray[np.generic]) -> None:
        """Copy a block.

        Raises:
            BaseException: what ended the other thread.
        """
        room = round_up(elements.nbytes)
        if self._filling is None or self._filling.left < room:
            self._hand_over()
            size = max(room, self._buffer_bytes)
            self._filling = _Buffer(self._take(size), size)
        copy = self._filling.lease.array(elements.shape, elements.dtype)
        self._filling.left -= room
        copy[...] = elements
        self._filling.blocks.append((block, copy))

    def close(self) -> None:
        """Everything is copied."""
        self._hand_over()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._start_writing()

    def give_up(self, error: BaseException) -> None:
        """Copying has failed: nothing of this is to be written any more."""
        self.fail(error)
        self._hand_over()

    def _stream(self) -> None:
        self.streamed = True
        self._start_writing()

    def _take(self, nbytes: int) -> Lease:
        lease = self._pool.take_unless(nbytes, lambda: True)
        if lease is None:
            self._stream()
            began = time.monotonic()
            lease = self._pool.take_unless(nbytes, lambda: self._failure is not None)
            self.blocked += time.monotonic() - began
        if self._failure is not None:
            if lease is not None:
                lease.give_back()
            raise self._failure
        assert lease is not None
        return lease

    def _hand_over(self) -> None:
        """What is copied so far may be written."""
        buffer, self._filling = self._filling, None
        if buffer is None:
            return
        with self._changed:
            if self._failure is None:
                self._ready.append(buffer)
                self._changed.notify_all()
                return
        buffer.lease.give_back()

    def _start_writing(self) -> None:
        if not self.started:
            self.started = True
            self._start()

    # --- the thread that writes

    def __iter__(self) -> Iterator[tuple[Block, NDArray[np.generic]]]:
        """The blocks and their elements; each is to be used up before the next is asked for.

        Raises:
            BaseException: what ended the other thread.
        """
        while (buffer := self._next()) is not None:
            try:
                yield from buffer.blocks
            finally:
                buffer.lease.give_back()

    def _next(self) -> _Buffer | None:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._closed or self._failure is not None)
            if self._failure is not None:
                raise self._failure
            return self._ready.popleft() if self._ready else None

    # --- both

    def fail(self, error: BaseException) -> None:
        """One side has failed: the other one is told, and all buffers are given back, but for one that is being read."""
        with self._changed:
            if self._failure is None:
                self._failure = error
            abandoned = [*self._ready]
            self._ready.clear()
            self._changed.notify_all()
        for buffer in abandoned:
            buffer.lease.give_back()
        self._pool.wake()
