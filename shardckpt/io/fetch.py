"""Getting a run's bytes from where they are stored.

On a local disk that is one positional scatter read: a chunk that is contiguous in its destination goes there
directly, any other into the thread's scratch buffer. On an object store it is one ranged read into memory of its own.
Nothing is verified here.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from shardckpt.errors import CorruptionError, MissingDataError, StorageError
from shardckpt.io.codec import CHECKSUM_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from shardckpt.io.runs import Run
    from shardckpt.io.store import Store
    from shardckpt.io.wanted import Chunk

__all__ = ["MOST_VECTORS", "Fetch", "Fetched", "LocalFetch", "ObjectFetch"]

MOST_VECTORS = 1000
"""Buffers per scatter read, below the kernel's IOV_MAX of 1024."""
_LEAST_SCRATCH = 4 << 20


@dataclass(frozen=True, slots=True)
class Fetched:
    """A chunk and its bytes; they are good until the thread fetches again."""

    chunk: Chunk
    payload: NDArray[np.uint8]
    """The stored bytes without the checksum."""
    checksum: NDArray[np.uint8]
    """The checksum that they end in."""
    placed: bool
    """Whether the payload is where it goes already."""


class Fetch(Protocol):
    """A way to get the bytes of a run. Safe to use from several threads."""

    def __call__(self, run: Run) -> list[Fetched]:
        """Read a run.

        Raises:
            MissingDataError: there is no such file.
            CorruptionError: it ends before the run does.
            StorageError: it cannot be read.
        """


class LocalFetch:
    """Reads from a file on this machine."""

    def __init__(self, place: Store, *, direct: bool) -> None:
        """Read below `place`, the attempt; `direct`: a chunk's bytes may be its elements, so they may go to where those go."""
        self._place = place
        self._direct = direct
        self._scratch = threading.local()

    def __call__(self, run: Run) -> list[Fetched]:
        """See `Fetch`."""
        scratch = self._scratch_of(run.nbytes)
        vectors: list[memoryview] = []
        fetched = []
        for chunk in run.chunks:
            stored = scratch[chunk.offset - run.start : chunk.stop - run.start]
            destination = chunk.destination() if self._direct else None
            if destination is None:
                vectors.append(stored.data)
                fetched.append(Fetched(chunk, stored[:-CHECKSUM_BYTES], stored[-CHECKSUM_BYTES:], placed=False))
            else:
                vectors += [destination.data, stored[-CHECKSUM_BYTES:].data]
                fetched.append(Fetched(chunk, destination, stored[-CHECKSUM_BYTES:], placed=True))
        path = self._place.local_path(run.file)
        with _errors(run, self._place):
            _scatter_read(str(path), run.start, run.nbytes, vectors)
        return fetched

    def _scratch_of(self, nbytes: int) -> NDArray[np.uint8]:
        """This thread's scratch buffer, at least that large; what it held is gone."""
        scratch: NDArray[np.uint8] | None = getattr(self._scratch, "buffer", None)
        if scratch is None or scratch.nbytes < nbytes:
            scratch = self._scratch.buffer = np.empty(max(nbytes, _LEAST_SCRATCH), np.uint8)
        return scratch


class ObjectFetch:
    """Reads from an object."""

    def __init__(self, place: Store) -> None:
        """Read below `place`, the attempt."""
        self._place = place

    def __call__(self, run: Run) -> list[Fetched]:
        """See `Fetch`. For a moment takes three times the run's bytes, and then once."""
        with _errors(run, self._place):
            data = np.frombuffer(self._place.read(run.file, run.start, run.stop), np.uint8)
        fetched = []
        for chunk in run.chunks:
            stored = data[chunk.offset - run.start : chunk.stop - run.start]
            fetched.append(Fetched(chunk, stored[:-CHECKSUM_BYTES], stored[-CHECKSUM_BYTES:], placed=False))
        return fetched


@contextmanager
def _errors(run: Run, place: Store) -> Iterator[None]:
    """Errors that name the tensor and the file."""
    try:
        yield
    except (FileNotFoundError, MissingDataError) as e:
        raise MissingDataError(f"{_first(run, place)} is missing; restore it from a copy, or leave the tensor out with only=.") from e
    except (EOFError, CorruptionError) as e:
        # Chunks are in the order of their places: of those that reach beyond the end the first is named.
        lost = bisect_left(run.chunks, True, key=lambda chunk: not place.is_longer(run.file, chunk.stop - 1))
        chunk = run.chunks[min(lost, len(run.chunks) - 1)]
        raise CorruptionError(
            f"{chunk.where}: {place}/{run.file} is cut off before byte {chunk.stop}; restore it from a copy, or leave the tensor out "
            f"with only=."
        ) from e
    except OSError as e:
        raise StorageError(f"{_first(run, place)} cannot be read ({e}).") from e


def _first(run: Run, place: Store) -> str:
    """For messages: a run's first chunk, and its file."""
    return f"{run.chunks[0].where}: {place}/{run.file}"


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
