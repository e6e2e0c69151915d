"""A run of bytes in a file: what a container format keeps one thing in."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from shardckpt.errors import CorruptionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["LoadedFile", "Readable", "Span", "StoredRun"]


class Readable(Protocol):
    """A file; mostly a `FileVersion`. Its text is its path or url."""

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Some of its bytes."""
        ...

    def read_into(self, start: int, vectors: Sequence[memoryview]) -> None:
        """Some of its bytes, to several places one after the other."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class LoadedFile:
    """A small file that has been read."""

    where: str
    """Its path or url."""
    data: bytes

    def __str__(self) -> str:
        """As messages call it."""
        return self.where

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Some of its bytes; CorruptionError where it ends before."""
        if stop > len(self.data):
            raise CorruptionError(f"{self} ends before byte {stop}; get it anew.")
        return np.frombuffer(self.data, np.uint8)[start:stop]

    def read_into(self, start: int, vectors: Sequence[memoryview]) -> None:
        """Some of its bytes, to several places one after the other; CorruptionError where it ends before."""
        data = self.read(start, start + sum(map(len, vectors))).data
        for vector in vectors:
            vector[:], data = data[: len(vector)], data[len(vector) :]


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes `start` to `stop` of a file."""

    file: Readable
    start: int
    stop: int

    def __len__(self) -> int:
        """Bytes."""
        return self.stop - self.start

    def __str__(self) -> str:
        """The file, and which of its bytes."""
        return f"{self.file}, bytes {self.start} to {self.stop}"

    def read(self, start: int, stop: int) -> memoryview:
        """Some of its bytes, counted from its own start.

        Raises:
            CorruptionError: they are not in it, or the file ends before them.
            ReplacedError: the file has changed, or is gone.
            StorageError: it cannot be read.
        """
        if not 0 <= start <= stop <= len(self):
            raise CorruptionError(f"{self}: of these {len(self)} bytes those from {start} to {stop} are asked for; restore it from a copy.")
        return memoryview(self.file.read(self.start + start, self.start + stop).data) if start < stop else memoryview(b"")

    def part(self, start: int, stop: int) -> Span:
        """Some of it, counted from its own start."""
        return Span(self.file, self.start + start, self.start + stop)


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run of bytes that may have a checksum."""

    span: Span
    crc: int | None
    """CRC-32 of all of them; None: not known."""

    def check(self, parts: Sequence[memoryview]) -> None:
        """Compare the checksum with some of the bytes, if those are all: one part behind the other.

        Raises:
            CorruptionError: they are not what was written.
        """
        if self.crc is None or sum(map(len, parts)) != len(self.span):
            return
        found = 0
        for part in parts:
            found = zlib.crc32(part, found)
        if found != self.crc:
            raise CorruptionError(f"{self.span}: its CRC-32 is {found:#010x}, and {self.crc:#010x} was written; restore it from a copy.")
