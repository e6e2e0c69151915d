"""A complete reshard: plan it, have its tasks done, and commit their output.

1. The source, the options, the memory and the destination are checked before anything is written.
2. Tasks without a record are submitted, a few more than there are workers at a time. A task whose
   worker dies is submitted again, a few times. A job that is already committed is done: repeating
   the call does nothing.
3. When all records exist they are committed like the records of a save by many hosts. Until then
   the destination shows no new checkpoint. An interrupted job leaves its finished tasks, and
   repeating the call continues from there.

One of N externally started workers (`worker=(K, N)`) does every N-th task and commits nothing.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter, deque
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from shardckpt.commit.assemble import assemble
from shardckpt.commit.dependants import Dependants
from shardckpt.commit.publish import data_stays, is_published, publish
from shardckpt.commit.remove import remove_replaced, remove_strays
from shardckpt.errors import CommitError, OptionError, ShardckptError, out_of_memory_is_typed
from shardckpt.io.datafile import check_space
from shardckpt.io.failures import reading_takes_threads
from shardckpt.io.store import kind_of
from shardckpt.io.url import parse
from shardckpt.options import documented, leaves_out_with
from shardckpt.reshard.clusters import WorkerLostError
from shardckpt.reshard.engines import start_engine
from shardckpt.reshard.forecast.words import notice_text
from shardckpt.reshard.job import Job, OpenJob
from shardckpt.reshard.options import DEFAULT_MEMORY_LIMIT, DEFAULT_TASK_BYTES, ReshardOptions
from shardckpt.reshard.reuse import reuse_files
from shardckpt.reshard.task import TaskReport, free_kept, keep_open, run_task
from shardckpt.runs.rollback import keep_superseded
from shardckpt.state.names import shown
from shardckpt.streaming.source import place_of
from shardckpt.text import Message, named

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shardckpt.layout.mesh import Mesh
    from shardckpt.layout.partition_spec import PartitionSpec
    from shardckpt.reading.checkpoint import Checkpoint
    from shardckpt.reshard.dtype_rules import ConvertedSubtree
    from shardckpt.reshard.engines import Engine
    from shardckpt.reshard.plan import Task
    from shardckpt.reshard.rules import Rules
    from shardckpt.streaming.source import OpenSource, SourceSpec

MOST_LOSSES = 3
"""Maximum number of workers lost over one task."""
_LINKED = (
    "no chunk changed: the new files are hard links to the source's, so damage to one damages both"
)
_ENGINE_WORKERS = 64
"""Assumed number of workers of an Executor, if `workers` is not given."""
_LOOK_EVERY = 1.0
"""Seconds between two checks of an engine that may have grown, or lost all its workers."""


@dataclass(frozen=True, slots=True)
class ReshardReport:
    """Result of a reshard."""

    url: str
    """URL of the new checkpoint."""
    attempt: str
    """Name of the directory, in the destination, into which all workers of the job write."""
    committed: bool
    """Whether the new checkpoint is committed now. A call with `worker=(K, N)` does not commit."""
    tasks: int
    """Number of tasks of the job."""
    done_before: int
    """Number of this call's tasks that were already done."""
    nbytes: int
    """Bytes of all elements in the new checkpoint."""
    read_bytes: int
    """Stored bytes of the source that this call read."""
    stored_bytes: int
    """Bytes of chunks that this call wrote."""
    seconds: float
    """Wall-clock seconds."""
    conversions: tuple[ConvertedSubtree, ...] = field(kw_only=True, default=())
    """Tensors that `dtype` converts and leaves, by subtree; empty if `dtype` was not given."""
    notices: tuple[str, ...] = field(kw_only=True, default=())
    """Possible surprises: in the new layouts, such as a mesh that lacks an axis, and hard links to
    the source; one line each."""

    def to_json(self) -> dict[str, Any]:
        """The report as JSON."""
        return {
            "url": self.url,
            "attempt": self.attempt,
            "committed": self.committed,
            "tasks": self.tasks,
            "done_before": self.done_before,
            "bytes": self.nbytes,
            "read_bytes": self.read_bytes,
            "stored_bytes": self.stored_bytes,
            "seconds": self.seconds,
            "conversions": [one.to_json() for one in self.conversions],
            "notices": list(self.notices),
        }


