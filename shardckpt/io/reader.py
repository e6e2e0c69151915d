"""Reading chunks by the chunk table, straight from the data files.

1. `plan.overlaps` says which chunks each tensor's boxes touch; the table says where they lie.
2. All chunks of a batch of tensors are sorted by file and offset, and adjacent ones joined into runs.
3. Threads take runs. On a local disk a run is one positional scatter read: a chunk that is contiguous in its
   destination goes there directly, any other into the thread's scratch buffer. On object stores a run is one
   ranged read.
4. Every chunk's crc32c is compared with the table's before it counts as read; what went through scratch is
   then copied to each box that wants it.

Every chunk is read once, however many boxes share it.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice, repeat
from math import prod
from types import EllipsisType
from typing import TYPE_CHECKING

import crc32c
import numpy as np
from numpy.typing import NDArray

from shardckpt.box import Box, BoxArray
from shardckpt.errors import CorruptionError, FormatError, MissingDataError, ShardckptError, StorageError
from shardckpt.io.codec import CHECKSUM_BYTES, decompress
from shardckpt.io.keys import chunk_object_key
from shardckpt.io.plain import PLAIN_ROOT
from shardckpt.io.table import OWN_OBJECT, ArrayChunks
from shardckpt.reshard.plan import Overlaps, Piece, chunk_boxes, overlaps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from shardckpt.io.store import Store

__all__ = ["ChunkReader", "ReadStats", "Request"]

Array = NDArray[np.generic]
Index = tuple[slice | EllipsisType, ...]
Target = tuple[Array, Index, Index]
"""Where a part of a chunk goes: the buffer, where in the buffer, where in the chunk."""

LOCAL_RUN = 4 << 20
"""Bytes of adjacent chunks joined into one read on a local disk."""
REMOTE_RUN = 16 << 20
"""The same on an object store, where a request costs milliseconds."""
MOST_CHUNKS = 1 << 14
"""Chunks that are planned, sorted and read at a time: at most, some 30 MB of Python objects."""
MOST_REPORTED = 10_000
"""Missing chunks of an array that are reported one by one."""
_NO_CHUNKS = ArrayChunks.none()
MOST_VECTORS = 1000
"""Buffers per scatter read, below the kernel's IOV_MAX of 1024."""


@dataclass(frozen=True, slots=True)
class Request:
    """One tensor's boxes to be read."""

    name: str
    """The tensor, for messages."""
    dtype: np.dtype[np.generic]
    """dtype of what is stored."""
    pieces: Sequence[Piece]
    boxes: BoxArray
    """The boxes wanted, in the tensor's indices."""
    buffers: Sequence[Array]
    """Per box an array with the box at its start (it may be larger): of `dtype`, or of any other if it is converted."""
    convert_from: np.dtype[np.generic] | None = None
    """What the stored elements mean, where buffers are of another dtype than they; None: all are of `dtype`."""


@dataclass(slots=True)
class ReadStats:
    """What reading took so far."""

    reads: int = 0
    """Read calls."""
    bytes_read: int = 0
    """Stored bytes read, checksums included."""
    bytes_needed: int = 0
    """Bytes of the boxes asked for, as they lie in memory."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk to be read: where it lies, what it must hold, where it goes."""

    request: Request
    piece: Piece
    position: int
    file: str
    own_object: bool
    """Whether the file is this chunk's alone."""
    offset: int
    length: int
    crc: int
    targets: Sequence[Target]

    @property
    def where(self) -> str:
        """For messages: tensor, index range."""
        return f"{self.request.name}{self.box}"

    @property
    def box(self) -> Box:
        """Its elements, in the tensor's indices."""
        return chunk_boxes(self.piece, np.array([self.position]))[0]


