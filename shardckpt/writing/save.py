"""`save`: one checkpoint saved before the call returns, by one process or by many together.

The steps are those of an `Attempt`. Several threads lay chunks out and write them, some MiB at a
time, straight from the tensors (`state_share.read_to_host`). `save_async` (`background`) has the
same steps, and does all except copying on another thread.
"""

from __future__ import annotations

import time
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardckpt.errors import out_of_memory
from shardckpt.frameworks.coordination import Coordinator, check_coordinator
from shardckpt.io.cores import cores
from shardckpt.io.extension import ENGINE
from shardckpt.io.failures import saving_takes_threads
from shardckpt.io.threads import collector_paused
from shardckpt.options import SaveOptions, checked_options
from shardckpt.writing.attempt import Attempt
from shardckpt.writing.state_share import MOST_COPIES, read_to_host

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

    from shardckpt.writing.host import HostWriter
    from shardckpt.writing.save_plan import SavePlan
    from shardckpt.writing.state_share import BlockElements, StateShare

_AT_A_TIME = 4 << 20
"""Bytes of elements that a thread of `save` lays out and writes at a time."""
_COPIES = {None: 1, "zstd": 3, "difference": 3}
"""Buffers of that size that a thread has, by compression: for laid-out chunks; else also for
compressed ones, alone and joined."""
_CHUNK_COPIES = {None: 1, "zstd": 3, "difference": 6}
"""Buffers of the size of a chunk that is larger: its changes are there, too, before and after they
are compressed."""
_LEAST_SHARE = 32 << 20
"""Least bytes that each thread writes on average: less does not justify data files of its own."""
_LEAST_MEAN = 512 << 10
"""Least mean bytes of a block for which several threads pay off: copying and writing, which release
the interpreter lock, then take far longer than the Python code."""
_SMALL_STATE, _SMALL_MEAN = 256 << 20, 64 << 10
"""Most bytes of a state, or mean bytes of its blocks, for which one pass of the collector of
reference cycles takes longer than the write."""


@dataclass(frozen=True, slots=True)
class SaveReport:
    """Report of one process on one save, with the seconds of each phase.

    The phases follow one another without gaps, so they add up:

        stall_s = planning_s + copying_s + blocked_s  while the call blocked the caller
        total_s = stall_s + writing_s + waiting_s + committing_s  from the call to the commit

    Background work during the stall counts as stall; `writing_s` is the time for the rest of the
    writing. `shardckpt.save` blocks its caller for all of `total_s`. It copies while it writes, and
    `writing_s` includes these copies.
    """

    url: str
    attempt: str
    """Name of the attempt, as in the commit record."""
    tensors: int
    """Number of tensors that this process knows."""
    nbytes: int
    """Bytes of the elements that this process wrote."""
    stored_bytes: int
    """Bytes of these elements in the storage, with padding, compression and checksums."""
    planning_s: float
    """Seconds from the call to the first copy: names, layouts, and the assignment of writes."""
    copying_s: float
    """Seconds for copies from devices, or from the host's own tensors, to the buffers. Copies from
    CUDA devices are only queued."""
    blocked_s: float
    """Seconds of waiting for a buffer."""
    writing_s: float
    """Seconds from the end of the stall until this process's share was durable."""
    waiting_s: float
    """Seconds that the committing process waited for the others, or that this process waited for
    the commit."""
    committing_s: float
    """Seconds until the checkpoint was published, on the committing process; 0 on the others."""
    streamed: bool
    """Whether the state exceeded the buffers, so that the call waited until part of it was
    written."""
    bases: tuple[str, ...] = ()
    """The other checkpoints that hold the skipped tensors."""
    engine: str = ENGINE
    """The engine that moves raw chunks to a local disk here: `C`, the extension, or `Python`."""

    @property
    def stall_s(self) -> float:
        """Seconds for which the call blocked the caller."""
        return self.planning_s + self.copying_s + self.blocked_s

    @property
    def total_s(self) -> float:
        """Seconds from the call to the commit."""
        return self.stall_s + self.writing_s + self.waiting_s + self.committing_s


