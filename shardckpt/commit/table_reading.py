"""Reading of an attempt's chunk tables and documents, checked against what refers to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.errors import FormatError
from shardckpt.format.documents import check_sizes
from shardckpt.format.record import HostFiles
from shardckpt.format.table import ROW, ArrayChunks, Table, TableHeader
from shardckpt.io.files import LARGEST_WHOLE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardckpt.format.documents import Fields, FileReference, TableReference
    from shardckpt.io.store import Store

PART_BLOCKS = 1 << 13
"""Blocks of a large table that are read at a time; 28 MiB with the block size that is written."""


def read_document(place: Store, reference: FileReference) -> Fields:
    """A sealed document; FormatError unless it is the file that the reference is to."""
    return reference.open(place.read(reference.key), place.path_of(reference.key))


def read_host_files(place: Store, reference: FileReference) -> HostFiles:
    """The references in a host's record, checked against the reference in the commit record."""
    document = read_document(place, reference)
    return HostFiles.from_json(document.doc, document.where)


def read_table(
    place: Store, reference: TableReference, count: Callable[[int], object] | None = None
) -> Table:
    """Read a complete chunk table, and check it against its reference."""
    where = f"{place}/{reference.key}"
    if reference.size > LARGEST_WHOLE:
        return _read_in_parts(place, reference, where, count)
    data = place.read(reference.key)
    if count is not None:
        count(len(data))
    return Table.of_body(TableHeader.vouched(data, reference, where), data, where)


def _read_in_parts(
    place: Store, reference: TableReference, where: str, count: Callable[[int], object] | None
) -> Table:
    """Read a table that is too large for one read.

    A table that only claims its size is refused at the first missing block.
    """
    check_sizes(reference, where)

    def read(start: int, stop: int) -> bytes:
        data = place.read(reference.key, start, stop)
        if count is not None:
            count(len(data))
        return data

    header = TableHeader.vouched(read(0, reference.header), reference, where)
    if place.is_longer(reference.key, reference.size):
        raise FormatError(
            f"{where}: the chunk table has more than the {reference.size} bytes that the record "
            "says; it is damaged or was replaced."
        )
    step = PART_BLOCKS * header.block * ROW.itemsize
    parts = [
        ArrayChunks.of_records(
            header.read_rows(read(start, min(start + step, reference.size)), i * PART_BLOCKS, where)
        )
        for i, start in enumerate(range(header.nbytes, reference.size, step))
    ]
    return Table.of_rows(header, ArrayChunks.concatenate(parts), where)


def merge_tables(tables: Sequence[Table]) -> Table:
    """One table over all hosts.

    Raises:
        FormatError: two hosts wrote the same chunk.
    """
    merged = Table.merge(tables)
    doubled = merged.doubled()
    if doubled is not None:
        raise FormatError(
            f"{doubled}: two hosts wrote the same chunk; the checkpoint's records contradict each "
            "other."
        )
    return merged
