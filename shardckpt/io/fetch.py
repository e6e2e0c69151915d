"""Getting a run's bytes from where they are stored.

On a local disk that is a positional scatter read: a chunk that is contiguous in its destination goes there
directly, any other into the thread's scratch buffer. On an object store it is one ranged read into memory of its own.
Nothing is verified here.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from shardckpt.errors import CorruptionError, MissingDataError, StorageError
from shardckpt.io.codec import CHECKSUM_BYTES
from shardckpt.io.vectors import MOST_VECTORS, after

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from shardckpt.io.bands import Band, Place
    from shardckpt.io.runs import Run
    from shardckpt.io.store import Store

__all__ = ["Fetch", "Fetched", "LocalFetch", "ObjectFetch", "scatter_read"]

_NONE = np.empty(0, np.uint32)


@dataclass(frozen=True, slots=True)
class Fetched:
    """The bytes of a run; they are good until the thread fetches again."""

    run: Run
    payloads: Sequence[memoryview]
    """Per chunk the stored bytes without the checksum."""
    checksums: NDArray[np.uint32]
    """Per chunk the checksum that they end in."""
    data: NDArray[np.uint8]
    """All of the run's bytes, but of what is where it goes already."""
    bands: Sequence[tuple[Band, Sequence[Place]]]
    """Those that are not, and their places."""

    def stored(self, band: Band) -> NDArray[np.uint8]:
        """(chunks, bytes) of a band's chunks, which are of one length, without their checksums."""
        begin = int(self.run.chunks.offset[band.begin]) - self.run.start
        length = int(self.run.chunks.length[band.begin])
        return self.data[begin : begin + (band.end - band.begin) * length].reshape(-1, length)[:, :-CHECKSUM_BYTES]


class Fetch(Protocol):
    """A way to get the bytes of runs. Safe to use from several threads."""

    def __call__(self, runs: Sequence[Run]) -> Iterator[Fetched]:
        """Read runs of one file, one after another.

        Raises:
            MissingDataError: there is no such file.
            CorruptionError: it ends before the run does.
            StorageError: it cannot be read.
        """


