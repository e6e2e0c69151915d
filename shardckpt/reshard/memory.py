"""Dividing the memory limit among buffers and workers.

A worker has two buffers of the same size, its *room*: what is read next is filled while other chunks are written. Beside
them are what is being read and what is on its way to the storage:

- read from a local disk: a scratch buffer per thread, of 4 MiB or the largest chunk; from an object store three copies of
  what is under way (`reading.reader`). A compressed chunk is unpacked beside that.
- written to a local disk: one compressed chunk, or nothing, and scratch buffers for reading back; to an object store five times
  a data file (`writing.packed`).

The rest is the room. The interpreter and the libraries of each process come on top of the limit: `PROCESS_BYTES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardckpt.errors import BudgetError
from shardckpt.excerpt import file_size, mebibytes_above
from shardckpt.io.threads import cores

if TYPE_CHECKING:
    from shardckpt.io.url import Location

__all__ = ["PARTS", "PROCESS_BYTES", "Memory", "Sizes", "check_limit", "readers", "share"]

PROCESS_BYTES = 128 << 20
"""What a process takes besides its buffers: Python, numpy, TensorStore, plans and lists of chunks. Stated, and tested."""
READERS = 2
"""Threads with which a worker reads from a local disk."""
_SCRATCH = 4 << 20
"""Bytes of a thread's scratch buffer, see `reading.fetch`."""
_REQUEST = 10 << 20
"""Bytes of a request to an object store, see `reading.reader`."""
_COPIES = 3
"""Times that they are in memory."""
_OBJECT = 8 << 20
"""Bytes of a data file on an object store at the least, and five of them are in memory, see `writing.packed`."""
_FILES = 5
_COMFORTABLE = 128 << 20
"""Bytes per worker below which another worker would only take room from the others."""
PARTS = 2
"""Batches of small steps that one of the two buffers has room for."""
_BATCH = 32 << 20
"""Bytes that are read at once, where work can be cut that small: more makes nothing faster, but the first use of every page of a
buffer costs what copying it a few times does, and nothing is written before the first of them is read."""
_WORTHWHILE = 512 << 20
"""Bytes of a job for each worker below which another one costs more than it saves: it starts in the time of some 200 MiB."""
_MOST_LOCAL = 8
"""Workers on one machine, unless told otherwise: more wait for the same disk."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the chunks and storages of a job demand."""

    source_chunk: int
    """Bytes of the largest chunk of the source, unpacked."""
    target_chunk: int
    """The same of the target."""
    source_local: bool
    target_local: bool
    source_compressed: bool
    target_compressed: bool

    @property
    def reading(self) -> int:
        """Bytes of what is being read, at the least."""
        unpacked = self.source_chunk * self.source_compressed
        if self.source_local:
            return READERS * (max(_SCRATCH, self.source_chunk) + unpacked)
        return _COPIES * max(_REQUEST, self.source_chunk) + unpacked

    @property
    def writing(self) -> int:
        """Bytes of what is being written, at the least."""
        packed = 2 * self.target_chunk * self.target_compressed
        read_back = READERS * max(_SCRATCH, self.target_chunk)
        return packed + (read_back if self.target_local else _FILES * max(_OBJECT, self.target_chunk))

    @property
    def least(self) -> int:
        """Bytes with which one worker can do any task."""
        return self.reading + self.writing + 2 * self.target_chunk


@dataclass(frozen=True, slots=True)
class Memory:
    """What one worker has."""

    workers: int
    room: int
    """Bytes of each of the two buffers."""
    reading: int
    """Bytes for what is being read."""
    writing: int
    """Bytes for what is being written."""

    @property
    def batch(self) -> int:
        """Bytes of the chunks to which what is small is joined, so as to be read at once; a large cell takes all the room."""
        return min(self.room // PARTS, _BATCH)

    @property
    def peak(self) -> int:
        """Bytes of all workers together, but for `PROCESS_BYTES` of each."""
        return self.workers * (2 * self.room + self.reading + self.writing)


def share(limit: int, workers: int | None, tasks: int, length: int, sizes: Sizes, where: str) -> Memory:
    """Share out the memory limit.

    Args:
        limit: bytes for all workers together.
        workers: how many; None: as many as are useful.
        tasks: how many there are.
        length: about how many bytes each of them writes.
        sizes: what they need.
        where: the source's place, for messages.

    Raises:
        BudgetError: it does not suffice; says for what, and how much would.
    """
    useful = min(tasks, tasks * length // _WORTHWHILE)
    wished = workers or max(1, min(cores(), _MOST_LOCAL, useful, limit // max(_COMFORTABLE, sizes.least)))
    check_limit(limit, wished, sizes, where)
    mine = limit // wished
    spare = mine - sizes.least
    # More requests at a time, and larger data files, are what an object store is fast with.
    reading = sizes.reading + (0 if sizes.source_local else spare // 4)
    writing = sizes.writing + (0 if sizes.target_local else spare // 4)
    return Memory(wished, (mine - reading - writing) // 2, reading, writing)


def check_limit(limit: int, workers: int, sizes: Sizes, where: str) -> None:
    """Raise BudgetError unless so many workers can do any task within the memory limit; for the arguments see `share`."""
    if limit // workers < sizes.least:
        several = workers > 1
        raise BudgetError(
            f"{where}: memory_limit={file_size(limit)} is too little for {workers} worker{'s' if several else ''}: with chunks of "
            f"{file_size(sizes.source_chunk)} in the source and {file_size(sizes.target_chunk)} in the target each needs "
            f"{file_size(sizes.least)}; raise it to {mebibytes_above(workers * sizes.least)}{', or use fewer workers' if several else ''}."
        )


def readers(location: Location, most: int = READERS) -> int | None:
    """Threads with which a worker reads there, `most` on a disk. None: as many as memory allows, where a request costs milliseconds."""
    return max(1, min(READERS, most)) if location.local is not None else None
