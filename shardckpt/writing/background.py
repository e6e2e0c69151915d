"""Saves in the background, with one thread per save.

Buffers and plans are kept from save to save.

On the thread that saves: plan, and copy all blocks to the stage (`staging`). On the save's own
thread: receive the blocks, write the chunks and the record, and commit or wait for the commit. All
communication with other processes is on that thread. More threads help it to write chunks: on half
of the cores, unless `SaveOptions.background_threads` says otherwise, so that training keeps the
rest.

When the interpreter shuts down, saves in flight are finished first (`shutdown`): this process's
writes without a time limit, the work of other processes for `_SHUTDOWN_SECONDS` seconds. After
that, and after Ctrl-C, the save is given up in order. A save that fails during the shutdown logs a
warning. A killed process leaves an attempt that is either unpublished or published. A fork of this
process has none of the saves in flight.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import nullcontext, suppress
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any

from shardckpt import frameworks
from shardckpt.errors import CommitError, OptionError, out_of_memory_is_typed
from shardckpt.frameworks.coordination import Coordinator, check_coordinator, coordinator_of
from shardckpt.io.buffers import BufferPool
from shardckpt.io.failures import saving_takes_threads
from shardckpt.io.shutdown import has_begun, start_background
from shardckpt.io.store import Store
from shardckpt.io.threads import collector_paused
from shardckpt.io.url import parse
from shardckpt.options import DEFAULT_MEMORY_LIMIT, LEAST_MEMORY_LIMIT, checked_options, parse_bytes
from shardckpt.text import file_size
from shardckpt.writing.announcements import in_words
from shardckpt.writing.attempt import Attempt
from shardckpt.writing.handle import SaveHandle, SaveProgress
from shardckpt.writing.late_elements import LateElements, late_bytes
from shardckpt.writing.memory import AT_A_TIME, SaveMemory, Warming
from shardckpt.writing.packed import object_buffers
from shardckpt.writing.save import SaveReport, SaveTimes, is_short, report
from shardckpt.writing.small_blocks import SmallBlocks
from shardckpt.writing.staging import Stage
from shardckpt.writing.state_share import read, share_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardckpt.format.record import Contents
    from shardckpt.frameworks.base import Source
    from shardckpt.options import SaveOptions
    from shardckpt.writing.kept import VersionToWrite
    from shardckpt.writing.replicas import ReplicaChecksums
    from shardckpt.writing.state_share import StateShare

_SHUTDOWN_SECONDS = 60.0
"""Seconds for which the interpreter shutdown waits for other processes, per save in flight."""


class Saver:
    """Saves in the background.

    Safe to use from several threads; any number of saves may be in flight, to different urls.
    """

    def __init__(
        self,
        *,
        memory_limit: int | str = DEFAULT_MEMORY_LIMIT,
        coordinator: Coordinator | None = None,
    ) -> None:
        """Create a saver; nothing is allocated before the first save.

        Args:
            memory_limit: bytes, or text such as "512MiB", of host memory for all saves in flight
                together; the limit in `SaveOptions` is ignored.
            coordinator: connects the processes of the job; by default detected once.

        Raises:
            OptionError: too little memory, or an invalid coordinator.
        """
        check_coordinator(coordinator)
        self._limit = _checked_limit(memory_limit)
        self._coordinator = coordinator
        self._renew()

    def limit_memory(self, memory_limit: int) -> None:
        """Change the limit; saves in flight keep what they have.

        Raises OptionError: too little memory.
        """
        self._limit = _checked_limit(memory_limit)
        if os.getpid() == self._process:
            self.pool.resize(self._limit)

    def _renew(self) -> None:
        """Drop all buffers: in a fork, threads that do not exist there may hold them."""
        self.pool = BufferPool(self._limit)
        """The pool of all buffers."""
        self._process = os.getpid()
        self._warming: Warming | None = None

    def _settle(self) -> None:
        """Wait for memory that is being prepared; in a fork, begin anew."""
        if os.getpid() != self._process:
            self._renew()
        warming = self._warming  # another thread may clear it meanwhile
        if warming is not None:
            warming.join()
            self._warming = None

    def warm(
        self,
        url: str | os.PathLike[str],
        state: Any,
        options: SaveOptions,
        *,
        only_devices: bool = False,
    ) -> None:
        """Prepare host memory for saves of a state, in the background.

        The next save waits until that is done.

        Args:
            url: where the state will be saved to.
            state: as in `shardckpt.save`.
            options: as in `shardckpt.save`. With `reduce_partial` nothing is prepared, because that
                takes collectives.
            only_devices: prepare nothing for a state that has no tensors on devices.

        Raises:
            LeafError, ShardingError, OptionError: the state or an option is invalid.
        """
        self._settle()
        if options.reduce_partial:
            return
        store = Store.open(parse(url))
        world = coordinator_of(self._coordinator, options.commit_timeout).world
        with saving_takes_threads(store):
            share = share_of(state, options, world, waits=False)
            sources, copies = frameworks.on_devices(share.sources, overlap=False)
            memory = SaveMemory.of(
                share, sources, store, options, self.pool.limit, options.compression
            )
            if only_devices and copies is None and not memory.kept:
                return
            self._warming = Warming(self.pool, memory, sources, copies, store)

    @out_of_memory_is_typed
    def begin(
        self,
        url: str | os.PathLike[str],
        state: Any,
        options: SaveOptions,
        *,
        coordinator: Coordinator | None = None,
        before_publish: Callable[[], None] | None = None,
        progress: Callable[[int, int], None] | None = None,
        version: VersionToWrite | None = None,
    ) -> SaveHandle:
        """Begin a save.

        When this returns, everything that this process has to write is in host buffers, or written.

        Args:
            url: as in `shardckpt.save`.
            state: as in `shardckpt.save`.
            options: as in `shardckpt.save`.
            coordinator: replaces the saver's own.
            before_publish: called in the background, on the committing process, just before the
                checkpoint is published; an exception from it fails the save.
            progress: called in the background, repeatedly, with the bytes of tensors that this
                process has written so far, and the bytes that it has to write in all.
            version: the version that the checkpoint is, if its chunks may be differences.

        Raises:
            LeafError, ShardingError, OptionError: the state or an option is invalid; nothing was
                begun.
        """
        began = time.monotonic()
        options = checked_options(options)
        check_coordinator(coordinator)
        self._settle()
        save = _Save(
            self.pool,
            Attempt.at(url, coordinator or self._coordinator, options, version),
            began,
            before_publish,
            progress,
        )
        with saving_takes_threads(save.outcome.url):
            save.run(state)
        handle = None if version is None else version.handle
        return SaveHandle(save.outcome) if handle is None else handle

    def close(self) -> None:
        """Wait for the saves in flight, whether they succeed or fail, and free the buffers."""
        for save in [*_in_flight]:
            if save.pool is self.pool:
                save.join(None)
        self._settle()
        self.pool.clear()
        object_buffers.clear()


class _Save:
    """One save in flight."""

    def __init__(
        self,
        pool: BufferPool,
        attempt: Attempt,
        began: float,
        before_publish: Callable[[], None] | None,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.pool = pool
        self.attempt = attempt
        self.outcome = SaveProgress(str(attempt.store))
        self._before_publish = before_publish or (lambda: None)
        self._progress = progress or (lambda _done, _total: None)
        self._stage = Stage(pool, self._start)
        self._thread: threading.Thread | None = None
        self._writes = threading.Event()
        """Set when this process has begun to write, or has ended without writing."""
        self._began = self._planned = self._copied = began
        self._share: tuple[Contents, bytes | None, ReplicaChecksums | None] | None = None
        self._late: LateElements | None = None
        self._memory: SaveMemory | None = None
        self._tensors = self._nbytes = self._done = 0
        self._counting = threading.Lock()

    # --- the thread that saves

    def run(self, state: Any) -> None:
        """Plan and copy; the rest continues in the background after the return."""
        try:
            share = self.attempt.take(state, waits=False)
            self._planned = time.monotonic()
            self._share = share.contents, share.values, share.replicas
            if self.attempt.version is not None and self.attempt.version.proof:
                self._stage.shapes_to_prove = {
                    piece.path: tensor.shape
                    for tensor in share.plan.tensors.values()
                    for piece in tensor.pieces
                }
            self._tensors, self._nbytes = len(share.plan.tensors), share.plan.nbytes
            self.outcome.nbytes = self._nbytes
            self._copy(share)
        except BaseException as e:
            self._stage.give_up(e)
            self.attempt.stop_waiting(f"copying the state has failed: {in_words(e)}")
            try:
                self.join(None)
            except RuntimeError:
                # Ctrl-C came before the thread started; if it still starts, it finds the save given
                # up.
                self._thread = None
                _in_flight.discard(self)
            self.outcome.heard = True
            if self._thread is None:
                self._stage.end()
                self.attempt.give_up(e)
                self.outcome.end(e)
            raise

    @property
    def _compression(self) -> str | None:
        """The compression that memory has room for."""
        return self.attempt.options.compression if self.attempt.version is None else "difference"

    def _copy(self, share: StateShare) -> None:
        """Copy all chunks to the stage.

        The memory for copies of the frameworks and of the writer is counted too.
        """
        overlap = self.attempt.options.device_copy == "overlap"
        plan, (sources, self._stage.copies) = (
            share.plan,
            frameworks.on_devices(share.sources, overlap=overlap),
        )
        if self._stage.copies is not None:
            self.pool.pin_with(self._stage.copies.pin)
        memory = SaveMemory.of(
            share,
            sources,
            self.attempt.store,
            self.attempt.options,
            self.pool.limit,
            self._compression,
        )
        self._memory = memory
        # All of them before the writing thread may start, as that gives them their elements.
        resident: list[str] = []
        if self.attempt.version is not None:  # only versions have such tensors
            resident = [name for name in plan.blocks if sources[name].resident]
        blocks = [*chain.from_iterable(read(plan, sources, memory.room, only=resident))]
        most = self._stage.fit(
            memory.blocks, memory.sizes, streams=self._stage.copies is None or not overlap
        )
        if self._stage.copies is not None and share.late:
            self._late = LateElements(share, sources, self._stage.copies, self._stage.late)
        if (
            self._stage.copies is not None
            and share.replicas is not None
            and share.replicas.late_bytes()
        ):
            share.replicas.queue(sources, self._stage.copies, self._stage.late[late_bytes(share) :])
        self._stage.put(blocks)
        self._put(share, sources, memory, most)
        self._copied = time.monotonic()
        self._stage.close()

    def _put(
        self, share: StateShare, sources: Mapping[str, Source], memory: SaveMemory, most: int
    ) -> None:
        """Copy the blocks that are not resident."""
        plan, stage = share.plan, self._stage
        # Copies that are kept, and those from devices, come in one batch.
        streams_or_proves = stage.streamed or stage.shapes_to_prove
        in_one = memory.kept or stage.copies is not None or streams_or_proves
        groups = [[*plan.blocks]] if in_one else plan.copy_groups
        with collector_paused() if is_short(plan) and not stage.streamed else nullcontext():
            for group in groups:
                every = group.names if isinstance(group, SmallBlocks) else group
                if isinstance(group, SmallBlocks) and stage.put_small(
                    group, [sources[name] for name in every]
                ):
                    continue
                names = every
                if self.attempt.version is not None:
                    names = [name for name in every if not sources[name].resident]
                kept = () if stage.streamed else memory.kept
                for batch in read(plan, sources, memory.room, most=most, kept=kept, only=names):
                    stage.put(batch)

    def _start(self) -> None:
        # Registered before the thread runs, so that giving up waits for it, and frees nothing that
        # it uses.
        self._thread = threading.Thread(target=self._finish, name="shardckpt-save", daemon=True)
        if self.attempt.version is not None:
            self.attempt.version.handle = SaveHandle(self.outcome)
        _in_flight.add(self)
        start_background(self._thread, finish=self._wait_at_exit, stop=self._stop)

    def _wait_at_exit(self) -> None:
        with suppress(Exception):  # the handle raises it
            if self._writes.wait(_SHUTDOWN_SECONDS):  # before that, it may wait for other processes
                self.outcome.wait("local", None)
                self.outcome.wait("commit", _SHUTDOWN_SECONDS)

    def _stop(self) -> None:
        if not self.outcome.ended:
            self.attempt.stop_waiting(
                "the program ends: `shardckpt commit` publishes the save if all processes have "
                "written their shares."
            )
            self._stage.fail(
                CommitError(f"{self.outcome.url}: the save was given up because the program ends.")
            )

    def join(self, timeout: float | None) -> None:
        """Wait until the save's thread has ended, if it was started."""
        if self._thread is not None:
            self._thread.join(timeout)

    # --- the save's own thread

    def _finish(self) -> None:
        try:
            with saving_takes_threads(self.outcome.url):
                report = self._report()
            self.outcome.end(report)
        except BaseException as e:  # noqa: BLE001  (the handle raises it)
            self.outcome.end(e)
            if has_begun():  # perhaps nobody waits for the handle any more
                self.outcome.warn()
        finally:
            self._writes.set()
            _in_flight.discard(self)

    def _report(self) -> SaveReport:
        with self.attempt as attempt:
            self._write()
            durable = time.monotonic()
            self.outcome.durable()
            waited = attempt.commit(self._before_publish)
        stage = self._stage
        times = SaveTimes(self._began, self._planned, self._copied, durable, waited)
        return report(
            attempt,
            self._tensors,
            self._nbytes,
            times,
            blocked=stage.blocked,
            streamed=stage.streamed,
        )

    def _write(self) -> None:
        assert self._share is not None
        assert self._memory is not None
        (contents, values, replicas), self._share = self._share, None
        try:
            if self._late is not None:
                contents, self._late = self._late.added_to(contents), None
            with self.attempt.writer(
                contents,
                values,
                memory=self._memory.in_flight,
                threads=self._memory.threads,
                replicas=replicas,
            ) as writer:
                self._writes.set()
                portions = self._stage.portions(writer, AT_A_TIME, self._count)
                writer.append(portions, self._stage.fail)
        except BaseException as e:
            self._stage.fail(e)
            raise
        finally:
            self._stage.end()

    def _count(self, nbytes: int) -> None:
        """Count bytes that are written, and report the progress.

        On any thread that writes, one at a time.
        """
        with self._counting:
            self._done += nbytes
            self._progress(self._done, self._nbytes)