class ChunkReader:
    """Reads boxes of the tensors of one attempt; safe to use from several threads."""

    def __init__(
        self,
        store: Store,
        files: Sequence[str],
        arrays: Mapping[str, ArrayChunks],
        *,
        compression: str | None = None,
        threads: int | None = None,
    ) -> None:
        """Read below `store`, the attempt, by the table `files`, `arrays`.

        Args:
            store: the attempt's place.
            files: data files, relative to the attempt.
            arrays: each array's chunks.
            compression: None or "zstd".
            threads: how many read at once; by default as many as there are cores, from 2 to 8.
        """
        self.stats = ReadStats()
        self._store = store
        self._files = files
        self._arrays = arrays
        self._compression = compression
        self._threads = threads or max(2, min(8, os.cpu_count() or 2))
        self._local = store.local_path("") is not None
        self._scratch = threading.local()
        self._lock = threading.Lock()

    def read(self, requests: Sequence[Request]) -> None:
        """Fill every request's buffers.

        Raises:
            MissingDataError: a chunk that is needed is not there.
            CorruptionError: a chunk does not hold what was written; names tensor, index range and file.
        """
        needed = sum(int(r.boxes.sizes().sum()) * r.dtype.itemsize for r in requests)
        for request in requests:
            for piece in request.pieces:
                self._check_table(request, piece)
        self._count(needed=needed)
        chunks = (chunk for request in requests for chunk in self._chunks(request))
        while some := list(islice(chunks, MOST_CHUNKS)):
            self._each_run(self._runs(some), self._read_run)

    def check(self, requests: Sequence[Request], damaged: Callable[[str, Box, str, ShardckptError], None]) -> None:
        """Read every chunk of the requests' pieces and compare it with the table; buffers are not used.

        Args:
            requests: tensors; `boxes` and `buffers` may be empty.
            damaged: called with tensor name, index range, file and error for each chunk that is not as written.
        """

        def check_run(run: Sequence[_Chunk]) -> None:
            try:
                self._read_run(run)
            except ShardckptError:
                for chunk in run:
                    try:
                        self._read_run([chunk])
                    except ShardckptError as e:
                        damaged(chunk.request.name, chunk.box, chunk.file, e)
            for chunk in run:
                if chunk.own_object and self._store.is_longer(chunk.file, chunk.length):
                    longer = CorruptionError(f"{chunk.where}: {self._store}/{chunk.file} is longer than what was written.")
                    damaged(chunk.request.name, chunk.box, chunk.file, longer)

        chunks = (chunk for request in requests for chunk in self._all_chunks(request, damaged))
        while some := list(islice(chunks, MOST_CHUNKS)):
            self._each_run(self._runs(some), check_run)

    def longer_files(self) -> Iterator[tuple[str, ShardckptError]]:
        """The data files that have more bytes than their chunks, between them or at the end. Nothing reads those."""
        held = np.zeros(len(self._files), np.uint64)
        for rows in self._arrays.values():
            packed = rows.file != OWN_OBJECT
            np.add.at(held, rows.file[packed], rows.length[packed])
        for file, nbytes in zip(self._files, held.tolist(), strict=True):
            try:
                if self._store.is_longer(file, nbytes):
                    yield file, CorruptionError(f"{self._store}/{file} has more bytes than the {nbytes} of its chunks.")
            except StorageError as e:
                yield file, e

    def stored_chunk(self, name: str, dtype: np.dtype[np.generic], piece: Piece, position: int) -> bytes:
        """A chunk's bytes as stored (checksum included), verified, for readers that decode by themselves.

        Args:
            name: the tensor, for messages.
            dtype: of what is stored.
            piece: the array.
            position: which chunk, in grid order.
        """
        request = Request(name, dtype, [piece], BoxArray.of([], len(piece.shape)), [])
        self._check_table(request, piece)
        (chunk,) = self._located(request, piece, np.array([position]))
        self._check_length(chunk)
        buffer = np.empty(chunk.length, np.uint8)
        self._fetch([chunk], [buffer.data])
        self._verify(chunk, buffer[:-CHECKSUM_BYTES], buffer[-CHECKSUM_BYTES:])
        return buffer.tobytes()

    def _chunks(self, request: Request) -> Iterator[_Chunk]:
        """The chunks that the request's boxes touch."""
        for piece in request.pieces:
            pairs = overlaps(piece, request.boxes)
            if not len(pairs.chunk):
                continue
            positions, first = np.unique(pairs.chunk, return_index=True)
            ends = np.append(first[1:], len(pairs.chunk))
            for i in range(0, len(positions), MOST_CHUNKS):
                some = slice(i, i + MOST_CHUNKS)
                begin = int(first[i])
                targets = _targets(request, pairs, slice(begin, int(ends[some][-1])))
                spans = zip((first[some] - begin).tolist(), (ends[some] - begin).tolist(), strict=True)
                yield from self._located(request, piece, positions[some], (targets[a:b] for a, b in spans))

    def _check_table(self, request: Request, piece: Piece) -> None:
        """Raise MissingDataError unless the table has every chunk of the piece, which a commit sees to.

        First of all: a record that claims a trillion chunks must not make us count them.
        """
        lost = self._arrays.get(piece.path, _NO_CHUNKS).first_missing(piece.num_chunks)
        if lost is not None:
            raise self._lost(request.name, chunk_boxes(piece, np.array([lost]))[0])

    def _lost(self, name: str, box: Box) -> MissingDataError:
        return MissingDataError(
            f"{name}{box} at {self._store}: no host's chunk table has this chunk; run `shardckpt verify` for the full list."
        )

    def _located(
        self, request: Request, piece: Piece, positions: NDArray[np.int64], targets: Iterable[Sequence[Target]] = repeat(())
    ) -> Iterator[_Chunk]:
        """Those chunks, which the table has, with their places and where they go."""
        table = self._arrays.get(piece.path, _NO_CHUNKS)
        rows = table.find(positions)
        columns = (table.file[rows], table.offset[rows], table.length[rows], table.crc[rows])
        for position, file, offset, length, crc, goes_to in zip(positions.tolist(), *(c.tolist() for c in columns), targets, strict=False):
            key = self._files[file] if file != OWN_OBJECT else f"{PLAIN_ROOT}/{chunk_object_key(piece, position)}"
            yield _Chunk(request, piece, position, key, file == OWN_OBJECT, offset, length, crc, goes_to)

    def _all_chunks(self, request: Request, damaged: Callable[[str, Box, str, ShardckptError], None]) -> Iterator[_Chunk]:
        """Every chunk of the request's pieces that the table has; the others are reported."""
        for piece in request.pieces:
            table = self._arrays.get(piece.path, _NO_CHUNKS)
            inside = table.chunk < piece.num_chunks
            missing = piece.num_chunks - int(inside.sum())
            # However many there are, the first of them are among the first of all.
            first = np.arange(min(piece.num_chunks, len(table) + MOST_REPORTED))
            first = first[table.find(first) < 0][:MOST_REPORTED]
            boxes = chunk_boxes(piece, first)
            for i in range(len(boxes)):
                damaged(request.name, boxes[i], piece.path, self._lost(request.name, boxes[i]))
            if missing > len(first):
                error = MissingDataError(f"{request.name}: {missing - len(first)} more of its chunks are in no host's chunk table.")
                damaged(request.name, piece.box, piece.path, error)
            yield from self._located(request, piece, table.chunk[inside].astype(np.int64))

    def _runs(self, chunks: list[_Chunk]) -> Iterator[list[_Chunk]]:
        """Chunks in order of their place, adjacent ones together."""
        limit = LOCAL_RUN if self._local else REMOTE_RUN
        run: list[_Chunk] = []
        size = 0
        for chunk in sorted(chunks, key=lambda c: (c.file, c.offset)):
            adjacent = bool(run) and chunk.file == run[-1].file and chunk.offset == run[-1].offset + run[-1].length
            if run and not (adjacent and size + chunk.length <= limit and 2 * len(run) < MOST_VECTORS - 2):
                yield run
                run, size = [], 0
            run.append(chunk)
            size += chunk.length
        if run:
            yield run

    def _each_run(self, runs: Iterator[list[_Chunk]], work: Callable[[Sequence[_Chunk]], None]) -> None:
        """Do `work` on all runs in several threads; the first error stops the rest."""
        listed = list(runs)
        if len(listed) <= 1:
            for run in listed:
                work(run)
            return
        with ThreadPoolExecutor(min(self._threads, len(listed)), "shardckpt-read") as pool:
            futures = [pool.submit(work, run) for run in listed]
            done, waiting = wait(futures, return_when=FIRST_EXCEPTION)
            for future in waiting:
                future.cancel()
        for future in done:
            future.result()

    def _read_run(self, run: Sequence[_Chunk]) -> None:
        """Read adjacent chunks, verify each and copy it where it is wanted."""
        for chunk in run:
            self._check_length(chunk)
        scratch = self._scratch_of(sum(c.length for c in run))
        vectors: list[memoryview] = []
        payloads: list[tuple[NDArray[np.uint8], NDArray[np.uint8], bool]] = []
        at = 0
        for chunk in run:
            place = scratch[at : at + chunk.length]
            at += chunk.length
            payload, stored_crc = place[:-CHECKSUM_BYTES], place[-CHECKSUM_BYTES:]
            direct = self._direct(chunk) if self._local else None
            if direct is None:
                vectors.append(place.data)
            else:
                vectors += [direct.data, stored_crc.data]
                payload = direct
            payloads.append((payload, stored_crc, direct is not None))
        self._fetch(run, vectors)
        for chunk, (payload, stored_crc, direct_done) in zip(run, payloads, strict=True):
            self._verify(chunk, payload, stored_crc)
            if not direct_done and chunk.targets:
                self._scatter(chunk, payload)

    def _direct(self, chunk: _Chunk) -> NDArray[np.uint8] | None:
        """The chunk's destination as bytes, where the whole chunk lies contiguous in just one buffer."""
        if self._compression is not None or chunk.request.convert_from is not None or len(chunk.targets) != 1:
            return None
        buffer, in_buffer, _ = chunk.targets[0]
        part = buffer[in_buffer]
        if part.shape != chunk.piece.chunks or not part.flags.c_contiguous or part.nbytes != chunk.length - CHECKSUM_BYTES:
            return None
        return part.reshape(-1).view(np.uint8)

    def _scatter(self, chunk: _Chunk, payload: NDArray[np.uint8]) -> None:
        """Copy a chunk's elements to every box that wants some of them."""
        expected = prod(chunk.piece.chunks) * chunk.request.dtype.itemsize
        raw: NDArray[np.uint8] = payload
        if self._compression is not None:
            raw = decompress(payload, expected, f"{chunk.where}, {chunk.file}")
        if raw.nbytes != expected:
            raise CorruptionError(f"{chunk.where}: {chunk.file} holds {raw.nbytes} bytes of it, {expected} are expected.")
        elements = raw.view(chunk.request.convert_from or chunk.request.dtype).reshape(chunk.piece.chunks)
        for buffer, in_buffer, in_chunk in chunk.targets:
            np.copyto(buffer[in_buffer], elements[in_chunk], casting="unsafe")

    def _check_length(self, chunk: _Chunk) -> None:
        """Refuse a length that the chunk cannot have, before memory is taken for it."""
        nbytes = prod(chunk.piece.chunks) * chunk.request.dtype.itemsize
        least, most = nbytes + CHECKSUM_BYTES, nbytes + CHECKSUM_BYTES
        if self._compression is not None:
            least, most = CHECKSUM_BYTES, nbytes + (nbytes >> 8) + 64 + CHECKSUM_BYTES  # ZSTD_compressBound
        if not least <= chunk.length <= most:
            raise FormatError(
                f"{chunk.where}: the chunk table gives it {chunk.length} bytes of {self._store}/{chunk.file}, {least} to {most} are "
                f"possible; the checkpoint was not written by shardckpt, or by a broken one."
            )

    def _verify(self, chunk: _Chunk, payload: NDArray[np.uint8], stored_crc: NDArray[np.uint8]) -> None:
        """Compare a chunk with the table and with its own checksum."""
        found = crc32c.crc32c(payload)
        if found != chunk.crc or int.from_bytes(stored_crc.tobytes(), "little") != chunk.crc:
            place = f"{self._store}/{chunk.file}, bytes {chunk.offset} to {chunk.offset + chunk.length}"
            raise CorruptionError(
                f"{chunk.where} is damaged: {place}, do not have the checksum that was written. Restore the file from a copy, or leave the "
                f"tensor out with only=."
            )

    def _fetch(self, run: Sequence[_Chunk], vectors: list[memoryview]) -> None:
        """Fill the vectors with the run's bytes."""
        first, last = run[0], run[-1]
        length = last.offset + last.length - first.offset
        path = self._store.local_path(first.file)
        file = f"{first.where}: {self._store}/{first.file}"
        try:
            if path is not None:
                _scatter_read(str(path), first.offset, length, vectors)
            else:
                data = memoryview(self._store.read(first.file, first.offset, first.offset + length))
                at = 0
                for vector in vectors:
                    vector[:] = data[at : at + len(vector)]
                    at += len(vector)
        except FileNotFoundError as e:
            raise MissingDataError(f"{file} is missing; restore it from a copy, or leave the tensor out with only=.") from e
        except EOFError as e:
            raise CorruptionError(f"{file} is cut off before byte {first.offset + length}; restore it from a copy.") from e
        except OSError as e:
            if isinstance(e, ShardckptError):
                raise
            raise StorageError(f"{file} cannot be read ({e}).") from e
        self._count(reads=1, read=length)

    def _scratch_of(self, nbytes: int) -> NDArray[np.uint8]:
        """This thread's scratch buffer, at least that large; what it held is gone."""
        scratch: NDArray[np.uint8] | None = getattr(self._scratch, "buffer", None)
        if scratch is None or scratch.nbytes < nbytes:
            scratch = self._scratch.buffer = np.empty(max(nbytes, LOCAL_RUN), np.uint8)
        return scratch

    def _count(self, *, reads: int = 0, read: int = 0, needed: int = 0) -> None:
        with self._lock:
            self.stats.reads += reads
            self.stats.bytes_read += read
            self.stats.bytes_needed += needed


def _targets(request: Request, pairs: Overlaps, rows: slice) -> list[Target]:
    """Per pair of those: the buffer, where in the buffer, where in the chunk."""
    slices = []
    for boxes in (pairs.in_box, pairs.in_chunk):
        ranges = zip(boxes.start[rows].tolist(), boxes.stop[rows].tolist(), strict=True)
        # The ellipsis makes a view of a 0-d array, too.
        slices.append([(*map(slice, start, stop), ...) for start, stop in ranges])
    return [(request.buffers[b], in_box, in_chunk) for b, in_box, in_chunk in zip(pairs.box[rows].tolist(), *slices, strict=True)]


def _scatter_read(path: str, offset: int, length: int, vectors: list[memoryview]) -> None:
    """Fill all vectors from one place of a file; EOFError where it ends before."""
    # Without O_NONBLOCK a pipe in place of the file would be waited for.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        got = os.preadv(fd, vectors, offset)
        while got < length:
            rest, skip = [], got
            for vector in vectors:
                if skip < len(vector):
                    rest.append(vector[skip:])
                skip = max(0, skip - len(vector))
            more = os.preadv(fd, rest, offset + got)
            if more == 0:
                raise EOFError
            got += more
    finally:
        os.close(fd)
