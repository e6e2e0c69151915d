"""Saving one checkpoint, from one process or from many at once: at once, or in the background.

Both take the same steps (`attempt`). `save` does all of them before it returns: some threads lay chunks out
and write them, some MiB at a time. `save_async` leaves all but copying to another thread (`saver`).
"""

from __future__ import annotations

import time
from threading import Lock
from typing import TYPE_CHECKING, Any

from shardckpt.errors import out_of_memory_is_typed
from shardckpt.frameworks.coordination import Coordinator, check_coordinator
from shardckpt.io.ending import saving_takes_threads
from shardckpt.io.store import Store
from shardckpt.io.threads import cores
from shardckpt.io.url import parse
from shardckpt.options import SaveOptions, checked_options
from shardckpt.plan.blocks import parts_of
from shardckpt.writing.attempt import Attempt
from shardckpt.writing.save_handle import SaveReport
from shardckpt.writing.saver import Saver
from shardckpt.writing.staging import MOST_COPIES, read

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from shardckpt.format.record import HostRecord
    from shardckpt.writing.attempt import Share
    from shardckpt.writing.host import HostWriter
    from shardckpt.writing.save_handle import SaveHandle
    from shardckpt.writing.save_plan import SavePlan

__all__ = ["save", "save_async"]

_AT_A_TIME = 4 << 20
"""Bytes of elements that a thread of `save` lays out and writes at a time."""
_COPIES = {None: 1, "zstd": 3}
"""Of these bytes at a time, by compression: laid out; compressed, chunk by chunk; and those joined."""
_MOST_THREADS = 4
"""Threads that write, where the process has so many cores: more than cores gain nothing."""
_LEAST_SHARE = 32 << 20
"""Bytes that each has to write on average: less is not worth data files of its own."""
_LEAST_MEAN = 512 << 10
"""Bytes of a block on average, from which on copying and writing, which leave Python to the others, take far longer than Python."""


@out_of_memory_is_typed
def save(
    url: str | os.PathLike[str],
    state: Any,
    *,
    options: SaveOptions | None = None,
    skip: str | Sequence[str] | None = None,
    coordinator: Coordinator | None = None,
) -> SaveReport:
    """Save `state` as one checkpoint; when this returns it is committed and durable.

    In a job of several processes all of them call it, with the same url and each with its own view of the state. They
    exchange no messages but one word in passing, that the checkpoint is committed.

    Args:
        url: where: a path, `file://…`, `gs://…`, `s3://…` or `memory://…`. The checkpoint is a directory.
        state: nested dicts, lists and tuples of tensors (torch_xla, DTensor, torch, JAX, numpy) and small leaves.
        options: see `SaveOptions`; the same on all processes.
        skip: instead of `SaveOptions(skip=…)`: patterns of tensors that lie in `SaveOptions(base=…)`; `()`: none.
        coordinator: how the processes know of each other; by default found out, once (`Coordinator.current`).

    Returns:
        What this process did, as `SaveHandle.wait` returns it. Copying goes on while writing does, and counts as that.

    Raises:
        LeafError, ShardingError: a leaf, or its layout, that cannot be stored, by name; this process wrote nothing.
        OptionError: a pattern in `shardings` or `skip` that no tensor goes by, or options that cannot be.
        NotFoundError, MismatchError: the base is not there, or has not the tensors that are skipped; nothing was published.
        AlreadyExistsError: a checkpoint is committed there and `overwrite` is not set.
        CommitError: the processes contradict each other, some did not finish in time, or Python is ending; nothing was published.
        StorageError: the storage failed; what was there before is as it was, or the new checkpoint is there and whole.
    """
    began = time.monotonic()
    options = checked_options(options, skip)
    check_coordinator(coordinator)
    attempt = Attempt(Store.open(parse(url)), Coordinator.current() if coordinator is None else coordinator, options)
    with saving_takes_threads(attempt.store):
        try:
            share = attempt.take(state)
            planned = time.monotonic()
            written = _write(attempt, share)
            durable = time.monotonic()
            if attempt.commits:
                attempt.await_hosts()
            waited = time.monotonic()
            record = attempt.assembled() if attempt.commits else None
        except BaseException as e:
            attempt.give_up(e)
            raise
        if record is None:
            attempt.see_published()
            waited = time.monotonic()
        else:
            attempt.publish(record)
    return SaveReport(
        url=str(attempt.store),
        attempt=attempt.name,
        tensors=len(share.plan.tensors),
        nbytes=share.plan.nbytes,
        stored_bytes=written.stored_bytes,
        planning_s=planned - began,
        copying_s=0.0,
        blocked_s=0.0,
        writing_s=durable - planned,
        waiting_s=waited - durable,
        committing_s=time.monotonic() - waited if record is not None else 0.0,
        streamed=False,
        bases=attempt.bases,
    )