class LocalFetch:
    """Reads from a file on this machine."""

    def __init__(self, place: Store, *, direct: bool, scratch: int) -> None:
        """Read below `place`, the attempt.

        Args:
            place: where.
            direct: whether a chunk's bytes are its elements, so that they may go to where those go.
            scratch: bytes of each thread's buffer; a run that is larger takes what it takes.
        """
        self._place = place
        self._direct = direct
        self._least = scratch
        self._scratch = threading.local()

    def __call__(self, runs: Sequence[Run]) -> Iterator[Fetched]:
        """See `Fetch`."""
        with _errors(runs[0], self._place):
            # Without O_NONBLOCK a pipe in place of the file would be waited for.
            fd = os.open(str(self._place.local_path(runs[0].file)), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            for run in runs:
                fetched, vectors = self._laid_out(run)
                with _errors(run, self._place):
                    scatter_read(fd, run.start, run.nbytes, vectors)
                yield replace(fetched, checksums=_checksums(run, fetched.data))
        finally:
            os.close(fd)

    def _laid_out(self, run: Run) -> tuple[Fetched, list[memoryview]]:
        """Where each byte of a run goes, before it is read: by chunk, and one after another."""
        data = self._scratch_of(run.nbytes)[: run.nbytes]
        stored = data.data
        vectors: list[memoryview] = []
        payloads: list[memoryview] = []
        bands = []
        reached = 0
        for band in run.bands:
            spans = _spans(run, band)
            places = band.places()
            place = band.destination(places) if self._direct else None
            if place is None:
                payloads += [stored[begin:end] for begin, end in spans]
                bands.append((band, places))
                continue
            if reached < spans[0][0]:
                vectors.append(stored[reached : spans[0][0]])
            each = len(place) // len(spans)
            for i, (_, end) in enumerate(spans):
                payloads.append(payload := place[i * each : i * each + each])
                vectors += [payload, stored[end : end + CHECKSUM_BYTES]]
            reached = spans[-1][1] + CHECKSUM_BYTES
        if reached < run.nbytes:
            vectors.append(stored[reached:])
        return Fetched(run, payloads, _NONE, data, bands), vectors

    def _scratch_of(self, nbytes: int) -> NDArray[np.uint8]:
        """This thread's scratch buffer, at least that large; what it held is gone."""
        scratch: NDArray[np.uint8] | None = getattr(self._scratch, "buffer", None)
        if scratch is None or scratch.nbytes < nbytes:
            scratch = self._scratch.buffer = np.empty(max(nbytes, self._least), np.uint8)
        return scratch


class ObjectFetch:
    """Reads from an object."""

    def __init__(self, place: Store) -> None:
        """Read below `place`, the attempt."""
        self._place = place

    def __call__(self, runs: Sequence[Run]) -> Iterator[Fetched]:
        """See `Fetch`. For a moment takes three times a run's bytes, and then once."""
        for run in runs:
            with _errors(run, self._place):
                data = np.frombuffer(self._place.read(run.file, run.start, run.stop), np.uint8)
            payloads = [data[begin:end].data for band in run.bands for begin, end in _spans(run, band)]
            yield Fetched(run, payloads, _checksums(run, data), data, [(band, band.places()) for band in run.bands])


def _spans(run: Run, band: Band) -> list[tuple[int, int]]:
    """Where in a run's bytes those of each chunk of a band begin and end, without the checksum."""
    begin = int(run.chunks.offset[band.begin]) - run.start
    stored = int(run.chunks.length[band.begin])
    return [(at, at + stored - CHECKSUM_BYTES) for at in range(begin, begin + stored * (band.end - band.begin), stored)]


def _checksums(run: Run, data: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """The checksums that the chunks of a run end in."""
    rows = slice(run.begin, run.end)
    last = run.chunks.offset[rows] + run.chunks.length[rows] - (run.start + CHECKSUM_BYTES)
    found: NDArray[np.uint32] = data[last[:, np.newaxis] + np.arange(CHECKSUM_BYTES)].view("<u4")[:, 0]
    return found


@contextmanager
def _errors(run: Run, place: Store) -> Iterator[None]:
    """Errors that name the tensor and the file."""
    try:
        yield
    except (FileNotFoundError, MissingDataError) as e:
        raise MissingDataError(
            f"{_first(run, place)} is missing; restore it from a copy, or leave the tensor out with only= (an export: exclude=)."
        ) from e
    except (EOFError, CorruptionError) as e:
        # Chunks are in the order of their places: of those that reach beyond the end the first is named.
        row = bisect_left(range(run.begin, run.end - 1), True, key=lambda row: not place.is_longer(run.file, run.chunks.stop(row) - 1))
        row += run.begin
        raise CorruptionError(
            f"{run.chunks.wanted.where(row)}: {place}/{run.file} is cut off before byte {run.chunks.stop(row)}; restore it from a copy, "
            f"or leave the tensor out with only= (an export: exclude=)."
        ) from e
    except OSError as e:
        raise StorageError(f"{_first(run, place)} cannot be read ({e}).") from e


def _first(run: Run, place: Store) -> str:
    """For messages: a run's first chunk, and its file."""
    return f"{run.chunks.wanted.where(run.begin)}: {place}/{run.file}"


def scatter_read(fd: int, offset: int, length: int, vectors: Sequence[memoryview]) -> None:
    """Fill all vectors from one place of a file; EOFError where it ends before."""
    while length:
        got = os.preadv(fd, vectors[:MOST_VECTORS], offset)
        if got == 0:
            raise EOFError
        offset, length = offset + got, length - got
        if length:
            vectors = after(vectors, got)
