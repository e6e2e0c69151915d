"""Verified reads of chunks straight from the data files, with the help of the chunk table.

1. `locate` finds the chunks that the boxes of a batch of tensors touch, where their elements go,
   and where the chunks lie, in columns with a row per chunk.
2. The chunks are sorted by file and offset, adjacent ones are joined into `runs`, and runs into
   tasks.
3. Threads take tasks and `fetch` their bytes: one positional scatter read per run on a local disk,
   one ranged read per run on object stores. There more threads with larger runs are used, because a
   request costs milliseconds. The extension, where it is there, reads, verifies and copies the raw
   chunks of a task with one call.
4. Every chunk's crc32c is compared with the table's before the chunk counts as read. Chunks that
   were not read straight into their destination are then copied to each box that needs them, in
   bands: as many chunks as one copy can move.

`open_reader` makes the reader of a committed attempt. It uses the table of all hosts, or the hosts'
own tables if that one is damaged. If the checkpoint has bases, `bases` gives each request the
attempt that holds its tensor. One call reads from all of them. Checkpoints of other formats are
read in the same way, with the lookup of `convert.foreign_chunks`.

Every chunk is read once, even if several boxes share it. Memory besides the destinations: on a
local disk a scratch buffer of 4 to 8 MiB per thread, which is kept; on object stores `memory`. A
chunk larger than a run needs memory of its own size.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt.errors import (
    CorruptionError,
    FormatError,
    MissingDataError,
    StorageError,
)
from shardckpt.format.zarr_arrays import largest_chunk
from shardckpt.io import extension
from shardckpt.io.cores import cores
from shardckpt.io.extension import CALL_BYTES, ENGINE, KINDS, MOST_DIMS
from shardckpt.io.status import is_directory
from shardckpt.io.store import kind_of
from shardckpt.io.threads import Workers, clocks
from shardckpt.layout.dtypes import make_bools_plain
from shardckpt.reading.bases import AT_A_TIME, Bases, Differences
from shardckpt.reading.fetch import CODECS, Fetch, ReadableChunks, as_readable, damaged_chunk, raw
from shardckpt.reading.host_rows import read_host_tables
from shardckpt.reading.locate import MOST_CHUNKS, ChunkFinder, Request, RequestedChunks
from shardckpt.reading.runs import ReadTask, RunLimits, tasks
from shardckpt.reading.table_blocks import TableBlocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from shardckpt.format.record import CheckpointRecord
    from shardckpt.io.store import Store
    from shardckpt.io.url import Location
    from shardckpt.plan.pieces import Piece
    from shardckpt.reading.fetch import FetchedChunks, Resolver
    from shardckpt.reading.locate import Located, RequestedArray
    from shardckpt.reading.lookup import Lookup, WholeTable


LOCAL_RUN = (4 << 20, 8 << 20)
"""Least and most bytes of a run of adjacent chunks on a local disk; the value depends on memory and
threads."""
LOCAL_CHUNKS = 1 << 10
"""Most chunks of a run on a local disk."""
TASK_RUNS = 64
"""Most runs of a task on a local disk; the file is opened once for all of them."""
OBJECT_THREADS = 32
"""Most requests at a time on an object store; a single stream uses a small part of a host's
bandwidth."""
NEAR = 0.005
"""Seconds. Where a request waits less for an object store, twice as many streams as cores use them
fully; more of them would get in each other's way: on two cores, 4 streams read 1.50 GB/s, and 16
streams 1.11 GB/s, with a third more processor time."""
LEAST_THREADS = 4
"""Least requests at a time on a near object store."""
OBJECT_MEMORY = 256 << 20
"""Bytes in flight on an object store; enough for 25 requests."""
OBJECT_RUN = (10 << 20, 16 << 20)
"""Least and most bytes of a run on an object store, by memory and threads; a run of complete chunks
then has at least 8 MiB."""
OBJECT_GAP = 64 << 10
"""Most bytes between two chunks that are read along instead of starting another request."""


@dataclass(slots=True)
class ReadStats:
    """Statistics of reading so far, for users and tests."""

    reads: int = 0
    """Read calls for chunks, or requests to an object store."""
    bytes_read: int = 0
    """Stored bytes of chunks that were read, checksums and small gaps included."""
    bytes_needed: int = 0
    """Bytes of the requested boxes in memory."""
    index_reads: int = 0
    """Reads of chunk tables."""
    index_bytes: int = 0
    """Bytes of chunk tables that were read."""
    engine: str = ENGINE
    """The engine that moves raw chunks from a local disk here: `C`, the extension, or `Python`."""
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
    """Limits for joining chunks into one read or request, and the number of reads at a time.

    `ChunkReader` describes the arguments.
    """
    least, most = LOCAL_RUN if local else OBJECT_RUN
    if local:
        threads = threads or max(2, min(cores(), memory // least))
        return RunLimits(
            max(least, min(most, memory // threads)), gap=0, chunks=LOCAL_CHUNKS, runs=TASK_RUNS
        ), threads
    wished = threads or OBJECT_THREADS
    run = max(least, min(most, memory // wished))
    return RunLimits(run, OBJECT_GAP, MOST_CHUNKS), max(1, min(wished, memory // run))


class ChunkReader:
    """Reads boxes of the tensors of a checkpoint; safe to use from several threads."""

    def __init__(
        self,
        source: Resolver,
        *,
        stats: ReadStats | None = None,
        threads: int | None = None,
        memory: int = OBJECT_MEMORY,
        workers: Workers | None = None,
        limits: RunLimits | None = None,
    ) -> None:
        """Nothing is read yet.

        Args:
            source: what holds the chunks, if it is one; or the resolver that gives each request its
                source.
            stats: counts the reads; None: a new one.
            threads: number of concurrent reads; by default `cores()`, but at least two, and no more
                than `memory` allows. On object stores up to 32, or fewer if they are near.
            memory: bytes in flight; less means smaller reads, and fewer threads on object stores.
            workers: the threads, as many as `reading_limits` says. None: new ones.
            limits: limits for joining chunks into one read; None: by threads and memory.
        """
        self.stats = stats or ReadStats()
        self.source = source
        """The argument of that name."""
        self._own = source if isinstance(source, ReadableChunks) else None
        self.finder = ChunkFinder(self._own)
        """Finds its chunks."""
        default, threads = reading_limits(local=source.place.near, threads=threads, memory=memory)
        self._limits = limits or default
        # One pool for all reads, because its threads keep scratch buffers, and fresh memory is
        # slow.
        self._workers = workers or Workers(threads, "shardckpt-read")
        self._fetch = Fetch(scratch=self._limits.nbytes, of_thread=self._workers.local)

    @contextmanager
    def _may_be_gone(self, requests: Sequence[Request]) -> Iterator[None]:
        """Raise a clearer error if a place was replaced or deleted while it was being read."""
        try:
            yield
        except MissingDataError:
            self.source.check_places(requests)
            raise

    def read(self, requests: Sequence[Request], *, at_once: int = 1) -> None:
        """Fill every request's buffers.

        Args:
            requests: boxes of tensors.
            at_once: number of such calls that share the threads.

        Raises:
            MissingDataError: a needed chunk is not there, or a base is gone or was replaced.
            CorruptionError: a chunk is damaged; the message names tensor, index range and file.
        """
        requests = self.source.resolve(requests)
        with self._may_be_gone(requests):
            self.finder.prepare(requests)
            self.stats.count(needed=_needed_bytes(requests))
            self._read_all(self.finder.needed(requests), at_once)
        _make_bools_plain(requests)

    def reads(self, groups: Sequence[Sequence[Request]]) -> list[Callable[[], None]]:
        """Plan several calls of `read`, one per group of requests.

        Planning them together costs less.

        Buffers are looked up at planning, and filled when the group's call is made. A chunk that
        two groups need is read for each.

        Returns:
            A callable for each group; it raises what `read` raises.
        """
        groups = [self.source.resolve(group) for group in groups]
        requests = [request for group in groups for request in group]
        group_of = {id(request): i for i, group in enumerate(groups) for request in group}
        with self._may_be_gone(requests):
            self.finder.prepare(requests)
        tasks_of: list[list[ReadTask]] = [[] for _ in groups]
        for chunks in self.finder.needed(requests):
            of_part = np.array([group_of[id(part.request)] for part in chunks.requested.parts])
            for task in self._tasks(chunks, of_part[chunks.requested.part]):
                tasks_of[of_part[task.chunks.requested.part[task.begin]]].append(task)
        return [
            partial(self._read_planned, group, of_group)
            for group, of_group in zip(groups, tasks_of, strict=True)
        ]

    def _read_planned(self, group: Sequence[Request], planned: Sequence[ReadTask]) -> None:
        self.stats.count(needed=_needed_bytes(group))
        with self._may_be_gone(group):
            self._workers.do(self.read_task, planned)
        _make_bools_plain(group)

    def confirm(self, places: Iterable[tuple[Request, Piece, NDArray[np.int64]]]) -> None:
        """Read some chunks and compare them with the table.

        Args:
            places: requests, whose boxes and buffers are not used, each with an array and positions
                of chunks in it.

        Raises:
            MissingDataError, CorruptionError: a chunk is missing or damaged.
        """
        self._read_all(self.finder.at_positions(places))

    def read_stored(
        self, requests: Sequence[Request], take: Callable[[Request, int, NDArray[np.uint8]], None]
    ) -> None:
        """Read the chunks that the requests' boxes touch, in their stored form.

        Buffers are not used.

        Args:
            requests: each for a part of one array.
            take: called by several threads with request, position of the chunk, and its bytes
                without the checksum, which are verified and valid until it returns.
        """
        requests = self.source.resolve(requests)

        def read(task: ReadTask) -> None:
            requested = task.chunks.requested
            for row, stored in zip(
                range(task.begin, task.end),
                self._read_stored(task, direct=False).payloads,
                strict=True,
            ):
                take(
                    requested.part_of(row).request,
                    int(requested.position[row]),
                    np.frombuffer(stored, np.uint8),
                )

        with self._may_be_gone(requests):
            self.finder.prepare(requests)
            self._workers.do(
                read, chain.from_iterable(map(self._tasks, self.finder.needed(requests)))
            )

    @property
    def limits(self) -> RunLimits:
        """Limits for joining chunks into one read or request."""
        return self._limits

    def whole_table(self) -> WholeTable:
        """The complete chunk table, of a checkpoint without bases; reads 28 bytes per chunk."""
        assert self._own is not None, "several attempts have several tables"
        return self._own.table.whole()

    def stored_chunk(self, request: Request, position: int) -> bytes:
        """A chunk's stored bytes with the checksum, verified.

        Args:
            request: for one array, as `source.resolve` gives it; boxes and buffers are not used.
            position: the chunk's position in grid order.
        """
        self.finder.check_table([request])
        chunks = self.finder.located(
            RequestedChunks.of_positions([(request, request.pieces[0], np.array([position]))])
        )
        (task,) = self._tasks(chunks)
        fetched = self._read_stored(task, direct=False)
        return bytes(fetched.payloads[0]) + fetched.checksums().astype("<u4").tobytes()

    def _read_all(self, located: Iterable[Located], at_once: int = 1) -> None:
        """Read chunks, verify them, and copy them to their destinations.

        Threads go on with the next batch before all of one is read.
        """
        self._workers.do(
            self.read_task,
            chain.from_iterable(map(partial(self._tasks, at_once=at_once), located)),
            joins=at_once == 1,
        )

    def do(self, read: Callable[[ReadTask], None], chunks: Located) -> None:
        """Call `read` with each task of a batch of chunks, on the threads."""
        self._workers.do(read, tasks(chunks, self._joining(chunks)))

    def _tasks(
        self, chunks: Located, group: NDArray[np.int64] | None = None, *, at_once: int = 1
    ) -> Iterator[ReadTask]:
        """The tasks that read a batch of chunks.

        FormatError for an impossible length, before memory is allocated for it.
        """
        for row in self.finder.impossible(chunks)[:1].tolist():
            raise self.finder.refusal(chunks, row)
        return tasks(chunks, self._joining(chunks, at_once), group)

    def read_task(self, task: ReadTask) -> None:
        """Read chunks of one file, verify each and copy it to its destinations."""
        requested = task.chunks.requested
        if self._moves(
            requested.parts[i] for i in {*requested.part[task.begin : task.end].tolist()}
        ):
            damaged = self._fetch.move(task)
            self.stats.count(reads=len(task.runs), read=task.nbytes)
            if damaged is not None:
                raise damaged_chunk(task, damaged)
            return
        for band, places, elements in as_readable(task.source).codec(task, self._read_stored):
            if places:
                band.scatter(elements, places)
            del elements  # before the codec makes the next: memory has room for those of one chunk

    def _read_stored(self, task: ReadTask, *, direct: bool) -> FetchedChunks:
        """Read chunks of one file; all are verified before any is returned."""
        fetched = self._fetch(task, direct=direct)
        self.stats.count(reads=len(task.runs), read=task.nbytes)
        as_readable(task.source).verify(fetched)
        return fetched

    def _moves(self, parts: Iterable[RequestedArray]) -> bool:
        """Whether the extension moves the chunks of these arrays.

        It moves raw chunks on a local disk if their elements are not converted.
        """
        if extension.moving is None or not self.source.place.has_paths:
            return False
        # A hundred thousand small tensors have one or two kinds.
        kinds = {
            (
                len(part.piece.chunks),
                part.request.dtype.itemsize,
                part.request.convert_from,
                part.request.source or self._own,
            )
            for part in parts
        }
        return all(
            convert_from is None
            and ndim <= MOST_DIMS
            and itemsize in KINDS
            and as_readable(source).codec is raw
            for ndim, itemsize, convert_from, source in kinds
        )

    def _joining(self, chunks: Located, at_once: int = 1) -> RunLimits:
        """Limits for chunks, with more bytes per task where the extension moves the chunks.

        Enough tasks are left for all threads.
        """
        if not self._moves(chunks.requested.parts):
            return self._limits
        share = at_once * int(chunks.length.sum()) // (2 * self._workers.at_once)
        return replace(self._limits, task=max(self._limits.nbytes, min(2 * CALL_BYTES, share)))


def _make_bools_plain(requests: Sequence[Request]) -> None:
    """Write the bools of earlier checkpoints as 0 and 1; these may have other bytes."""
    for request in requests:
        if request.dtype == np.bool_ and request.convert_from is None:
            for i, buffer in enumerate(request.buffers):
                inside: Any = (*map(slice, request.boxes[i].shape), ...)
                make_bools_plain(buffer[inside])


def _needed_bytes(requests: Sequence[Request]) -> int:
    """Bytes of the requests' boxes in memory."""
    return sum(request.boxes.elements * request.dtype.itemsize for request in requests)


