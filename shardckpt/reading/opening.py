"""A reader for a committed attempt: by the one table of all chunks, or, where that cannot be read, by the hosts' own."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from shardckpt.commit.host_files import read_host_files, read_table
from shardckpt.errors import CorruptionError, FormatError
from shardckpt.format.codec import largest_chunk
from shardckpt.format.table import merge_tables
from shardckpt.io.stats import ReadStats
from shardckpt.io.threads import Workers, map_on_threads
from shardckpt.reading.based_reader import BasedReader
from shardckpt.reading.lookup import WholeTable
from shardckpt.reading.reader import OBJECT_MEMORY, ChunkReader, reading_limits
from shardckpt.reading.table_blocks import TableBlocks

if TYPE_CHECKING:
    from shardckpt.format.record import CheckpointRecord
    from shardckpt.io.store import Store
    from shardckpt.io.url import Location
    from shardckpt.reading.lookup import Lookup

__all__ = ["memory_of_runs", "open_reader"]


def open_reader(
    place: Store, record: CheckpointRecord, *, threads: int | None = None, memory: int = OBJECT_MEMORY
) -> ChunkReader | BasedReader:
    """Reads the chunks of a checkpoint, of its attempt and of its bases.

    Args:
        place: the attempt.
        record: of the checkpoint.
        threads: as for `ChunkReader`.
        memory: as for `ChunkReader`; on a local disk, what threads that are given unpack is within it, too.
    """
    stats = ReadStats()
    _, most = reading_limits(local=place.location.local is not None, threads=threads, memory=memory)
    workers = Workers(most, "shardckpt-read")  # of all bases together, however many: they have scratch buffers

    def of_one(place: Store, record: CheckpointRecord) -> ChunkReader:
        lookup, left = _lookup(place, record, stats), memory_of_runs(place.location, record, threads, memory)
        return ChunkReader(place, lookup, stats=stats, compression=record.compression, threads=threads, memory=left, workers=workers)

    return BasedReader(place, record, stats, of_one) if record.structure.bases else of_one(place, record)


def memory_of_runs(location: Location, record: CheckpointRecord, threads: int | None, memory: int) -> int:
    """What of a reader's memory is left for what is read at once: on a local disk a thread unpacks a chunk beside it."""
    if threads is None or record.compression is None or location.local is None:
        return memory
    return memory - threads * largest_chunk(record.structure.tensors.values())


def _lookup(place: Store, record: CheckpointRecord, stats: ReadStats) -> Lookup:
    """The one table of all; where that is damaged or missing, each host's own, and the committer's of small tensors."""
    of_hosts = partial(_read_host_tables, place, record, stats)
    if record.table is None:
        return of_hosts()
    try:
        return TableBlocks(place, record.table, stats, of_hosts if record.hosts else None, record.hosts)
    except (CorruptionError, FormatError):
        if not record.hosts:
            raise
        return of_hosts()


def _read_host_tables(place: Store, record: CheckpointRecord, stats: ReadStats) -> WholeTable:
    """The chunks of all hosts, from each host's own table, and the committer's of small tensors."""
    references = [host.table for host in map_on_threads(partial(read_host_files, place), record.hosts)]
    if record.small_table is not None:
        references.append(record.small_table)
    merged = merge_tables(map_on_threads(partial(read_table, place, stats=stats), references))
    return WholeTable(merged.files, merged.arrays())
