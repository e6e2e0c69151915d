"""Reads of a task's bytes from the storage, and the elements in them.

`ReadableChunks` are what holds chunks: an attempt, or a checkpoint of another format
(`convert.foreign_chunks`). Their lookup says where they lie. Their codec, a function, gives the
elements of a task's chunks: it asks for their stored bytes, verified, and decodes them.

A chunk that is contiguous in its destination is read directly into it, any other chunk into the
thread's scratch buffer. On a local disk that is a positional scatter read, on an object store one
ranged request. The extension reads raw chunks of an attempt on a local disk, verifies them and
copies them to their destinations in one call (`Fetch.move`).
"""

from __future__ import annotations

import os
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import crc32c
import numpy as np

from shardckpt.errors import (
    CorruptionError,
    MissingDataError,
    ShardckptError,
    StorageError,
    of_one_tensor,
)
from shardckpt.format.stored_chunks import decompress
from shardckpt.format.zarr_arrays import CHECKSUM_BYTES
from shardckpt.io import extension
from shardckpt.io.buffers import MOST_VECTORS, after
from shardckpt.io.failures import failure_at
from shardckpt.io.files import OpenFile
from shardckpt.reading.runs import EVERYTHING, Band, places_of

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardckpt.io.store import Store
    from shardckpt.reading.locate import Index, Request
    from shardckpt.reading.lookup import ChunkSource, Lookup
    from shardckpt.reading.runs import ChunkRun, Place, ReadTask

    Ints = NDArray[np.int64]
    BandOfChunks = tuple[
        int, int, int, tuple[int, ...], tuple[tuple[NDArray[np.generic], tuple[int, ...], int], ...]
    ]
    """Offset of the first chunk in the file, number of chunks, bytes of an element, chunk's shape;
    and for each place of the band memory for the elements of all its chunks, their first index in
    each chunk, and the dimension along which chunks follow."""
    BandOfElements = tuple[Band, Sequence[Place], NDArray[np.uint8]]
    """A band, its destinations, and (chunks, bytes) the elements of its chunks."""
    Codec = Callable[[ReadTask, "ReadStored"], Iterator[BandOfElements]]
    """Gives the elements of a task's chunks, except those that were read to their destination.

    It may ask for the stored bytes of any other task, too: elements may be stored as differences
    from another chunk.
    """


@dataclass(frozen=True, slots=True)
class FetchedChunks:
    """The bytes of a task; they are valid until the thread fetches again."""

    task: ReadTask
    payloads: Sequence[memoryview]
    """For each chunk its stored bytes without the checksum."""
    data: NDArray[np.uint8]
    """The bytes of all runs, one after another, without the elements that were read directly into
    their destination."""
    at: Ints
    """For each chunk its offset in `data`; for a chunk read into its destination the offset at
    which only its checksum ends the chunk."""
    bands: Sequence[tuple[Band, Sequence[Place]]]
    """The bands that were not read into their destinations, and their destinations."""

    def checksums(self) -> NDArray[np.uint32]:
        """For each chunk the checksum at its end."""
        last = self.at + self.task.chunks.length[self.task.begin : self.task.end] - CHECKSUM_BYTES
        checksums: NDArray[np.uint32] = self.data[
            last[:, np.newaxis] + np.arange(CHECKSUM_BYTES)
        ].view("<u4")[:, 0]
        return checksums

    def stored(self, band: Band) -> NDArray[np.uint8]:
        """(chunks, bytes) stored bytes of a band's chunks, without their checksums.

        The chunks have equal lengths.
        """
        begin, length = (
            int(self.at[band.begin - self.task.begin]),
            int(self.task.chunks.length[band.begin]),
        )
        rows = self.data[begin : begin + (band.end - band.begin) * length].reshape(-1, length)
        return rows[:, : length - self.task.source.checksum_bytes]


class ReadStored(Protocol):
    """Reads the stored bytes of a task's chunks, and verifies them; `ChunkReader` does."""

    def __call__(self, task: ReadTask, *, direct: bool) -> FetchedChunks:
        """Read a task; with `direct`, its bytes may be read directly into their destination.

        `direct` says that stored bytes are elements.
        """


def raw(task: ReadTask, read: ReadStored) -> Iterator[BandOfElements]:
    """The codec of chunks whose stored bytes are their elements."""
    fetched = read(task, direct=True)
    for band, places in fetched.bands:
        yield band, places, fetched.stored(band)