@out_of_memory_is_typed
@leaves_out_with("only")
@documented(ReshardOptions)
def reshard(  # noqa: D417  (the other arguments are documented where they are declared)
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    mesh: Mesh | None = None,
    rules: Rules | str | Sequence[str] | Mapping[str, PartitionSpec] | None = None,
    like: str | os.PathLike[str] | Checkpoint | None = None,
    layout: Literal["packed", "zarr"] | None = None,
    compression: Literal["zstd", "none"] | None = None,
    dtype: str | Mapping[str, str] | None = None,
    only: str | Sequence[str] | None = None,
    engine: Executor | str | None = None,
    memory_limit: int | str = DEFAULT_MEMORY_LIMIT,
    workers: int | None = None,
    worker: tuple[int, int] | None = None,
    task_bytes: int | str = DEFAULT_TASK_BYTES,
    overwrite: bool = False,
    verify: bool = True,
    unmatched: Literal["replicate", "error"] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ReshardReport:
    """Rewrite a checkpoint for another mesh, layout, dtype or storage.

    Only `dtype` changes elements; everything else stays bit for bit. No devices are needed, and
    memory for only a few chunks, however large a tensor is. The source is only read. After an
    interruption, repeat the call: it continues where it stopped.

    Args:
        src: the checkpoint to read: a path or URL.
        dst: a path or URL for the new checkpoint. With `overwrite`, it may equal `src`.
        options: the other arguments are the fields of `ReshardOptions`.

    Returns:
        A report with bytes read and written, seconds, and whether the new checkpoint is committed.

    Raises:
        NotFoundError: there is no committed checkpoint at `src`.
        AlreadyExistsError: a checkpoint is committed at `dst` and `overwrite` is not set; or
            another job committed one during the call.
        OptionError, ShardingError, NamesMismatchError, DtypeMismatchError, LeafError: the options
        do not fit the source.
        BudgetError: the memory limit is too small; the message names a sufficient one.
        CorruptionError: stored bytes of the source are damaged or missing.
        ReplacedError: the source was replaced or deleted during the call.
        CommitError: three workers died over one task, or one of an Executor that does not replace
            it; or the tasks' records contradict each other.
        CoordinationError: the cluster does not answer, or has lost all its workers.
        MissingExtraError: the cluster's package is not installed here, or shardckpt is not
            installed on the cluster.
        StorageError: a storage failed or is full; or the interpreter is shutting down and cannot
            start reader threads.
    """
    options = ReshardOptions.of(locals())
    source, destination = parse(src), parse(dst)
    if destination.is_within(source) and destination.resolved != source.resolved:
        raise OptionError(f"{destination} is inside the source, {source}; choose another place.")
    with reading_takes_threads(src):
        return run_job(str(source), dst, options)


def run_job(
    source: str | SourceSpec,
    dst: str | os.PathLike[str],
    options: ReshardOptions,
    checkpoint: OpenSource | None = None,
) -> ReshardReport:
    """Reshard any source; `checkpoint` is the source if the caller has opened it."""
    began, destination = time.monotonic(), parse(dst)
    private = next(
        (place for place in (place_of(source), destination) if not kind_of(place).shared), None
    )
    on_cluster = isinstance(options.engine, str)
    if on_cluster and private is not None:
        advice = (
            f": a cluster cannot reach a {private.scheme}:// url, which exists only in this "
            "process; choose another place."
        )
        raise OptionError(Message(named("engine", options.engine), advice))
    each = options.of_job()
    if on_cluster:  # each worker has the memory for itself
        each = replace(each, workers=1)
    job = Job(
        source,
        str(destination),
        each,
        call=secrets.token_hex(8),
        alone=options.worker is None and options.engine is None,
    )
    opened, done = OpenJob(job, checkpoint), None
    dependants = Dependants(opened.store)
    # One call of the job reads the checkpoints beside the destination.
    first = options.worker is None or options.worker[0] == 0
    if first and opened.prior.is_checkpoint and not opened.committed:
        dependants.check_replaceable(opened.prior.attempt)
    if opened.reuse:
        try:
            done = _reuse_source(opened, options)
        except NotImplementedError:  # the object store cannot copy
            opened = OpenJob(replace(job, alone=False))
    if done is None:
        done = _run_tasks(opened, options, in_one_memory=private is not None)
    if options.worker is None and not opened.committed:
        _commit(opened, dependants)
    linked = opened.reuse == "links" and opened.plan.nbytes
    return ReshardReport(
        url=str(opened.store.location),
        attempt=opened.attempt,
        committed=options.worker is None or opened.committed,
        tasks=done.tasks,
        done_before=done.done_before,
        nbytes=opened.plan.nbytes,
        read_bytes=done.read_bytes,
        stored_bytes=done.stored_bytes,
        seconds=time.monotonic() - began,
        conversions=opened.plan.conversions,
        notices=(*map(notice_text, opened.plan.notices), *([_LINKED] if linked else [])),
    )


class _WorkDone(NamedTuple):
    """The work of one call: the fields of `ReshardReport` with these names."""

    tasks: int
    done_before: int
    read_bytes: int
    stored_bytes: int


def _reuse_source(opened: OpenJob, options: ReshardOptions) -> _WorkDone:
    """Reuse the source's files, where nothing in them changes."""
    hosts = len(opened.plan.source.hosts)
    if opened.committed:
        return _WorkDone(hosts, hosts, 0, 0)
    done_before, read_bytes = reuse_files(opened, options.report)
    return _WorkDone(hosts, done_before, read_bytes, 0)


def _run_tasks(opened: OpenJob, options: ReshardOptions, *, in_one_memory: bool) -> _WorkDone:
    """Run the unfinished tasks of this call's share."""
    plan, (number, sharing), workers = opened.plan, options.worker or (0, 1), options.workers
    # Workers on other machines would count their own cores.
    of_job = replace(opened.job.options, workers=plan.memory.workers)
    job = replace(opened.job, options=of_job, attempt=opened.attempt, alone=False)
    finished = {task.number for task in plan.tasks} if opened.committed else opened.finished_tasks()
    mine = [task for task in plan.tasks if task.number % sharing == number]
    left = [task for task in mine if task.number not in finished]
    total, missing = (sum(task.nbytes for task in tasks) for tasks in (mine, left))
    if plan.compression is None:
        check_space(opened.store, missing)
    options.report(total - missing, total)
    reports: list[TaskReport] = []
    if left:
        own = 1 if in_one_memory else plan.memory.workers
        at_once = min(own if options.engine is None else workers or _ENGINE_WORKERS, len(left))
        opened.hold_finished_tasks()
        keep_open(job, opened)  # for tasks that run in this thread
        try:
            with start_engine(
                options.engine, workers, at_once, plan.memory.peak // plan.memory.workers
            ) as engine:
                for report in _run_on_engine(engine, job, left, sharing):
                    reports.append(report)
                    missing -= report.nbytes
                    options.report(total - missing, total)
        finally:
            free_kept()
    return _WorkDone(
        tasks=len(plan.tasks),
        done_before=len(mine) - len(left) + sum(report.done_before for report in reports),
        read_bytes=sum(report.read_bytes for report in reports),
        stored_bytes=sum(report.stored_bytes for report in reports),
    )


def _run_on_engine(
    engine: Engine, job: Job, tasks: Sequence[Task], sharing: int
) -> Iterator[TaskReport]:
    """Run tasks, and yield their reports as they arrive; `sharing` calls work on the same job."""
    waiting, losses = deque(tasks), Counter[int]()
    under_way: dict[Future[TaskReport], Task] = {}
    try:
        while waiting or under_way:
            places = engine.places()
            while waiting and len(under_way) < engine.ahead * places:
                future = _submit(engine, job, waiting[0], sharing * places)
                under_way[future] = waiting.popleft()
            done = wait(under_way, _LOOK_EVERY if engine.changes else None, FIRST_COMPLETED).done
            # The error of the first call explains those of later ones.
            for future in [future for future in under_way if future in done]:
                task = under_way.pop(future)
                try:
                    report = future.result()
                except BrokenExecutor as e:
                    losses[task.number] += e.times if isinstance(e, WorkerLostError) else 1
                    if losses[task.number] >= MOST_LOSSES:
                        raise _lost_error(task, losses[task.number], e) from e
                    waiting.append(task)
                else:
                    yield report
    finally:
        for future in under_way:
            future.cancel()


def _submit(engine: Engine, job: Job, task: Task, sharing: int) -> Future[TaskReport]:
    try:
        return engine.executor.submit(run_task, job, task.number, sharing)
    except BrokenExecutor as e:  # the standard library's pools do not replace a worker
        raise CommitError(
            f"The engine has lost a worker and takes no more tasks ({e}). Finished tasks are kept; "
            "the same call with a new engine continues from there."
        ) from e


def _lost_error(task: Task, times: int, error: BaseException) -> CommitError:
    names = [share.tensor for share in task.shares]
    what = (
        f"{shown(names[0])}{f' to {shown(names[-1])}' if len(set(names)) > 1 else ''}"
        if names
        else "nothing but small values"
    )
    return CommitError(
        f"Task {task.number} ({what}) lost its worker {times} times, most recently: {error} If "
        "memory is short, lower memory_limit or workers. Finished tasks are kept; the same call "
        "continues from there."
    )


def _commit(opened: OpenJob, dependants: Dependants) -> None:
    """Publish the output of all tasks."""
    store, prior = opened.store, opened.prior
    opened.checkpoint.check_unchanged()
    try:
        contents, _ = opened.contents.seal()
        with data_stays(store, prior):
            record = assemble(opened.place, {contents: opened.contents})  # which saves parsing them
            if prior.is_checkpoint:
                dependants.check_replaceable(prior.attempt)
    except ShardckptError:
        if is_published(store, opened.attempt):
            return  # another process has committed it and cleaned up before this check
        raise
    keep_superseded(store, record, prior)
    published = publish(store, record, prior)
    with suppress(ShardckptError):  # leftovers only cost space
        remove_strays(opened.place)
    if published and prior.attempt is not None:
        remove_replaced(store, prior.attempt)
