"""Doing one task of a job: read its cells, write them as the new chunks, read those back, and leave a host's record.

1. A record that is there already means that the task is done; nothing else is looked at.
2. Steps are taken together until their chunks fill one of two buffers. A second thread reads them: source chunks go, or are
   scattered, straight to where they lie in the chunks of the target, converted on the way where dtypes differ.
3. Meanwhile what the other buffer holds is finished (checksum, compression) and written.
4. When all is durable it is read back and compared with the chunk table. Then the record is written, if it is not there.

A task may be done twice, at the same time too: by a worker that was taken for dead, say. Each writes below a name of its own,
the first record counts, and who comes second removes what is its own. In the plain layout, where a chunk has one name, both
write the same bytes there, each chunk at once.

Idempotent, and all that it is told can be pickled: this is what engines run.
"""

from __future__ import annotations

import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from threading import local
from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt.box import BoxArray
from shardckpt.errors import CommitError, CorruptionError, ShardckptError
from shardckpt.io.budget import round_up
from shardckpt.io.codec import CHECKSUM_BYTES, room_for
from shardckpt.io.host import HostWriter
from shardckpt.io.reader import Request
from shardckpt.planning.plan import chunk_boxes, overlaps, touched
from shardckpt.record import seal
from shardckpt.reshard.carry import read_back
from shardckpt.reshard.job import OpenJob

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from shardckpt.io.store import Store
    from shardckpt.io.table import Table
    from shardckpt.planning.plan import Overlaps, Piece
    from shardckpt.reshard.cells import Step
    from shardckpt.reshard.job import Job
    from shardckpt.reshard.plan import ReshardPlan, Task
    from shardckpt.structure import TensorRecord

    Bytes = NDArray[np.uint8]

__all__ = ["TaskReport", "forget", "record_key", "run_task"]

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


_NOTHING: Bytes = np.empty(0, np.uint8)
_here = local()
"""The job that this thread is at work on, and its buffers, kept from task to task."""


def forget() -> None:
    """Free what this thread keeps from task to task."""
    _here.__dict__.clear()


def _opened(job: Job) -> OpenJob:
    if getattr(_here, "job", None) != job:
        _here.job, _here.buffers = None, None  # the former one's memory is free before the new one takes any
        _here.opened = OpenJob(job)
        _here.job = job
        _here.buffers = _Buffer(), _Buffer()
    opened: OpenJob = _here.opened
    return opened


class _Buffer:
    """Memory that is used from front to back, and then again."""

    def __init__(self) -> None:
        self._bytes: Bytes = np.empty(0, np.uint8)
        self._used = 0

    def begin(self, nbytes: int) -> None:
        """Forget what is in it, and have room for so many bytes."""
        if self._bytes.nbytes < nbytes:
            self._bytes = _NOTHING
            self._bytes = np.empty(nbytes, np.uint8)
        self._used = 0

    def take(self, nbytes: int) -> Bytes:
        """The next bytes of it."""
        begin = self._used
        self._used += round_up(nbytes)
        return self._bytes[begin : begin + nbytes]


@dataclass(slots=True, eq=False)
class _Planned:
    """A step, and the chunks of the target that it reaches into, array by array."""

    target: TensorRecord
    source: TensorRecord
    step: Step
    pairs: list[tuple[Piece, Overlaps]]

    @property
    def nbytes(self) -> int:
        """Of those chunks, in a buffer."""
        itemsize = self.target.dtype.itemsize
        return sum(len(pairs.chunk) * round_up(room_for(piece.chunks, itemsize)) for piece, pairs in self.pairs)


@dataclass(slots=True)
class _Batch:
    """What is read at once, and the chunks that are whole then: array, position, and the elements as they are stored."""

    steps: list[_Planned]
    nbytes: int
    whole: list[tuple[Piece, int, Bytes]] = field(default_factory=list)


