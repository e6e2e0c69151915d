"""Doing one task of a job: read its cells, write them as the new chunks, read those back, and leave a host's record.

1. A record that is there already means that the task is done; nothing else is looked at.
2. Its steps are read into the chunks of the target (`assembling`).
3. Meanwhile what was read before is finished (checksum, compression) and written.
4. When all is durable it is read back and compared with the chunk table. Then the record is written, if it is not there.

A task may be done twice, at the same time too: by a worker that was taken for dead, say. Each writes below a name of its own,
the first record counts, and who comes second removes what is its own. In the plain layout, where a chunk has one name, both
write the same bytes there, each chunk at once.

Idempotent, and all that it is told can be pickled: this is what engines run.
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
from shardckpt.plan.views import View
from shardckpt.reshard.assembling import assembled
from shardckpt.reshard.batches import BatchMemory, ChunkTarget, PlannedStep
from shardckpt.reshard.carry import read_back
from shardckpt.reshard.job import OpenJob
from shardckpt.writing.host import HostWriter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardckpt.format.table import Table
    from shardckpt.io.store import Store
    from shardckpt.reshard.job import Job
    from shardckpt.reshard.plan import ReshardPlan, Task

__all__ = ["TaskReport", "forget", "keep", "record_key", "run_task"]

_PAGES = 64 << 20
"""Bytes of files of a local disk that are being made durable at a time. They are the kernel's, not this process's."""


@dataclass(frozen=True, slots=True)
class TaskReport:
    """What doing a task took."""

    number: int
    done_before: bool
    """Whether its record was there already: nothing was done, or it was for nothing."""
    nbytes: int
    """Of the elements that the task writes."""
    read_bytes: int = 0
    """Stored bytes of the source that were read."""
    stored_bytes: int = 0
    """That were written, of chunks."""
    seconds: float = 0.0


def record_key(number: int) -> str:
    """Where a task's record is, relative to the attempt."""
    return f"records/{number:05d}.json"


def run_task(job: Job, number: int, at_once: int = 1) -> TaskReport:
    """Do one task of a job, unless it is done.

    Args:
        job: which one; the same for all its tasks.
        number: of the task, from 0.
        at_once: how many tasks of the job are done at a time, everywhere: they share what a bucket bears.

    Raises:
        CorruptionError: the source is damaged there; or what was written does not read back as it was.
        ReplacedError: the source was replaced or deleted meanwhile.
        CommitError, NotFoundError, AlreadyExistsError: the source or the destination is no longer what the job began with.
        StorageError: the storage failed.
    """
    opened = _opened(job)
    task = opened.plan.tasks[number]
    if opened.place.exists(record_key(number)):
        return TaskReport(number, done_before=True, nbytes=task.nbytes)
    began, stats = time.monotonic(), opened.checkpoint.stats
    before = stats.bytes_read
    first, stored = _Run(opened, task, at_once).do()
    return TaskReport(number, not first, task.nbytes, stats.bytes_read - before, stored, time.monotonic() - began)


_here = local()
"""The job that this thread is at work on, and its memory, kept from task to task."""


def keep(job: Job, opened: OpenJob) -> None:
    """Have this thread do tasks of a job that it has open: neither source nor plan are looked at once more."""
    forget()  # the former one's memory is free before the new one takes any
    _here.job, _here.opened, _here.memory = job, opened, BatchMemory()


def forget() -> None:
    """Free what this thread keeps from task to task."""
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
        """Whether this run's record counts, and the bytes that it wrote."""
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
        writer.vouches = True  # if the answer is lost the record may be there all the same, and then all that it names has to stay
        first = self._place.create(record.key, seal(record.to_json()))
        if not first:
            self._remove(writer)
        return first, record.stored_bytes

    def _remove(self, writer: HostWriter) -> None:
        """Remove this run's own files; what cannot be removed goes with what else no record names."""
        with suppress(ShardckptError):
            self._place.delete_prefix(f"{writer.folder}/")

    def _values(self) -> bytes | None:
        """The file of what the process of this number owned by itself."""
        if not self._plan.values or self._task.number >= self._plan.source.processes:
            return None
        found = self._opened.checkpoint.process_values(self._task.number)
        values = {name: value for name, value in found.items() if name in self._plan.values}
        return seal({"values": values}) if values else None

    def _write(self, writer: HostWriter) -> None:
        """Read everything, and write it while what follows is read."""
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
        """Compare what is durable with what was written."""
        try:
            read_back(self._opened, table)
        except CorruptionError as e:
            raise CommitError(
                f"{self._place}: task {self._task.number} does not read back what it wrote ({e}) Nothing was published."
            ) from e
