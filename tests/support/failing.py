"""Operations on a storage that fail one by one, and what must not be lost by that.

1. `failing` lets the k-th operation of the system below a directory fail. In a bucket, the fault
   proxy refuses the k-th request.
2. A `Scenario` prepares a place, acts there while an operation fails, and then proves without
   faults that no complete data is gone.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from below_python import lead_through_os

import shardckpt
from shardckpt import SaveOptions
from shardckpt.commit.publish import RECORD
from shardckpt.errors import NotFoundError, ShardckptError
from shardckpt.io.store import Store
from shardckpt.runs import collecting
from shardckpt.writing import attempt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "SCENARIOS",
    "STAYS",
    "Scenario",
    "disk_full",
    "failing",
    "record_refused",
    "removal_refused",
    "save",
    "save_without_commit",
    "sync_refused",
    "value_of",
]

_BY_PATH = ("mkdir", "rename", "replace", "link", "unlink", "rmdir", "open", "scandir")
_BY_FILE = ("write", "writev", "pwrite", "pread", "preadv", "fsync", "ftruncate")
_SPACE = ("mkdir", "link", "write", "writev", "pwrite")
"""Operations for which a disk may have no room."""
_LOCKS = ("fcntl", "flock")
STAYS = "complete and stays"
"""Part of the message of a save whose data was complete when it failed."""


@dataclass
class Fault:
    """The operation that failed."""

    operation: str = ""
    """"": none has."""
    path: str = ""
    operations: int = 0
    """Number of operations so far."""


@contextmanager
def failing(root: Path, k: int) -> Iterator[Fault]:
    """Let the k-th operation of this process below a directory fail, counted from 0: a device
    error, a full disk, or no locks."""
    fault, lock, left = Fault(), threading.Lock(), [k]

    def count(name: str, path: str) -> None:
        if not path.startswith(str(root)):
            return
        with lock:
            fault.operations += 1
            left[0] -= 1
            if left[0] == -1:
                fault.operation, fault.path = name, path
                code = (
                    errno.ENOSPC
                    if name in _SPACE
                    else errno.ENOLCK
                    if name in _LOCKS
                    else errno.EIO
                )
                raise OSError(code, os.strerror(code))

    def by_path(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(path: Any, *arguments: Any, **options: Any) -> Any:
            above = options.get("dir_fd")
            where = _path_of(path) if isinstance(path, int) else os.fspath(path)
            count(name, where if above is None else f"{_path_of(above)}/{where}")
            return function(path, *arguments, **options)

        return called

    def by_file(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(file: int, *arguments: Any) -> Any:
            count(name, _path_of(file))
            return function(file, *arguments)

        return called

    with pytest.MonkeyPatch.context() as patch:
        for name in _BY_PATH:
            patch.setattr(os, name, by_path(name, getattr(os, name)))
        for name in _BY_FILE:
            patch.setattr(os, name, by_file(name, getattr(os, name)))
        for name in _LOCKS:
            patch.setattr(fcntl, name, by_file(name, getattr(fcntl, name)))
        end = lead_through_os()
        try:
            yield fault
        finally:
            end()


@contextmanager
def disk_full(root: Path) -> Iterator[None]:
    """Let a directory be on a disk without room, except for that of the files that the block
    replaces, in blocks of 4 KiB."""
    free, lock = [0], threading.Lock()

    def blocks(nbytes: int) -> int:
        return -(-nbytes // 4096)

    def writing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(file: int, data: Any, *arguments: Any) -> Any:
            if _path_of(file).startswith(str(root)):
                needed = blocks(sum(map(len, data)) if name == "writev" else len(data))
                with lock:
                    if needed > free[0]:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    free[0] -= needed
            return function(file, data, *arguments)

        return called

    def freeing(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(source: Any, target: Any, **options: Any) -> Any:
            freed = blocks(Path(target).stat().st_size) if Path(target).exists() else 0
            function(source, target, **options)
            with lock:
                free[0] += freed

        return called

    with pytest.MonkeyPatch.context() as patch:
        for name in ("write", "writev", "pwrite"):
            patch.setattr(os, name, writing(name, getattr(os, name)))
        for name in ("rename", "replace"):
            patch.setattr(os, name, freeing(getattr(os, name)))
        end = lead_through_os()
        try:
            yield
        finally:
            end()


@contextmanager
def record_refused(place: str | None = None, error: Exception | None = None) -> Iterator[None]:
    """Let every commit record of the block fail to get its name on a disk, with a device error or
    another one, or only those of places of that name; placeholders and tombstones succeed."""
    rename = os.rename

    def refused(source: Any, target: Any, **options: Any) -> None:
        of_record = Path(target).name == RECORD and place in (None, Path(target).parent.name)
        if of_record and b'"tombstone"' not in Path(source).read_bytes():
            raise error or OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, target, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", refused)
        yield


@contextmanager
def sync_refused(name: str, when: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Let every fsync of files and directories of that name fail with a device error, as far as
    `when` says so."""
    fsync = os.fsync

    def refused(file: int) -> None:
        if Path(_path_of(file)).name == name and when():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", refused)
        yield


