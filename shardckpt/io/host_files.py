"""Reading what the records vouch for: where a host's files are, and the chunk tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.errors import CorruptionError, FormatError
from shardckpt.io.table import Table, merge_tables
from shardckpt.record import CheckpointRecord, FileReference, HostFiles, open_envelope

if TYPE_CHECKING:
    from shardckpt.io.store import Store
    from shardckpt.io.table import ArrayChunks

__all__ = ["read_all_tables", "read_host_files", "read_table"]


def read_host_files(place: Store, reference: FileReference) -> HostFiles:
    """Where a host's files are, by its record, checked against what the commit record vouches for."""
    data, where = place.read(reference.key), f"{place}/{reference.key}"
    reference.check(data, where)
    return HostFiles.from_json(open_envelope(data, where), where)


def read_table(place: Store, reference: FileReference) -> Table:
    """A chunk table, checked against what refers to it."""
    data, where = place.read(reference.key), f"{place}/{reference.key}"
    reference.check(data, where)
    return Table.decode(data, where)


def read_all_tables(place: Store, record: CheckpointRecord) -> tuple[list[str], dict[str, ArrayChunks]]:
    """The chunks of all hosts, from the one table of all.

    Where that is damaged or missing, from each host's own, and from the committer's of small tensors.

    Args:
        place: the attempt.
        record: of the checkpoint.
    """
    try:
        if record.table is not None:
            table = read_table(place, record.table)
            return table.files, table.arrays()
    except (CorruptionError, FormatError):
        if not record.hosts:
            raise
    references = [read_host_files(place, reference).table for reference in record.hosts]
    if record.small_table is not None:
        references.append(record.small_table)
    merged = merge_tables([read_table(place, reference) for reference in references])
    return merged.files, merged.arrays()
