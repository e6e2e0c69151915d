"""Looking up chunks in a chunk table of which only the blocks that are needed are read.

1. The header is read once. It says how many chunks each array has; in the table of all hosts each array has all of its
   grid, so a chunk's row is the array's first row and its position.
2. Rows are read in *units*, which are whole blocks: one block on a local disk, and on object stores, where a request
   costs milliseconds, so many as make 256 KiB. A table that is no larger than that is read at once, header and all.
3. `prepare` takes the boxes of many tensors, and reads what is missing of their rows together: units side by side in one
   request, several requests at a time. On object stores, who goes through the table call by call, as a restore with its batches does,
   reads on beyond what a call asks for, twice as far each time: a request costs the time of about a megabyte.
4. On object stores, where that would be many requests, it first looks at one unit, the one with most of the rows: in whose
   data files are the chunks? That host's own table (`host_rows`) is read, and so on with what it does not have: with more hosts at a
   time where it had much, and no further where some had little.
5. Every block is compared with its digest in the header, and every row with the place where it stands.
6. A table that is damaged is given up for what other tables say (`spare`), from then on.

Units are kept until there are 32 MiB of others that were asked for later; what one call asks for stays, however much. Of hosts' tables
another 32 MiB are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, islice
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.commit.assemble import read_table
from shardckpt.errors import CorruptionError, FormatError
from shardckpt.format.table import ROW, ArrayChunks, TableHeader, check_sizes
from shardckpt.io.threads import map_on_threads
from shardckpt.plan.overlaps import chunk_runs
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
"""Bytes that a request to an object store asks for: fewer take no less time."""
LARGEST_REQUEST = 4 << 20
"""Bytes; more of them are several requests at a time."""
NEAR_BYTES = 1 << 20
"""Of the table, that may lie between what one call reads and the next, for the second to follow on the first."""
KEPT_BYTES = 32 << 20
"""Bytes of rows that are kept for later."""
FEW_REQUESTS = 8
"""Fewer are not worth asking hosts for their tables."""
MOST_WASTED = 1 / 16
"""Of what is left to read, so much may be spent on hosts that turn out to tell little."""
MOST_ROWS = 1 << 20
"""Of one call, for which hosts are asked: each is looked at."""


@dataclass(frozen=True, slots=True)
class _Source:
    """A table's rows in its file."""

    place: Store
    reference: TableReference
    header: TableHeader
    rows: int
    """Rows of a unit."""
    begins: NDArray[np.int64]
    """First row of each array."""
    count: Callable[[int], object]

    @property
    def where(self) -> str:
        """The table's url, for messages."""
        return self.place.path_of(self.reference.key)

    @property
    def units(self) -> int:
        """How many there are."""
        return -(-(self.reference.size - self.header.nbytes) // (self.rows * ROW.itemsize))

    def read(self, units: range) -> NDArray[np.void]:
        """Read neighbours; their rows."""
        nbytes = self.rows * ROW.itemsize
        start = self.header.nbytes + units.start * nbytes
        stop = min(self.header.nbytes + units.stop * nbytes, self.reference.size)
        return self.parse(_read(self.place, self.reference.key, start, stop, self.count), units.start)

    def parse(self, data: bytes | memoryview, unit: int) -> NDArray[np.void]:
        """The rows that `data` holds, from the beginning of a unit on, each of which is where it is to be."""
        rows = self.header.read_rows(data, unit * self.rows // self.header.block, self.where)
        row = np.arange(unit * self.rows, unit * self.rows + len(rows))
        # Of arrays without chunks, which begin where the next one does, the last that begins there counts.
        position = row - self.begins[np.searchsorted(self.begins, row, side="right") - 1]
        if (rows["chunk"] != position.astype(np.uint64)).any():
            raise FormatError(f"{self.where}: the table of all chunks lacks some, or has them in another order.")
        return rows


class TableBlocks:
    """The chunk table of all hosts, of which only that is read which is asked for."""

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
            reference: to the table, in the commit record.
            count: called with the bytes of each read of a table.
            spare: reads what other tables say, for when this one is found to be damaged; None: there are none.
            hosts: their records, which refer to tables of their own.

        Raises:
            FormatError: it is not the table that the record vouches for; MissingDataError, CorruptionError: it is gone, or too short.
        """
        where = place.path_of(reference.key)
        check_sizes(reference, where)
        all_of_it, local = reference.size <= LEAST_REQUEST, place.location.local is not None
        data = _read(place, reference.key, 0, reference.size if all_of_it else reference.header, count)
        header = TableHeader.vouched(data, reference, where)
        blocks = 1 if local else max(1, LEAST_REQUEST // (header.block * ROW.itemsize))
        counts = np.fromiter(header.counts.values(), np.int64, len(header.counts))
        begins = np.cumsum(counts) - counts
        self._source = _Source(place, reference, header, header.block * blocks, begins, count)
        self._first = dict(zip(header.counts, begins.tolist(), strict=True))
        # Chunks that are objects of their own do not say who wrote them.
        self._hosts = None if local or not header.files or not hosts else HostRows(place, hosts, header, self._first, count)
        """Rows that hosts' own tables have told; None where hosts are not asked."""
        self._units: dict[int, NDArray[np.void]] = {}
        """Those kept, by number, the ones asked for last at the end."""
        self._last = range(-1, -1)
        """The units that were read last, side by side."""
        self._instead: WholeTable | None = None
        self._spare = spare
        self._lock = Lock()
        if all_of_it:
            self._keep(range(self._source.units), self._source.parse(memoryview(data)[header.nbytes :], 0))

    def first_missing(self, path: str, num_chunks: int) -> int | None:
        """See `Lookup`."""
        if self._instead is not None:
            return self._instead.first_missing(path, num_chunks)
        count = self._source.header.counts.get(path, 0)
        return count if count < num_chunks else None

    def prepare(self, wanted: Iterable[tuple[Piece, BoxArray]]) -> None:
        """See `Lookup`."""
        if self._instead is not None or len(self._units) == self._source.units:
            return
        self._load(self._units_to_read(wanted))

    def find(self, paths: Sequence[str], array: NDArray[np.int64], chunks: NDArray[np.int64]) -> tuple[Sequence[str], ArrayChunks]:
        """See `Lookup`."""
        if self._instead is None:
            counts = np.array([self._source.header.counts.get(path, 0) for path in paths], np.int64)
            beyond = np.flatnonzero(chunks >= counts[array])
            if len(beyond):
                raise KeyError(int(beyond[0]))
            first = np.array([self._first.get(path, 0) for path in paths], np.int64)
            number = first[array] + chunks
            rows = self._rows(number) if self._hosts is None else self._rows_with_hosts(number, self._hosts)
            if rows is not None:
                return self._source.header.files, ArrayChunks.of_records(rows)
        assert self._instead is not None
        return self._instead.find(paths, array, chunks)

    def _rows(self, number: NDArray[np.int64]) -> NDArray[np.void] | None:
        """The rows of those numbers; None where the table is damaged, and has been given up."""
        unit, within = np.divmod(number, self._source.rows)
        units, nth = np.unique(unit, return_inverse=True)
        found = self._load(units.tolist())
        if found is None:
            return None
        # Only the table's last unit may have fewer rows than the others, and it comes last.
        read = found[0] if len(found) == 1 else np.concatenate([np.empty(0, ROW), *found])
        rows: NDArray[np.void] = read[nth * self._source.rows + within]
        return rows

    def _rows_with_hosts(self, number: NDArray[np.int64], hosts: HostRows) -> NDArray[np.void] | None:
        """As `_rows`, but rows that hosts have told are not read."""
        rows, known = hosts.take(number)
        others = self._rows(number[~known])
        if others is None:
            return None
        rows[~known] = others
        return rows

    def whole(self) -> WholeTable:
        """See `Lookup`."""
        if self._instead is None:
            table = read_table(self._source.place, self._source.reference, self._source.count)
            return WholeTable(table.files, table.arrays())
        return self._instead

    def _units_of(self, piece: Piece, boxes: BoxArray) -> Iterable[int]:
        """Units with the rows of the chunks that boxes touch; may name some of them more than once."""
        if not 0 < piece.num_chunks <= self._source.header.counts.get(piece.path, 0):
            return ()
        first = self._first[piece.path]
        low, high = first // self._source.rows, (first + piece.num_chunks - 1) // self._source.rows
        if high - low < 2:
            return range(low, high + 1)
        starts, stops = chunk_runs(piece, boxes)
        units: list[int] = _spread((first + starts) // self._source.rows, (first + stops - 1) // self._source.rows + 1).tolist()
        return units

    def _units_to_read(self, wanted: Iterable[tuple[Piece, BoxArray]]) -> list[int]:
        """Units with the rows of all chunks that boxes touch, but for those that hosts have told."""
        if self._hosts is None:
            return sorted(set(chain.from_iterable(self._units_of(*some) for some in wanted)))
        counts = self._source.header.counts
        runs = [np.empty((2, 0), np.int64)]
        for piece, boxes in wanted:
            if 0 < piece.num_chunks <= counts.get(piece.path, 0):
                runs.append(self._first[piece.path] + np.stack(chunk_runs(piece, boxes)))
        starts, stops = np.concatenate(runs, axis=1)
        if (stops - starts).sum() <= MOST_ROWS:
            return self._ask_hosts(np.unique(_spread(starts, stops)), self._hosts)
        units: list[int] = np.unique(_spread(starts // self._source.rows, (stops - 1) // self._source.rows + 1)).tolist()
        return units

    def _ask_hosts(self, number: NDArray[np.int64], told: HostRows) -> list[int]:
        """Read tables of hosts, as long as that pays; the units that are then left to read for those rows."""
        wasted, several, wanted = 0.0, 1, number
        while True:
            number = number[~told.take(number)[1]]
            unit = number // self._source.rows
            units: list[int] = np.unique(unit).tolist()
            missing = [u for u in units if u not in self._units]
            costs = cost(len(list(self._spans(missing))), len(missing) * self._source.rows * ROW.itemsize)
            if costs < FEW_REQUESTS or wasted > costs * MOST_WASTED:
                return units
            fullest = missing[int(np.argmax(np.bincount(unit)[missing]))]
            rows = self._load([fullest])
            if rows is None:
                return []
            hosts = told.hosts_of(rows[0]["file"][number[unit == fullest] - fullest * self._source.rows])[:several]
            if told.least_cost(hosts) > costs / 2:
                return units
            spent = told.read(hosts, costs / 2, wanted)
            new = int(told.take(number)[1].sum())
            if spent * (len(number) - new) < costs * new:  # to hear of all others like this costs less than reading them
                several *= 4
            else:
                wasted, several = wasted + spent + 1, 1

    def _spans(self, units: Sequence[int]) -> Iterable[range]:
        """Units as what is read at a time."""
        return _neighbours(units, max(1, LARGEST_REQUEST // (self._source.rows * ROW.itemsize)))

    def _load(self, units: Sequence[int]) -> list[NDArray[np.void]] | None:
        """The rows of each of those units, which ascend; None where the table is damaged, and has been given up."""
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
                    self._read(spans)  # what is damaged may be what nobody has asked for
            except (CorruptionError, FormatError):
                if self._spare is None:
                    raise
                self._instead = self._spare()
                self._units.clear()
                return None
            found = []
            for unit in units:
                self._units[unit] = self._units.pop(unit)  # asked for last
                found.append(self._units[unit])
            most = max(len(found), KEPT_BYTES // (self._source.rows * ROW.itemsize))
            for unit in list(islice(self._units, max(0, len(self._units) - most))):
                del self._units[unit]
        return found

    def _read_on(self, spans: list[range]) -> list[range]:
        """What to read for some spans: where they are one that follows on the one read last, twice as much as that at least."""
        unit = self._source.rows * ROW.itemsize
        if self._source.place.location.local is None and len(spans) == 1 and 0 <= spans[0].start - self._last.stop < NEAR_BYTES // unit:
            (span,) = spans
            far = min(span.start + min(2 * len(self._last), LARGEST_REQUEST // unit), self._source.units)
            spans = [range(span.start, max(span.stop, far))]
        self._last = spans[-1] if spans else self._last
        return spans

    def _read(self, spans: Sequence[range]) -> None:
        """Read neighbours, and keep them."""
        local = self._source.place.location.local is not None
        read = [self._source.read(span) for span in spans] if local else map_on_threads(self._source.read, spans)
        for span, rows in zip(spans, read, strict=True):
            self._keep(span, rows)

    def _keep(self, units: range, rows: NDArray[np.void]) -> None:
        """Keep the rows of neighbours."""
        n = self._source.rows
        for i, unit in enumerate(units):
            self._units[unit] = rows[i * n : i * n + n].copy()


def _read(place: Store, key: str, start: int, stop: int, count: Callable[[int], object]) -> bytes:
    """A part of a file."""
    data = place.read(key, start, stop)
    count(len(data))
    return data


def _spread(starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.int64]:
    """All numbers of ranges, one range after another."""
    sizes = stops - starts
    return np.repeat(starts - (np.cumsum(sizes) - sizes), sizes) + np.arange(sizes.sum())


def _neighbours(units: Sequence[int], most: int) -> Iterable[range]:
    """Ascending numbers as ranges, none longer than `most`."""
    begin = 0
    for i in range(1, len(units) + 1):
        if i == len(units) or units[i] != units[i - 1] + 1 or i - begin == most:
            yield range(units[begin], units[i - 1] + 1)
            begin = i
