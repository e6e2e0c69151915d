"""Elements of a save in the background, on their way from the thread that saves to the one that writes.

1. `save.read` goes through this process's blocks in grid order: batch after batch of tensors, whose copies (where a framework
   makes some) stay within a limit.
2. A `Stage` takes them on the thread that saves. It keeps blocks that have memory of their own, and copies the others into
   a pooled buffer, many bytes at once (`copying`).
3. Another thread takes them off, in the same order, and cuts them into chunks (`write_chunks`).

The other thread starts when everything is copied, because until then the two would share the machine's memory bandwidth,
and training waits for the first one. The buffer has the size of all blocks that are copied, the same from save to save. Only
where the pool has no room for all of it the buffer is smaller and falls into parts, the second thread starts at once, and the
first one waits for the parts that it frees: the save streams. Then all blocks are copied.

A save asks the pool once, for all that it needs until it is written. So saves wait for each other only while they hold
nothing, and one that has begun to copy waits for its own second thread alone.

Either side that fails wakes the other one. What was taken from the pool is given back when both have left.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from dataclasses import dataclass, field
from threading import Condition
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.io.buffers import round_up
from shardckpt.io.copying import copy_all
from shardckpt.plan.pieces import parts_of
from shardckpt.writing.host import portions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

    from shardckpt.io.buffers import BufferPool, Lease
    from shardckpt.plan.pieces import Block
    from shardckpt.writing.host import HostWriter
    from shardckpt.writing.save import BlockElements

WRITTEN_BYTES = 2 << 20
"""Bytes of elements that the background encodes and writes at a time: many chunks, in no more memory than one may take."""
_BUFFER_BYTES = 32 << 20
"""Bytes of a part of the buffer, where the buffer does not hold all."""
_LEAST_PARTS = 8
"""Least number of parts. Each part loses what its last block leaves, and both sides work on one at a time."""


def write_chunks(writer: HostWriter, blocks: Iterable[tuple[Block, NDArray[np.generic]]]) -> Iterator[int]:
    """Write the chunks of blocks, some at a time; the bytes of elements of these, when they are written."""
    cut = ((block.piece, box, elements[index]) for block, elements in blocks for box, index in parts_of(block, WRITTEN_BYTES))
    for portion in portions(cut, WRITTEN_BYTES):
        writer.put_all(portion, WRITTEN_BYTES)
        yield sum(elements.nbytes for _, _, elements in portion)


@dataclass(slots=True)
class _Part:
    """A part of the buffer: the blocks in it one after another, and blocks in memory of their own that come between them."""

    memory: NDArray[np.generic]
    used: int = 0
    """Bytes of the memory."""
    blocks: list[tuple[Block, NDArray[np.generic]]] = field(default_factory=list)


class Stage:
    """Blocks on their way from the thread that saves to the one that writes."""

    def __init__(self, pool: BufferPool, start: Callable[[], None]) -> None:
        """Nothing is taken from the pool before `fit`.

        Args:
            pool: where the buffer comes from, and goes back to.
            start: starts the thread that takes the blocks off; called once, on the thread that saves.
        """
        self.streamed = False
        """Whether the buffer is smaller than what is copied."""
        self.blocked = 0.0
        """Seconds for which the thread that saves has waited for the pool, or for a part of the buffer."""
        self.started = False
        """Whether the writing thread was started."""
        self._pool = pool
        self._start = start
        self._lease: Lease | None = None
        self._sides = {"copying"}
        """Who may still touch the buffer."""
        self._fetching = 0
        self._filling: _Part | None = None
        self._free: deque[NDArray[np.generic]] = deque()
        self._ready: deque[_Part] = deque()
        self._closed = False
        self._interrupted = False
        """Whether copying has failed: after Ctrl-C a thread may still be copying into the buffer, so that no other save may have it."""
        self._failure: BaseException | None = None
        self._changed = Condition()

    # --- the thread that saves

    def fit(self, blocks: Iterable[tuple[Block, bool]], *, fetching: int = 0, writing: int = 0) -> int:
        """Take from the pool what the save needs, waiting until it has that.

        Args:
            blocks: all that will be put, and which of them are in memory of their own.
            fetching: bytes that frameworks allocate at a time, until everything is copied.
            writing: bytes that the other thread allocates, until everything is written.

        Returns:
            How large a block may be, in bytes.
        """
        wanted = [*blocks]
        copied = sum(round_up(block.nbytes) for block, own in wanted if not own)
        beside = fetching + writing
        kept = sum(block.nbytes for block, own in wanted if own)
        self._fetching = fetching
        if copied + kept + beside <= self._pool.limit:
            self._lease = self._pool.take_at_once(copied, beside=kept + beside)
        if self._lease is not None:
            self._free.append(self._lease.array((copied,), np.uint8))
            return sys.maxsize
        chunk = max((round_up(block.chunk_bytes) for block, _ in wanted), default=0)
        least = max(chunk, (self._pool.limit - beside) // _LEAST_PARTS)
        began = time.monotonic()
        self._lease = self._pool.take(least, most=sum(round_up(block.nbytes) for block, _ in wanted), beside=beside)
        self.blocked += time.monotonic() - began
        size = max(chunk, round_up(min(_BUFFER_BYTES, self._lease.nbytes // _LEAST_PARTS)))
        self._free.extend(self._lease.array((size,), np.uint8) for _ in range(self._lease.nbytes // size))
        self.streamed = True
        self._start_writing()
        return size

    def put(self, batch: Iterable[BlockElements]) -> None:
        """Keep blocks, or copy them: when this returns, their tensors may change.

        Raises:
            BaseException: what ended the other thread.
        """
        copies: list[tuple[NDArray[np.generic], NDArray[np.generic]]] = []
        for block, elements, own in batch:
            keep = own and not self.streamed
            room = 0 if keep else round_up(elements.nbytes)
            if self._filling is None or self._filling.memory.nbytes - self._filling.used < room:
                copy_all(copies)
                copies = []
                self._hand_over()
                self._filling = _Part(self._free_memory())
            if keep:
                self._filling.blocks.append((block, elements))
                continue
            begin = self._filling.used
            self._filling.used += room
            copy = self._filling.memory[begin : begin + elements.nbytes].view(elements.dtype).reshape(elements.shape)
            self._filling.blocks.append((block, copy))
            copies.append((copy, elements))
        copy_all(copies)

    def close(self) -> None:
        """Everything is copied."""
        assert self._lease is not None
        self._lease.release(self._fetching)
        self._hand_over()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._start_writing()
        self._leave("copying")

    def give_up(self, error: BaseException) -> None:
        """Copying has failed: nothing of this is to be written any more."""
        self.fail(error)
        self._interrupted = True
        self._filling = None
        self._leave("copying")

    def _free_memory(self) -> NDArray[np.generic]:
        with self._changed:
            if not self._free and self._failure is None:
                began = time.monotonic()
                self._changed.wait_for(lambda: self._free or self._failure is not None)
                self.blocked += time.monotonic() - began
            if self._failure is not None:
                raise self._failure
            return self._free.popleft()

    def _hand_over(self) -> None:
        """Let the other thread write what is copied so far."""
        part, self._filling = self._filling, None
        with self._changed:
            if part is not None and self._failure is None:
                self._ready.append(part)
                self._changed.notify_all()

    def _start_writing(self) -> None:
        if not self.started:
            self.started = True
            self._sides.add("writing")
            self._start()

    # --- the thread that writes

    def __iter__(self) -> Iterator[list[tuple[Block, NDArray[np.generic]]]]:
        """The blocks and their elements, some at a time, which are to be used up before the next are asked for.

        Raises:
            BaseException: what ended the other thread.
        """
        while (part := self._next()) is not None:
            try:
                yield part.blocks
            finally:
                part.blocks.clear()
                with self._changed:
                    self._free.append(part.memory)
                    self._changed.notify_all()

    def end(self) -> None:
        """Nothing is written any more: everything is, or something has failed."""
        self._leave("writing")

    def _next(self) -> _Part | None:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._closed or self._failure is not None)
            if self._failure is not None:
                raise self._failure
            return self._ready.popleft() if self._ready else None

    # --- both

    def fail(self, error: BaseException) -> None:
        """One side has failed: the other one is told."""
        with self._changed:
            if self._failure is None:
                self._failure = error
            self._ready.clear()
            self._changed.notify_all()

    def _leave(self, side: str) -> None:
        """One side touches nothing any more; the last one gives everything back."""
        with self._changed:
            self._sides.discard(side)
            lease = None
            if not self._sides:
                lease, self._lease = self._lease, None
        if lease is not None:
            lease.give_back(keep=not self._interrupted)
