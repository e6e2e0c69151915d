"""Saving one checkpoint, from one process or from many at once: at once, or in the background.

Both take the same steps (`attempt`). `save` does all of them on the thread that calls it, chunk after chunk through one
small buffer. `save_async` leaves all but copying to another thread (`saver`).
"""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, Any

from shardckpt.attempt import Attempt
from shardckpt.coordination import Coordinator, check_coordinator
from shardckpt.io.store import Store
from shardckpt.io.url import parse
from shardckpt.options import SaveOptions, checked_options
from shardckpt.saver import Saver
from shardckpt.staging import MOST_COPIES, read, write_chunks

if TYPE_CHECKING:
    import os

    from shardckpt.io.host import HostWriter
    from shardckpt.save_handle import SaveHandle

__all__ = ["save", "save_async"]


def save(url: str | os.PathLike[str], state: Any, *, options: SaveOptions | None = None, coordinator: Coordinator | None = None) -> None:
    """Save `state` as one checkpoint; when this returns it is committed and durable.

    In a job of several processes all of them call it, with the same url and each with its own view of the state. They
    exchange no messages but one word in passing, that the checkpoint is committed.

    Args:
        url: where: a path, `file://…`, `gs://…`, `s3://…` or `memory://…`. The checkpoint is a directory.
        state: nested dicts, lists and tuples of tensors (torch_xla, DTensor, torch, JAX, numpy) and small leaves.
        options: see `SaveOptions`; the same on all processes.
        coordinator: how the processes know of each other; by default found out, once (`Coordinator.current`).

    Raises:
        LeafError, ShardingError: a leaf, or its layout, that cannot be stored, by name; this process wrote nothing.
        OptionError: a pattern in `shardings` that no plain tensor goes by, or `options` that are no SaveOptions.
        AlreadyExistsError: a checkpoint is committed there and `overwrite` is not set.
        CommitError: the processes contradict each other, or some did not finish in time; nothing was published.
        StorageError: the storage failed; what was there before is as it was, or the new checkpoint is there and whole.
    """
    options = checked_options(options)
    check_coordinator(coordinator)
    attempt = Attempt(Store.open(parse(url)), Coordinator.current() if coordinator is None else coordinator, options)
    staging = min(MOST_COPIES, options.budget // 4)
    try:
        share = attempt.take(state)

        def fill(writer: HostWriter) -> None:
            for batch in read(share.plan, share.sources, staging):
                for block, elements, _ in batch:
                    for _ in write_chunks(writer, block, elements):
                        pass

        attempt.write(share.contents, share.values, fill, options.budget // 2)
        if attempt.commits:
            attempt.await_hosts()
        record = attempt.assembled() if attempt.commits else None
    except BaseException as e:
        attempt.give_up(e)
        raise
    if record is None:
        attempt.see_published()
    else:
        attempt.publish(record)


_saver: Saver | None = None
_choosing = Lock()


def save_async(
    url: str | os.PathLike[str], state: Any, *, options: SaveOptions | None = None, coordinator: Coordinator | None = None
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
        coordinator: as in `save`.

    Raises:
        LeafError, ShardingError, OptionError: as in `save`; nothing was begun. Everything else the handle raises.
    """
    options = checked_options(options)
    return _shared_saver(options.budget).begin(url, state, options, coordinator=coordinator)


def _shared_saver(memory_limit: int) -> Saver:
    """The one whose buffers all calls share, as long as they set the same limit."""
    global _saver  # noqa: PLW0603  (kept from call to call)
    with _choosing:
        if _saver is None or _saver.memory_limit != memory_limit:
            _saver = Saver(memory_limit=memory_limit)
        return _saver
