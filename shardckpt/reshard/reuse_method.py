"""The method, if there is one, by which files of one place can be reused at another.

Reused files come to exist there without being read and written here.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

from shardckpt.io.failures import storage_errors
from shardckpt.io.status import is_link, status

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt.io.store import Store

ReuseMethod = Literal["links", "copies"]
"""The method by which files come to exist in both places."""


def reuse_method(source: Store, target: Store) -> ReuseMethod | None:
    """The method for reusing files at another place; None if there is no method.

    The bytes of the files do not pass through this process.

    "links": both places are on one file system of this machine; the target's need not exist yet.
    Links are refused if the source has symbolic links: a link made by somebody else could lead to
    any file of this user, and that file would become part of the target. Tasks, in contrast, reuse
    only chunks that have the right checksums. "copies": both places are in buckets of one service.
    """
    if target.copies_from(source):
        return "copies"
    old, new = source.local_path(""), target.local_path("")
    if old is None or new is None:
        return None
    existing = next(
        (entry for path in (new, *new.parents) if (entry := status(path)) is not None), None
    )
    read = status(old)
    one = existing is not None and read is not None and read.st_dev == existing.st_dev
    return "links" if one and not _has_links(old) else None


def _has_links(directory: Path) -> bool:
    """Whether the directory is a symbolic link or has one anywhere below it.

    Files are not opened.
    """
    if is_link(directory):
        return True
    with storage_errors("list", directory), os.scandir(directory) as entries:
        return any(
            entry.is_symlink() or (entry.is_dir() and _has_links(directory / entry.name))
            for entry in entries
        )
