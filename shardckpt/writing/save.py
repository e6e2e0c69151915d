"""`save`: one checkpoint saved before the call returns, by one process or by many together.

`take_steps` has the order of the steps, which are those of `attempt`. Several threads lay chunks out and write them, some MiB at a
time, straight from the tensors (`read`). `save_async` (`saver`) has the same steps, and does all except copying on another thread.
"""

from __future__ import annotations

import sys
import time
from contextlib import closing, nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardckpt import frameworks
from shardckpt.commit.publish import data_stays
from shardckpt.errors import out_of_memory
from shardckpt.frameworks.coordination import Coordinator, check_coordinator, coordinator_of
from shardckpt.io.buffers import BufferPool, round_up
from shardckpt.io.cores import cores, note_local_processes
from shardckpt.io.failures import saving_takes_threads
from shardckpt.io.store import Store
from shardckpt.io.threads import collector_paused
from shardckpt.io.url import parse
from shardckpt.options import SaveOptions, checked_options
from shardckpt.plan.blocks import parts_of, smaller
from shardckpt.plan.pieces import batches
from shardckpt.writing.attempt import Attempt
from shardckpt.writing.save_handle import SaveReport
from shardckpt.writing.save_plan import stored

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardckpt.format.record import HostRecord
    from shardckpt.frameworks.base import Array, Source
    from shardckpt.frameworks.cuda import Arrival, DeviceCopies
    from shardckpt.io.buffers import Lease
    from shardckpt.plan.blocks import Block
    from shardckpt.writing.attempt import StateShare
    from shardckpt.writing.host import HostWriter
    from shardckpt.writing.save_plan import SavePlan

MOST_COPIES = 32 << 20
"""Bytes of copies that frameworks make at a time. An allocator reuses so little memory again and again. More would be fresh
memory each time, which the kernel has to clear: reads from torch_xla then take four times as long."""

_AT_A_TIME = 4 << 20
"""Bytes of elements that a thread of `save` lays out and writes at a time."""
_COPIES = {None: 1, "zstd": 3}
"""Copies of these bytes that a thread holds, by compression: laid out; with zstd also the compressed chunks, and their joined bytes."""
_LEAST_SHARE = 32 << 20
"""Least bytes that each thread writes on average: less does not justify data files of its own."""
_LEAST_MEAN = 512 << 10
"""Least mean bytes of a block for which several threads pay off: copying and writing, which release the interpreter lock, then take
far longer than the Python code."""
_SMALL_STATE = 256 << 20
"""Most bytes of a state that is written faster than the collector of reference cycles visits the objects that this makes."""


def save(
    url: str | os.PathLike[str],
    state: Any,
    *,
    options: SaveOptions | None = None,
    skip: str | Sequence[str] | None = None,
    coordinator: Coordinator | None = None,
) -> SaveReport:
    """Save `state` as one checkpoint. It is committed and durable when the call returns.

    In a job of several processes, all processes call it with the same url, each with its own part of the state. Their only
    communication is one announcement of the commit. In the first save to a storage, they also prove that all of them see it.

    Args:
        url: destination: a path, `file://…`, `gs://…`, `s3://…` or `memory://…`. The checkpoint is a directory.
        state: nested dicts, lists and tuples of tensors (torch_xla, DTensor, torch, JAX, numpy) and small leaves.
        options: see `SaveOptions`; the same on all processes.
        skip: replaces `SaveOptions(skip=…)`: name patterns of tensors that stay in `SaveOptions(base=…)`. `()` skips no tensor.
        coordinator: connects the processes of the job. By default it is detected once (`Coordinator.current`). `SingleProcess()`: this
            process saves by itself.

    Returns:
        The report of this process. Copying overlaps with writing, and counts as writing.

    Raises:
        LeafError, ShardingError: a leaf or its layout cannot be stored. The error names it; this process wrote nothing.
        OptionError: a pattern in `shardings` or `skip` matches no tensor, or an option is invalid.
        NotFoundError, MismatchError: the base does not exist, or lacks skipped tensors; nothing was published.
        AlreadyExistsError: there is a checkpoint at `url`, and `overwrite` is not set.
        OptionError: `overwrite` would replace a checkpoint that is pinned, tagged, or the base of checkpoints beside it.
        CommitError: processes saved different states, did not finish in time, have storages of their own at `url`, or Python is
            shutting down; nothing was published.
        StorageError: the storage failed. The checkpoint at `url` is the old one or the new one. If all data was written, it stays, and the
            message says how to publish it.
    """
    began = time.monotonic()
    options = checked_options(options, skip)
    check_coordinator(coordinator)
    try:
        coordinator = coordinator_of(coordinator, options.commit_timeout)
        note_local_processes(coordinator.world.sharing)
        attempt = Attempt(Store.open(parse(url)), coordinator, options)
        with saving_takes_threads(attempt.store):
            return _save(attempt, state, began)
    except MemoryError as e:
        raise out_of_memory(str(url), e) from e