def zstd(task: ReadTask, read: ReadStored) -> Iterator[BandOfElements]:
    """The codec of compressed chunks; memory has room for the elements of one at a time."""
    fetched = read(task, direct=False)
    for band, places in fetched.bands:
        part = band.chunks.requested.part_of(band.begin)
        for row in range(band.begin, band.end if places else band.begin):
            where, alone = (
                f"{band.chunks.requested.where(row)}, {task.file}",
                Band(band.chunks, row, row + 1),
            )
            stored = np.asarray(fetched.payloads[row - task.begin])
            yield (
                alone,
                places_of([alone])[0],
                decompress(stored, part.chunk_bytes, where)[np.newaxis],
            )


CODECS: Mapping[str | None, Codec] = {None: raw, "zstd": zstd}
"""The codec of each `compression` of a commit record."""


class Resolver(Protocol):
    """Turns requests for tensors of a checkpoint into requests for stored tensors.

    Safe to use from several threads.
    """

    place: Store
    """The place of the checkpoint's own chunks."""

    def resolve(self, requests: Sequence[Request]) -> Sequence[Request]:
        """The requests for the stored tensors, each with the source of its chunks.

        The source is left out if it is the reader's own.

        Raises:
            MissingDataError, FormatError: a place that holds chunks is gone, was replaced, or does
                not hold the tensor.
        """

    def check_places(self, requests: Sequence[Request]) -> None:
        """Raise a clear error if a place with chunks of the requests was replaced or deleted.

        Only changes since the place was opened count.
        """


class ReadableChunks:
    """An attempt that holds chunks; a `Resolver` for a checkpoint whose tensors are all there."""

    checksum_bytes = CHECKSUM_BYTES
    """Bytes of the checksum at the end of each chunk."""

    def __init__(self, place: Store, table: Lookup, codec: Codec = raw) -> None:
        """Nothing is read yet; for the arguments see `ChunkSource` and `Codec`."""
        self.place, self.table, self.codec = place, table, codec

    def resolve(self, requests: Sequence[Request]) -> Sequence[Request]:
        """See `Resolver`."""
        return requests

    def check_places(self, requests: Sequence[Request]) -> None:
        """See `Resolver`.

        The attempt was opened by the caller, who compares it with the checkpoint.
        """

    def lengths(self, nbytes: int) -> tuple[int, int]:
        """See `ChunkSource`."""
        most = nbytes + CHECKSUM_BYTES
        # ZSTD_compressBound.
        return (most, most) if self.codec is raw else (CHECKSUM_BYTES, most + (most >> 8) + 64)

    def read_into(self, task: ReadTask, vectors: Sequence[Sequence[memoryview]]) -> None:
        """Read the bytes of each run of a task into its memory, one vector after another.

        Raises:
            MissingDataError: the file does not exist.
            CorruptionError: the file ends before a run does.
            StorageError: the file cannot be read.
        """
        path = self.place.local_path(task.file)
        run = task.runs[0]
        try:
            if path is None:
                for run, into in zip(task.runs, vectors, strict=True):
                    self.place.read_into(task.file, run.start, into)
                return
            # Without O_NONBLOCK, opening a pipe in place of the file would block.
            with OpenFile(str(path), os.O_RDONLY | os.O_NONBLOCK) as fd:
                for run, into in zip(task.runs, vectors, strict=True):
                    scatter_read(fd, run.start, run.nbytes, into)
        except (OSError, EOFError, MissingDataError, CorruptionError) as e:
            raise _typed_error(e, task, run) from e

    def verify(self, fetched: FetchedChunks) -> None:
        """Compare each chunk with the table and with its own checksum.

        CorruptionError if one differs.
        """
        task = fetched.task
        expected = task.chunks.crc[task.begin : task.end]
        actual = np.fromiter(map(crc32c.crc32c, fetched.payloads), np.uint32, len(expected))
        wrong = (actual != expected) | (fetched.checksums() != expected)
        if wrong.any():
            raise damaged_chunk(task, task.begin + int(np.argmax(wrong)))


def as_readable(source: ChunkSource | None) -> ReadableChunks:
    """The source of chunks that were found, to read them."""
    assert isinstance(source, ReadableChunks)
    return source