def open_reader(
    place: Store,
    record: CheckpointRecord,
    *,
    threads: int | None = None,
    memory: int = OBJECT_MEMORY,
) -> ChunkReader:
    """Open a reader for the chunks of a checkpoint's attempt and its bases.

    Args:
        place: the attempt.
        record: the checkpoint's commit record.
        threads: as for `ChunkReader`.
        memory: as for `ChunkReader`; on a local disk with a given number of threads it includes the
            chunks that they decompress.
    """
    stats = ReadStats()
    _, most = reading_limits(local=place.near, threads=threads, memory=memory)
    workers = Workers(most, "shardckpt-read")

    def open_one(place: Store, record: CheckpointRecord) -> ReadableChunks:
        began, used = clocks()
        opened = open_chunks(place, record, stats)
        ended, used_then = clocks()
        if threads is None and not place.near and ended - began - (used_then - used) < NEAR:
            workers.at_once = min(workers.at_once, max(LEAST_THREADS, 2 * cores()))
        return opened

    left = memory_of_runs(place.location, record, threads, memory)
    source = Bases(place, record, open_one) if record.structure.bases else open_one(place, record)
    return ChunkReader(source, stats=stats, threads=threads, memory=left, workers=workers)


def open_chunks(
    place: Store, record: CheckpointRecord, stats: ReadStats, table: Lookup | None = None
) -> ReadableChunks:
    """Open the chunks of an attempt.

    Reads the header of its table, unless the caller has the table.
    """
    older = partial(open_chunks, stats=stats)
    codec = (
        Differences(place, record, older) if record.structure.chain else CODECS[record.compression]
    )
    return ReadableChunks(place, table or _lookup(place, record, stats), codec)


