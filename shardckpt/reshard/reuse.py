"""Reuse of the source's files (hard links, server-side copies) where no chunk changes.

This applies when layout, compression, dtypes, names and all chunk grids equal the source's, and
both places are on one file system or in buckets of one object store that can copy by itself. Each
host of the source then becomes a host of the new attempt, with its own record that describes the
new checkpoint. Its chunks are read back and compared with their checksums, like the chunks of a
task.

Data files and the indexes beside them never change once written, and they name each other relative
to their own folder. So a host of one attempt becomes a host of another by linking its files. Only
its chunk table holds paths from the top of the attempt, and is rewritten. A linked file has two
names and needs no additional space; each attempt can be removed without the other.

Where a disk cannot link (or has reached its link limit), the kernel copies: it shares blocks where
the file system can, and otherwise moves the bytes without passing them through this process where
it can. An object store copies server-side (`object_copies`).
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.commit.index import write_table
from shardckpt.commit.table_reading import read_host_files, read_table
from shardckpt.errors import (
    CorruptionError,
    FormatError,
    MissingDataError,
    ShardckptError,
    of_one_tensor,
)
from shardckpt.format.documents import FileReference
from shardckpt.format.record import HostFiles, HostRecord
from shardckpt.format.table import OWN_OBJECT
from shardckpt.format.zarr_arrays import chunk_object_key, plain_key
from shardckpt.io.failures import storage_errors
from shardckpt.io.files import sync_directory
from shardckpt.io.status import is_file
from shardckpt.writing.host import write_record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from shardckpt.format.table import Table
    from shardckpt.io.store import Store
    from shardckpt.plan.pieces import Piece
    from shardckpt.reshard.job import OpenJob

_NO_RANGES = (errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""Errors of the kernel where it cannot copy between two files, although both can be read and
written."""


