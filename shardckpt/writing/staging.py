"""Staging of a background save: elements move from the thread that saves to the threads that write.

1. `state_share.read` goes through this process's blocks in grid order: batch after batch of
   tensors, whose copies (if the framework makes any) stay within a limit.
2. A `Stage` receives the blocks on the thread that saves. It keeps blocks that have memory of their
   own, such as XLA's pinned memory beside an accelerator (all of them come in one batch), and
   copies the others into a pooled buffer, many bytes at once (`copying`).
3. The writing thread, and threads that help it, receive them cut and grouped for the writer
   (`Stage.portions`), in the same order except for blocks whose sums are known.

The writing thread starts when everything is copied. Before that, the two would share the machine's
memory bandwidth, and training waits for the copies. The buffer has the size of all blocks that are
copied, the same from save to save. If the pool has no room for all of it, the buffer is smaller and
has several parts, the writing thread starts at once, and the saving thread waits for free parts:
the save streams. Then all blocks are copied.

Blocks of CUDA tensors (`DeviceArray`) are copied by the device: the saving thread only queues their
copies, into a buffer of pinned memory, and the writing thread waits for their arrival before it
reads a part. No part is reused, and the lease is not given back, before that. A part is reused when
all of its portions are written; meanwhile portions of the next part are written.

A save makes one request to the pool for everything that it needs until it is written. So a save
waits for other saves only while it holds nothing, and a save that has begun to copy waits only for
its own writing thread.

If either thread fails, it wakes the other one. The lease is given back when both threads have left.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from shardckpt import frameworks
from shardckpt.errors import BudgetError, CorruptionError
from shardckpt.format.fingerprint import crc_of_run, sums_of_run
from shardckpt.io.buffers import BufferPool, round_up
from shardckpt.io.copying import checksum, copy_all, copy_summed
from shardckpt.io.threads import InterruptibleCondition, map_on_threads
from shardckpt.text import file_size
from shardckpt.writing.small_blocks import SmallBlocks, addresses_of
from shardckpt.writing.state_share import is_array

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardckpt.format.fingerprint import RunSums
    from shardckpt.frameworks.base import Source
    from shardckpt.frameworks.cuda import Arrival, DeviceCopies
    from shardckpt.io.buffers import Lease
    from shardckpt.plan.blocks import Block
    from shardckpt.writing.encoder import Portion
    from shardckpt.writing.host import HostWriter
    from shardckpt.writing.state_share import BlockElements

    Proof: TypeAlias = Callable[[NDArray[np.generic]], bool] | int | None
    """A function that says whether a copy has the elements of its tensor; the CRC-32C of the
    tensor's elements; or None: the tensor has changed."""

_BUFFER_BYTES = 32 << 20
"""Bytes of a part of the buffer, if the buffer does not hold everything."""
_LEAST_PARTS = 8
"""Least number of parts. The end of each part may stay unused, and each thread works on one part at
a time."""
_SUMMED_AGAIN = 256 << 10
"""Most bytes of a copy that are summed twice: to join the sums of its runs takes longer."""


@dataclass(slots=True)
class _Part:
    """A part of the buffer with copied blocks one after another.

    It also has the blocks in memory of their own that come between them.
    """

    memory: NDArray[np.generic]
    used: int = 0
    """Bytes of the memory that are in use."""
    blocks: list[tuple[Block, NDArray[np.generic]]] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)
    """The copies from devices that must arrive before the memory is read or reused."""
    proofs: list[tuple[Block, NDArray[np.generic], Proof]] = field(default_factory=list)
    """Blocks with their copies, which are compared with their tensors."""
    small: list[tuple[int, SmallBlocks, int]] = field(default_factory=list)
    """Small blocks that were copied together: how many of `blocks` come before them, and where in
    the memory they are."""
    portions: int = 1
    """Portions that are drawn but not yet written, plus one while more may be drawn."""

    def all_blocks(self) -> list[tuple[Block, NDArray[np.generic]]]:
        """All blocks with their elements, in order."""
        blocks: list[tuple[Block, NDArray[np.generic]]] = []
        done = 0
        for before, small, begin in self.small:
            blocks += self.blocks[done:before]
            blocks += small.arrays(self.memory[begin:].view(np.uint8))
            done = before
        return blocks + self.blocks[done:]