def damaged_chunk(task: ReadTask, row: int) -> ShardckptError:
    """The error for a chunk of a task that does not have its checksum."""
    chunks = task.chunks
    place = f"{task.source.place}/{task.file}, bytes {chunks.offset[row]} to {chunks.stop(row)}"
    return of_one_tensor(
        CorruptionError(
            f"{chunks.requested.where(row)} is damaged: {place}, do not have the checksum that "
            "was written. Replace the file with a backup."
        )
    )


class Fetch:
    """Reads the bytes of tasks. Safe to use from several threads."""

    def __init__(self, *, scratch: int, of_thread: threading.local) -> None:
        """Read from the places of the tasks' attempts.

        Args:
            scratch: bytes of each thread's buffer; a larger run gets a larger buffer.
            of_thread: holds that buffer.
        """
        self._least = scratch
        self._scratch = of_thread

    def __call__(self, task: ReadTask, *, direct: bool) -> FetchedChunks:
        """Read a task, as `ReadStored`, but verify nothing."""
        fetched, vectors = _lay_out(
            task, _scratch_buffer(self._scratch, task.nbytes, self._least), direct=direct
        )
        as_readable(task.source).read_into(task, vectors)
        return fetched

    def move(self, task: ReadTask) -> int | None:
        """Read, verify and copy a task's raw chunks with the extension.

        The chunks are compared with their checksums and copied to their destinations.

        Returns:
            The row of the first chunk that is damaged; None: all are right.

        Raises:
            MissingDataError, CorruptionError, StorageError: the file is missing or too short, or
                cannot be read.
        """
        chunks, path = task.chunks, task.source.place.local_path(task.file)
        scratch = _scratch_buffer(self._scratch, extension.SCRATCH_BYTES, extension.SCRATCH_BYTES)
        bands = _describe([band for run in task.runs for band in run.bands])
        row, crcs = task.begin, np.ascontiguousarray(chunks.crc[task.begin : task.end], np.uint32)
        error: OSError | EOFError | None
        try:
            with OpenFile(str(path), os.O_RDONLY | os.O_NONBLOCK) as fd:
                done, error = _read_bands(fd, bands, crcs, scratch)
            row += done
        except OSError as e:
            error = e
        if error is not None:
            run = next(run for run in task.runs if row < run.end)
            raise _typed_error(error, task, run) from error
        return row if row < task.end else None


def _read_bands(
    fd: int, bands: tuple[BandOfChunks, ...], crcs: NDArray[np.uint32], scratch: NDArray[np.uint8]
) -> tuple[int, OSError | EOFError | None]:
    """Read chunks from a file, compare them with their checksums, and copy them to their places.

    Args:
        fd: the file.
        bands: chunks and their places.
        crcs: (n,) checksums of all chunks.
        scratch: memory for this call.

    Returns:
        The number of chunks that were read: all of them, or those before the first that cannot be
        read. And the reason: the system's error, or the end of the file, or None: it does not have
        its checksum.
    """
    done = 0
    while done < len(crcs):
        how, done, error = extension.moving.read_chunks(
            fd, bands, done, crcs, scratch, extension.LONGEST_S
        )
        if how == extension.SYSTEM_ERROR:
            return done, OSError(error, os.strerror(error))
        if how == extension.END_OF_FILE:
            return done, EOFError()
        if how == extension.WRONG_CHECKSUM:
            break
    return done, None


def _describe(bands: Sequence[Band]) -> tuple[BandOfChunks, ...]:
    """Consecutive bands of the same chunks as the extension takes them."""
    chunks, rows = bands[0].chunks, slice(bands[0].begin, bands[-1].end)
    part, offset = chunks.requested.part[rows].tolist(), chunks.offset[rows].tolist()
    described: list[BandOfChunks] = []
    for band, places in zip(bands, places_of(bands), strict=True):
        row, array = band.begin - rows.start, chunks.requested.parts[part[band.begin - rows.start]]
        itemsize, sides = array.request.dtype.itemsize, array.piece.chunks
        kind = extension.KINDS[itemsize]
        to = tuple(
            [
                (memory.view(kind), _corner(in_chunk, sides), along)
                for memory, in_chunk, along in places
            ]
        )
        described.append((offset[row], band.end - band.begin, itemsize, sides, to))
    return tuple(described)


