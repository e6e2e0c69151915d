"""A whole reshard: plan it, have its tasks done, and commit what they wrote.

1. Everything is checked before anything is written: the source, the options, the memory, the destination.
2. The tasks of which no record is there are handed out, a few more than there are workers at a time. One whose worker dies is
   handed out again, a few times.
   A job that is committed already is done: the same call again does nothing.
3. When all records are there they are committed like those of a save by many hosts. Until then nothing is to be seen at the
   destination; whoever stops on the way leaves what is finished, and the same call goes on there.

One of N workers that are started by somebody else (`worker=(K, N)`) does every N-th task and commits nothing.
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

__all__ = ["ReshardReport", "all_rules", "reshard", "run_job"]

MOST_LOSSES = 3
"""Workers that may die over one task."""
_ENGINE_WORKERS = 64
"""That an engine is taken to have, where nobody says."""
_LOOK_EVERY = 1.0
"""Seconds between two looks at an engine that may have grown, or have lost everybody."""


@dataclass(frozen=True, slots=True)
class ReshardReport:
    """What a reshard has done."""

    url: str
    """Of the new checkpoint."""
    attempt: str
    """The directory that all workers of the job write into."""
    committed: bool
    """Whether the new checkpoint is there now; one worker of several commits nothing."""
    tasks: int
    """That the job has."""
    done_before: int
    """Of those that were this call's to do: how many were done when it came to them."""
    nbytes: int
    """Of all elements in the new checkpoint."""
    read_bytes: int
    """Stored bytes of the source that this call read."""
    stored_bytes: int
    """Bytes of chunks that this call wrote."""
    seconds: float
    """That it took."""
    conversions: tuple[ConvertedSubtree, ...] = field(kw_only=True, default=())
    """How many tensors `dtype` converts and leaves, by subtree; empty where it was not given."""


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
    """Write a checkpoint anew, stored as it suits another layout; bit for bit the same, but for what `dtype` converts.

    It needs no devices, and memory for a few chunks only, however large tensors are. Interrupted and called again with the same
    arguments it goes on where it was. The source is only read.

    Args:
        src: the checkpoint to read: a path or url.
        dst: where the new one goes, on the same storage or another one. The source's own place with `overwrite`.
        mesh: the devices that specs refer to. Alone: tensors keep their recorded specs, over this mesh.
        rules: how each tensor is laid out: `Rules`, texts such as "**/w1=(None,model)", or a dict of pattern → spec.
        like: another checkpoint: tensors that no rule means are laid out as there.
        layout: "packed" or "zarr"; None: as the source has it.
        compression: "zstd" or "none"; None: as the source has it.
        dtype: a dtype, or pattern → dtype: what tensors are converted to, as `restore(cast=True)` converts. A dtype alone leaves integers,
            tensors without dimensions and state of optimizers as they are (docs/reshard.md#dtypes).
        only: the names that the new checkpoint has: a pattern, or several.
        engine: who does the work: an Executor, or the url of a cluster, as in "ray://head:10001" or "dask://scheduler:8786"; None:
            processes on this machine.
        memory_limit: bytes of buffers, over all workers of this machine together, and on a cluster of each task that is being done;
            each process takes up to 128 MiB besides.
        workers: how many tasks are done at once; None: as many as there are cores, and memory for, or places in the cluster.
        worker: (K, N): this call is worker K, from 0, of N that are started by somebody else, and does its share only. When all
            are done, `shardckpt.commit(dst)` commits.
        task_bytes: about what a task writes: what an interruption loses at most, per worker.
        overwrite: replace a checkpoint that is committed there.
        verify: read back what was written.
        unmatched: what becomes of tensors that no rule means; None: as `rules` has it, and else "replicate".
        progress: called with bytes of elements done so far, and in all (of this call's share).

    Returns:
        What was done.

    Raises:
        NotFoundError: no committed checkpoint at `src`.
        AlreadyExistsError: one is committed at `dst`, and `overwrite` is not set; or somebody else committed there meanwhile.
        OptionError, ShardingError, NamesMismatchError, DtypeMismatchError, LeafError: what is asked for cannot be made of it.
        BudgetError: the memory limit does not suffice; names it, and what would.
        CorruptionError: stored bytes of the source are damaged or missing.
        ReplacedError: the source was replaced or deleted meanwhile.
        CommitError: workers died over a task again and again; or the tasks' records contradict each other.
        CoordinationError: the cluster does not answer, or has lost all its workers.
        MissingExtraError: the cluster's package is not installed here, or shardckpt not there.
        StorageError: a storage failed, or has no room; or Python is ending and starts no threads to read with.
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
    """Reshard any source: as `reshard`, of which these are the arguments, but for `found`: the source, where the caller has it open."""
    began, workers = time.monotonic(), options.workers
    share = _checked(worker)
    check_engine(engine)
    if isinstance(engine, str):
        options = replace(options, workers=1)  # each has the memory for itself
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
        except NotImplementedError:  # of the object store: it has no copies
            opened = OpenJob(replace(job, alone=False))
    own = 1 if in_one_memory else opened.plan.memory.workers
    # Workers on other machines would count cores of their own.
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
        keep(job, opened)  # for tasks that are done in this very thread
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
    """Take the source's files over, where nothing in them changes."""
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
    """All that says how tensors are laid out, as one."""
    if rules is None and like is None:
        if unmatched is not None:
            raise OptionError("unmatched=… is about tensors that no rule means, and there are no rules; give rules= or like=.")
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
    """Which of how many workers."""
    if worker is None:
        return 0, 1
    if not (isinstance(worker, tuple) and len(worker) == 2 and all(type(n) is int for n in worker) and 0 <= worker[0] < worker[1]):
        raise OptionError(f"worker={excerpt(worker)}: give (K, N): this is worker K of N, counted from 0.")
    return worker


def _done(engine: Engine, job: Job, tasks: Sequence[Task], jobs: int) -> Iterator[TaskReport]:
    """Have tasks done, by one of so many engines that share the job; their reports as they come."""
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
    """Publish what all tasks have written."""
    try:
        record = assemble(opened.place)
        publish(opened.store, record, opened.prior)
    except ShardckptError:
        if published_attempt(opened.store) != opened.attempt:
            raise  # else somebody else has done it, and has cleaned up before we looked
    else:
        with suppress(ShardckptError):  # what cannot be removed costs room, no more
            remove_strays(opened.place)
    if isinstance(opened.prior.record, CheckpointRecord):
        remove_replaced(opened.store, opened.prior.record.attempt)
