"""Reads of a task's bytes from the storage.

A chunk that is contiguous in its destination is read directly into it, any other chunk into the thread's scratch buffer. On a local
disk that is a positional scatter read, on an object store one ranged request. Nothing is verified here, but by the extension, which
reads raw chunks of a local disk, verifies them and copies them to their destinations in one call (`Fetch.move`).
"""

from __future__ import annotations

import os
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.errors import CorruptionError, MissingDataError, ShardckptError, StorageError, of_one_tensor
from shardckpt.format.zarr_arrays import CHECKSUM_BYTES
from shardckpt.io import extension
from shardckpt.io.buffers import MOST_VECTORS, after
from shardckpt.io.descriptor import OpenFile
from shardckpt.io.failures import failure_at
from shardckpt.reading.runs import EVERYTHING, places_of

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shardckpt.io.store import Store
    from shardckpt.reading.locate import Index
    from shardckpt.reading.runs import Band, ChunkRun, Place, ReadTask

    Ints = NDArray[np.int64]
    BandOfChunks = tuple[int, int, int, tuple[int, ...], tuple[tuple[NDArray[np.generic], tuple[int, ...], int], ...]]
    """Offset of the first chunk in the file, number of chunks, bytes of an element, shape of a chunk; and for each place of the band memory
    for the elements of all its chunks, their first index in each chunk, and the dimension along which chunks follow."""


@dataclass(frozen=True, slots=True)
class FetchedChunks:
    """The bytes of a task; they are valid until the thread fetches again."""

    task: ReadTask
    payloads: Sequence[memoryview]
    """For each chunk its stored bytes without the checksum."""
    data: NDArray[np.uint8]
    """The bytes of all runs, one after another, without the elements that were read directly into their destination."""
    at: Ints
    """For each chunk its offset in `data`; for a chunk read into its destination the offset at which only its checksum ends the chunk."""
    bands: Sequence[tuple[Band, Sequence[Place]]]
    """The bands that were not read into their destinations, and their destinations."""
    checksum_bytes: int = CHECKSUM_BYTES
    """Bytes of the checksum at the end of each chunk."""

    def checksums(self) -> NDArray[np.uint32]:
        """For each chunk the checksum at its end."""
        last = self.at + self.task.chunks.length[self.task.begin : self.task.end] - CHECKSUM_BYTES
        found: NDArray[np.uint32] = self.data[last[:, np.newaxis] + np.arange(CHECKSUM_BYTES)].view("<u4")[:, 0]
        return found

    def stored(self, band: Band) -> NDArray[np.uint8]:
        """(chunks, bytes) stored bytes of a band's chunks, which have equal lengths, without their checksums."""
        begin, length = int(self.at[band.begin - self.task.begin]), int(self.task.chunks.length[band.begin])
        return self.data[begin : begin + (band.end - band.begin) * length].reshape(-1, length)[:, : length - self.checksum_bytes]


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

    def __call__(self, task: ReadTask) -> FetchedChunks:
        """Read a task.

        Raises:
            MissingDataError: the file does not exist.
            CorruptionError: the file ends before a run does.
            StorageError: the file cannot be read.
        """
        place = task.source.place
        direct = task.source.codec is None  # then a chunk's stored bytes are its elements
        fetched, vectors = lay_out(task, scratch_buffer(self._scratch, task.nbytes, self._least), direct=direct)
        path = place.local_path(task.file)
        run = task.runs[0]
        try:
            if path is None:
                for run, into in zip(task.runs, vectors, strict=True):
                    place.read_into(task.file, run.start, into)
                return fetched
            # Without O_NONBLOCK, opening a pipe in place of the file would block.
            with OpenFile(str(path), os.O_RDONLY | os.O_NONBLOCK) as fd:
                for run, into in zip(task.runs, vectors, strict=True):
                    scatter_read(fd, run.start, run.nbytes, into)
        except (OSError, EOFError, MissingDataError, CorruptionError) as e:
            raise _said(e, task, run, place) from e
        return fetched

    def move(self, task: ReadTask) -> int | None:
        """Read a task's raw chunks with the extension, compare them with their checksums, and copy them to their destinations.

        Returns:
            The row of the first chunk that is damaged; None: all are right.

        Raises:
            MissingDataError, CorruptionError, StorageError: as for a call.
        """
        place, chunks = task.source.place, task.chunks
        path = place.local_path(task.file)
        scratch = scratch_buffer(self._scratch, extension.SCRATCH_BYTES, extension.SCRATCH_BYTES)
        places = iter(places_of([band for run in task.runs for band in run.bands]))
        bands = [_described(band, next(places)) for run in task.runs for band in run.bands]
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
            raise _said(error, task, run, place) from error
        return row if row < task.end else None


