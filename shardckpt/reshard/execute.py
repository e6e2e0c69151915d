"""A complete reshard: plan it, have its tasks done, and commit their output.

1. The source, the options, the memory and the destination are checked before anything is written.
2. Tasks without a record are submitted, a few more than there are workers at a time. A task whose worker dies is
   submitted again, a few times.
   A job that is already committed is done: repeating the call does nothing.
3. When all records exist they are committed like the records of a save by many hosts. Until then the destination shows no new
   checkpoint. An interrupted job leaves its finished tasks, and repeating the call continues from there.

One of N externally started workers (`worker=(K, N)`) does every N-th task and commits nothing.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from shardckpt.commit.assemble import assemble
from shardckpt.commit.publish import publish, published_attempt, remove_replaced
from shardckpt.commit.strays import remove_strays
from shardckpt.errors import CommitError, OptionError, ShardckptError, out_of_memory_is_typed
from shardckpt.excerpt import excerpt
from shardckpt.format.record import CheckpointRecord
from shardckpt.io.datafile import check_space
from shardckpt.io.failures import reading_takes_threads
from shardckpt.io.url import parse
from shardckpt.reading.checkpoint import Checkpoint
from shardckpt.reshard.carry import carry
from shardckpt.reshard.clusters import WorkerLostError
from shardckpt.reshard.engines import check_engine, start
from shardckpt.reshard.finished import finished_tasks
from shardckpt.reshard.job import Job, OpenJob
from shardckpt.reshard.options import DEFAULT_MEMORY_LIMIT, DEFAULT_TASK_BYTES, ReshardOptions
from shardckpt.reshard.rules import Rule, Rules
from shardckpt.reshard.source import place_of
from shardckpt.reshard.task import TaskReport, forget, keep, run_task
from shardckpt.state.names import shown

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    from shardckpt.layout.mesh import Mesh
    from shardckpt.layout.partition_spec import PartitionSpec
    from shardckpt.reshard.dtype_rules import ConvertedSubtree
    from shardckpt.reshard.engines import Engine
    from shardckpt.reshard.plan import Task
    from shardckpt.reshard.source import OpenSource, SourceSpec

MOST_LOSSES = 3
"""Maximum number of workers lost over one task."""
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
    """The directory into which all workers of the job write."""
    committed: bool
    """Whether the new checkpoint is committed now; one worker of several commits nothing."""
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


@out_of_memory_is_typed
def reshard(
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
    """Rewrite a checkpoint so that it suits another layout; bit-identical, except where `dtype` converts.

    It needs no devices, and memory for only a few chunks, however large tensors are. After an interruption, the same call continues
    where it stopped. The source is only read.

    Args:
        src: the checkpoint to read: a path or URL.
        dst: the place of the new checkpoint, on the same storage or another one. It may equal `src` with `overwrite`.
        mesh: the devices that specs refer to. With neither `rules` nor `like`, tensors keep their recorded specs, over this mesh.
        rules: how each tensor is laid out: `Rules`, texts such as "**/w1=(None,model)", or a dict of pattern → spec.
        like: another checkpoint; a tensor that no rule matches gets its layout from there.
        layout: "packed" or "zarr"; None: same as the source.
        compression: "zstd" or "none"; None: same as the source.
        dtype: a dtype, or pattern → dtype: the target of the conversion, which works like `restore(cast=True)`. A dtype alone leaves
            integers, tensors without dimensions and optimizer state unchanged (docs/reshard.md#dtypes).
        only: the names in the new checkpoint: a pattern, or several.
        engine: who does the work: an Executor, or the URL of a cluster, such as "ray://head:10001" or "dask://scheduler:8786"; None:
            processes on this machine.
        memory_limit: bytes of buffers: on one machine the total over all workers, on a cluster the limit of each running task.
            Each process uses up to 128 MiB more.
        workers: number of concurrent tasks; None: limited by cores and memory, or by the places in the cluster.
        worker: (K, N): this call is worker K, from 0, of N externally started workers, and does only its share. When all
            are done, `shardckpt.commit(dst)` commits.
        task_bytes: approximate bytes that a task writes: the most that an interruption loses, per worker.
        overwrite: replace a checkpoint that is committed at `dst`.
        verify: read back the written data and compare checksums.
        unmatched: what happens to tensors that no rule matches; None: the setting of `rules`, or else "replicate".
        progress: called with the bytes of elements done so far, and in all (of this call's share).

    Returns:
        The report of the work done.

    Raises:
        NotFoundError: there is no committed checkpoint at `src`.
        AlreadyExistsError: a checkpoint is committed at `dst` and `overwrite` is not set; or another job committed there meanwhile.
        OptionError, ShardingError, NamesMismatchError, DtypeMismatchError, LeafError: the request does not fit the source.
        BudgetError: the memory limit is too small; names it, and a sufficient one.
        CorruptionError: stored bytes of the source are damaged or missing.
        ReplacedError: the source was replaced or deleted meanwhile.
        CommitError: workers died over a task again and again; or the tasks' records contradict each other.
        CoordinationError: the cluster does not answer, or has lost all its workers.
        MissingExtraError: the cluster's package is not installed here, or shardckpt is not installed on the cluster.
        StorageError: a storage failed or is full; or the interpreter is shutting down and cannot start reader threads.
    """
    options = ReshardOptions(
        mesh=mesh,
        rules=all_rules(rules, like, unmatched),
        layout=layout,
        compression=compression,
        dtype=dtype,
        only=only,
        memory_limit=memory_limit,
        workers=workers,
        task_bytes=task_bytes,
        overwrite=overwrite,
        verify=verify,
    )
    with reading_takes_threads(src):
        return run_job(str(parse(src)), dst, options, engine=engine, worker=worker, progress=progress)


def run_job(
    source: str | SourceSpec,
    dst: str | os.PathLike[str],
    options: ReshardOptions,
    *,
    engine: Executor | str | None = None,
    worker: tuple[int, int] | None = None,
    progress: Callable[[int, int], None] | None = None,
    found: OpenSource | None = None,
) -> ReshardReport:
    """Reshard any source; the arguments are those of `reshard`, and `found` is the source if the caller has opened it."""
    began, workers = time.monotonic(), options.workers
    share = _checked(worker)
    check_engine(engine)
    if isinstance(engine, str):
        options = replace(options, workers=1)  # each worker has the memory for itself
    job = Job(source, str(parse(dst)), options, call=secrets.token_hex(8), alone=worker is None and engine is None)
    in_one_memory = "memory" in (place_of(source).scheme, parse(job.destination).scheme)
    if isinstance(engine, str) and worker is not None:
        raise OptionError(f"engine={engine!r}, worker={worker}: a cluster has workers of its own; leave one of the two out.")
    if isinstance(engine, str) and in_one_memory:
        raise OptionError(f"engine={engine!r}: a memory:// url is of this process alone, and a cluster cannot reach it.")
    opened = OpenJob(job, found)
    if opened.carries:
        try:
            return _carried(opened, progress or (lambda _done, _total: None), began)
        except NotImplementedError:  # the object store cannot copy
            opened = OpenJob(replace(job, alone=False))
    own = 1 if in_one_memory else opened.plan.memory.workers
    # Workers on other machines would count their own cores.
    job = replace(job, options=replace(options, workers=opened.plan.memory.workers), attempt=opened.attempt, alone=False)
    finished = {task.number for task in opened.plan.tasks} if opened.committed else finished_tasks(opened.place)
    mine = [task for task in opened.plan.tasks if task.number % share[1] == share[0]]
    left = [task for task in mine if task.number not in finished]
    if opened.plan.compression is None:
        check_space(opened.store, sum(task.nbytes for task in left))
    done, total = sum(task.nbytes for task in mine) - sum(task.nbytes for task in left), sum(task.nbytes for task in mine)
    tell = progress or (lambda _done, _total: None)
    tell(done, total)
    reports: list[TaskReport] = []
    if left:
        at_once = min(own if engine is None else workers or _ENGINE_WORKERS, len(left))
        keep(job, opened)  # for tasks that run in this thread
        try:
            with start(engine, workers, at_once, opened.plan.memory.peak // opened.plan.memory.workers) as does:
                for report in _done(does, job, left, share[1]):
                    reports.append(report)
                    done += report.nbytes
                    tell(done, total)
        finally:
            forget()
    if worker is None and not opened.committed:
        _commit(opened)
    return ReshardReport(
        url=str(opened.store.location),
        attempt=opened.attempt,
        committed=worker is None or opened.committed,
        tasks=len(opened.plan.tasks),
        done_before=len(mine) - len(left) + sum(report.done_before for report in reports),
        nbytes=opened.plan.nbytes,
        read_bytes=sum(report.read_bytes for report in reports),
        stored_bytes=sum(report.stored_bytes for report in reports),
        seconds=time.monotonic() - began,
        conversions=opened.plan.conversions,
    )


def _carried(opened: OpenJob, progress: Callable[[int, int], None], began: float) -> ReshardReport:
    """Reuse the source's files, where nothing in them changes."""
    done = None if opened.committed else carry(opened, progress)
    if done is not None:
        _commit(opened)
    return ReshardReport(
        url=str(opened.store.location),
        attempt=opened.attempt,
        committed=True,
        tasks=len(opened.plan.source.hosts),
        done_before=len(opened.plan.source.hosts) if done is None else done.done_before,
        nbytes=opened.plan.nbytes,
        read_bytes=0 if done is None else done.read_bytes,
        stored_bytes=0,
        seconds=time.monotonic() - began,
        conversions=opened.plan.conversions,
    )


def all_rules(
    rules: Rules | str | Sequence[str] | Mapping[str, PartitionSpec] | None,
    like: str | os.PathLike[str] | Checkpoint | None,
    unmatched: Literal["replicate", "error"] | None,
) -> Rules | None:
    """Combine `rules`, `like` and `unmatched` into one `Rules`."""
    if rules is None and like is None:
        if unmatched is not None:
            raise OptionError("unmatched=… is about tensors that no rule matches, and there are no rules; give rules= or like=.")
        return None
    found = Rules() if rules is None else rules
    if isinstance(found, Mapping):
        found = Rules(tuple(Rule(pattern, spec) for pattern, spec in found.items()))
    elif isinstance(found, str | Sequence):
        found = Rules.parse(found)
    elif not isinstance(found, Rules):
        raise OptionError(f"rules={excerpt(rules)}: give shardckpt.Rules, texts such as '**/w1=(None,model)', or a dict.")
    if like is not None:
        other = like if isinstance(like, Checkpoint) else Checkpoint(like)
        found = found.then(Rules.like(other.record, str(other.location)))
    return found if unmatched is None else replace(found, unmatched=unmatched)


def _checked(worker: Any) -> tuple[int, int]:
    """The worker number and the number of workers."""
    if worker is None:
        return 0, 1
    if not (isinstance(worker, tuple) and len(worker) == 2 and all(type(n) is int for n in worker) and 0 <= worker[0] < worker[1]):
        raise OptionError(f"worker={excerpt(worker)}: give (K, N): this is worker K of N, counted from 0.")
    return worker


def _done(engine: Engine, job: Job, tasks: Sequence[Task], jobs: int) -> Iterator[TaskReport]:
    """Run tasks on one of `jobs` engines that share the job, and yield their reports as they arrive."""
    waiting, losses = deque(tasks), Counter[int]()
    under_way: dict[Future[TaskReport], Task] = {}
    try:
        while waiting or under_way:
            places = engine.places()
            while waiting and len(under_way) < engine.ahead * places:
                task = waiting.popleft()
                under_way[engine.executor.submit(run_task, job, task.number, jobs * places)] = task
            for future in wait(under_way, _LOOK_EVERY if engine.changes else None, FIRST_COMPLETED).done:
                task = under_way.pop(future)
                try:
                    report = future.result()
                except BrokenExecutor as e:
                    losses[task.number] += e.times if isinstance(e, WorkerLostError) else 1
                    if losses[task.number] >= MOST_LOSSES:
                        raise _lost(task, losses[task.number], e) from e
                    waiting.append(task)
                else:
                    yield report
    finally:
        for future in under_way:
            future.cancel()


def _lost(task: Task, times: int, error: BaseException) -> CommitError:
    names = [share.tensor for share in task.shares]
    what = f"{shown(names[0])}{f' to {shown(names[-1])}' if len(set(names)) > 1 else ''}" if names else "nothing but small values"
    return CommitError(
        f"Task {task.number} ({what}) has lost its worker {times} times, the last time so: {error} If memory is short, lower memory_limit "
        f"or workers. What other tasks have finished stays; the same call goes on there."
    )


def _commit(opened: OpenJob) -> None:
    """Publish the output of all tasks."""
    try:
        record = assemble(opened.place)
        publish(opened.store, record, opened.prior)
    except ShardckptError:
        if published_attempt(opened.store) != opened.attempt:
            raise  # otherwise another process committed it and cleaned up before this check
    else:
        with suppress(ShardckptError):  # leftovers only cost space
            remove_strays(opened.place)
    if isinstance(opened.prior.record, CheckpointRecord):
        remove_replaced(opened.store, opened.prior.record.attempt)