def _save(attempt: Attempt, state: Any, began: float) -> SaveReport:
    planned, share = began, None

    def write() -> HostRecord:
        nonlocal planned, share
        share = attempt.take(state)
        planned = time.monotonic()
        short = share.plan.nbytes <= _SMALL_STATE and attempt.store.location.local is not None  # waits for no network
        with collector_paused() if short else nullcontext():
            return _write(attempt, share)

    steps = take_steps(attempt, write)
    assert share is not None
    return SaveReport(
        url=str(attempt.store),
        attempt=attempt.name,
        tensors=len(share.plan.tensors),
        nbytes=share.plan.nbytes,
        stored_bytes=steps.written.stored_bytes,
        planning_s=planned - began,
        copying_s=0.0,
        blocked_s=0.0,
        writing_s=steps.durable - planned,
        waiting_s=steps.waited - steps.durable,
        committing_s=steps.ended - steps.waited,
        streamed=False,
        bases=attempt.bases,
    )


class StepTimes(NamedTuple):
    """Result of the steps of a save, and their end times in seconds of the monotonic clock."""

    written: HostRecord
    durable: float
    """Time at which this process's share was durable."""
    waited: float
    """Time at which all hosts had finished; on other processes than the committer, time of the publication."""
    ended: float


def take_steps(
    attempt: Attempt,
    write: Callable[[], HostRecord],
    *,
    on_durable: Callable[[], None] = lambda: None,
    before_publish: Callable[[], None] = lambda: None,
) -> StepTimes:
    """Take all steps of a save in order: write, wait for the other hosts, publish or see it published.

    Args:
        attempt: the attempt; given up if a step before publishing fails. From the moment that it is durable, its data stays.
        write: writes this process's share.
        on_durable: called when this process's share is durable.
        before_publish: called on the committing process just before the checkpoint is published; an error from it fails the save.
    """
    try:
        written = write()
        durable_at = time.monotonic()
        on_durable()
        record = None
        if attempt.commits:
            attempt.await_hosts()
            waited_at = time.monotonic()
            record = attempt.assemble_record()
            with data_stays(attempt.store):
                before_publish()
            attempt.check_replaced()
    except BaseException as e:
        attempt.give_up(e)
        raise
    if record is None:
        attempt.see_published()
        ended_at = waited_at = time.monotonic()
    else:
        attempt.publish(record)
        ended_at = time.monotonic()
    return StepTimes(written, durable_at, waited_at, ended_at)


