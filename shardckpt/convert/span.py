"""A run of bytes in a file: what a container format keeps one thing in."""

from __future__ import annotations

from dataclasses import dataclass

from shardckpt.errors import CorruptionError
from shardckpt.io.file_version import FileVersion

__all__ = ["FileVersion", "Span"]


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes `start` to `stop` of a file."""

    file: FileVersion
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
        return self.file.read(self.start + start, self.start + stop).data if start < stop else memoryview(b"")

    def part(self, start: int, stop: int) -> Span:
        """Some of it, counted from its own start."""
        return Span(self.file, self.start + start, self.start + stop)