def reuse_files(opened: OpenJob, progress: Callable[[int, int], None]) -> tuple[int, int]:
    """Link or copy the files of all hosts of the source that are not done yet.

    Args:
        opened: a job whose source files can be reused (`OpenJob.reuse`).
        progress: called with the bytes of elements done so far, and in all.

    Returns:
        The number of hosts that an earlier call had linked or copied, and the stored bytes that
        were read back.

    Raises:
        CorruptionError, MissingDataError: a linked or copied file differs from the recorded
            checksums.
        StorageError: the storage failed.
        NotImplementedError: the object store cannot copy.
    """
    hosts, total = opened.plan.source.hosts, opened.plan.nbytes
    before, read = opened.finished_tasks(), 0
    for number, reference in enumerate(hosts):
        if number not in before:
            read += _reuse_host(opened, number, reference)
        progress(total * (number + 1) // len(hosts), total)
    return len(before), read


def _reuse_host(opened: OpenJob, number: int, reference: FileReference) -> int:
    """Link or copy the files of one host; return the bytes read back."""
    source, place, plan = opened.source_place, opened.place, opened.plan
    described = opened.described
    files = read_host_files(source, reference)
    table = old = read_table(source, files.table)
    folder = f"hosts/{number:05d}-{secrets.token_hex(4)}"
    try:
        lanes: list[str] = []
        if plan.layout == "packed":
            lanes, table = reuse_lanes(source, place, files.lanes, table, folder)
        else:
            pieces = {
                piece.path: piece
                for tensor in plan.target.tensors.values()
                for piece in tensor.pieces
            }
            reuse_chunks(source, place, table, pieces, f"{folder}/drafts")
        values = None
        if files.values is not None:
            data = source.read(files.values.key)
            files.values.check(data, source.path_of(files.values.key))
            values = FileReference.of(f"{folder}/values.json", data)
            place.write(values.key, data)
        read = _read_back(opened, table, old) if opened.job.options.verify else 0
        written = HostFiles(
            write_table(place, f"{folder}/table", table), tuple(lanes), described, values
        )
    except BaseException:
        with suppress(ShardckptError):
            place.delete_prefix(f"{folder}/")
        raise
    record = HostRecord(
        attempt=opened.attempt,
        host=number,
        hosts=len(plan.source.hosts),
        prior=opened.prior.digest,
        layout=plan.layout,
        compression=plan.compression,
        files=written,
        chunks=len(table.rows),
        stored_bytes=int(table.rows.length.sum(dtype=np.int64)),
    )
    if not write_record(place, record, first=True):  # another process was first
        with suppress(ShardckptError):
            place.delete_prefix(f"{folder}/")
    return read


def _read_back(opened: OpenJob, table: Table, old: Table) -> int:
    """Compare what was linked or copied with its chunk table; return the bytes read.

    `old` is the source's table.

    Raises:
        CorruptionError, MissingDataError: they differ. If the source's file is damaged as well, the
            error names that one.
    """
    try:
        return opened.read_back(table, opened.place)
    except CorruptionError:
        opened.read_back(old, opened.source_place)
        raise


def reuse_lanes(
    source: Store, target: Store, lanes: Sequence[str], table: Table, folder: str
) -> tuple[list[str], Table]:
    """Reuse the files of a host's packed chunks.

    Args:
        source: an attempt.
        target: another attempt; `reuse_method` must give a method for it.
        lanes: the host's databases.
        table: the host's chunk table.
        folder: folder for the files, relative to the target.

    Returns:
        The databases' new names, and the chunk table of the new places.

    Raises:
        FormatError: the table names a file that is in none of the databases.
        MissingDataError: a file is missing.
        StorageError: the storage failed.
        NotImplementedError: an object store cannot copy.
    """
    foreign = [
        file for file in table.files if not any(file.startswith(f"{lane}/") for lane in lanes)
    ]
    if foreign:
        raise FormatError(
            f"{source}: a host's chunk table names {foreign[0]!r}, which is in none of its "
            "databases; it was not written by shardckpt."
        )
    new = {lane: f"{folder}/{number}" for number, lane in enumerate(lanes)}
    files = {
        file: f"{name}{file.removeprefix(lane)}"
        for lane, name in new.items()
        for file in _below(source, lane)
    }
    for file in table.files:
        if file not in files:
            raise _missing(source.path_of(file))
    _link_or_copy(source, target, files.items())
    moved = [
        next(f"{new[lane]}{file.removeprefix(lane)}" for lane in new if file.startswith(f"{lane}/"))
        for file in table.files
    ]
    return list(new.values()), replace(table, files=moved)


def reuse_chunks(
    source: Store, target: Store, table: Table, pieces: Mapping[str, Piece], drafts: str
) -> None:
    """Reuse a host's chunks that are separate objects.

    `drafts` is a folder for incomplete files.
    """
    keys = (
        plain_key(chunk_object_key(pieces[path], position))
        for path, rows in table.arrays().items()
        for position in rows.chunk[rows.file == OWN_OBJECT].tolist()
    )
    _link_or_copy(source, target, ((key, key) for key in keys), drafts)
    target.delete_prefix(f"{drafts}/")


def _below(store: Store, lane: str) -> list[str]:
    """The files of a database."""
    top = store.local_path(lane)
    if top is None:
        return store.list(f"{lane}/")
    with storage_errors("read", top):
        return [
            f"{lane}/{path.relative_to(top)}" for path in sorted(top.rglob("*")) if is_file(path)
        ]


def _link_or_copy(
    source: Store, target: Store, files: Iterable[tuple[str, str]], drafts: str | None = None
) -> None:
    """Link or copy files (old key, new key), durably; with `drafts`, replace existing files."""
    if target.copies_from(source):
        target.copy_from(source, files)
        return
    changed: set[Path] = set()
    for number, (old, new) in enumerate(files):
        draft = new if drafts is None else f"{drafts}/{number}"
        first, path, final = (
            source.local_path(old),
            target.local_path(draft),
            target.local_path(new),
        )
        assert first is not None
        assert path is not None
        assert final is not None
        for key in {draft, new}:
            target.make_parents(key)
        with storage_errors("link", final):
            try:
                os.link(first, path, follow_symlinks=True)
            except FileNotFoundError:
                raise _missing(first) from None
            except OSError:
                _copy(first, path)
            if path != final:
                path.replace(final)
                # Replacing one name of a file by another name of it removes neither.
                path.unlink(missing_ok=True)
        changed.add(final.parent)
    for directory in changed:
        with storage_errors("write", directory):
            sync_directory(directory)


def _missing(file: object) -> MissingDataError:
    return of_one_tensor(MissingDataError(f"{file} is missing; put it back from a backup."))


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
