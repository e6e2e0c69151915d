"""The contents file and the record of one host's part of an attempt.

The record is written last, after everything that it refers to is durable. So its presence means
that the host has finished.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from shardckpt.errors import ShardckptError
from shardckpt.format.documents import seal
from shardckpt.io.failures import storage_errors

if TYPE_CHECKING:
    from shardckpt.format.documents import FileReference
    from shardckpt.format.record import Contents, HostRecord
    from shardckpt.io.store import Store
    from shardckpt.io.together import Uploads


def describe(
    place: Store,
    contents: Contents,
    key: str | None = None,
    *,
    always: bool = False,
    uploads: Uploads | None = None,
) -> FileReference:
    """Write a host's contents into the attempt at `place`, unless they are there already.

    A host with the same contents may have written them. With `always` they are written in any case,
    with `uploads` among these.
    """
    reference, data = contents.seal(key)
    if always or not place.exists(reference.key):
        (uploads or place).write(reference.key, data)
    return reference


def write_record(place: Store, record: HostRecord, *, first: bool = False) -> bool:
    """Write a host's record, after everything that it refers to is durable.

    On a disk, a file may be visible although making it durable failed. Such a record is removed, or
    else emptied, so that nobody commits what it refers to.

    Args:
        place: the attempt.
        record: the host's record.
        first: write it only if there is none yet.

    Returns:
        Whether the record there is this one.
    """
    data = seal(record.to_json(), record.version)
    try:
        if first:
            return place.create(record.key, data)
        place.write(record.key, data)
    except BaseException:
        _take_back(place, record.key, data)
        raise
    return True


def _take_back(place: Store, key: str, data: bytes) -> None:
    """Remove a record from a disk, or empty it where nothing can be removed.

    If the record is durable, a crash may bring it back.
    """
    if (path := place.local_path(key)) is None:
        return
    with suppress(ShardckptError):
        there, generation = place.read_versioned(key)
        if there != data:
            return
        try:
            place.remove(key, generation)
        except ShardckptError:
            with storage_errors("empty", path):
                os.truncate(path, 0)
