"""Deletion of everything below a location: a directory on disk, or the objects below a prefix.

A single file is removed under the lock of its writers (`files`), so that it is the one that the
caller has read.
"""

from __future__ import annotations

import errno
import os
import time
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

from shardckpt.io.files import (
    LOCK_SUFFIX,
    OpenFile,
    generation_now,
    is_locked,
    open_locked,
    release,
    sync_directory,
)
from shardckpt.io.locks import HIDDEN, remove_directory
from shardckpt.io.status import exists, is_link
from shardckpt.io.threads import run_on_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

MOST_DELETIONS = 32
"""Deletions in progress at a time."""
_TRIES, _PAUSE = 5, 0.1


def remove_file(path: Path, generation: bytes) -> bool:
    """Delete a file if it still has this generation; return whether this call deleted it.

    Raises:
        OSError: as for `files.replace`.
    """
    try:
        lock = open_locked(path)
        try:
            if generation != generation_now(path):
                return False
            path.unlink()
            sync_directory(path.parent)
            return True
        finally:
            release(lock, delete=True)
    except FileNotFoundError:  # the file, or its directory, is gone
        return False


def remove_empty_directory(directory: Path) -> None:
    """Remove a directory without files, or with nothing but lock files of killed writers.

    Raises:
        OSError: it has files, or cannot be removed.
    """
    files = [*directory.iterdir()]
    if all(file.name.endswith(LOCK_SUFFIX) for file in files):
        for lock in files:
            if not is_locked(lock):
                remove_file(
                    lock.with_name(lock.name.removesuffix(LOCK_SUFFIX)),
                    b"no generation of any file",
                )
    remove_directory(directory)


def delete_file(path: Path) -> None:
    """Delete a file, if it exists.

    It takes no lock: a `files.replace` at the same moment may succeed, and the file may stay.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        path.unlink()
        sync_directory(path.parent)


def remove_tree(path: Path) -> None:
    """Remove a directory and everything below it; a link is removed, and its target stays.

    NFS and FUSE keep a deleted file that somebody reads, under a hidden name; then its directory
    stays for a later collection.
    """
    if is_link(path):
        path.unlink()
        return
    try:
        _remove(path)
    except FileNotFoundError:
        # It is gone already; or another process is deleting it too, and a second pass removes the
        # rest.
        _remove(path, ignore_errors=True)
    except OSError as e:
        if e.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
            raise
        for _ in range(_TRIES):
            _remove(path, ignore_errors=True)
            if not exists(path):
                return
            time.sleep(_PAUSE)
        left = [name for _, _, names in os.walk(path) for name in names]
        if not all(map(HIDDEN.fullmatch, left)):
            raise
        # The last file is gone by now; or an empty directory cannot be removed, because it is a
        # mount.
        if not left:
            _remove(path)


def _remove(path: str | Path, parent: int | None = None, *, ignore_errors: bool = False) -> None:
    """Do as `shutil.rmtree`, which leaves a directory open if Ctrl-C comes right after `os.open`.

    Args:
        path: the directory; relative to `parent`, if that is given.
        parent: an open directory.
        ignore_errors: whether to go on where something cannot be removed.
    """
    with suppress(OSError) if ignore_errors else nullcontext():
        with OpenFile(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, parent) as directory:
            for entry in [*os.scandir(directory)]:
                if entry.is_dir(follow_symlinks=False):
                    _remove(entry.name, directory, ignore_errors=ignore_errors)
                else:
                    with suppress(OSError) if ignore_errors else nullcontext():
                        os.unlink(entry.name, dir_fd=directory)
        os.rmdir(path, dir_fd=parent)


def delete_objects(keys: Iterable[str], delete: Callable[[str], object]) -> None:
    """Delete objects, a few at a time; an object that is created meanwhile may stay.

    Args:
        keys: keys of the objects.
        delete: deletes one.
    """
    run_on_threads(keys, [delete] * MOST_DELETIONS, "shardckpt-delete")