def save(
    url: str | os.PathLike[str],
    state: Any,
    *,
    options: SaveOptions | None = None,
    skip: str | Sequence[str] | None = None,
    coordinator: Coordinator | None = None,
) -> SaveReport:
    """Save `state` as one checkpoint. It is committed and durable when the call returns.

    In a job of several processes, all processes call it with the same url, each with its own part
    of the state. Their only communication is one announcement of the commit. In the first save to a
    storage, they also prove that all of them see it.

    Args:
        url: destination: a path, `file://…`, `gs://…`, `s3://…`, `az://…` or `memory://…`. The
            checkpoint is a directory.
        state: nested dicts, lists and tuples of tensors (torch_xla, DTensor, torch, JAX, numpy) and
            small leaves.
        options: see `SaveOptions`; the same on all processes.
        skip: replaces `SaveOptions(skip=…)`: name patterns of tensors that stay in
            `SaveOptions(base=…)`. `()` skips no tensor.
        coordinator: connects the processes of the job. By default it is detected once
            (`Coordinator.current`). `SingleProcess()`: this process saves by itself.

    Returns:
        The report of this process. Copying overlaps with writing, and counts as writing.

    Raises:
        LeafError, ShardingError: a leaf or its layout cannot be stored. The error names it; this
            process wrote nothing.
        OptionError: a pattern in `shardings` or `skip` matches no tensor, or an option is invalid.
        NotFoundError, MismatchError: the base does not exist, or lacks skipped tensors; nothing was
            published.
        AlreadyExistsError: there is a checkpoint at `url`, and `overwrite` is not set.
        OptionError: `overwrite` would replace a checkpoint that is pinned, tagged, or the base of
            checkpoints beside it.
        CommitError: processes saved different states, did not finish in time, have storages of
            their own at `url`, or Python is shutting down; nothing was published.
        StorageError: the storage failed. The checkpoint at `url` is the old one or the new one. If
            all data was written, it stays, and the message says how to publish it.
    """
    began = time.monotonic()
    options = checked_options(options, skip)
    check_coordinator(coordinator)
    try:
        attempt = Attempt.at(url, coordinator, options)
        with saving_takes_threads(attempt.store), attempt:
            share = attempt.take(state)
            planned = time.monotonic()
            short = attempt.store.near and is_short(share.plan)  # waits for no network
            with collector_paused() if short else nullcontext():
                _write(attempt, share)
            durable = time.monotonic()
            waited = attempt.commit()
    except MemoryError as e:
        raise out_of_memory(str(url), e) from e
    times = SaveTimes(began, planned, planned, durable, waited)
    return report(attempt, len(share.plan.tensors), share.plan.nbytes, times)


def _write(attempt: Attempt, share: StateShare) -> None:
    """Write this process's share straight from its tensors, and its record."""
    options, plan, quarter = attempt.options, share.plan, attempt.options.budget // 4
    staging, at_a_time = (
        min(MOST_COPIES, quarter),
        min(_AT_A_TIME, quarter // _COPIES[options.compression]),
    )
    threads = writing_threads(
        plan, cores(), 2 * quarter // thread_bytes(plan, options.compression, at_a_time)
    )
    with (
        attempt.writer(
            share.contents,
            share.values,
            memory=2 * quarter,
            threads=threads,
            replicas=share.replicas,
        ) as writer,
        closing(read_to_host(plan, share.sources, staging)) as batches_on_host,
    ):
        for batch in batches_on_host:
            _append(writer, batch, at_a_time)


def _append(writer: HostWriter, batch: Iterable[BlockElements], at_a_time: int) -> None:
    """Write a batch. No reference to it is left: its memory is free for the next one."""
    writer.append(
        writer.portions_of([(block, elements) for block, elements, *_ in batch], at_a_time)
    )


def is_short(plan: SavePlan) -> bool:
    """Whether writing takes less time than the cycle collector's visits meanwhile."""
    return plan.nbytes <= max(_SMALL_STATE, _SMALL_MEAN * sum(map(len, plan.blocks.values())))


def thread_bytes(plan: SavePlan, compression: str | None, at_a_time: int) -> int:
    """Bytes of memory of each thread that writes the plan.

    A thread lays out `at_a_time` bytes of elements at a time, or one chunk.
    """
    return max(_COPIES[compression] * at_a_time, _CHUNK_COPIES[compression] * plan.largest_chunk)


def writing_threads(plan: SavePlan, *most: int) -> int:
    """Number of threads that lay out and write the plan: at most any of `most`, and at least one.

    It is one if there is little to write, or if tensors are so small that threads would wait for
    the interpreter lock.
    """
    if plan.nbytes < sum(map(len, plan.blocks.values())) * _LEAST_MEAN:
        return 1
    return max(1, min(*most, plan.nbytes // _LEAST_SHARE))


@dataclass(frozen=True, slots=True)
class SaveTimes:
    """Times at which the phases of a save ended, in seconds of the monotonic clock."""

    began: float
    planned: float
    copied: float
    durable: float
    waited: float


def report(
    attempt: Attempt,
    tensors: int,
    nbytes: int,
    times: SaveTimes,
    *,
    blocked: float = 0.0,
    streamed: bool = False,
) -> SaveReport:
    """Report of a save that has just ended.

    Args:
        attempt: the attempt.
        tensors: number of tensors that this process knows.
        nbytes: bytes of the elements that it wrote.
        times: times at which the phases ended.
        blocked: seconds for which copying waited.
        streamed: see the report.
    """
    assert attempt.record is not None
    return SaveReport(
        url=str(attempt.store),
        attempt=attempt.name,
        tensors=tensors,
        nbytes=nbytes,
        stored_bytes=attempt.record.stored_bytes,
        planning_s=times.planned - times.began,
        copying_s=times.copied - times.planned - blocked,
        blocked_s=blocked,
        writing_s=times.durable - times.copied,
        waiting_s=times.waited - times.durable,
        committing_s=time.monotonic() - times.waited if attempt.commits else 0.0,
        streamed=streamed,
        bases=attempt.bases,
    )
