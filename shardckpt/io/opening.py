"""A reader for a committed attempt: by the one table of all chunks, or, where that cannot be read, by the hosts' own."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from shardckpt.errors import CorruptionError, FormatError
from shardckpt.io.host_files import read_host_tables
from shardckpt.io.reader import OBJECT_MEMORY, ChunkReader
from shardckpt.io.stats import ReadStats
from shardckpt.io.table_blocks import TableBlocks

if TYPE_CHECKING:
    from shardckpt.io.lookup import Lookup
    from shardckpt.io.store import Store
    from shardckpt.record import CheckpointRecord

__all__ = ["open_reader"]


def open_reader(place: Store, record: CheckpointRecord, *, threads: int | None = None, memory: int = OBJECT_MEMORY) -> ChunkReader:
    """Reads the chunks of an attempt.

    Args:
        place: the attempt.
        record: of the checkpoint.
        threads: as for `ChunkReader`.
        memory: as for `ChunkReader`.
    """
    stats = ReadStats()
    lookup = _lookup(place, record, stats)
    return ChunkReader(place, lookup, stats=stats, compression=record.compression, threads=threads, memory=memory)


def _lookup(place: Store, record: CheckpointRecord, stats: ReadStats) -> Lookup:
    """The one table of all; where that is damaged or missing, each host's own, and the committer's of small tensors."""
    of_hosts = partial(read_host_tables, place, record, stats)
    if record.table is None:
        return of_hosts()
    try:
        return TableBlocks(place, record.table, stats, of_hosts if record.hosts else None)
    except (CorruptionError, FormatError):
        if not record.hosts:
            raise
        return of_hosts()
