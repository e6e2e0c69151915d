"""Execution of one task of a job, from its cells to its host record.

A task reads its cells, writes the new chunks, reads those back, and writes a host record.

1. If a record already exists, the task is done; nothing else is checked.
2. The task's steps are read into the chunks of the target (`streaming.assemble`).
3. Meanwhile chunks of earlier steps are finished (checksum, compression) and written.
4. Once all data is durable, it is read back and compared with the chunk table. Then the record is
   written, if none exists.

A task may run twice, even at the same time, for example if a worker was wrongly considered dead.
Each run writes below its own name, the first record counts, and the other run removes its own
files. In the plain layout, where a chunk has one name, both runs write the same bytes there, each
chunk atomically.

The function is idempotent, and all its arguments can be pickled: engines run it.
"""

from __future__ import annotations

import secrets
from contextlib import closing, suppress
from dataclasses import dataclass
from threading import local
from typing import TYPE_CHECKING

from shardckpt.errors import CommitError, CorruptionError, ShardckptError
from shardckpt.format.record import host_record_key
from shardckpt.frameworks.per_process import values_file
from shardckpt.reshard.job import OpenJob
from shardckpt.streaming.assemble import assemble_chunks
from shardckpt.streaming.batches import BatchMemory
from shardckpt.writing.host import HostWriter, write_record

if TYPE_CHECKING:
    from shardckpt.io.store import Store
    from shardckpt.reshard.job import Job
    from shardckpt.reshard.plan import Task

_PAGES = 64 << 20
"""Bytes of local files that are flushed to disk at a time. These pages belong to the kernel, not to
this process."""


@dataclass(frozen=True, slots=True)
class TaskReport:
    """Result of a task."""

    done_before: bool
    """Whether the record existed already: nothing was done, or this run's work was discarded."""
    nbytes: int
    """Bytes of the elements that the task writes."""
    read_bytes: int = 0
    """Stored bytes of the source that this run read."""
    stored_bytes: int = 0
    """Stored bytes of the chunks that this run wrote."""


def run_task(job: Job, number: int, at_once: int = 1) -> TaskReport:
    """Do one task of a job, unless it is done.

    Args:
        job: the job; the same for all its tasks.
        number: number of the task, from 0.
        at_once: number of tasks of the job that run at a time, everywhere: they share the request
            rate of a bucket.

    Raises:
        CorruptionError: the source is damaged; or the written data differs when read back.
        ReplacedError: the source was replaced or deleted meanwhile.
        CommitError, NotFoundError, AlreadyExistsError: the source or the destination is no longer
            what the job began with.
        StorageError: the storage failed.
    """
    opened = _open(job)
    task = opened.plan.tasks[number]
    if opened.place.exists(host_record_key(number)):
        return TaskReport(done_before=True, nbytes=task.nbytes)
    stats = opened.checkpoint.stats
    before = stats.bytes_read
    first, stored = _run(opened, task, opened.place.among(task.number % at_once, at_once))
    return TaskReport(not first, task.nbytes, stats.bytes_read - before, stored)


_here = local()
"""This thread's open job and its memory, kept between tasks."""


def keep_open(job: Job, opened: OpenJob) -> None:
    """Use an open job for the tasks that this thread runs: source and plan are not read again."""
    free_kept()  # frees the memory of the previous job first
    _here.job, _here.opened, _here.memory = job, opened, BatchMemory()


def free_kept() -> None:
    """Free the job and memory that this thread keeps between tasks."""
    _here.__dict__.clear()


def _open(job: Job) -> OpenJob:
    kept: Job | None = getattr(_here, "job", None)
    # Rules of many tensors take long to compare, and the call identifies its job.
    if kept is None or (kept.call != job.call if job.call else kept != job):
        free_kept()
        keep_open(job, OpenJob(job))
    opened: OpenJob = _here.opened
    return opened


def _run(opened: OpenJob, task: Task, place: Store) -> tuple[bool, int]:
    """Run a task; return whether this run's record counts, and the bytes that the run wrote.

    Args:
        opened: the job.
        task: the task.
        place: the attempt, with this task's share of the request rate of a bucket.
    """
    plan = opened.plan
    writer = HostWriter(
        place,
        opened.attempt,
        task.number,
        layout=plan.layout,
        compression=plan.compression,
        memory_limit=max(plan.memory.writing, _PAGES) if place.appends else plan.memory.writing,
        run=secrets.token_hex(4),
    )
    try:
        # Each batch is written while the next one is read.
        with closing(
            assemble_chunks(
                opened.checkpoint, plan.planned_steps(task), plan.memory.batch, _here.memory
            )
        ) as batches:
            for batch in batches:
                writer.append_laid_out(
                    [(chunk.piece, chunk.position, chunk.raw) for chunk in batch.whole]
                )
        described, hosts, values = (
            opened.described,
            len(plan.tasks),
            _process_values(opened, task.number),
        )
        record, table = writer.complete(
            described, hosts=hosts, prior=opened.prior.digest, values=values
        )
        if opened.job.options.verify:
            try:
                opened.read_back(table, place)
            except CorruptionError as e:
                raise CommitError(
                    f"{place}: task {task.number} read back other data than it wrote ({e}) "
                    "Nothing was published."
                ) from e
    except BaseException:
        writer.abort()
        _remove(writer, place)
        raise
    writer.vouches = (
        True  # the record may exist even if the answer is lost; then its files must stay
    )
    first = write_record(place, record, first=True)
    if not first:
        _remove(writer, place)
    return first, record.stored_bytes


def _remove(writer: HostWriter, place: Store) -> None:
    """Remove a run's own files.

    Files that cannot be removed are collected later with other unreferenced files.
    """
    with suppress(ShardckptError):
        place.delete_prefix(f"{writer.folder}/")


def _process_values(opened: OpenJob, process: int) -> bytes | None:
    """The file with the own values of a process of the source; None: it has none."""
    if not opened.plan.values or process >= opened.plan.source.processes:
        return None
    values = {
        name: value
        for name, value in opened.checkpoint.process_values(process).items()
        if name in opened.plan.values
    }
    return values_file(values)
