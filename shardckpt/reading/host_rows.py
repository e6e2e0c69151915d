"""Rows of the table of all chunks, read from the hosts' own chunk tables.

In the table of all hosts, a tensor's rows lie together, whichever host wrote its chunks. A process
that needs a little of each of a thousand tensors finds a row or two in each of a thousand places. A
host's own table has the rows of everything that the host wrote side by side. A process that needs a
little of everything mostly needs all that one host or a few hosts wrote, which takes two requests
per host: its record and its table.

1. A known row shows which host wrote a chunk: its data file lies in the host's folder.
2. The record is compared with its digest in the commit record, the table with its digest in the
   record, each block with the table's header, and every row with its array in the table of all
   hosts.
3. A row's number in the table of all hosts is its array's first row plus its position. Rows are
   looked up here by that number.

A host whose record or table is gone, damaged or refused has no rows here; the table of all hosts
has the same rows.
"""

from __future__ import annotations

import re
from functools import cached_property, partial
from itertools import accumulate
from math import inf
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.commit.table_reading import merge_tables, read_host_files, read_table
from shardckpt.errors import CorruptionError, FormatError, StorageError
from shardckpt.format.table import ROW
from shardckpt.io.threads import map_on_threads
from shardckpt.reading.lookup import WholeTable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from shardckpt.format.documents import FileReference
    from shardckpt.format.record import CheckpointRecord, HostFiles
    from shardckpt.format.table import Table, TableHeader
    from shardckpt.io.store import Store


REQUEST_BYTES = 1 << 20
"""Bytes whose transfer from an object store takes as long as one request."""
MOST_BYTES = 32 << 20
"""Most bytes of rows from hosts' tables that are kept at a time."""
_SKIPPED_ERRORS = (CorruptionError, FormatError, StorageError)
"""Errors after which a host is skipped: a storage may refuse its files alone; if all fails, the
table of all hosts fails too."""
_FOLDER = re.compile(r"hosts/(\d{1,9})(?:-[^/]*)?/")


def host_of_file(name: str, hosts: int) -> int | None:
    """The host whose folder has a data file, of a number of hosts; None: no host's folder has it.

    >>> host_of_file("hosts/00002/0/d/00000", 3), host_of_file("small/00000", 3)
    (2, None)
    """
    match = _FOLDER.match(name)
    return int(match[1]) if match and int(match[1]) < hosts else None


def cost(requests: int, nbytes: int) -> float:
    """The cost of reads from an object store, in requests."""
    return requests + nbytes / REQUEST_BYTES


