"""Chunk lookup in a table of which only the needed blocks are read.

1. The header is read once. It has the number of chunks of each array. The table of all hosts has
   every chunk of every array's grid, so a chunk's row number is the array's first row plus the
   chunk's position.
2. Rows are read in *units* of complete blocks. A unit is one block on a local disk. On object
   stores, where a request costs milliseconds, a unit is as many blocks as make 256 KiB. A table of
   at most that size is read at once with its header.
3. `prepare` takes the boxes of many tensors and reads the missing rows of all of them together:
   adjacent units in one request, several requests at a time. On object stores, a caller that goes
   through the table call by call, as a restore does with its batches, gets read-ahead: each call
   reads twice as far as the call before, because a request costs the time of about a megabyte.
4. On object stores, if many requests would be needed, it first reads the one unit that has most of
   the needed rows. The data files in those rows show which host wrote them, and that host's own
   table (`host_rows`) is read. This repeats for the rows that are still missing: with more hosts at
   a time if a host had many of them; it stops if hosts had few.
5. Every block is compared with its digest in the header, and every row with its expected position.
6. If the table is damaged, it is given up, and the other tables (`spare`) are used from then on.

The most recently used units are kept, up to 32 MiB. If one call reads more, all of them are kept
until the next call of any thread; later calls read again what they need of the rest. Another 32 MiB
are kept of hosts' tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.commit.table_reading import read_table
from shardckpt.errors import CorruptionError, FormatError
from shardckpt.format.documents import check_sizes
from shardckpt.format.table import ROW, ArrayChunks, TableHeader
from shardckpt.io.threads import map_on_threads
from shardckpt.plan.pieces import chunk_runs
from shardckpt.reading.host_rows import HostRows, cost
from shardckpt.reading.lookup import WholeTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from shardckpt.format.documents import FileReference, TableReference
    from shardckpt.io.store import Store
    from shardckpt.layout.box import BoxArray
    from shardckpt.plan.pieces import Piece


LEAST_REQUEST = 256 << 10
"""Least bytes per request to an object store; a smaller request takes as long."""
LARGEST_REQUEST = 4 << 20
"""Most bytes per request; a longer range is split into several requests that run at a time."""
NEAR_BYTES = 1 << 20
"""Most bytes of the table between the reads of two calls for the second call to count as a
continuation of the first."""
KEPT_BYTES = 32 << 20
"""Bytes of rows that are kept for later calls."""
FEW_REQUESTS = 8
"""Number of requests below which it does not pay to read hosts' tables."""
MOST_WASTED = 1 / 16
"""Share of the remaining cost that may be wasted on hosts whose tables turn out to have few of the
needed rows."""
MOST_ROWS = 1 << 20
"""Most rows of one call for which hosts' tables are considered, because each row is examined."""


