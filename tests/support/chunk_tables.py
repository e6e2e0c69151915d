"""Chunk tables as bytes, and as what they say."""

from __future__ import annotations

from shardckpt.format.table import Table, TableHeader

__all__ = ["decode_table", "encode_table", "read_table"]


def encode_table(files, arrays):
    """The table's bytes; `arrays` in the order in which they are stored."""
    return Table.of(files, arrays).encode()


def decode_table(data, where):
    """Files and arrays of a table."""
    table = read_table(data, where)
    return table.files, dict(table.arrays())


def read_table(data, where):
    """A table from all of its bytes; `where` is its url, for messages."""
    return Table.of_body(TableHeader.decode(data, where), data, where)
