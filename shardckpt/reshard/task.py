"""Execution of one task of a job: read its cells, write the new chunks, read those back, and write a host record.

1. If a record already exists, the task is done; nothing else is checked.
2. The task's steps are read into the chunks of the target (`assembling`).
3. Meanwhile chunks of earlier steps are finished (checksum, compression) and written.
4. Once all data is durable, it is read back and compared with the chunk table. Then the record is written, if none exists.

A task may run twice, even at the same time, for example if a worker was wrongly considered dead. Each run writes below its own
name, the first record counts, and the other run removes its own files. In the plain layout, where a chunk has one name, both
runs write the same bytes there, each chunk atomically.

The function is idempotent, and all its arguments can be pickled: engines run it.
"""

from __future__ import annotations

import secrets
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from threading import local
from typing import TYPE_CHECKING

from shardckpt.errors import CommitError, CorruptionError, ShardckptError
from shardckpt.format.documents import seal
from shardckpt.format.record import host_record_key
from shardckpt.plan.views import View
from shardckpt.reshard.assembling import assembled
from shardckpt.reshard.batches import BatchMemory, ChunkTarget, PlannedStep
from shardckpt.reshard.job import OpenJob
from shardckpt.writing.host import HostWriter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardckpt.format.table import Table
    from shardckpt.io.store import Store
    from shardckpt.reshard.job import Job
    from shardckpt.reshard.plan import ReshardPlan, Task

_PAGES = 64 << 20
"""Bytes of local files that are flushed to disk at a time. These pages belong to the kernel, not to this process."""


@dataclass(frozen=True, slots=True)
class TaskReport:
    """Result of a task."""

    number: int
    done_before: bool
    """Whether the record existed already: nothing was done, or this run's work was discarded."""
    nbytes: int
    """Bytes of the elements that the task writes."""
    read_bytes: int = 0
    """Stored bytes of the source that this run read."""
    stored_bytes: int = 0
    """Stored bytes of the chunks that this run wrote."""
    seconds: float = 0.0


def run_task(job: Job, number: int, at_once: int = 1) -> TaskReport:
    """Do one task of a job, unless it is done.

    Args:
        job: the job; the same for all its tasks.
        number: number of the task, from 0.
        at_once: number of tasks of the job that run at a time, everywhere: they share the request rate of a bucket.

    Raises:
        CorruptionError: the source is damaged; or the written data differs when read back.
        ReplacedError: the source was replaced or deleted meanwhile.
        CommitError, NotFoundError, AlreadyExistsError: the source or the destination is no longer what the job began with.
        StorageError: the storage failed.
    """
    opened = _opened(job)
    task = opened.plan.tasks[number]
    if opened.place.exists(host_record_key(number)):
        return TaskReport(number, done_before=True, nbytes=task.nbytes)
    began, stats = time.monotonic(), opened.checkpoint.stats
    before = stats.bytes_read
    first, stored = _Run(opened, task, at_once).do()
    return TaskReport(number, not first, task.nbytes, stats.bytes_read - before, stored, time.monotonic() - began)


_here = local()
"""This thread's open job and its memory, kept between tasks."""


def keep(job: Job, opened: OpenJob) -> None:
    """Use an open job for the tasks that this thread runs: neither source nor plan is read again."""
    forget()  # frees the memory of the previous job first
    _here.job, _here.opened, _here.memory = job, opened, BatchMemory()


def forget() -> None:
    """Free the job and memory that this thread keeps between tasks."""
    _here.__dict__.clear()


def _opened(job: Job) -> OpenJob:
    if getattr(_here, "job", None) != job:
        forget()
        keep(job, OpenJob(job))
    opened: OpenJob = _here.opened
    return opened


class _Run:
    """One run of one task."""

    def __init__(self, opened: OpenJob, task: Task, at_once: int) -> None:
        self._opened = opened
        self._plan: ReshardPlan = opened.plan
        self._task = task
        self._place: Store = opened.place.among(task.number % at_once, at_once)

    def do(self) -> tuple[bool, int]:
        """Run the task; return whether this run's record counts, and the bytes that it wrote."""
        plan, number = self._plan, self._task.number
        writer = HostWriter(
            self._place,
            self._opened.attempt,
            number,
            layout=plan.layout,
            compression=plan.compression,
            memory_limit=max(plan.memory.writing, _PAGES) if self._place.location.local is not None else plan.memory.writing,
            run=secrets.token_hex(4),
        )
        try:
            self._write(writer)
            described, hosts = self._opened.described, len(plan.tasks)
            record, table = writer.complete(described, hosts=hosts, prior=self._opened.prior.digest, values=self._values())
            if self._opened.job.options.verify:
                self._read_back(table)
        except BaseException:
            writer.abort()
            self._remove(writer)
            raise
        writer.vouches = True  # the record may exist even if the answer is lost; then its files must stay
        first = self._place.create(record.key, seal(record.to_json()))
        if not first:
            self._remove(writer)
        return first, record.stored_bytes

    def _remove(self, writer: HostWriter) -> None:
        """Remove this run's own files; files that cannot be removed are collected later with other unreferenced files."""
        with suppress(ShardckptError):
            self._place.delete_prefix(f"{writer.folder}/")

    def _values(self) -> bytes | None:
        """The file with the own values of the process of this number."""
        if not self._plan.values or self._task.number >= self._plan.source.processes:
            return None
        found = self._opened.checkpoint.process_values(self._task.number)
        values = {name: value for name, value in found.items() if name in self._plan.values}
        return seal({"values": values}) if values else None

    def _write(self, writer: HostWriter) -> None:
        """Read all steps, and write each batch while the next one is read."""
        with closing(assembled(self._opened.checkpoint, self._steps(), self._plan.memory.batch, _here.memory)) as batches:
            for batch in batches:
                writer.put_laid_out([(chunk.piece, chunk.position, chunk.raw) for chunk in batch.whole])

    def _steps(self) -> Iterator[PlannedStep]:
        for share in self._task.shares:
            tensor, source = self._plan.target.tensors[share.tensor], self._plan.sources[share.tensor]
            view = View.whole(source.name, source.shape)
            target = ChunkTarget(tensor.name, tensor.dtype, tensor.pieces, [(source, view)], as_stored=True)
            for step in self._plan.steps(share):
                yield PlannedStep(target, step)

    def _read_back(self, table: Table) -> None:
        """Compare the durable data with the data written."""
        try:
            self._opened.read_back(table)
        except CorruptionError as e:
            raise CommitError(
                f"{self._place}: task {self._task.number} does not read back what it wrote ({e}) Nothing was published."
            ) from e