class HostRows:
    """Rows of some hosts. Safe to use from several threads."""

    def __init__(
        self,
        place: Store,
        records: Sequence[FileReference],
        header: TableHeader,
        first: Mapping[str, int],
        count: Callable[[int], object],
    ) -> None:
        """Nothing is read yet.

        Args:
            place: the attempt.
            records: the records of all hosts, in their order; at least one.
            header: header of the table of all hosts.
            first: array path → its first row in that table.
            count: called with the bytes of each read of a record or table.
        """
        self._place = place
        self._records = records
        self._header = header
        self._first = first
        self._count = count
        self._lock = Lock()
        self._asked: set[int] = set()
        self._known = np.empty(0, np.int64), np.empty(0, ROW)
        """Row numbers, ascending, and the rows."""

    def least_cost(self, hosts: Sequence[int]) -> float:
        """Estimated cost of reading these hosts' tables, in requests, for average sizes."""
        return cost(
            2 * len(hosts), len(hosts) * self._header.rows * ROW.itemsize // len(self._records)
        )

    def hosts_of(self, files: NDArray[np.uint32]) -> list[int]:
        """Hosts not read yet that wrote some of those files, the one with the most rows first.

        `files` numbers the files as the table of all hosts does.
        """
        number, times = np.unique(files, return_counts=True)
        names = (
            self._header.files[i]
            for i in number[np.argsort(-times, kind="stable")].tolist()
            if i < len(self._header.files)
        )
        hosts = dict.fromkeys(host_of_file(name, len(self._records)) for name in names)
        return [host for host in hosts if host is not None and host not in self._asked]

    def take(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.void], NDArray[np.bool_]]:
        """An array with the rows of those numbers, and a mask of the rows that are known.

        The other rows are undefined.
        """
        known, rows = self._known
        if not len(known):
            return np.empty(len(numbers), ROW), np.zeros(len(numbers), bool)
        at = np.minimum(np.searchsorted(known, numbers), len(known) - 1)
        return rows[at], known[at] == numbers

    def read(self, hosts: Sequence[int], most: float, needed: NDArray[np.int64]) -> float:
        """Read the rows of some hosts, unless their tables turn out to cost more than `most`.

        Args:
            hosts: numbers of the hosts.
            most: in the unit of `cost`.
            needed: numbers of rows that stay known when other rows are dropped to make room.

        Returns:
            The cost of what was read; infinity if there was no room for all rows of these hosts.
        """
        with self._lock:
            self._asked.update(hosts)
        records = {
            host: host_record
            for host, host_record in zip(hosts, map_on_threads(self._record, hosts), strict=True)
            if host_record is not None
        }
        spent = cost(len(hosts), sum(self._records[host].size for host in hosts))
        costs = cost(len(records), nbytes := sum(record.table.size for record in records.values()))
        if spent + costs > most:
            return spent
        room = self._make_room(nbytes, hosts, needed)
        ends = accumulate(record.table.size for record in records.values())
        left_out = {host for host, end in zip(records, ends, strict=True) if end > room}
        tables = map_on_threads(
            self._table, [record for host, record in records.items() if host not in left_out]
        )
        with self._lock:
            self._asked -= left_out
            self._add([table for table in tables if table is not None])
        return inf if left_out else spent + costs

    def _make_room(self, nbytes: int, hosts: Sequence[int], needed: NDArray[np.int64]) -> int:
        """Drop rows that are not needed if `nbytes` more bytes do not fit.

        Return how many bytes fit then.
        """
        with self._lock:
            numbers, rows = self._known
            if rows.nbytes + nbytes > MOST_BYTES:
                kept = np.isin(numbers, needed)
                numbers, rows = self._known = numbers[kept], rows[kept]
                # Rows of other hosts may be dropped, so those hosts may be read again.
                self._asked = set(hosts)
            return MOST_BYTES - rows.nbytes

    def _record(self, host: int) -> HostFiles | None:
        reference = self._records[host]
        self._count(reference.size)
        try:
            return read_host_files(self._place, reference)
        except _SKIPPED_ERRORS:
            return None

    def _table(self, files: HostFiles) -> tuple[NDArray[np.int64], NDArray[np.void]] | None:
        """A host's rows with their numbers; None if its table cannot be read."""
        try:
            return self._renumber(read_table(self._place, files.table, self._count))
        except _SKIPPED_ERRORS:
            return None

    def _renumber(self, table: Table) -> tuple[NDArray[np.int64], NDArray[np.void]] | None:
        """The rows of a host's table, renumbered for the table of all hosts.

        None if that table lacks some of them.
        """
        counts = np.fromiter(table.counts.values(), np.int64, len(table.counts))
        first, end = (
            np.repeat(
                np.fromiter(
                    map(column.get, table.counts, [0] * len(counts)), np.int64, len(counts)
                ),
                counts,
            )
            for column in (self._first, self._header.counts)
        )
        files = np.fromiter(
            (self._file.get(name, -1) for name in table.files), np.int64, len(table.files)
        )
        rows = table.rows
        if (
            (files < 0).any()
            or (rows.file >= len(files)).any()
            or (rows.chunk >= end.astype(np.uint64)).any()
        ):
            return None
        renumbered = np.empty(len(rows), ROW)
        for name in ROW.names or ():
            renumbered[name] = files[rows.file] if name == "file" else getattr(rows, name)
        return first + rows.chunk.astype(np.int64), renumbered

    def _add(self, parts: Sequence[tuple[NDArray[np.int64], NDArray[np.void]]]) -> None:
        numbers, rows = zip(self._known, *parts, strict=True)
        every = np.concatenate(numbers)
        order = np.argsort(every, kind="stable")
        self._known = every[order], np.concatenate(rows)[order]

    @cached_property
    def _file(self) -> dict[str, int]:
        """Data file → its index in the table of all hosts."""
        return {name: i for i, name in enumerate(self._header.files)}


def read_host_tables(
    place: Store, record: CheckpointRecord, count: Callable[[int], None]
) -> WholeTable:
    """The chunks of all hosts, from each host's own table and the table of small tensors.

    The table of small tensors is the committer's.

    `count` is called with the bytes of each table that is read.
    """
    references = [
        host.table for host in map_on_threads(partial(read_host_files, place), record.hosts)
    ]
    if record.small_table is not None:
        references.append(record.small_table)
    return WholeTable(
        merge_tables(map_on_threads(partial(read_table, place, count=count), references))
    )
