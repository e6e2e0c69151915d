"""Search for the tasks of a job that an earlier call finished.

A task is finished if its record and all files that the record names exist. A record whose files were removed since proves nothing:
it is removed too, and the task is done again. One listing of the attempt's hosts shows what exists. In the plain layout, which
stores chunks as thousands of objects, the check covers only tables and values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.commit.assemble import finished_hosts, read_host_record, read_table
from shardckpt.errors import CorruptionError, FormatError, MissingDataError
from shardckpt.io.buckets.listing import modification_times
from shardckpt.io.threads import map_on_threads

if TYPE_CHECKING:
    from shardckpt.io.store import Store

_HOSTS = "hosts/"


def finished_tasks(place: Store) -> set[int]:
    """Return the finished tasks of an attempt, and remove records whose files are missing.

    Args:
        place: the attempt.

    Raises:
        StorageError: the storage failed.
    """
    found = finished_hosts(place)
    if not found:
        return set()
    there = {key for key, _ in modification_times(place, _HOSTS)}
    whole = map_on_threads(lambda number: _is_whole(place, number, there), found)
    for number, is_whole in zip(found, whole, strict=True):
        if not is_whole:
            place.delete(f"records/{number:05d}.json")
    return {number for number, is_whole in zip(found, whole, strict=True) if is_whole}


def _is_whole(place: Store, number: int, there: set[str]) -> bool:
    """Whether all files that a record names exist."""
    try:
        files = read_host_record(place, number)[0].files
        named = [files.table.key, *read_table(place, files.table).files, *(f"{lane}/manifest.ocdbt" for lane in files.lanes)]
    except (MissingDataError, CorruptionError, FormatError):
        return False
    return there.issuperset([*named, files.values.key] if files.values else named)