_in_flight: set[_Save] = set()
os.register_at_fork(after_in_child=_in_flight.clear)


_choosing = threading.RLock()  # a signal handler may save, too


def save_async(
    url: str | os.PathLike[str],
    state: Any,
    *,
    options: SaveOptions | None = None,
    skip: str | Sequence[str] | None = None,
    coordinator: Coordinator | None = None,
) -> SaveHandle:
    """Copy this process's data to host buffers, and save it in the background.

    The state may change when the call returns: the checkpoint gets the values at the call. Copies
    of CUDA tensors are only queued then; `SaveOptions.device_copy` orders later work after them.
    `wait()` on the handle returns the report of the save, or raises its error. An error is in the
    log if the handle is dropped before.

    A signal handler may call it, but must not wait for the save: the interrupted code may hold a
    lock that the save needs. Better let the handler set a flag.

    Buffers and the plan of the writes are kept, so later saves of the same state are faster than
    the first. Buffers have at most `memory_limit` bytes. If the state is larger, the call waits
    until the rest is written (`SaveReport.streamed`).

    Args:
        url: as in `save`.
        state: as in `save`.
        options: as in `save`.
        skip: as in `save`; the base is read in the background.
        coordinator: as in `save`.

    Raises:
        LeafError, ShardingError, OptionError: as in `save`; nothing was begun.
        CommitError: Python is shutting down; nothing was begun. The handle raises all other errors.
        BudgetError: a signal handler makes this call amid another one, and would wait for its
            memory for ever; nothing was begun.
    """
    options = checked_options(options, skip)
    with _choosing:
        saver = _shared_saver()
        saver.limit_memory(options.budget)
    return saver.begin(url, state, options, coordinator=coordinator)


@cache
def _shared_saver() -> Saver:
    """The saver whose buffers all calls of `save_async` share.

    Its limit is that of the last call.
    """
    return Saver()


def _checked_limit(memory_limit: int | str) -> int:
    limit = parse_bytes(memory_limit, "memory_limit")
    if limit < LEAST_MEMORY_LIMIT:
        raise OptionError(
            f"memory_limit={file_size(limit)}: at least {file_size(LEAST_MEMORY_LIMIT)} are needed."
        )
    return limit
