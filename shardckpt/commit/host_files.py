"""Reading what the records vouch for: where a host's files are, and the hosts' own chunk tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.errors import FormatError
from shardckpt.format.record import FileReference, HostFiles, TableReference, open_envelope
from shardckpt.format.table import ArrayChunks, Table
from shardckpt.format.table_header import ROW, TableHeader, check_sizes
from shardckpt.io.store import LARGEST_WHOLE

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardckpt.io.store import Store

__all__ = ["read_host_files", "read_table", "write_table"]

PART_BLOCKS = 1 << 13
"""Blocks of a large table that are read at a time; 28 MiB of those that are written."""


def read_host_files(place: Store, reference: FileReference) -> HostFiles:
    """Where a host's files are, by its record, checked against what the commit record vouches for."""
    data, where = place.read(reference.key), f"{place}/{reference.key}"
    reference.check(data, where)
    return HostFiles.from_json(open_envelope(data, where), where)


def read_table(place: Store, reference: TableReference, count: Callable[[int], object] | None = None) -> Table:
    """A whole chunk table, checked against what refers to it."""
    where = f"{place}/{reference.key}"
    if reference.size > LARGEST_WHOLE:
        return _read_in_parts(place, reference, where, count)
    data = place.read(reference.key)
    if count is not None:
        count(len(data))
    return Table.of_body(TableHeader.vouched(data, reference, where), data, where)


def _read_in_parts(place: Store, reference: TableReference, where: str, count: Callable[[int], object] | None) -> Table:
    """A table too large to be read as a file at once: one that only claims its size is refused at the first block that is not there."""
    check_sizes(reference, where)

    def read(start: int, stop: int) -> bytes:
        data = place.read(reference.key, start, stop)
        if count is not None:
            count(len(data))
        return data

    header = TableHeader.vouched(read(0, reference.header), reference, where)
    if place.is_longer(reference.key, reference.size):
        raise FormatError(f"{where}: the record gives the chunk table {reference.size} bytes, it has more.")
    step = PART_BLOCKS * header.block * ROW.itemsize
    parts = [
        ArrayChunks.of_records(header.read_rows(read(start, min(start + step, reference.size)), i * PART_BLOCKS, where))
        for i, start in enumerate(range(header.nbytes, reference.size, step))
    ]
    return Table.of_rows(header, ArrayChunks.concatenate(parts), where)


def write_table(place: Store, key: str, table: Table) -> TableReference:
    """Write a chunk table; what vouches for it."""
    data = table.encode()
    place.write(key, data)
    return TableReference.of(key, data, len(data) - table.body_bytes)