def _read_bands(
    fd: int, bands: Sequence[BandOfChunks], crcs: NDArray[np.uint32], scratch: NDArray[np.uint8]
) -> tuple[int, OSError | EOFError | None]:
    """Read chunks from a file, compare them with their checksums, and copy them to their places.

    Args:
        fd: the file.
        bands: chunks and their places.
        crcs: (n,) checksums of all chunks.
        scratch: memory for this call.

    Returns:
        The number of chunks that were read: all of them, or those before the first that cannot be read. And the reason: the system's
        error, or the end of the file, or None: it does not have its checksum.
    """
    some = tuple(
        (
            offset,
            count,
            itemsize,
            chunk,
            tuple((array.view(extension.KINDS[array.itemsize]), start, along) for array, start, along in places),
        )
        for offset, count, itemsize, chunk, places in bands
    )
    done = 0
    while done < len(crcs):
        how, done, error = extension.moving.read_chunks(fd, some, done, crcs, scratch, extension.LONGEST_S)
        if how == extension.SYSTEM_ERROR:
            return done, OSError(error, os.strerror(error))
        if how == extension.END_OF_FILE:
            return done, EOFError()
        if how == extension.WRONG_CHECKSUM:
            break
    return done, None


def _described(band: Band, places: Sequence[Place]) -> BandOfChunks:
    """A band as the extension takes it."""
    chunks, part = band.chunks, band.chunks.wanted.part_of(band.begin)
    return (
        int(chunks.offset[band.begin]),
        band.end - band.begin,
        part.request.dtype.itemsize,
        part.piece.chunks,
        tuple((memory, _corner(in_chunk, part.piece.chunks), along) for memory, in_chunk, along in places),
    )


def _corner(in_chunk: Index, chunks: tuple[int, ...]) -> tuple[int, ...]:
    """The first index of a part of a chunk."""
    return (0,) * len(chunks) if in_chunk is EVERYTHING else tuple(side.start for side in in_chunk if isinstance(side, slice))


def lay_out(
    task: ReadTask, data: NDArray[np.uint8], *, direct: bool, checksum_bytes: int = CHECKSUM_BYTES
) -> tuple[FetchedChunks, list[list[memoryview]]]:
    """Assign memory to each byte of a task before it is read: by chunk, and for each run one vector after another.

    Args:
        task: the task.
        data: scratch memory, of at least the bytes of the task.
        direct: whether a chunk's stored bytes are its elements, so that they may be read into their destination.
        checksum_bytes: bytes of the checksum at the end of each chunk.
    """
    stored = data.data
    offset, length = (column[task.begin : task.end].tolist() for column in (task.chunks.offset, task.chunks.length))
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
            wanted = next(places)
            place = band.destination(wanted, nbytes) if direct else None
            if place is None:
                bands.append((band, wanted))
                begins = range(free, free := free + n * each, each)
                at += begins
                payloads += [stored[begin : begin + nbytes] for begin in begins]
                continue
            for begin in range(0, len(place), nbytes):
                if kept < free:
                    into.append(stored[kept:free])
                payloads.append(place[begin : begin + nbytes])
                into.append(payloads[-1])
                at.append(free - nbytes)  # only its checksum gets memory: fresh memory costs as much as reading into it
                kept, free = free, free + checksum_bytes
        if kept < free:
            into.append(stored[kept:free])
        vectors.append(into)
    return FetchedChunks(task, payloads, data, np.array(at), bands, checksum_bytes), vectors


def scratch_buffer(thread: threading.local, nbytes: int, least: int) -> NDArray[np.uint8]:
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


def _said(error: Exception, task: ReadTask, run: ChunkRun, place: Store) -> ShardckptError:
    """The typed error for a failed run, with the tensor and the file."""
    chunks = task.chunks
    first = f"{chunks.wanted.where(run.begin)}: {place}/{task.file}"
    if isinstance(error, (FileNotFoundError, MissingDataError)):
        return of_one_tensor(MissingDataError(f"{first} is missing; put it back from a backup."))
    if isinstance(error, (EOFError, CorruptionError)):
        # Chunks are in order of offset; the error names the first one that reaches beyond the end of the file.
        row = bisect_left(range(run.begin, run.end - 1), True, key=lambda row: not place.is_longer(task.file, chunks.stop(row) - 1))
        row += run.begin
        where = f"{chunks.wanted.where(row)}: {place}/{task.file}"
        return of_one_tensor(CorruptionError(f"{where} is cut off before byte {chunks.stop(row)}; replace it with a backup."))
    if not isinstance(error, ShardckptError):
        return StorageError(f"{chunks.wanted.where(run.begin)}: cannot read {failure_at(f'{place}/{task.file}', error)}")
    return StorageError(f"{first} cannot be read ({error}).")
