"""The division of the memory limit among buffers and workers.

A worker has two buffers of the same size, its *room*: one is filled by reads while the chunks of
the other are written. In addition, memory is needed for reads and writes in progress:

- reads from a local disk: a scratch buffer per thread, of 4 MiB or the largest chunk. Reads from an
  object store: three copies of the data in flight (`reading.reader`). A compressed chunk is
  decompressed into additional memory.
- writes to a local disk: one compressed chunk, or nothing, and scratch buffers for reading back.
  Writes to an object store: five times a data file (`writing.packed`).

The remaining memory is the room. The interpreter and the libraries of each process come on top of
the limit: `PROCESS_BYTES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardckpt.errors import BudgetError
from shardckpt.io.cores import cores
from shardckpt.io.store import kind_of
from shardckpt.text import Message, file_size, mebibytes_above, named_size

if TYPE_CHECKING:
    from shardckpt.io.url import Location

PROCESS_BYTES = 128 << 20
"""Bytes that a process uses besides its buffers: Python, numpy, TensorStore, plans and lists of
chunks. Documented, and tested."""
READERS = 2
"""Threads that read from a local disk, per worker."""
_SCRATCH = 4 << 20
"""Bytes of a thread's scratch buffer, see `reading.fetch`."""
_REQUEST = 10 << 20
"""Bytes of a request to an object store, see `reading.reader`."""
_COPIES = 3
"""Copies of a request's bytes in memory."""
_OBJECT = 8 << 20
"""Minimum bytes of a data file on an object store; five data files are in memory, see
`writing.packed`."""
_FILES = 5
_COMFORTABLE = 128 << 20
"""Bytes per worker below which another worker would only take memory from the others."""
PARTS = 2
"""Batches of small steps that fit into one of the two buffers."""
_BATCH = 32 << 20
"""Bytes of a batch, where the work can be cut that finely. A larger batch is not faster: the first
use of each page of a buffer costs as much as copying it a few times, and no write starts before the
first batch is read."""
_WORTHWHILE = 512 << 20
"""Bytes of a job per worker below which another worker costs more than it saves: its start takes as
long as about 200 MiB."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Memory demands of the chunks and storages of a job."""

    source_chunk: int
    """Bytes of the largest source chunk, uncompressed."""
    target_chunk: int
    """Bytes of the largest target chunk, uncompressed."""
    source_local: bool
    target_local: bool
    source_compressed: bool
    target_compressed: bool

    @property
    def reading(self) -> int:
        """Minimum bytes for reads in progress."""
        unpacked = self.source_chunk * self.source_compressed
        if self.source_local:
            return READERS * (max(_SCRATCH, self.source_chunk) + unpacked)
        return _COPIES * max(_REQUEST, self.source_chunk) + unpacked

    @property
    def writing(self) -> int:
        """Minimum bytes for writes in progress."""
        packed = 2 * self.target_chunk * self.target_compressed
        read_back = READERS * max(_SCRATCH, self.target_chunk)
        return packed + (
            read_back if self.target_local else _FILES * max(_OBJECT, self.target_chunk)
        )

    @property
    def least(self) -> int:
        """Minimum bytes with which one worker can do any task."""
        return self.reading + self.writing + 2 * self.target_chunk


@dataclass(frozen=True, slots=True)
class Memory:
    """The number of workers, and the memory of each."""

    workers: int
    room: int
    """Bytes of each of the two buffers."""
    reading: int
    """Bytes for reads in progress."""
    writing: int
    """Bytes for writes in progress."""

    @property
    def batch(self) -> int:
        """Bytes up to which small steps are joined into a batch.

        A large cell uses the complete room.
        """
        return min(self.room // PARTS, _BATCH)

    @property
    def peak(self) -> int:
        """Bytes of all workers together, without `PROCESS_BYTES` of each."""
        return self.workers * (2 * self.room + self.reading + self.writing)


def share(
    limit: int, workers: int | None, tasks: int, length: int, sizes: Sizes, where: str
) -> Memory:
    """Divide the memory limit.

    Args:
        limit: bytes for all workers together.
        workers: number of workers; None: as many as are useful.
        tasks: number of tasks.
        length: approximate bytes that each task writes.
        sizes: memory demands of the tasks.
        where: the source's place, for messages.

    Raises:
        BudgetError: the limit is too small; names the need and a sufficient limit.
    """
    useful = min(tasks, tasks * length // _WORTHWHILE)
    wished = workers or max(1, min(cores(), useful, limit // max(_COMFORTABLE, sizes.least)))
    check_limit(limit, wished, sizes, where)
    mine = limit // wished
    spare = mine - sizes.least
    # Object stores are fast with more concurrent requests and larger data files.
    reading = sizes.reading + (0 if sizes.source_local else spare // 4)
    writing = sizes.writing + (0 if sizes.target_local else spare // 4)
    return Memory(wished, (mine - reading - writing) // 2, reading, writing)


def check_limit(limit: int, workers: int, sizes: Sizes, where: str) -> None:
    """Raise BudgetError unless `workers` workers can do any task within the memory limit.

    For the arguments see `share`.
    """
    if limit // workers < sizes.least:
        several = workers > 1
        reason = (
            f" is too little for {workers} worker{'s' if several else ''}: with chunks of "
            f"{file_size(sizes.source_chunk)} in the source and {file_size(sizes.target_chunk)} "
            f"in the target each needs {file_size(sizes.least)}; raise it to "
            f"{mebibytes_above(workers * sizes.least)}"
            f"{', or use fewer workers' if several else ''}."
        )
        raise BudgetError(Message(f"{where}: ", named_size("memory_limit", limit), reason))


def readers(location: Location, most: int = READERS) -> int | None:
    """Reader threads of a worker at a place: at most `most` on a disk.

    None: limited by memory only, where a request costs milliseconds.
    """
    return max(1, min(READERS, most)) if kind_of(location).near else None