def _corner(in_chunk: Index, chunks: tuple[int, ...]) -> tuple[int, ...]:
    """The first index of a part of a chunk."""
    return (
        (0,) * len(chunks)
        if in_chunk is EVERYTHING
        else tuple(side.start for side in in_chunk if isinstance(side, slice))
    )


def _lay_out(
    task: ReadTask, data: NDArray[np.uint8], *, direct: bool
) -> tuple[FetchedChunks, list[list[memoryview]]]:
    """Assign memory to each byte of a task before it is read.

    Memory is assigned by chunk and, for each run, one vector after another.

    Args:
        task: the task.
        data: scratch memory, of at least the bytes of the task.
        direct: whether a chunk's stored bytes are its elements, so that they may be read into their
            destination.
    """
    stored, checksum_bytes = data.data, task.source.checksum_bytes
    offset, length = (
        column[task.begin : task.end].tolist()
        for column in (task.chunks.offset, task.chunks.length)
    )
    places = iter(places_of([band for run in task.runs for band in run.bands]))
    payloads: list[memoryview] = []
    at: list[int] = []
    bands, vectors = [], []
    free = 0
    for run in task.runs:
        into: list[memoryview] = []
        kept, reached = free, run.start
        for band in run.bands:
            row, n = band.begin - task.begin, band.end - band.begin
            each, nbytes = length[row], length[row] - checksum_bytes
            free += offset[row] - reached
            reached = offset[row] + n * each
            destinations = next(places)
            place = band.destination(destinations, nbytes) if direct else None
            if place is None:
                bands.append((band, destinations))
                begins = range(free, free := free + n * each, each)
                at += begins
                payloads += [stored[begin : begin + nbytes] for begin in begins]
                continue
            for begin in range(0, len(place), nbytes):
                if kept < free:
                    into.append(stored[kept:free])
                payloads.append(place[begin : begin + nbytes])
                into.append(payloads[-1])
                # Only its checksum gets memory: fresh memory costs as much as reading into it.
                at.append(free - nbytes)
                kept, free = free, free + checksum_bytes
        if kept < free:
            into.append(stored[kept:free])
        vectors.append(into)
    return FetchedChunks(task, payloads, data, np.array(at), bands), vectors


def _scratch_buffer(thread: threading.local, nbytes: int, least: int) -> NDArray[np.uint8]:
    """A thread's scratch buffer, with at least `nbytes` bytes; its earlier contents are lost.

    Args:
        thread: holds the buffer.
        nbytes: bytes that are needed.
        least: bytes of a new buffer, unless more are needed.
    """
    scratch: NDArray[np.uint8] | None = getattr(thread, "buffer", None)
    if scratch is None or scratch.nbytes < nbytes:
        scratch = thread.buffer = np.empty(max(nbytes, least), np.uint8)
    return scratch


def scatter_read(fd: int, offset: int, length: int, vectors: Sequence[memoryview]) -> None:
    """Fill all vectors from one range of a file; EOFError if the file ends before."""
    while length:
        got = os.preadv(fd, vectors[:MOST_VECTORS], offset)
        if got == 0:
            raise EOFError
        offset, length = offset + got, length - got
        if length:
            vectors = after(vectors, got)


def _typed_error(error: Exception, task: ReadTask, run: ChunkRun) -> ShardckptError:
    """The typed error for a failed run, with the tensor and the file."""
    chunks, place = task.chunks, task.source.place
    first = f"{chunks.requested.where(run.begin)}: {place}/{task.file}"
    if isinstance(error, (FileNotFoundError, MissingDataError)):
        return of_one_tensor(MissingDataError(f"{first} is missing; put it back from a backup."))
    if isinstance(error, (EOFError, CorruptionError)):
        # Chunks are in order of offset; the error names the first one that reaches beyond the end
        # of the file.
        row = bisect_left(
            range(run.begin, run.end - 1),
            True,
            key=lambda row: not place.is_longer(task.file, chunks.stop(row) - 1),
        )
        row += run.begin
        where = f"{chunks.requested.where(row)}: {place}/{task.file}"
        return of_one_tensor(
            CorruptionError(
                f"{where} is cut off before byte {chunks.stop(row)}; replace it with a backup."
            )
        )
    if not isinstance(error, ShardckptError):
        return StorageError(
            f"{chunks.requested.where(run.begin)}: cannot read "
            f"{failure_at(f'{place}/{task.file}', error)}"
        )
    return StorageError(f"{first} cannot be read ({error}).")
