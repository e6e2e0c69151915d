"""Kinds of files on this machine's file systems, with typed errors.

These functions replace the predicates of `pathlib` and `os.path`. Those raise untyped errors, or
answer False, for a path in a directory that this user may not enter, a name that is too long, or a
device that fails.

The path may be a `local_path`, which is None on a storage without paths: nothing is there.
"""

from __future__ import annotations

import errno
import stat
from typing import TYPE_CHECKING

from shardckpt.io.failures import storage_errors

if TYPE_CHECKING:
    import os
    from pathlib import Path

_NOTHING = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""Errors that say that there is nothing at a path."""


def status(path: Path | None, *, follow: bool = True) -> os.stat_result | None:
    """The status of a file or directory; None if there is nothing, or a broken link.

    Without `follow`, the status of a link itself.

    Raises:
        StorageError: the path cannot be looked at.
    """
    if path is None:
        return None
    with storage_errors("look at", path):
        try:
            return path.stat(follow_symlinks=follow)
        except OSError as e:
            if e.errno not in _NOTHING:
                raise
            return None


def exists(path: Path | None, *, follow: bool = True) -> bool:
    """Whether there is something at a path; without `follow`, a broken link counts.

    Raises as `status` does.
    """
    return status(path, follow=follow) is not None


def is_directory(path: Path | None) -> bool:
    """Whether there is a directory at a path, or a link to one. Raises as `status` does."""
    entry = status(path)
    return entry is not None and stat.S_ISDIR(entry.st_mode)


def is_file(path: Path | None) -> bool:
    """Whether there is a regular file at a path, or a link to one. Raises as `status` does."""
    entry = status(path)
    return entry is not None and stat.S_ISREG(entry.st_mode)


def is_link(path: Path | None) -> bool:
    """Whether there is a symbolic link at a path. Raises as `status` does."""
    entry = status(path, follow=False)
    return entry is not None and stat.S_ISLNK(entry.st_mode)