def _write(attempt: Attempt, share: StateShare) -> HostRecord:
    """Write this process's share straight from its tensors, and return its host record."""
    quarter, copies = attempt.options.budget // 4, _COPIES[attempt.options.compression]
    staging, at_a_time = min(MOST_COPIES, quarter), min(_AT_A_TIME, quarter // copies)

    def fill(writer: HostWriter) -> None:
        with closing(read_to_host(share.plan, share.sources, staging)) as batches_on_host:
            for batch in batches_on_host:
                writer.put_all(
                    ((block.piece, box, elements[index]) for block, elements, _ in batch for box, index in parts_of(block, at_a_time)),
                    at_a_time,
                )

    threads = _writing_threads(share.plan, 2 * quarter // copies)
    return attempt.write(share.contents, share.values, fill, 2 * quarter, replicas=share.replicas, threads=threads)


def _writing_threads(plan: SavePlan, memory: int) -> int:
    """Number of threads that lay out and write the plan, each with memory of `_AT_A_TIME` bytes, or of one chunk.

    It is one if there is little to write, or if tensors are so small that threads would wait for the interpreter lock.
    `memory` is for the layouts of all threads together.
    """
    blocks = [block for some in plan.blocks.values() for block in some]
    if plan.nbytes < len(blocks) * _LEAST_MEAN:
        return 1
    room = max((_AT_A_TIME, *(block.chunk_bytes for block in blocks)))
    return max(1, min(cores(), plan.nbytes // _LEAST_SHARE, memory // room))


class BlockElements(NamedTuple):
    """A block, and its elements in the stored dtype."""

    block: Block
    elements: NDArray[np.generic]
    """An array; or a `DeviceArray`, as far as tensors are left on their devices."""
    own: bool
    """Whether the elements are in memory that they share with nothing else."""


def is_array(elements: object) -> bool:
    """Whether the elements of a block are in host memory, and not left on their device."""
    return isinstance(elements, np.ndarray)


def are_own(blocks: Sequence[Block], source: Source) -> list[bool]:
    """For each block of a source, whether it will be fetched into memory of its own: a complete box of a source that makes copies."""
    if not source.private:
        return [False] * len(blocks)
    sizes = source.boxes.sizes().tolist()
    return [block.box.size == sizes[block.held] for block in blocks]


def read(plan: SavePlan, sources: Mapping[str, Source], room: int, *, most: int = sys.maxsize) -> Generator[Iterable[BlockElements]]:
    """All blocks of this process, in batches.

    Elements that are not in memory of their own may be views of the tensors. Use them up before you request the next
    batch.

    Args:
        plan: the plan of this process's writes.
        sources: its tensors.
        room: bytes of copies that may exist at a time; a tensor that needs more is a batch of its own.
        most: most bytes of a block, unless one chunk has more.
    """
    for names in batches(plan.blocks, lambda name: (sources[name].staged_bytes,), (room,)):
        # This frame keeps no reference to the batch: when it is used up, its memory is free for the next one.
        yield _fetched(plan, {name: sources[name] for name in names}, most)


def read_to_host(plan: SavePlan, sources: Mapping[str, Source], room: int) -> Generator[Iterable[BlockElements]]:
    """Like `read`, with all elements in host memory; close it if it is not used up."""
    left, copies = frameworks.on_devices(sources, overlap=False)
    return read(plan, sources, room) if copies is None else _arrived(plan, left, copies, room // 2)


def _arrived(plan: SavePlan, sources: Mapping[str, Source], copies: DeviceCopies, room: int) -> Generator[Iterable[BlockElements]]:
    """Like `read`, for tensors some of which are on devices: each batch is copied to pinned memory while the one before is in use.

    Args:
        plan: as for `read`.
        sources: as for `read`; elements on devices are left there.
        copies: copies those.
        room: bytes of pinned memory of a batch; there are two.
    """
    room = max((room, *(round_up(block.chunk_bytes) for blocks in plan.blocks.values() for block in blocks)))
    pool = BufferPool(2 * room, copies.pin)
    blocks = chain.from_iterable(read(plan, sources, room, most=room))
    before: tuple[Lease, Arrival, list[BlockElements]] | None = None
    try:
        for batch in batches(blocks, lambda item: (round_up(item.elements.nbytes),), (room,)):
            lease, landed = pool.take(room), list[BlockElements]()
            pairs: list[tuple[Array, Any]] = []
            for block, elements, own in batch:
                array: Array = elements
                if not is_array(elements):
                    array = lease.array(elements.shape, elements.dtype)
                    pairs.append((array, elements))
                landed.append(BlockElements(block, array, own))
            ahead = lease, copies.copy(pairs), landed
            if before is not None:
                yield from _landed(*before)
            before = ahead
        if before is not None:
            yield from _landed(*before)
    finally:
        copies.drain()


def _landed(lease: Lease, arrival: Arrival, batch: list[BlockElements]) -> Iterator[list[BlockElements]]:
    with lease:
        arrival.wait()
        yield batch


def _fetched(plan: SavePlan, sources: Mapping[str, Source], most: int) -> Iterator[BlockElements]:
    """Fetch a batch before returning, because frameworks have streams and settings of the thread that saves."""
    wanted = [sorted({block.held for block in plan.blocks[name]}) for name in sources]
    return _cut(plan, sources, wanted, frameworks.fetch([*sources.values()], wanted), most)


def _cut(
    plan: SavePlan, sources: Mapping[str, Source], wanted: list[list[int]], fetched: list[list[Array]], most: int
) -> Iterator[BlockElements]:
    for (name, source), boxes, arrays in zip(sources.items(), wanted, fetched, strict=True):
        of_box = {i: stored(array, plan.tensors[name]) for i, array in zip(boxes, arrays, strict=True)}
        for block, own in zip(plan.blocks[name], are_own(plan.blocks[name], source), strict=True):
            for part in smaller(block, most):
                yield BlockElements(part, of_box[part.held][part.inside], own)