@dataclass(frozen=True, slots=True)
class StageSizes:
    """Bytes of memory that a save needs beside its blocks."""

    fetching: int = 0
    """Bytes that frameworks allocate at a time, until everything is copied."""
    keeping: int | None = None
    """The same while blocks that have memory of their own are kept; None: as much."""
    writing: int = 0
    """Bytes that the writing thread allocates, until everything is written."""
    late: int = 0
    """Bytes of memory for other elements, which the writing thread reads: `Stage.late`."""


class Stage:
    """Blocks in transit from the thread that saves to the thread that writes."""

    def __init__(self, pool: BufferPool, start: Callable[[], None]) -> None:
        """Create an empty stage; nothing is leased before `fit`.

        Args:
            pool: leases the buffer.
            start: starts the writing thread; called once, on the thread that saves.
        """
        self.streamed = False
        """Whether the buffer is smaller than the blocks to copy."""
        self.blocked = 0.0
        """Seconds that the thread that saves has waited for the pool, or for a free part."""
        self.started = False
        """Whether the writing thread was started."""
        self.shapes_to_prove: Mapping[str, tuple[int, ...]] = {}
        """Tensor shapes by array path; empty: copies are not proved."""
        self.copies: DeviceCopies | None = None
        """Copies elements that are on devices; None: none are."""
        self.late: NDArray[np.uint8] = np.empty(0, np.uint8)
        """Leased memory for the `late` bytes of the sizes; valid until both sides have left."""
        self._pool = pool
        self._start = start
        self._lease: Lease | None = None
        self._fills: int | None = None
        """The thread that saves, in `BufferPool.copying`, while it fills the lease."""
        self._sides = {"copying"}
        """The sides that may still use the buffer."""
        self._fetching = 0
        self._filling: _Part | None = None
        self._free: deque[NDArray[np.generic]] = deque()
        self._ready: deque[_Part] = deque()
        self._closed = False
        self._interrupted = False
        """Whether copying has failed. After Ctrl-C a thread may still write into the buffer, so the
        pool must not reuse it."""
        self._failure: BaseException | None = None
        self._changed = InterruptibleCondition()

    # --- the thread that saves

    def fit(
        self, blocks: Iterable[tuple[Block, bool]], sizes: StageSizes, *, streams: bool = True
    ) -> int:
        """Lease everything that the save needs from the pool; wait until that is possible.

        Args:
            blocks: all blocks of the save, and whether each has memory of its own.
            sizes: the memory that is needed beside them.
            streams: whether a buffer that is smaller than the blocks will do.

        Returns:
            Most bytes of a block.

        Raises:
            BudgetError: the limit is too small for all blocks, and `streams` is not set; or too
                much memory to pin; or this thread would wait for another save that it is in the
                middle of itself.
        """
        most = self._fit([*blocks], sizes, streams=streams)
        if get_ident() not in self._pool.copying:
            self._fills = get_ident()
            self._pool.copying.add(self._fills)
        return most

    def warm(self, blocks: Iterable[tuple[Block, bool]], sizes: StageSizes) -> bool:
        """Touch the memory of the lease that `fit` would make for a save, and give it back.

        Return whether the save streams.
        """
        try:
            self.fit(blocks, sizes)
            assert self._lease is not None
            self._lease.touch()
            return self.streamed
        finally:
            self._leave("writing")
            self._leave("copying")

    def _fit(self, pairs: Sequence[tuple[Block, bool]], sizes: StageSizes, *, streams: bool) -> int:
        """See `fit`."""
        keeping = sizes.fetching if sizes.keeping is None else sizes.keeping
        copied = sum(round_up(block.nbytes) for block, own in pairs if not own)
        late = round_up(sizes.late)
        kept = sum(block.nbytes for block, own in pairs if own) + keeping + sizes.writing
        self._fetching = keeping
        needed = late + copied + kept
        if needed <= self._pool.limit:
            self._lease = self._pool.take_at_once(late + copied, beside=kept)
        if self._lease is None and not streams:
            if needed > self._pool.limit:
                raise BudgetError(
                    f'SaveOptions(device_copy="overlap"): this process needs {needed:,} bytes of '
                    f"host memory at once, and memory_limit={file_size(self._pool.limit)}; raise "
                    'memory_limit, or use "wait".'
                )
            self._lease = self._take(late + copied, beside=kept)
        if self._lease is not None:
            self.late = self._lease.array((late,), np.uint8).view(np.uint8)
            self._free.append(self._lease.array((copied,), np.uint8))
            return sys.maxsize
        beside = sizes.fetching + sizes.writing
        self._fetching = sizes.fetching
        chunk = max((round_up(block.chunk_bytes) for block, _ in pairs), default=0)
        least = max(chunk, (self._pool.limit - beside) // _LEAST_PARTS)
        self._lease = self._take(
            late + least,
            most=late + sum(round_up(block.nbytes) for block, _ in pairs),
            beside=beside,
        )
        self.late = self._lease.array((late,), np.uint8).view(np.uint8)
        room = self._lease.nbytes - late
        size = max(chunk, round_up(min(_BUFFER_BYTES, room // _LEAST_PARTS)))
        self._free.extend(self._lease.array((size,), np.uint8) for _ in range(room // size))
        self.streamed = True
        self._start_writing()
        return size

    def _take(self, nbytes: int, *, most: int = 0, beside: int) -> Lease:
        """Wait for a lease, unless this thread itself would have to give memory back."""
        if get_ident() in self._pool.copying:
            raise BudgetError(
                f"memory_limit={file_size(self._pool.limit)} is in use by a save that this thread "
                "is in the middle of, and a signal handler or a finalizer has begun another one. "
                "Let it set a flag, and save when the first call has returned (of a "
                "CheckpointManager: `preemption=OnPreemption()`); or raise memory_limit."
            )
        began = time.monotonic()
        try:
            return self._pool.take(nbytes, most=most, beside=beside)
        finally:
            self.blocked += time.monotonic() - began

    def put(self, batch: Iterable[BlockElements]) -> None:
        """Keep or copy blocks: their tensors may change when this returns.

        Raises:
            BaseException: the error of the writing thread.
        """
        copies: list[tuple[Block, NDArray[np.generic], Any]] = []
        for block, elements, own, resident in batch:
            keep = resident or (own and not self.streamed)
            room = 0 if keep else round_up(elements.nbytes)
            if self._filling is None or self._filling.memory.nbytes - self._filling.used < room:
                self._copy(copies)
                copies = []
                self._hand_over()
                self._filling = _Part(self._free_memory())
            if keep:
                self._filling.blocks.append((block, elements))
                continue
            begin = self._filling.used
            self._filling.used += room
            copy = (
                self._filling.memory[begin : begin + elements.nbytes]
                .view(elements.dtype)
                .reshape(elements.shape)
            )
            self._filling.blocks.append((block, copy))
            copies.append((block, copy, elements))
        self._copy(copies)

    def put_small(self, small: SmallBlocks, sources: Sequence[Source]) -> bool:
        """Copy small blocks of these tensors; the stage does not stream or prove.

        False, and nothing is done, if some of them are fetched into memory of their own.
        """
        addresses = addresses_of(sources)
        if addresses is None:
            return False
        if self._filling is None:
            self._filling = _Part(self._free_memory())
        part = self._filling
        begin = part.used
        part.used += small.nbytes
        part.small.append((len(part.blocks), small, begin))
        small.copy(sources, addresses, part.memory[begin : part.used].view(np.uint8))
        return True

    def _copy(self, copies: list[tuple[Block, NDArray[np.generic], Any]]) -> None:
        """Copy elements to the part that is being filled, or queue their copies."""
        pairs = [(copy, elements) for _, copy, elements in copies]
        if self.copies is not None and copies:
            assert self._filling is not None
            self._filling.arrivals.append(
                self.copies.copy(pair for pair in pairs if not is_array(pair[1]))
            )
        on_host = [pair for pair in pairs if is_array(pair[1])]
        if not self.shapes_to_prove:
            copy_all(on_host)
        elif copies:
            assert self._filling is not None
            sums = iter(copy_summed(on_host))
            for block, copy, elements in copies:
                # A device sums its own: the host does not wait for that.
                proof = next(sums) if is_array(elements) else frameworks.sum_on_device(elements)
                self._filling.proofs.append((block, copy, proof))

    def close(self) -> None:
        """Finish the copying side: everything is copied, or its copy is queued."""
        assert self._lease is not None
        if self.copies is not None:
            self.copies.end()
        self._lease.release(self._fetching)
        self._hand_over()
        with self._changed.lock:
            self._closed = True
            self._changed.notify_all()
        self._start_writing()
        self._leave("copying")

    def give_up(self, error: BaseException) -> None:
        """Stop both sides after a failure of the copying side: nothing more is written."""
        self.fail(error)
        self._interrupted = True
        self._filling = None
        self._leave("copying")

    def _free_memory(self) -> NDArray[np.generic]:
        with self._changed.lock:
            if not self._free and self._failure is None:
                began = time.monotonic()
                self._changed.wait_for(lambda: self._free or self._failure is not None)
                self.blocked += time.monotonic() - began
            if self._failure is not None:
                raise self._failure
            return self._free.popleft()

    def _hand_over(self) -> None:
        """Pass the blocks copied so far to the writing thread."""
        part, self._filling = self._filling, None
        with self._changed.lock:
            if part is not None and self._failure is None:
                self._ready.append(part)
                self._changed.notify_all()

    def _start_writing(self) -> None:
        if not self.started:
            self.started = True
            self._sides.add("writing")
            self._start()

    # --- the thread that writes

    def portions(
        self, writer: HostWriter, at_a_time: int, written: Callable[[int], None]
    ) -> Iterator[Portion]:
        """Yield the blocks with their elements in portions for a writer.

        The writer's threads may draw the portions, one at a time.

        Args:
            writer: the writer.
            at_a_time: as for `HostWriter.portions_of`.
            written: as for `HostWriter.portions_of`.

        Raises:
            BaseException: the error of the saving thread.
            CommitError: a tensor on a device was changed while it was copied.
        """

        def free(part: _Part, nbytes: int) -> None:
            self._count_portions(part, -1)
            written(nbytes)

        while (part := self._next()) is not None:
            for arrival in part.arrivals:
                arrival.wait()
            if part.proofs:
                self._prove(part, writer)
            if self.copies is not None and not self.streamed:  # all are in this part
                self.copies.check()
            for portion in writer.portions_of(part.all_blocks(), at_a_time, partial(free, part)):
                self._count_portions(part, 1)
                yield portion
            self._count_portions(part, -1)
        if self.copies is not None:
            self.copies.check()

    def _prove(self, part: _Part, writer: HostWriter) -> None:
        """Compare copies with their tensors; the writer gets the sums that were made of them.

        Raises:
            CorruptionError: names the tensor.
        """

        def check(of: tuple[Block, NDArray[np.generic], Proof]) -> tuple[bool, RunSums | None]:
            block, copy, proof = of
            if callable(proof):
                return proof(copy), None
            shape = self.shapes_to_prove[block.piece.path]
            sums = sums_of_run(shape, block.box.start, copy)
            if sums is None or copy.nbytes <= _SUMMED_AGAIN:
                return checksum(copy) == proof, sums
            return crc_of_run(sums, copy.nbytes) == proof, sums

        for (block, _, _), (is_equal, sums) in zip(
            part.proofs, map_on_threads(check, part.proofs), strict=True
        ):
            if not is_equal:
                raise CorruptionError(
                    f"{block.piece.path}: the copy to be saved has other elements than the tensor "
                    "has: the tensor changed while it was copied, or the copy is damaged. Nothing "
                    "was published; save again, and change no tensor before the call has returned."
                )
            if sums is not None:
                writer.add_sums(block, sums)
        part.proofs.clear()

    def _count_portions(self, part: _Part, more: int) -> None:
        """Count the portions of a part; when all are written, the part is free."""
        with self._changed.lock:
            part.portions += more
            if part.portions == 0:
                part.blocks.clear()
                part.small.clear()
                self._free.append(part.memory)
                self._changed.notify_all()

    def end(self) -> None:
        """Finish the writing side: everything is written, or a side has failed."""
        self._leave("writing")

    def _next(self) -> _Part | None:
        with self._changed.lock:
            self._changed.wait_for(lambda: self._ready or self._closed or self._failure is not None)
            if self._failure is not None:
                raise self._failure
            return self._ready.popleft() if self._ready else None

    # --- both

    def fail(self, error: BaseException) -> None:
        """Record the first failure, and wake the other side."""
        with self._changed.lock:
            if self._failure is None:
                self._failure = error
            self._ready.clear()
            self._changed.notify_all()

    def _leave(self, side: str) -> None:
        """Note that one side no longer uses the buffer; the last side gives the lease back."""
        if side == "copying" and self._fills is not None:
            self._pool.copying.discard(self._fills)
        with self._changed.lock:
            self._sides.discard(side)
            lease = None
            if not self._sides:
                lease, self._lease = self._lease, None
        if lease is not None:
            arrived = self.copies is None or self.copies.drain()
            lease.give_back(keep=arrived and not self._interrupted)
