"""What reading took: counted where it is done, asked for by users and tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock

__all__ = ["ReadStats"]


@dataclass(slots=True)
class ReadStats:
    """What reading took so far."""

    reads: int = 0
    """Read calls for chunks, or requests to an object store."""
    bytes_read: int = 0
    """Stored bytes of chunks that were read, checksums and small gaps included."""
    bytes_needed: int = 0
    """Bytes of the boxes asked for, as they lie in memory."""
    index_reads: int = 0
    """Reads of chunk tables, which say where the chunks are."""
    index_bytes: int = 0
    """Bytes of chunk tables that were read."""
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def count(self, *, reads: int = 0, read: int = 0, needed: int = 0) -> None:
        """Add reads of chunks."""
        with self._lock:
            self.reads += reads
            self.bytes_read += read
            self.bytes_needed += needed

    def count_index(self, nbytes: int) -> None:
        """Add a read of a chunk table."""
        with self._lock:
            self.index_reads += 1
            self.index_bytes += nbytes
