"""Reuse of one host's files in another attempt, by hard links or by copies that the storage makes.

Data files and the indexes beside them never change once written, and they name each other relative to their own folder. So a host
of one attempt becomes a host of another by linking its files. Only its chunk table holds paths from the top of the attempt, and is
rewritten. A linked file has two names and needs no additional space; each attempt can be removed without the other.

Where a disk cannot link (or has reached its link limit), the kernel copies: it shares blocks where the file system can, and
otherwise moves the bytes without passing them through this process where it can. An object store copies server-side
(`object_copies`).
"""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from shardckpt.errors import FormatError
from shardckpt.format.table import OWN_OBJECT
from shardckpt.format.zarr_arrays import chunk_object_key, plain_key
from shardckpt.io.buckets.object_copies import can_copy, copy_objects
from shardckpt.io.failures import storage_errors
from shardckpt.io.store import sync_directory

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from shardckpt.format.table import Table
    from shardckpt.io.store import Store
    from shardckpt.plan.pieces import Piece

TakenOver = Literal["links", "copies"]
"""The method by which files come to exist in both places."""
_NO_RANGES = (errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""Errors of the kernel where it cannot copy between two files, although both can be read and written."""


def way(source: Store, target: Store) -> TakenOver | None:
    """The method for reusing files at another place without passing their bytes through this process; None: there is no method.

    "links": both places are on one file system of this machine; the target's need not exist yet. Links are refused if the source has
    symbolic links: a link made by somebody else could lead to any file of this user, and that file would become part of the
    target. Tasks, in contrast, reuse only chunks that have the right checksums.
    "copies": both places are in buckets of one service.
    """
    if can_copy(source, target):
        return "copies"
    ours, theirs = source.local_path(""), target.local_path("")
    if ours is None or theirs is None:
        return None
    there = next((path for path in (theirs, *theirs.parents) if path.exists()), None)
    one = there is not None and ours.exists() and ours.stat().st_dev == there.stat().st_dev
    return "links" if one and not _has_links(ours) else None


def _has_links(directory: Path) -> bool:
    """Whether the directory is a symbolic link or has one anywhere below it; files are not opened."""
    if directory.is_symlink():
        return True
    with storage_errors("list", directory), os.scandir(directory) as entries:
        return any(entry.is_symlink() or (entry.is_dir() and _has_links(directory / entry.name)) for entry in entries)


def carry_lanes(source: Store, target: Store, lanes: Sequence[str], table: Table, folder: str) -> tuple[list[str], Table]:
    """Reuse the files of a host's packed chunks.

    Args:
        source: an attempt.
        target: another attempt; `way` must give a method for it.
        lanes: the host's databases.
        table: the host's chunk table.
        folder: folder for the files, relative to the target.

    Returns:
        The databases' new names, and the chunk table of the new places.

    Raises:
        FormatError: the table names a file that is in none of the databases.
        StorageError: the storage failed.
        NotImplementedError: an object store cannot copy.
    """
    foreign = [file for file in table.files if not any(file.startswith(f"{lane}/") for lane in lanes)]
    if foreign:
        raise FormatError(
            f"{source}: a host's chunk table names {foreign[0]!r}, which is in none of its databases; it was not written by shardckpt."
        )
    new = {lane: f"{folder}/{number}" for number, lane in enumerate(lanes)}
    _take_over(source, target, ((file, f"{name}{file.removeprefix(lane)}") for lane, name in new.items() for file in _below(source, lane)))
    moved = [next(f"{new[lane]}{file.removeprefix(lane)}" for lane in new if file.startswith(f"{lane}/")) for file in table.files]
    return list(new.values()), replace(table, files=moved)


def carry_chunks(source: Store, target: Store, table: Table, pieces: Mapping[str, Piece], drafts: str) -> None:
    """Reuse a host's chunks that are separate objects; `drafts` is a folder for incomplete files."""
    keys = (
        plain_key(chunk_object_key(pieces[path], position))
        for path, rows in table.arrays().items()
        for position in rows.chunk[rows.file == OWN_OBJECT].tolist()
    )
    _take_over(source, target, ((key, key) for key in keys), drafts)
    target.delete_prefix(f"{drafts}/")


def _below(store: Store, lane: str) -> list[str]:
    """The files of a database."""
    top = store.local_path(lane)
    if top is None:
        return store.list(f"{lane}/")
    with storage_errors("read", top):
        return [f"{lane}/{path.relative_to(top)}" for path in sorted(top.rglob("*")) if path.is_file()]


def _take_over(source: Store, target: Store, files: Iterable[tuple[str, str]], drafts: str | None = None) -> None:
    """Link or copy files, durably; with `drafts`, replace existing files."""
    if target.location.bucket is not None:
        copy_objects(source, target, files)
    else:
        _link(source, target, files, drafts)


def _link(source: Store, target: Store, files: Iterable[tuple[str, str]], drafts: str | None = None) -> None:
    """Link files, durably; with `drafts`, replace existing files."""
    changed: set[Path] = set()
    for number, (old, new) in enumerate(files):
        ours, final = source.local_path(old), target.local_path(new)
        assert ours is not None
        assert final is not None
        target.make_parents(new)
        place = final
        if drafts is not None:
            target.make_parents(f"{drafts}/{number}")
            place = target.local_path(f"{drafts}/{number}") or final
        with storage_errors("link", final):
            try:
                os.link(ours, place, follow_symlinks=True)
            except OSError:
                _copy(ours, place)
            if place != final:
                place.replace(final)
                place.unlink(missing_ok=True)  # replacing one name of a file by another name of it removes neither
        changed.add(final.parent)
    for directory in changed:
        with storage_errors("write", directory):
            sync_directory(directory)


def _copy(source: Path, target: Path) -> None:
    """Copy a file, inside the kernel if it supports that."""
    with source.open("rb", buffering=0) as read, target.open("xb") as write:
        size = left = os.fstat(read.fileno()).st_size
        try:
            while left and (moved := os.copy_file_range(read.fileno(), write.fileno(), left)):
                left -= moved
        except OSError as e:
            if e.errno not in _NO_RANGES:
                raise
        if left:
            shutil.copyfileobj(read, write)  # both continue at their current positions
        write.flush()
        os.fsync(write.fileno())
        if os.fstat(write.fileno()).st_size != size:
            raise OSError(f"{source} ends before its size says so")
