"""Deletion of everything below a location: a directory on disk, or the objects below a prefix."""

from __future__ import annotations

import errno
import os
import shutil
import time
from typing import TYPE_CHECKING

from shardckpt.io.locks import HIDDEN
from shardckpt.io.status import exists, is_link
from shardckpt.io.threads import run_on_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

MOST_DELETIONS = 32
"""Deletions in progress at a time."""
_TRIES, _PAUSE = 5, 0.1


def remove_tree(path: Path) -> None:
    """Remove a directory and everything below it; a link is removed, and its target stays.

    NFS and FUSE keep a deleted file that somebody reads, under a hidden name; then its directory
    stays for a later collection.
    """
    if is_link(path):
        path.unlink()
        return
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        # It is gone already; or another process is deleting it too, and a second pass removes the
        # rest.
        shutil.rmtree(path, ignore_errors=True)
    except OSError as e:
        if e.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
            raise
        for _ in range(_TRIES):
            shutil.rmtree(path, ignore_errors=True)
            if not exists(path):
                return
            time.sleep(_PAUSE)
        left = [name for _, _, names in os.walk(path) for name in names]
        if not all(map(HIDDEN.fullmatch, left)):
            raise
        # The last file is gone by now; or an empty directory cannot be removed, because it is a
        # mount.
        if not left:
            shutil.rmtree(path)


def delete_objects(keys: Iterable[str], delete: Callable[[str], object]) -> None:
    """Delete objects, a few at a time; an object that is created meanwhile may stay.

    Args:
        keys: keys of the objects.
        delete: deletes one.
    """
    run_on_threads(keys, [delete] * MOST_DELETIONS, "shardckpt-delete")
