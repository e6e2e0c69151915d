"""Measurement of a storage's read and write rates from this machine, for estimates of time.

Reading: boxes of the largest tensors, through the library's own reader with checksum comparison, at
most 64 MiB and about one second. On a local disk the page cache is first asked to drop these bytes;
otherwise the rate of memory would be measured. Writing: one object of 32 MiB in the
destination, or above it if it does not exist, until it is durable; then it is deleted.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.errors import OptionError, StorageError
from shardckpt.io.status import is_directory
from shardckpt.io.store import Store
from shardckpt.io.url import parse
from shardckpt.layout.box import Box, BoxArray
from shardckpt.options import parse_bytes
from shardckpt.plan.pieces import overlaps
from shardckpt.text import Message, named

if TYPE_CHECKING:
    from shardckpt.format.structure import TensorRecord
    from shardckpt.reading.checkpoint import Checkpoint
    from shardckpt.reading.places import Places

SAMPLE = 16 << 20
"""Bytes of one read sample, and the fewest from which a rate is computed."""
MOST_SAMPLES = 4
LONGEST = 1.0
"""Seconds after which no further sample is read."""
WRITTEN = 32 << 20
"""Bytes of the write sample."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Bytes per second."""

    per_second: float
    sample_bytes: int | None = None
    """Bytes read or written for the measurement; None: the rate was given."""
    sample_seconds: float | None = None
    """Wall-clock seconds of the measurement."""

    @classmethod
    def measured(cls, nbytes: int, seconds: float) -> Rate:
        """The rate of a sample."""
        return cls(nbytes / max(seconds, 1e-9), nbytes, seconds)


@dataclass(frozen=True, slots=True)
class Rates:
    """Read and write rates of one storage or of two; None: not known."""

    read: Rate | None = None
    write: Rate | None = None


def given_rates(text: str) -> Rates:
    """Parse the rates of an option such as "1GiB" or "1GiB,400MiB".

    The rates are in bytes per second, for reading and writing.

    >>> given_rates("1GiB,512MiB").write.per_second
    536870912.0

    Raises:
        OptionError: the text is not a rate.
    """
    numbers = [float(parse_bytes(part, "rate")) for part in text.split(",")]
    if not 1 <= len(numbers) <= 2 or min(numbers) <= 0:
        raise OptionError(
            Message(
                named("rate", text),
                ": give bytes per second for reading and writing, as in 1GiB,400MiB.",
            )
        )
    return Rates(Rate(numbers[0]), Rate(numbers[-1]))


def measure_read(checkpoint: Checkpoint, places: Places | None) -> Rate | None:
    """Measure stored bytes of chunks read per second.

    None if less than `SAMPLE` bytes were read, which says nothing about more.

    Args:
        checkpoint: the checkpoint to read.
        places: places of its chunks, if known; they are then dropped from the page cache first.
    """
    tensors = sorted(checkpoint.record.structure.tensors.values(), key=lambda t: -t.nbytes)[
        :MOST_SAMPLES
    ]
    samples = [(tensor, _sample(tensor)) for tensor in tensors if tensor.nbytes]
    if not samples:
        return None
    stats = checkpoint.stats
    before, seconds = stats.bytes_read, 0.0
    for tensor, box in samples:
        if places is not None:
            _forget(checkpoint, places, tensor, box)
        begun = perf_counter()
        checkpoint.read(tensor.name, box)
        seconds += perf_counter() - begun
        if seconds > LONGEST:
            break
    nbytes = stats.bytes_read - before
    return Rate.measured(nbytes, seconds) if nbytes >= SAMPLE else None


def _sample(tensor: TensorRecord) -> Box:
    """A box of complete chunks at the middle of a tensor's first array.

    The box has at most `SAMPLE` bytes unless one chunk is larger.
    """
    piece = tensor.pieces[0]
    stop = list(piece.shape)
    for d, side in enumerate(piece.chunks):
        most = SAMPLE // max(
            1, prod(stop[:d]) * prod(stop[d + 1 :]) * tensor.dtype.storage.itemsize
        )
        if stop[d] > most:
            stop[d] = min(stop[d], max(side, most // side * side))
    start = [
        (n - s) // 2 // side * side
        for n, s, side in zip(piece.shape, stop, piece.chunks, strict=True)
    ]
    corner = [a + b for a, b in zip(piece.start, start, strict=True)]
    return Box(tuple(corner), tuple(a + s for a, s in zip(corner, stop, strict=True)))


def _forget(checkpoint: Checkpoint, places: Places, tensor: TensorRecord, box: Box) -> None:
    """Ask a local disk's page cache to drop the chunks of a box; harmless if it does not."""
    piece = tensor.pieces[0]
    places_of_chunks = places.of(tensor.name, [piece])
    for chunk in np.unique(overlaps(piece, BoxArray.of([box], box.ndim)).chunk).tolist():
        number = int(places_of_chunks.file[chunk])
        path = (
            checkpoint.place.local_path(places.table.files[number])
            if number < len(places.table.files)
            else None
        )
        if path is None:
            return
        with suppress(OSError, AttributeError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                os.posix_fadvise(
                    fd,
                    int(places_of_chunks.offset[chunk]),
                    int(places_of_chunks.length[chunk]),
                    os.POSIX_FADV_DONTNEED,
                )
            finally:
                os.close(fd)


def measure_write(url: str | os.PathLike[str]) -> Rate:
    """Measure bytes written per second, until durable, in a destination or above it.

    Raises:
        StorageError: writing there failed.
    """
    location = parse(url)
    if (path := location.local_path) is not None:
        existing = next(one for one in (path, *path.parents) if is_directory(one))
        location = parse(existing)
    store, key = Store.open(location), f".shardckpt-rate-{secrets.token_hex(8)}"
    data = np.random.default_rng(0).bytes(WRITTEN)
    begun = perf_counter()
    try:
        store.write(key, data)
        seconds = perf_counter() - begun
        store.delete(key)
    except BaseException:
        with suppress(StorageError):  # the first error says more
            store.delete(key)
        raise
    return Rate.measured(WRITTEN, seconds)
