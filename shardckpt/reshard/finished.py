"""Finding the tasks of a job that an earlier call has finished.

Those whose record is there, with all the files that it names: a record whose files somebody has removed since vouches for nothing. It
is removed too, and its task is done again. One listing of the attempt's hosts says what is there; of the plain layout, whose
chunks are objects by the thousand, that is tables and values only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.commit.assemble import finished_hosts, read_host_record, read_table
from shardckpt.errors import CorruptionError, FormatError, MissingDataError
from shardckpt.io.buckets.listing import modification_times
from shardckpt.io.threads import map_on_threads

if TYPE_CHECKING:
    from shardckpt.io.store import Store

__all__ = ["finished_tasks"]

_HOSTS = "hosts/"


def finished_tasks(place: Store) -> set[int]:
    """The tasks of an attempt that need not be done again; records of which something is missing are removed.

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
    """Whether all files are there that a record names."""
    try:
        files = read_host_record(place, number)[0].files
        named = [files.table.key, *read_table(place, files.table).files, *(f"{lane}/manifest.ocdbt" for lane in files.lanes)]
    except (MissingDataError, CorruptionError, FormatError):
        return False
    return there.issuperset([*named, files.values.key] if files.values else named)
