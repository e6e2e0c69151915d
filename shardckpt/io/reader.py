"""Reading chunks by the chunk table, straight from the data files.

1. `wanted` says which chunks each tensor's boxes touch, where they lie and where their elements go.
2. All chunks of a batch of tensors are sorted by file and offset, and neighbours joined into `runs`.
3. Threads take runs and `fetch` their bytes: on a local disk one positional scatter read, on object stores one
   ranged read; there more threads have larger runs, because a request costs milliseconds.
4. Every chunk's crc32c is compared with the table's before it counts as read; what did not go straight to its
   destination is then copied to each box that wants it.

Every chunk is read once, however many boxes share it. Memory besides the destinations: on a local disk a scratch buffer
of 4 MiB per thread, which is kept; on object stores `memory`. A chunk larger than a run takes what it takes.
"""

from __future__ import annotations

import os
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from itertools import islice
from typing import TYPE_CHECKING

import crc32c
import numpy as np

from shardckpt.box import BoxArray
from shardckpt.errors import CorruptionError, ShardckptError, StorageError
from shardckpt.io.codec import decompress
from shardckpt.io.fetch import MOST_VECTORS, Fetch, Fetched, LocalFetch, ObjectFetch
from shardckpt.io.runs import Run, RunLimits, runs
from shardckpt.io.stats import ReadStats
from shardckpt.io.wanted import MOST_CHUNKS, ChunkFinder, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from shardckpt.io.lookup import Lookup, WholeTable
    from shardckpt.io.store import Store
    from shardckpt.io.wanted import Chunk, Damaged
    from shardckpt.planning.plan import Piece

__all__ = ["ChunkReader", "Request"]

LOCAL_LIMITS = RunLimits(nbytes=4 << 20, gap=0, chunks=MOST_VECTORS // 2 - 1)
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
    ) -> None:
        """Read below `store`, the attempt.

        Args:
            store: the attempt's place.
            table: where the chunks are.
            stats: where reads are counted; None: from zero.
            compression: None or "zstd".
            threads: how many read at once; by default as many as there are cores, from 2 to 8, and on object stores up to 16.
            memory: on object stores: bytes for what is under way; less of it means fewer threads.
        """
        self.stats = stats or ReadStats()
        self._store = store
        self._table = table
        self._compression = compression
        self._finder = ChunkFinder(store, table, compression)
        self._fetch_run: Fetch
        if store.location.local is not None:
            at_once = threads or max(2, min(8, os.cpu_count() or 2))
            self._limits = LOCAL_LIMITS
            self._fetch_run = LocalFetch(store, direct=compression is None)
        else:
            least, most = OBJECT_RUN
            wished = threads or OBJECT_THREADS
            run = max(least, min(most, memory // (OBJECT_COPIES * wished)))
            at_once = max(1, min(wished, memory // (OBJECT_COPIES * run)))
            self._limits = RunLimits(run, OBJECT_GAP, MOST_CHUNKS)
            self._fetch_run = ObjectFetch(store)
        # One pool for all reads: its threads have scratch buffers, and fresh memory is slow.
        self._pool = ThreadPoolExecutor(at_once, "shardckpt-read")

    def read(self, requests: Sequence[Request]) -> None:
        """Fill every request's buffers.

        Raises:
            MissingDataError: a chunk that is needed is not there.
            CorruptionError: a chunk does not hold what was written; names tensor, index range and file.
        """
        needed = sum(int(r.boxes.sizes().sum()) * r.dtype.itemsize for r in requests)
        self._finder.prepare(requests)
        self.stats.count(needed=needed)
        self._each_run((chunk for request in requests for chunk in self._finder.needed(request)), self._read_run)

    def check(self, requests: Sequence[Request], damaged: Damaged) -> None:
        """Read every chunk of the requests' pieces and compare it with the table; buffers are not used.

        Args:
            requests: tensors; `boxes` and `buffers` may be empty.
            damaged: called with tensor name, index range, file and error for each chunk that is not as written.
        """

        def check_run(run: Run) -> None:
            try:
                self._read_run(run)
            except ShardckptError:
                for chunk in run.chunks:
                    try:
                        self._read_run(Run([chunk]))
                    except ShardckptError as e:
                        damaged(chunk.request.name, chunk.box, chunk.file, e)
            for chunk in run.chunks:
                if chunk.own_object and self._store.is_longer(chunk.file, chunk.length):
                    longer = CorruptionError(f"{chunk.where}: {self._store}/{chunk.file} is longer than what was written.")
                    damaged(chunk.request.name, chunk.box, chunk.file, longer)

        self._each_run((chunk for request in requests for chunk in self._finder.every(request, damaged)), check_run)

    def confirm(self, wanted: Iterable[tuple[Request, Piece, NDArray[np.int64]]]) -> None:
        """Read some chunks and compare them with the table.

        Args:
            wanted: requests, of which boxes and buffers are not used, and positions of chunks in an array of each.

        Raises:
            MissingDataError, CorruptionError: one of them is not as it was written.
        """
        self._each_run((chunk for some in wanted for chunk in self._finder.located(*some)), self._read_run)

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
        (chunk,) = self._finder.located(request, piece, np.array([position]))
        (fetched,) = self._verified(Run([chunk]))
        return fetched.payload.tobytes() + fetched.checksum.tobytes()

    def _each_run(self, chunks: Iterator[Chunk], work: Callable[[Run], None]) -> None:
        """Do `work` on the runs of all chunks in several threads; the first error stops the rest."""
        while some := list(islice(chunks, MOST_CHUNKS)):
            first, *others = runs(some, self._limits)
            if not others:
                work(first)
                continue
            futures = [self._pool.submit(work, run) for run in (first, *others)]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                # Nobody may still write into the caller's buffers once this returns.
                begun = [future for future in futures if not future.cancel()]
                wait(begun)
            for future in begun:
                future.result()

    def _read_run(self, run: Run) -> None:
        """Read a run, verify each chunk and copy it where it is wanted."""
        for fetched in self._verified(run):
            chunk = fetched.chunk
            if fetched.placed or not chunk.targets:
                continue
            raw = fetched.payload
            if self._compression is not None:
                raw = decompress(raw, chunk.nbytes, f"{chunk.where}, {chunk.file}")
            if raw.nbytes != chunk.nbytes:
                raise CorruptionError(f"{chunk.where}: {chunk.file} holds {raw.nbytes} bytes of it, {chunk.nbytes} are expected.")
            chunk.scatter(raw)

    def _verified(self, run: Run) -> Iterator[Fetched]:
        """Read a run; each chunk is compared with the table and with its own checksum before it is handed out."""
        for chunk in run.chunks:
            self._finder.check_length(chunk)
        fetched = self._fetch_run(run)
        self.stats.count(reads=1, read=run.nbytes)
        for one in fetched:
            chunk = one.chunk
            found = crc32c.crc32c(one.payload)
            if found != chunk.crc or int.from_bytes(one.checksum.tobytes(), "little") != chunk.crc:
                place = f"{self._store}/{chunk.file}, bytes {chunk.offset} to {chunk.stop}"
                raise CorruptionError(
                    f"{chunk.where} is damaged: {place}, do not have the checksum that was written. Restore the file from a copy, or "
                    f"leave the tensor out with only=."
                )
            yield one