class _Run:
    """One run of one task."""

    def __init__(self, opened: OpenJob, task: Task, at_once: int) -> None:
        self._opened = opened
        self._plan: ReshardPlan = opened.plan
        self._task = task
        self._place: Store = opened.place.among(task.number % at_once, at_once)
        self._open: dict[tuple[str, int], tuple[_Batch, Bytes]] = {}
        """Chunks, by array and position, that the last step has begun and not finished; and in which batch."""

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
        batches = self._batches()
        with ThreadPoolExecutor(1, "shardckpt-ahead") as ahead, self._opened.checkpoint.reading():
            buffer, other = _here.buffers
            coming = ahead.submit(self._read, next(batches, None), buffer)
            while (batch := coming.result()) is not None:
                buffer, other = other, buffer
                coming = ahead.submit(self._read, next(batches, None), buffer)
                for piece, position, raw in batch.whole:
                    writer.put_laid_out(piece, position, raw)

    def _batches(self) -> Iterator[_Batch]:
        """All steps of the task, as many at a time as there is room for."""
        batch = _Batch([], 0)
        for planned in self._steps():
            if batch.steps and batch.nbytes + planned.nbytes > self._plan.memory.batch:
                yield batch
                batch = _Batch([], 0)
            batch.steps.append(planned)
            batch.nbytes += planned.nbytes
        if batch.steps:
            yield batch

    def _steps(self) -> Iterator[_Planned]:
        for share in self._task.shares:
            target, source = self._plan.target.tensors[share.tensor], self._plan.sources[share.tensor]
            for step in self._plan.steps(share):
                box = BoxArray.of([step.box], step.box.ndim)
                yield _Planned(target, source, step, [(piece, overlaps(piece, box)) for piece in touched(target.pieces, box)])

    def _read(self, batch: _Batch | None, buffer: _Buffer) -> _Batch | None:
        """Read a batch into a buffer."""
        if batch is not None:
            buffer.begin(batch.nbytes)
            self._opened.checkpoint.reader.read([self._request(planned, batch, buffer) for planned in batch.steps])
        return batch

    def _request(self, planned: _Planned, batch: _Batch, buffer: _Buffer) -> Request:
        """What a step reads: of each chunk that it reaches into, the part that lies in it, to where that is in the chunk."""
        target, source = planned.target, planned.source
        converts = target.dtype != source.dtype
        kind = target.dtype.numpy if converts else target.dtype.storage
        begun, self._open = self._open, {}
        along = slice(planned.step.along, planned.step.along + 1)
        starts, stops, parts = [], [], []
        for piece, pairs in planned.pairs:
            size = room_for(piece.chunks, kind.itemsize)
            boxes = chunk_boxes(piece, pairs.chunk)
            short = np.any(boxes.stop - boxes.start < np.array(piece.chunks, np.int64), axis=1).tolist()
            later = np.any((boxes.stop > np.array(planned.step.box.stop, np.int64))[:, along], axis=1).tolist()
            inside = zip(pairs.in_chunk.start.tolist(), pairs.in_chunk.stop.tolist(), strict=True)
            for position, cut_off, unfinished, (start, stop) in zip(pairs.chunk.tolist(), short, later, inside, strict=True):
                key = piece.path, position
                before, raw = begun.get(key, (None, _NOTHING))
                if before is not batch:
                    former, raw = raw, buffer.take(size)
                    if before is not None:
                        raw[:] = former
                    elif cut_off:
                        raw[:] = 0
                index: Any = (*map(slice, start, stop), ...)
                parts.append(raw[:-CHECKSUM_BYTES].view(kind).reshape(piece.chunks)[index])
                if unfinished:
                    self._open[key] = batch, raw
                else:
                    batch.whole.append((piece, position, raw))
            starts.append(boxes.start + pairs.in_chunk.start)
            stops.append(boxes.start + pairs.in_chunk.stop)
        wanted = BoxArray(np.concatenate(starts), np.concatenate(stops))
        meaning = source.dtype.numpy if converts else None
        return Request(source.name, source.dtype.storage, source.pieces, wanted, parts, convert_from=meaning)

    def _read_back(self, table: Table) -> None:
        """Compare what is durable with what was written."""
        try:
            read_back(self._opened, table)
        except CorruptionError as e:
            raise CommitError(
                f"{self._place}: task {self._task.number} does not read back what it wrote ({e}) Nothing was published."
            ) from e