@contextmanager
def removal_refused(folder: str) -> Iterator[None]:
    """Let every removal of a file from a directory of that name fail with a device error."""
    unlink = os.unlink

    def refused(path: Any, *, dir_fd: int | None = None) -> None:
        above = Path(path).parent if dir_fd is None else Path(_path_of(dir_fd), path).parent
        if above.name == folder:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        unlink(path, dir_fd=dir_fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "unlink", refused)
        yield


def _path_of(file: int) -> str:
    try:
        return str(Path(f"/proc/self/fd/{file}").readlink())
    except OSError:
        return ""


def state(value: int) -> dict[str, Any]:
    """A small state that is recognised by its value."""
    return {
        "w": np.full((40, 30), value, np.float32),
        "b": np.arange(value, value + 5),
        "leaf": value,
    }


def save(url: str, value: int, **options: Any) -> None:
    """Save the state of that value."""
    shardckpt.save(url, state(value), options=SaveOptions(**options))


def value_of(url: str) -> int | None:
    """Value of a checkpoint, which must be whole and undamaged; None: there is none."""
    try:
        restored = shardckpt.restore(url)
    except NotFoundError:
        return None
    value: int = restored["leaf"]
    for name, array in state(value).items():
        np.testing.assert_array_equal(np.asarray(restored[name], np.float64), array)
    assert shardckpt.open(url).verify().damage == []
    return value


class _Killed(BaseException):
    """Ends a save as SIGKILL would, just before it publishes."""


@contextmanager
def killed_before_publishing() -> Iterator[None]:
    """Let the saves of the block end when everything but their publication is done."""

    def publish(*_: Any) -> bool:
        raise _Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attempt, "publish", publish)
        yield


def save_without_commit(url: str, value: int, **options: Any) -> None:
    """Leave a complete save that is not published."""
    with killed_before_publishing(), pytest.raises(_Killed):
        save(url, value, **options)


@dataclass(frozen=True)
class Scenario:
    """Something that is done at a place while an operation fails."""

    prepare: Callable[[str], object]
    act: Callable[[str], object]
    check: Callable[[str, Fault, Exception | None], str]
    """Proves that nothing complete was lost, and returns the outcome in a few words."""

    def run(self, url: str) -> Exception | None:
        """Act; return the error, which must be one of shardckpt's."""
        try:
            self.act(url)
        except ShardckptError as e:
            return e
        return None


def _committed(url: str) -> list[str]:
    try:
        return [
            outcome.attempt for outcome in shardckpt.commit(url) if outcome.state == "committed"
        ]
    except NotFoundError:
        return []


def _check_saved(url: str, fault: Fault, error: Exception | None, before: int | None) -> str:
    """After a save of value 2 failed or not: the old checkpoint or the new one, and complete data
    is published by `commit`."""
    if error is None:
        assert value_of(url) == 2
        return "saved"
    there = value_of(url)
    assert there in (before, 2)
    committed = _committed(url)
    if there == 2:
        return "committed with an error"
    if STAYS in str(error):
        assert len(committed) == 1
        assert value_of(url) == 2
        return "kept, then published"
    if fault.operation == "fsync" and {"hosts", "contents", "records"} & {*Path(fault.path).parts}:
        assert not committed  # what could not be made durable is never published
    assert value_of(url) == (2 if committed else before)
    return "published later" if committed else "failed before its data was complete"


def _check_complete(url: str, _: Fault, error: Exception | None) -> str:
    """A complete unpublished save of value 2 was there: it is published, now or by the next
    commit."""
    done = value_of(url) == 2
    _committed(url)
    assert value_of(url) == 2
    return "published" if done else f"kept: {type(error).__name__}" if error else "kept"


def _leave_two(url: str) -> None:
    save_without_commit(url, 2)
    store = Store.open(url)
    store.write("20200101T000000-0000000a/hosts/00000/table", b"of a killed save")


def _save_both(url: str) -> None:
    save(f"{url}/a", 1)
    save(f"{url}/b", 2)


