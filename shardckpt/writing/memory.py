"""Host memory of a background save: how much it needs, and its preparation before the first save.

The first use of memory is slow: the kernel clears its pages, and pinning takes longer still.
`Warming` makes the request that a save would make, on a thread of its own, touches all pages on
several threads, and gives the memory back to the pool. The first save finds it there. It takes at
most half of the memory that is free, and nothing beyond the limit of saves.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from shardckpt import frameworks
from shardckpt.errors import ShardckptError
from shardckpt.io.buffers import round_up
from shardckpt.io.cores import cores, free_memory
from shardckpt.io.shutdown import start_background
from shardckpt.io.threads import collector_paused
from shardckpt.text import file_size
from shardckpt.writing.late_elements import late_bytes
from shardckpt.writing.save import thread_bytes, writing_threads
from shardckpt.writing.staging import Stage, StageSizes
from shardckpt.writing.state_share import MOST_COPIES, are_own, only_kept

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shardckpt.frameworks.base import Source
    from shardckpt.frameworks.cuda import DeviceCopies
    from shardckpt.io.buffers import BufferPool
    from shardckpt.io.store import Store
    from shardckpt.options import SaveOptions
    from shardckpt.plan.blocks import Block
    from shardckpt.writing.state_share import StateShare

_log = logging.getLogger("shardckpt")
AT_A_TIME = 2 << 20
"""Bytes of elements that a thread encodes and writes at a time: many small chunks, in no more
memory than a large one."""


@dataclass(frozen=True, slots=True)
class SaveMemory:
    """Host memory that a background save needs."""

    blocks: list[tuple[Block, bool]]
    """All blocks to copy, and whether each has memory of its own."""
    room: int
    """Bytes of copies that frameworks make at a time."""
    kept: set[str]
    """The tensors whose copies are kept, see `only_kept`."""
    in_flight: int
    """Bytes of chunks that may be on their way to the storage."""
    threads: int
    """Number of threads that write: on a local disk, and for differences, half of the cores, or as
    many as the caller allows."""
    sizes: StageSizes
    """The memory that is needed beside the blocks."""

    @classmethod
    @collector_paused()
    def of(
        cls,
        share: StateShare,
        sources: Mapping[str, Source],
        store: Store,
        options: SaveOptions,
        limit: int,
        compression: str | None,
    ) -> SaveMemory:
        """The memory for a share of a state.

        Args:
            share: this process's share.
            sources: its tensors; elements on devices are left there.
            store: where it is saved to.
            options: of the save.
            limit: most bytes of all saves together.
            compression: of the chunks, as memory must have room for it.
        """
        plan, in_place = share.plan, share.is_in_place
        room = min(MOST_COPIES, limit // 4)
        kept = set() if in_place else only_kept(plan, sources)
        in_flight, threads, each = limit // 4, 1, thread_bytes(plan, compression, AT_A_TIME)
        if store.appends:
            in_flight = 0
        if store.appends or compression == "difference":
            threads = writing_threads(
                plan, options.background_threads or max(1, cores() // 2), limit // 4 // each
            )

        def fetching(names: Iterable[str]) -> int:
            largest = max((sources[name].staged_bytes for name in names), default=0)
            return max(room, largest) if largest else 0

        sizes = StageSizes(
            fetching=0 if in_place else fetching(plan.blocks),
            keeping=fetching(plan.blocks.keys() - kept) if kept else None,
            writing=in_flight + threads * each,
            late=late_bytes(share) + (0 if share.replicas is None else share.replicas.late_bytes()),
        )
        if in_place:
            blocks = [(block, False) for block in chain.from_iterable(plan.blocks.values())]
        else:
            blocks = [
                pair
                for name, of_tensor in plan.blocks.items()
                if not sources[name].resident
                for pair in zip(of_tensor, are_own(of_tensor, sources[name]), strict=True)
            ]
        return cls(blocks, room, kept, in_flight, threads, sizes)

    @property
    def elements(self) -> int:
        """Bytes of the elements that are held until they are written."""
        return self.sizes.late + sum(round_up(block.nbytes) for block, _ in self.blocks)


class Warming:
    """The preparation of a pool's memory for the saves of a state, in the background."""

    def __init__(
        self,
        pool: BufferPool,
        memory: SaveMemory,
        sources: Mapping[str, Source],
        copies: DeviceCopies | None,
        where: Store,
    ) -> None:
        """Start it, unless it would take too much memory, or the pool is in use."""
        self._pool = pool
        self._where = where
        self._thread: threading.Thread | None = None
        needed, free = min(memory.elements, pool.limit), free_memory()
        if free is not None and needed > free // 2:
            _log.info(
                "%s: memory for saves is not prepared: they need %s, and %s are free.",
                where,
                file_size(needed),
                file_size(free),
            )
            return
        if pool.is_used:
            return
        if copies is not None:
            pool.pin_with(copies.pin)
        # The thread alone has the tensors: they may be freed when it has ended.
        self._thread = threading.Thread(
            target=self._run,
            args=(memory, [sources[name] for name in memory.kept]),
            name="shardckpt-warm",
            daemon=True,
        )
        start_background(self._thread)

    def join(self) -> None:
        """Wait until it has ended."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, memory: SaveMemory, kept: list[Source]) -> None:
        try:
            if not Stage(self._pool, lambda: None).warm(memory.blocks, memory.sizes):
                frameworks.warm(kept)
        except (ShardckptError, RuntimeError, MemoryError) as e:
            _log.warning(
                "%s: memory for saves could not be prepared (%s); the first save tries again.",
                self._where,
                e,
            )