@dataclass(frozen=True, slots=True)
class _Source:
    """A table whose rows are read from its file."""

    place: Store
    reference: TableReference
    header: TableHeader
    rows: int
    """Rows per unit."""
    begins: NDArray[np.int64]
    """First row of each array."""
    count: Callable[[int], object]

    @property
    def where(self) -> str:
        """The table's url, for messages."""
        return self.place.path_of(self.reference.key)

    @property
    def units(self) -> int:
        """Number of units."""
        return -(-(self.reference.size - self.header.nbytes) // (self.rows * ROW.itemsize))

    def read(self, units: range) -> NDArray[np.void]:
        """Read adjacent units and return their rows."""
        nbytes = self.rows * ROW.itemsize
        start = self.header.nbytes + units.start * nbytes
        stop = min(self.header.nbytes + units.stop * nbytes, self.reference.size)
        return self.parse(
            _read(self.place, self.reference.key, start, stop, self.count), units.start
        )

    def parse(self, data: bytes | memoryview, unit: int) -> NDArray[np.void]:
        """Parse rows from a unit's start on, and check that each is at its expected position."""
        rows = self.header.read_rows(data, unit * self.rows // self.header.block, self.where)
        row = np.arange(unit * self.rows, unit * self.rows + len(rows))
        # Arrays without chunks begin at the same row as the next array; side="right" selects the
        # last array that begins there.
        position = row - self.begins[np.searchsorted(self.begins, row, side="right") - 1]
        if (rows["chunk"] != position.astype(np.uint64)).any():
            raise FormatError(
                f"{self.where}: the chunk table lacks chunks, or has them in the wrong order; it "
                "is damaged."
            )
        return rows


class TableBlocks:
    """The chunk table of all hosts, read block by block as needed."""

    def __init__(
        self,
        place: Store,
        reference: TableReference,
        count: Callable[[int], object],
        spare: Callable[[], WholeTable] | None,
        hosts: Sequence[FileReference] = (),
    ) -> None:
        """Read the header.

        Args:
            place: the attempt.
            reference: refers to the table, from the commit record.
            count: called with the bytes of each read of a table.
            spare: reads the other tables, for when this one is damaged; None: there are none.
            hosts: references to the host records, which refer to the hosts' own tables.

        Raises:
            FormatError: the file is not the table that the record refers to; MissingDataError,
                CorruptionError: it is gone, or too short.
        """
        where = place.path_of(reference.key)
        check_sizes(reference, where)
        all_of_it = reference.size <= LEAST_REQUEST
        data = _read(
            place, reference.key, 0, reference.size if all_of_it else reference.header, count
        )
        header = TableHeader.vouched(data, reference, where)
        blocks = 1 if place.near else max(1, LEAST_REQUEST // (header.block * ROW.itemsize))
        counts = np.fromiter(header.counts.values(), np.int64, len(header.counts))
        begins = np.cumsum(counts) - counts
        self._source = _Source(place, reference, header, header.block * blocks, begins, count)
        self._first = dict(zip(header.counts, begins.tolist(), strict=True))
        # A chunk that is an object of its own does not show which host wrote it.
        self._hosts = (
            None
            if place.near or not header.files or not hosts
            else HostRows(place, hosts, header, self._first, count)
        )
        """Rows from hosts' own tables; None if hosts' tables are not used."""
        self._units: dict[int, NDArray[np.void]] = {}
        """Kept units by number, the most recently used last."""
        self._last = range(-1, -1)
        """The adjacent units that were read last."""
        self._instead: WholeTable | None = None
        self._spare = spare
        self._lock = Lock()
        if all_of_it:
            self._keep(
                range(self._source.units), self._source.parse(memoryview(data)[header.nbytes :], 0)
            )

    def first_missing(self, path: str, num_chunks: int) -> int | None:
        """See `Lookup`."""
        if self._instead is not None:
            return self._instead.first_missing(path, num_chunks)
        count = self._source.header.counts.get(path, 0)
        return count if count < num_chunks else None

    def prepare(self, boxes: Iterable[tuple[Piece, BoxArray]]) -> None:
        """See `Lookup`."""
        if self._instead is not None or len(self._units) == self._source.units:
            return
        self._load(self._units_to_read(boxes))

    def find(
        self, paths: Sequence[str], array: NDArray[np.int64], chunks: NDArray[np.int64]
    ) -> tuple[Sequence[str], ArrayChunks]:
        """See `Lookup`."""
        if self._instead is None:
            counts = np.array([self._source.header.counts.get(path, 0) for path in paths], np.int64)
            beyond = np.flatnonzero(chunks >= counts[array])
            if len(beyond):
                raise KeyError(int(beyond[0]))
            first = np.array([self._first.get(path, 0) for path in paths], np.int64)
            number = first[array] + chunks
            rows = (
                self._rows(number)
                if self._hosts is None
                else self._rows_with_hosts(number, self._hosts)
            )
            if rows is not None:
                return self._source.header.files, ArrayChunks.of_records(rows)
        assert self._instead is not None
        return self._instead.find(paths, array, chunks)

    def _rows(self, number: NDArray[np.int64]) -> NDArray[np.void] | None:
        """The rows with those numbers; None if the table is damaged and was given up."""
        unit, within = np.divmod(number, self._source.rows)
        units, nth = np.unique(unit, return_inverse=True)
        parts = self._load(units.tolist())
        if parts is None:
            return None
        # Only the table's last unit may be shorter than the others, and it comes last.
        read = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, ROW), *parts])
        rows: NDArray[np.void] = read[nth * self._source.rows + within]
        return rows

    def _rows_with_hosts(
        self, number: NDArray[np.int64], hosts: HostRows
    ) -> NDArray[np.void] | None:
        """Like `_rows`, but rows known from hosts' tables are not read."""
        rows, known = hosts.take(number)
        others = self._rows(number[~known])
        if others is None:
            return None
        rows[~known] = others
        return rows

    def whole(self) -> WholeTable:
        """See `Lookup`."""
        if self._instead is None:
            return WholeTable(
                read_table(self._source.place, self._source.reference, self._source.count)
            )
        return self._instead

    def _units_to_read(self, pieces: Iterable[tuple[Piece, BoxArray]]) -> list[int]:
        """Units with the rows of all chunks that the boxes touch.

        Rows that are known from hosts' tables are left out.
        """
        counts, per_unit = self._source.header.counts, self._source.rows
        few: set[int] = set()
        runs = [np.empty((2, 0), np.int64)]
        for piece, boxes in pieces:
            num_chunks = piece.num_chunks
            if not 0 < num_chunks <= counts.get(piece.path, 0):
                continue
            first = self._first[piece.path]
            low, high = first // per_unit, (first + num_chunks - 1) // per_unit
            if self._hosts is None and high - low < 2:  # all small tensors
                few.add(low)
                few.add(high)
            else:
                runs.append(first + np.stack(chunk_runs(piece, boxes)))
        starts, stops = np.concatenate(runs, axis=1)
        if self._hosts is not None and (stops - starts).sum() <= MOST_ROWS:
            return self._ask_hosts(np.unique(_spread(starts, stops)), self._hosts)
        return sorted(few.union(_spread(starts // per_unit, (stops - 1) // per_unit + 1).tolist()))

    def _ask_hosts(self, number: NDArray[np.int64], host_rows: HostRows) -> list[int]:
        """Read hosts' tables as long as that pays off.

        Return the units that must still be read for the given rows.
        """
        wasted, several, needed = 0.0, 1, number
        while True:
            number = number[~host_rows.take(number)[1]]
            unit = number // self._source.rows
            units: list[int] = np.unique(unit).tolist()
            missing = [u for u in units if u not in self._units]
            costs = cost(
                len(list(self._spans(missing))), len(missing) * self._source.rows * ROW.itemsize
            )
            if costs < FEW_REQUESTS or wasted > costs * MOST_WASTED:
                return units
            fullest = missing[int(np.argmax(np.bincount(unit)[missing]))]
            rows = self._load([fullest])
            if rows is None:
                return []
            hosts = host_rows.hosts_of(
                rows[0]["file"][number[unit == fullest] - fullest * self._source.rows]
            )[:several]
            if host_rows.least_cost(hosts) > costs / 2:
                return units
            spent = host_rows.read(hosts, costs / 2, needed)
            new = int(host_rows.take(number)[1].sum())
            # The remaining rows cost less from hosts at this rate than from units.
            if spent * (len(number) - new) < costs * new:
                several *= 4
            else:
                wasted, several = wasted + spent + 1, 1

    def _spans(self, units: Sequence[int]) -> Iterable[range]:
        """Group units into the ranges that are read with one request each."""
        return _neighbours(units, max(1, LARGEST_REQUEST // (self._source.rows * ROW.itemsize)))

    def _load(self, units: Sequence[int]) -> list[NDArray[np.void]] | None:
        """The rows of the given ascending units; None if the table is damaged and was given up."""
        with self._lock:
            if self._instead is not None:
                return None
            spans = list(self._spans([unit for unit in units if unit not in self._units]))
            ahead = self._read_on(spans)
            try:
                try:
                    self._read(ahead)
                except (CorruptionError, FormatError):
                    if ahead == spans:
                        raise
                    self._read(spans)  # the damage may be in the read-ahead, which no caller needs
            except (CorruptionError, FormatError):
                if self._spare is None:
                    raise
                self._instead = self._spare()
                self._units.clear()
                return None
            loaded = []
            for unit in units:
                self._units[unit] = self._units.pop(unit)  # most recently used
                loaded.append(self._units[unit])
            most = max(len(loaded), KEPT_BYTES // (self._source.rows * ROW.itemsize))
            for unit in list(islice(self._units, max(0, len(self._units) - most))):
                del self._units[unit]
        return loaded

    def _read_on(self, spans: list[range]) -> list[range]:
        """The spans to read, extended if a single span continues the last read.

        Such a span is extended to at least twice the length of the last read.
        """
        unit = self._source.rows * ROW.itemsize
        if (
            not self._source.place.near
            and len(spans) == 1
            and 0 <= spans[0].start - self._last.stop < NEAR_BYTES // unit
        ):
            (span,) = spans
            far = min(
                span.start + min(2 * len(self._last), LARGEST_REQUEST // unit), self._source.units
            )
            spans = [range(span.start, max(span.stop, far))]
        self._last = spans[-1] if spans else self._last
        return spans

    def _read(self, spans: Sequence[range]) -> None:
        """Read spans of adjacent units, and keep them."""
        read = (
            [self._source.read(span) for span in spans]
            if self._source.place.near
            else map_on_threads(self._source.read, spans)
        )
        for span, rows in zip(spans, read, strict=True):
            self._keep(span, rows)

    def _keep(self, units: range, rows: NDArray[np.void]) -> None:
        """Keep the rows of adjacent units."""
        n = self._source.rows
        for i, unit in enumerate(units):
            self._units[unit] = rows[i * n : i * n + n].copy()


def _read(place: Store, key: str, start: int, stop: int, count: Callable[[int], object]) -> bytes:
    """Read a part of a file."""
    data = place.read(key, start, stop)
    count(len(data))
    return data


def _spread(starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.int64]:
    """All numbers in the ranges, one range after another."""
    sizes = stops - starts
    return np.repeat(starts - (np.cumsum(sizes) - sizes), sizes) + np.arange(sizes.sum())


def _neighbours(units: Sequence[int], most: int) -> Iterable[range]:
    """Group ascending numbers into ranges of at most `most` numbers."""
    begin = 0
    for i in range(1, len(units) + 1):
        if i == len(units) or units[i] != units[i - 1] + 1 or i - begin == most:
            yield range(units[begin], units[i - 1] + 1)
            begin = i