def _check_deleted(url: str, _: Fault, error: Exception | None) -> str:
    assert value_of(f"{url}/b") == 2
    there = value_of(f"{url}/a")
    assert there in (1, None)
    if there is not None:
        collecting.delete(f"{url}/a", grace=0)
    collecting.collect(url, grace=0)
    assert value_of(f"{url}/a") is None
    assert value_of(f"{url}/b") == 2
    return "deleted" if error is None else "not deleted" if there else "deleted with an error"


def _manager(url: str) -> shardckpt.CheckpointManager:
    return shardckpt.CheckpointManager(url, every=1, keep=2, progress=False)


def _leave_steps(url: str) -> None:
    """Steps 1 and 2, and a complete step 3 that is not published."""
    with _manager(url) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
            manager.wait()
    with killed_before_publishing():
        manager = _manager(url)
        manager.restore(state(0))
        manager.save(3, state(3))
        with pytest.raises(_Killed):
            manager.wait()


def _save_step(url: str) -> None:
    """A manager that begins anew, publishes step 3, saves step 4, and deletes steps 1 and 2."""
    with _manager(url) as manager:
        manager.save(4, state(4))
        manager.wait()
        if manager._background.cleaner.failure is not None:
            raise manager._background.cleaner.failure


def _check_steps(url: str, _: Fault, error: Exception | None) -> str:
    """Step 3 was complete, so it is there. Of the others, as many as should be kept."""
    steps = {step: value_of(f"{url}/{step}") for step in (1, 2, 3, 4)}
    assert all(value in (None, step) for step, value in steps.items())
    there = [step for step, value in steps.items() if value]
    if (
        3 not in there
        # The storage refused it again: the next save publishes it, as the same run would, before it
        # collects.
    ):
        left = [outcome for outcome in shardckpt.commit(url) if outcome.location.name == "3"]
        assert [outcome.state for outcome in left] in (["committed"], ["refused"]), left
        there += [3] if left[0].state == "committed" else []
        assert left[0].state == "committed" or "saves there now" in left[0].reason
    assert len(there) >= 2
    return f"{'error' if error else 'saved'}, step 3 {'published' if 3 in there else 'kept'}"


def _reshard(url: str, *, overwrite: bool = False) -> Any:
    return shardckpt.reshard(
        f"{url}/source",
        f"{url}/new",
        mesh=shardckpt.Mesh((2,), ("x",)),
        dtype="bfloat16",
        workers=1,
        task_bytes="4KiB",
        overwrite=overwrite,
    )


def _check_resharded(url: str, _: Fault, error: Exception | None, before: int | None) -> str:
    """The source is untouched; the same call goes on, and a job that was complete is not done
    again."""
    assert value_of(f"{url}/source") == 2
    there = value_of(f"{url}/new")
    assert there in (before, 2)
    if error is None:
        assert there == 2
        return "done"
    if STAYS in str(error):
        again = _reshard(url, overwrite=before is not None)
        assert again.done_before == again.tasks
    elif there == before:
        _reshard(url, overwrite=before is not None)
    assert value_of(f"{url}/new") == 2
    return (
        "committed with an error"
        if there == 2
        else "kept, then published"
        if STAYS in str(error)
        else "failed before it was complete"
    )


SCENARIOS = {
    "save": Scenario(
        lambda _: None, lambda url: save(url, 2), lambda *outcome: _check_saved(*outcome, None)
    ),
    "overwrite": Scenario(
        lambda url: save(url, 1),
        lambda url: save(url, 2, overwrite=True),
        lambda *outcome: _check_saved(*outcome, 1),
    ),
    "zarr": Scenario(
        lambda url: save(url, 1),
        lambda url: save(url, 2, overwrite=True, layout="zarr"),
        lambda *outcome: _check_saved(*outcome, 1),
    ),
    "commit": Scenario(lambda url: save_without_commit(url, 2), shardckpt.commit, _check_complete),
    "commit over another": Scenario(
        lambda url: (save(url, 1), save_without_commit(url, 2, overwrite=True)),
        shardckpt.commit,
        _check_complete,
    ),
    "collect": Scenario(_leave_two, lambda url: collecting.collect(url, grace=0), _check_complete),
    "delete": Scenario(
        _save_both, lambda url: collecting.delete(f"{url}/a", grace=0), _check_deleted
    ),
    "manager": Scenario(_leave_steps, _save_step, _check_steps),
    "reshard": Scenario(
        lambda url: save(f"{url}/source", 2),
        _reshard,
        lambda *outcome: _check_resharded(*outcome, None),
    ),
    "reshard over another": Scenario(
        lambda url: (save(f"{url}/source", 2), save(f"{url}/new", 1)),
        lambda url: _reshard(url, overwrite=True),
        lambda *outcome: _check_resharded(*outcome, 1),
    ),
}
"""Name → what is done."""
