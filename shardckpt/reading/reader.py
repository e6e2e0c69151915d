"""Reading chunks by the chunk table, straight from the data files.

1. `locate` says which chunks the boxes of a batch of tensors touch, where their elements go, and where they lie: in columns, a row per
   chunk.
2. They are sorted by file and offset, neighbours joined into `runs`, and these into tasks.
3. Threads take tasks and `fetch` their bytes: of each run on a local disk one positional scatter read, on object stores one
   ranged read; there more threads have larger runs, because a request costs milliseconds.
4. Every chunk's crc32c is compared with the table's before it counts as read; what did not go straight to its
   destination is then copied to each box that wants it, by bands: as many chunks at once as one copy can move.

`open_reader` makes the reader of a committed attempt: by the one table of all chunks, or, where that cannot be read, by the hosts' own.

Every chunk is read once, however many boxes share it. Memory besides the destinations: on a local disk a scratch buffer
of 4 to 8 MiB per thread, which is kept; on object stores `memory`. A chunk larger than a run takes what it takes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING

import crc32c
import numpy as np

from shardckpt.commit.assemble import merge_tables, read_host_files, read_table
from shardckpt.errors import CorruptionError, FormatError, ShardckptError, StorageError
from shardckpt.format.zarr_arrays import decompress, largest_chunk
from shardckpt.io.threads import Workers, cores, map_on_threads
from shardckpt.layout.box import BoxArray
from shardckpt.reading.based_reader import BasedReader
from shardckpt.reading.fetch import Fetch, FetchedChunks, LocalFetch, ObjectFetch
from shardckpt.reading.locate import MOST_CHUNKS, ChunkFinder, Request, RequestedChunks
from shardckpt.reading.lookup import WholeTable
from shardckpt.reading.runs import Band, ReadTask, RunLimits, places_of, tasks
from shardckpt.reading.table_blocks import TableBlocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from shardckpt.format.record import CheckpointRecord
    from shardckpt.io.store import Store
    from shardckpt.io.url import Location
    from shardckpt.plan.pieces import Piece
    from shardckpt.reading.locate import Damaged, Located
    from shardckpt.reading.lookup import Lookup


LOCAL_RUN = (4 << 20, 8 << 20)
"""Least and most bytes to which adjacent chunks are joined on a local disk, by memory and threads."""
LOCAL_CHUNKS = 1 << 10
"""Chunks that a run has there, at the most."""
TASK_RUNS = 64
"""Runs of a task on a local disk, at most: a file is opened once for all of them."""
OBJECT_THREADS = 16
"""Requests at a time on an object store, at most; a single one is a small part of what a host can receive."""
OBJECT_MEMORY = 384 << 20
"""Bytes for what is under way on an object store: by default 12 requests."""
OBJECT_COPIES = 3
"""Times that a run's bytes are in memory: as they come in from the network, TensorStore's value, and ours."""
OBJECT_RUN = (10 << 20, 16 << 20)
"""Least and most bytes to which adjacent chunks are joined there, by memory and threads; of whole chunks, at least 8 MiB."""
OBJECT_GAP = 64 << 10
"""Bytes between two chunks that are rather read than asked around."""


@dataclass(slots=True)
class ReadStats:
    """What reading took so far: counted where it is done, asked for by users and tests."""

    reads: int = 0
    """Read calls for chunks, or requests to an object store."""
    bytes_read: int = 0
    """Stored bytes of chunks that were read, checksums and small gaps included."""
    bytes_needed: int = 0
    """Bytes of the boxes asked for, as they lie in memory."""
    index_reads: int = 0
    """Reads of chunk tables, which say where the chunks are."""
    index_bytes: int = 0
    """Bytes of chunk tables that were read."""
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def count(self, *, reads: int = 0, read: int = 0, needed: int = 0) -> None:
        """Add reads of chunks."""
        with self._lock:
            self.reads += reads
            self.bytes_read += read
            self.bytes_needed += needed

    def count_index(self, nbytes: int) -> None:
        """Add a read of a chunk table."""
        with self._lock:
            self.index_reads += 1
            self.index_bytes += nbytes


def reading_limits(*, local: bool, threads: int | None, memory: int) -> tuple[RunLimits, int]:
    """How far a reader joins chunks into one read or request, and how many it makes at a time; for arguments see `ChunkReader`."""
    least, most = LOCAL_RUN if local else OBJECT_RUN
    if local:
        threads = threads or max(2, min(8, cores()))
        return RunLimits(max(least, min(most, memory // threads)), gap=0, chunks=LOCAL_CHUNKS, runs=TASK_RUNS), threads
    wished = threads or OBJECT_THREADS
    run = max(least, min(most, memory // (OBJECT_COPIES * wished)))
    return RunLimits(run, OBJECT_GAP, MOST_CHUNKS), max(1, min(wished, memory // (OBJECT_COPIES * run)))


class ChunkReader:
    """Reads boxes of the tensors of one attempt; safe to use from several threads."""

    def __init__(
        self,
        store: Store,
        table: Lookup,
        *,
        stats: ReadStats | None = None,
        compression: str | None = None,
        threads: int | None = None,
        memory: int = OBJECT_MEMORY,
        workers: Workers | None = None,
    ) -> None:
        """Read below `store`, the attempt.

        Args:
            store: the attempt's place.
            table: where the chunks are.
            stats: where reads are counted; None: from zero.
            compression: None or "zstd".
            threads: how many read at once; by default as many as there are cores, from 2 to 8, and on object stores up to 16.
            memory: bytes for what is under way; less of it means smaller reads, and fewer threads on object stores.
            workers: the threads, if others read by the same ones: so many as `reading_limits` says. None: its own.
        """
        self.stats = stats or ReadStats()
        self._store = store
        self._table = table
        self._compression = compression
        self._finder = ChunkFinder(store, table, compression)
        self._fetch: Fetch
        self._limits, threads = reading_limits(local=store.location.local is not None, threads=threads, memory=memory)
        # The same for all reads: they have scratch buffers, and fresh memory is slow.
        self._workers = workers or Workers(threads, "shardckpt-read")
        if store.location.local is not None:
            of_thread = self._workers.local
            self._fetch = LocalFetch(store, direct=compression is None, scratch=self._limits.nbytes, of_thread=of_thread)
        else:
            self._fetch = ObjectFetch(store)

    def read(self, requests: Sequence[Request]) -> None:
        """Fill every request's buffers.

        Raises:
            MissingDataError: a chunk that is needed is not there.
            CorruptionError: a chunk does not hold what was written; names tensor, index range and file.
        """
        self._finder.prepare(requests)
        self.stats.count(needed=_needed(requests))
        self._read_all(self._finder.needed(requests))

    def reads(self, groups: Sequence[Sequence[Request]]) -> list[Callable[[], None]]:
        """Plan to `read` several groups of requests, for all of them together, which costs less.

        Buffers are looked at now, and written to when the call for their group is made. A chunk that two groups need is read for each.

        Returns:
            A call for each group; raises what `read` does.
        """
        requests = [request for group in groups for request in group]
        group_of = {id(request): i for i, group in enumerate(groups) for request in group}
        self._finder.prepare(requests)
        found: list[list[ReadTask]] = [[] for _ in groups]
        for chunks in self._finder.needed(requests):
            self._refuse_impossible(chunks)
            of_part = np.array([group_of[id(part.request)] for part in chunks.wanted.parts])
            for task in tasks(chunks, self._limits, of_part[chunks.wanted.part]):
                found[of_part[task.chunks.wanted.part[task.begin]]].append(task)
        return [partial(self._read_planned, _needed(group), some) for group, some in zip(groups, found, strict=True)]

    def _read_planned(self, needed: int, some: Sequence[ReadTask]) -> None:
        self.stats.count(needed=needed)
        self._workers.do(self._read_task, some)

    def check(self, requests: Sequence[Request], damaged: Damaged) -> None:
        """Read every chunk of the requests' pieces and compare it with the table; buffers are not used.

        Args:
            requests: tensors; `boxes` and `buffers` may be empty.
            damaged: called with tensor name, index range, file and error for each chunk that is not as written.
        """

        def report(chunks: Located, row: int, error: ShardckptError) -> None:
            damaged(chunks.wanted.part_of(row).request.name, chunks.wanted.box(row), chunks.file_of(row), error)

        def check_task(task: ReadTask) -> None:
            try:
                self._read_task(task)
            except ShardckptError:
                for one in task.alone():
                    try:
                        self._read_task(one)
                    except ShardckptError as e:
                        report(one.chunks, one.begin, e)
            chunks, row = task.chunks, task.begin  # an object of its own is a task of its own
            if chunks.is_own_object(row) and self._store.is_longer(task.file, chunks.stop(row)):
                report(
                    chunks,
                    row,
                    CorruptionError(f"{chunks.wanted.where(row)}: {self._store}/{task.file} is longer than what was written."),
                )

        for chunks in self._finder.every(requests, damaged):
            impossible = self._finder.impossible(chunks)
            for row in impossible.tolist():
                report(chunks, row, self._finder.refusal(chunks, row))
            self._each(chunks.take(np.setdiff1d(np.arange(len(chunks)), impossible)), check_task)

    def confirm(self, wanted: Iterable[tuple[Request, Piece, NDArray[np.int64]]]) -> None:
        """Read some chunks and compare them with the table.

        Args:
            wanted: requests, of which boxes and buffers are not used, and positions of chunks in an array of each.

        Raises:
            MissingDataError, CorruptionError: one of them is not as it was written.
        """
        self._read_all(self._finder.some(wanted))

    def longer_files(self) -> Iterator[tuple[str, ShardckptError]]:
        """The data files that have more bytes than their chunks, between them or at the end. Nothing reads those."""
        for file, nbytes in self._finder.bytes_in_files().items():
            try:
                if self._store.is_longer(file, nbytes):
                    yield file, CorruptionError(f"{self._store}/{file} has more bytes than the {nbytes} of its chunks.")
            except StorageError as e:
                yield file, e

    @property
    def limits(self) -> RunLimits:
        """How far chunks are joined into one read or request here."""
        return self._limits

    def whole_table(self) -> WholeTable:
        """Where all chunks are; reads the whole table, 28 bytes per chunk."""
        return self._table.whole()

    def stored_chunk(self, name: str, dtype: np.dtype[np.generic], piece: Piece, position: int) -> bytes:
        """A chunk's bytes as stored (checksum included), verified, for readers that decode by themselves.

        Args:
            name: the tensor, for messages.
            dtype: of what is stored.
            piece: the array.
            position: which chunk, in grid order.
        """
        request = Request(name, dtype, [piece], BoxArray.of([], len(piece.shape)), [])
        self._finder.check_table(request)
        chunks = self._finder.located(RequestedChunks.of_positions([(request, piece, np.array([position]))]))
        self._refuse_impossible(chunks)
        (task,) = tasks(chunks, self._limits)
        fetched = self._verified(task)
        return bytes(fetched.payloads[0]) + fetched.checksums().astype("<u4").tobytes()

    def _read_all(self, some: Iterable[Located]) -> None:
        """Read chunks, verify them, and copy them where they are wanted."""
        for chunks in some:
            self._refuse_impossible(chunks)
            self._each(chunks, self._read_task)

    def _refuse_impossible(self, chunks: Located) -> None:
        """FormatError for a length that a chunk cannot have, before memory is taken for it."""
        for row in self._finder.impossible(chunks)[:1].tolist():
            raise self._finder.refusal(chunks, row)

    def _each(self, chunks: Located, work: Callable[[ReadTask], None]) -> None:
        """Do `work` on all chunks, some of a file at a time, in several threads; the first error stops the rest."""
        self._workers.do(work, tasks(chunks, self._limits))

    def _read_task(self, task: ReadTask) -> None:
        """Read chunks of one file, verify each and copy it where it is wanted."""
        fetched = self._verified(task)
        for band, places in fetched.bands:
            if not places:
                continue
            if self._compression is None:
                band.scatter(fetched.stored(band), places)
                continue
            for row in range(band.begin, band.end):
                part, where = task.chunks.wanted.part_of(row), f"{task.chunks.wanted.where(row)}, {task.file}"
                raw = decompress(np.asarray(fetched.payloads[row - task.begin]), part.chunk_bytes, where)
                alone = Band(task.chunks, row, row + 1)
                alone.scatter(raw[np.newaxis], places_of([alone])[0])
                del raw  # before the next is unpacked: one at a time is what a reader's memory is for

    def _verified(self, task: ReadTask) -> FetchedChunks:
        """Read chunks of one file; each is compared with the table and with its own checksum before any is handed out."""
        fetched = self._fetch(task)
        chunks = task.chunks
        self.stats.count(reads=len(task.runs), read=task.nbytes)
        expected = chunks.crc[task.begin : task.end]
        found = np.fromiter(map(crc32c.crc32c, fetched.payloads), np.uint32, len(expected))
        wrong = (found != expected) | (fetched.checksums() != expected)
        if wrong.any():
            row = task.begin + int(np.argmax(wrong))
            place = f"{self._store}/{task.file}, bytes {chunks.offset[row]} to {chunks.stop(row)}"
            raise CorruptionError(
                f"{chunks.wanted.where(row)} is damaged: {place}, do not have the checksum that was written. Restore the file from a "
                f"copy, or leave the tensor out with only= (an export: exclude=)."
            )
        return fetched


def _needed(requests: Sequence[Request]) -> int:
    """Bytes that go to the buffers."""
    return sum(int(r.boxes.sizes().sum()) * r.dtype.itemsize for r in requests)


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
        return TableBlocks(place, record.table, stats.count_index, of_hosts if record.hosts else None, record.hosts)
    except (CorruptionError, FormatError):
        if not record.hosts:
            raise
        return of_hosts()


def _read_host_tables(place: Store, record: CheckpointRecord, stats: ReadStats) -> WholeTable:
    """The chunks of all hosts, from each host's own table, and the committer's of small tensors."""
    references = [host.table for host in map_on_threads(partial(read_host_files, place), record.hosts)]
    if record.small_table is not None:
        references.append(record.small_table)
    merged = merge_tables(map_on_threads(partial(read_table, place, count=stats.count_index), references))
    return WholeTable(merged.files, merged.arrays())