def _write(attempt: Attempt, share: Share) -> HostRecord:
    """Write this process's share straight from its tensors; what its host record says."""
    quarter, copies = attempt.options.budget // 4, _COPIES[attempt.options.compression]
    staging, at_a_time = min(MOST_COPIES, quarter), min(_AT_A_TIME, quarter // copies)

    def fill(writer: HostWriter) -> None:
        for batch in read(share.plan, share.sources, staging):
            writer.put_all(
                ((block.piece, box, elements[index]) for block, elements, _ in batch for box, index in parts_of(block, at_a_time)),
                at_a_time,
            )

    return attempt.write(share.contents, share.values, fill, 2 * quarter, threads=_writing_threads(share.plan, 2 * quarter // copies))


def _writing_threads(plan: SavePlan, memory: int) -> int:
    """How many threads lay out and write what is planned, each in its own memory of `_AT_A_TIME` bytes, or of one chunk.

    One, where there is little to write, or tensors are so small that threads would wait for each other's Python.
    `memory` is what all of them have to lay out in.
    """
    blocks = [block for some in plan.blocks.values() for block in some]
    if plan.nbytes < len(blocks) * _LEAST_MEAN:
        return 1
    room = max((_AT_A_TIME, *(block.chunk_bytes for block in blocks)))
    return max(1, min(_MOST_THREADS, cores(), plan.nbytes // _LEAST_SHARE, memory // room))


_saver: Saver | None = None
_choosing = Lock()


def save_async(
    url: str | os.PathLike[str],
    state: Any,
    *,
    options: SaveOptions | None = None,
    skip: str | Sequence[str] | None = None,
    coordinator: Coordinator | None = None,
) -> SaveHandle:
    """Copy what this process has to save to host buffers, and save it in the background.

    When this returns the state may change: the checkpoint will be what it was. What is not known yet is whether the save
    will go well; `wait()` on the handle tells, or raises what went wrong. Buffers, and the plan of what to write, are
    kept from call to call, so that later saves of the same state are quicker than the first. They take `memory_limit`
    bytes at most; a state that is larger blocks until it is written all but for that (`SaveReport.streamed`).

    Args:
        url: as in `save`.
        state: as in `save`.
        options: as in `save`.
        skip: as in `save`; the base is looked at in the background.
        coordinator: as in `save`.

    Raises:
        LeafError, ShardingError, OptionError: as in `save`; nothing was begun.
        CommitError: Python is ending; nothing was begun. Everything else the handle raises.
    """
    options = checked_options(options, skip)
    return _shared_saver(options.budget).begin(url, state, options, coordinator=coordinator)


def _shared_saver(memory_limit: int) -> Saver:
    """The one whose buffers all calls share, as long as they set the same limit."""
    global _saver  # noqa: PLW0603  (kept from call to call)
    with _choosing:
        if _saver is None or _saver.memory_limit != memory_limit:
            _saver = Saver(memory_limit=memory_limit)
        return _saver
