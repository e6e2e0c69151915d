"""Replacement of a finished directory by another one, so that a complete one is always found.

The new directory takes the old one's name by an exchange of the two names, which is atomic. Some
file systems (NFS, FUSE, overlayfs) cannot exchange names. There, the replacement takes four steps:

1. The new directory, `.<name>.<random>.partial`, becomes `.<name>.<random>.complete`.
2. The old directory becomes `.<name>.<random>.replaced`. Where it cannot be renamed (it lies in a
   lower layer of an overlayfs), it is copied there, and removed: first the files by which readers
   recognise it.
3. `.complete` takes the final name.
4. The caller removes `.replaced`.

If the process is killed between these steps, `settle` gives one of the two complete directories the
final name.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from shardckpt.errors import StorageError
from shardckpt.io.files import OpenFile, sync_directory
from shardckpt.io.status import exists

if TYPE_CHECKING:
    from collections.abc import Collection

PARTIAL, COMPLETE, REPLACED, COPY = SUFFIXES = (".partial", ".complete", ".replaced", ".copy")
"""Suffixes of a draft, a finished draft, an old directory, and an unfinished copy of an old
directory."""
_NO_EXCHANGE = (
    errno.EINVAL,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.EXDEV,
    errno.EPERM,
    errno.ENOTEMPTY,
    errno.EEXIST,
)
"""Errors of file systems, kernels and sandboxes that cannot exchange two names; the last two are
those of a plain rename, which some FUSE servers make of it."""
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
"""Constants of renameat2(2)."""


def replace_directory(draft: Path, final: Path, marks: Collection[str]) -> Path:
    """Give a finished, durable directory the name of another one.

    Args:
        draft: the finished directory, `.<name>.<random>.partial` beside the other one.
        final: the directory that it replaces.
        marks: names of files by which readers recognise such a directory.

    Returns:
        The path that the old directory has now. The new name is durable.

    Raises:
        StorageError: neither directory could get the name; the message names both.
        OSError: the new directory could not get the name durably.
    """
    if exchange(draft, final):
        sync_directory(final.parent)
        return draft
    complete, replaced = draft.with_suffix(COMPLETE), draft.with_suffix(REPLACED)
    draft.rename(complete)
    sync_directory(final.parent)
    try:
        _set_aside(final, replaced, marks)
        complete.rename(final)
    except OSError as e:
        with suppress(OSError):
            settle(draft, final, marks, (REPLACED, COMPLETE))
        if not exists(final, follow=False):
            raise neither_is_named(draft, final, e) from e
        raise
    sync_directory(final.parent)
    return replaced


def settle(
    draft: Path, final: Path, marks: Collection[str], order: tuple[str, str] = (COMPLETE, REPLACED)
) -> bool:
    """Give one of two complete directories the final name after an interrupted replacement.

    This is done only if the replacement has left no directory under the final name.

    Args:
        draft: the path that the draft had at first.
        final: the final name.
        marks: names of files by which readers recognise a complete directory there.
        order: the suffixes of the two directories; the first one that exists gets the name.

    Returns:
        Whether one of them got the name by this call.

    Raises:
        OSError: neither of them could get the name durably.
    """
    complete = [path for path in map(draft.with_suffix, order) if exists(path, follow=False)]
    if len(complete) == len(order) and exists(final, follow=False) and _lacks(final, marks):
        _remove_copied(final, draft.with_suffix(REPLACED), marks)
    named = bool(complete) and not exists(final, follow=False)
    if named:
        complete[0].rename(final)
    if exists(final, follow=False):
        sync_directory(final.parent)
    return named


def neither_is_named(draft: Path, final: Path, error: OSError) -> StorageError:
    """The error for a name that neither the new directory nor the old one could get."""
    return StorageError(
        f"{final}: neither the new export nor the old one could get this name ({error}). The new "
        f"one is complete in {draft.with_suffix(COMPLETE)}, the old one in "
        f"{draft.with_suffix(REPLACED)}; rename one of them, or export again."
    )


def exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two directories in one step.

    False: the file system, kernel or C library cannot do it.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def sync_file(path: Path) -> None:
    """Make the bytes of a file durable."""
    with OpenFile(path, os.O_RDONLY) as fd:
        os.fsync(fd)


def _set_aside(final: Path, replaced: Path, marks: Collection[str]) -> None:
    """Give the old directory another name.

    Where it cannot be renamed, copy it durably, and remove it.
    """
    try:
        final.rename(replaced)
    except OSError as e:
        if e.errno != errno.EXDEV:
            raise
    else:
        return
    copy = replaced.with_suffix(COPY)
    shutil.copytree(final, copy)
    for directory, _, names in os.walk(copy, topdown=False):
        for name in names:
            sync_file(Path(directory, name))
        sync_directory(Path(directory))
    copy.rename(replaced)
    sync_directory(final.parent)
    _remove_copied(final, replaced, marks)


def _lacks(directory: Path, names: Collection[str]) -> bool:
    """Whether a directory has no entry of any of these names."""
    return not any(entry.name in names for entry in directory.iterdir())


def _remove_copied(directory: Path, copy: Path, marks: Collection[str]) -> None:
    """Remove the files of a directory that has been copied, the ones of these names first.

    Other files make it fail.
    """
    for mark in marks:
        (directory / mark).unlink(missing_ok=True)
    sync_directory(directory)
    for below, _, names in os.walk(copy, topdown=False):
        there = directory / Path(below).relative_to(copy)
        for name in names:
            (there / name).unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            there.rmdir()