def memory_of_runs(
    location: Location, record: CheckpointRecord, threads: int | None, memory: int
) -> int:
    """A reader's memory that is left for runs.

    On a local disk each thread also decompresses a chunk beside its run.
    """
    codecs = {record.compression, *(base.compression for base in record.structure.bases)}
    if threads is None or codecs == {None} or not kind_of(location).near:
        return memory
    largest = largest_chunk(record.structure.tensors.values())
    return memory - threads * (2 * max(largest, AT_A_TIME) if "difference" in codecs else largest)


def _lookup(place: Store, record: CheckpointRecord, stats: ReadStats) -> Lookup:
    """The table of all hosts, or the hosts' own tables in its place.

    If the table of all hosts is damaged, missing or no file, each host's own table and the
    committer's table of small tensors replace it.
    """
    of_hosts = partial(read_host_tables, place, record, stats.count_index)
    if record.table is None:
        return of_hosts()
    try:
        return TableBlocks(
            place, record.table, stats.count_index, of_hosts if record.hosts else None, record.hosts
        )
    except (CorruptionError, FormatError, StorageError) as e:
        damaged = not isinstance(e, StorageError) or is_directory(
            place.local_path(record.table.key)
        )
        if not record.hosts or not damaged:
            raise
        return of_hosts()
