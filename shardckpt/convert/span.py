"""Runs of bytes in a file, in which container formats store their entries."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Protocol

import numpy as np

from shardckpt.errors import CorruptionError
from shardckpt.layout.records import record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shardckpt.layout.box import Box

_READ = 8 << 20
"""Bytes of one read of a long run."""


class Readable(Protocol):
    """The interface of a file, usually a `FileVersion`. Its text is its path or url."""

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Read bytes `start` to `stop`."""
        ...

    def read_into(self, start: int, vectors: Sequence[memoryview]) -> None:
        """Read consecutive bytes into several buffers, one after the other."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class LoadedFile:
    """A small file that has been read."""

    where: str
    """Its path or url."""
    data: bytes

    def __str__(self) -> str:
        """The path or url, for messages."""
        return self.where

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Read bytes `start` to `stop`; CorruptionError if the file ends before."""
        if stop > len(self.data):
            raise CorruptionError(f"{self} ends before byte {stop}; get it anew.")
        return np.frombuffer(self.data, np.uint8)[start:stop]

    def read_into(self, start: int, vectors: Sequence[memoryview]) -> None:
        """Read consecutive bytes into several buffers, one after the other.

        CorruptionError if the file ends before.
        """
        data = self.read(start, start + sum(map(len, vectors))).data
        for vector in vectors:
            vector[:], data = data[: len(vector)], data[len(vector) :]


@record
class Span:
    """Bytes `start` to `stop` of a file."""

    file: Readable
    start: int
    stop: int

    def __len__(self) -> int:
        """Length in bytes."""
        return self.stop - self.start

    def __str__(self) -> str:
        """The file and the range of bytes."""
        return f"{self.file}, bytes {self.start} to {self.stop}"

    def read(self, start: int, stop: int) -> memoryview:
        """Read a range of bytes, counted from the span's start.

        Raises:
            CorruptionError: the range is not in the span, or the file ends before it.
            ReplacedError: the file has changed or was deleted.
            StorageError: the file cannot be read.
        """
        if not 0 <= start <= stop <= len(self):
            raise CorruptionError(
                f"{self}: bytes {start} to {stop} are needed, but there are {len(self)}; replace "
                "it with a backup."
            )
        return (
            memoryview(self.file.read(self.start + start, self.start + stop).data)
            if start < stop
            else memoryview(b"")
        )

    def part(self, start: int, stop: int) -> Span:
        """A part of the span, counted from its start."""
        return Span(self.file, self.start + start, self.start + stop)


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run of bytes that may have a checksum."""

    span: Span
    crc: int | None
    """CRC-32 of all its bytes; None: unknown."""

    def check(self, parts: Sequence[memoryview]) -> None:
        """Compare the checksum with consecutive parts, if these are all of the run's bytes.

        Raises:
            CorruptionError: the checksum differs.
        """
        if self.crc is None or sum(map(len, parts)) != len(self.span):
            return
        crc = 0
        for part in parts:
            crc = zlib.crc32(part, crc)
        self._compare(crc)

    def check_all(self) -> None:
        """Read all of the run's bytes and compare the checksum, which is known.

        Raises:
            CorruptionError: the checksum differs, or the file is too short.
            ReplacedError, StorageError: the file has changed, or cannot be read.
        """
        crc = 0
        for begin in range(0, len(self.span), _READ):
            crc = zlib.crc32(self.span.read(begin, min(begin + _READ, len(self.span))), crc)
        self._compare(crc)

    def _compare(self, crc: int) -> None:
        if crc != self.crc:
            raise CorruptionError(
                f"{self.span}: its CRC-32 is {crc:#010x}, and {self.crc:#010x} was written; "
                "replace it with a backup."
            )


def find_runs(shape: Sequence[int], box: Box, itemsize: int) -> tuple[NDArray[np.int64], int]:
    """The runs of bytes of a box in a tensor that is one run of bytes, row by row.

    Args:
        shape: shape of the tensor.
        box: one of its boxes, not empty.
        itemsize: bytes of an element.

    Returns:
        (n,) The first byte of each contiguous part, in row-major order, and the length of each part
        in bytes.
    """
    if box.shape == tuple(shape):  # true for most tensors
        return np.zeros(1, np.int64), prod(shape) * itemsize
    # A run consists of the last dimensions that the box covers completely, and one more.
    along = max((d for d, n in enumerate(shape) if box.shape[d] < n), default=0)
    strides = [itemsize * prod(shape[d + 1 :]) for d in range(len(shape))]
    offsets = np.array(
        [sum(start * stride for start, stride in zip(box.start, strides, strict=True))], np.int64
    )
    for n, stride in zip(box.shape[:along], strides[:along], strict=True):
        offsets = np.add.outer(offsets, np.arange(n, dtype=np.int64) * stride).reshape(-1)
    return offsets, prod(box.shape[along:]) * itemsize
