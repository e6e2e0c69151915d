"""The elements of the chunks that a process wrote last.

The process makes the differences of the next version from them.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from shardckpt.errors import CommitError
from shardckpt.format.differences import difference, pack_changes, whole
from shardckpt.io import extension
from shardckpt.io.buffers import Arena

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardckpt.format.record import CheckpointRecord, Contents
    from shardckpt.frameworks.base import Source
    from shardckpt.frameworks.coordination import Coordinator
    from shardckpt.io.store import Store
    from shardckpt.state.flatten import Flat

    Rows = NDArray[np.uint8]
    """(chunks, bytes) elements of chunks in their stored form."""
    Chunks = Sequence[NDArray[Any]]
    """Elements of chunks: arrays of any strides whose elements have 1, 2, 4 or 8 bytes, or rows of
    bytes."""


class SkippedError(CommitError):
    """A version is not written, because a later one has come while it waited.

    This is the same on all processes.
    """


class VersionToWrite(Protocol):
    """A checkpoint that may be stored as differences from an earlier one.

    `selected` and `converted` are asked on the thread that saves, the rest in the background.
    """

    handle: Any
    """The `SaveHandle` of the save that writes it: set before its thread starts; None: not yet."""
    kept: KeptChunks
    proof: bool
    """Whether the staged copies are compared with the tensors that they were made of."""
    supersedes: Mapping[str, str | None]
    """Checkpoints beside it that it supersedes, on the committing process: name → attempt. Their
    markers are written just before it is published."""

    def selected(self, flat: Flat) -> Flat:
        """The part of a state to write."""

    def converted(self, sources: dict[str, Source]) -> dict[str, Source]:
        """The tensors to write, by name, made from those of the state."""

    def await_turn(
        self, place: Store, coordinator: Coordinator, stopped: Callable[[], str]
    ) -> None:
        """Wait until it can be written; an error ends the attempt, which has done nothing yet.

        Args:
            place: the checkpoint's place.
            coordinator: connects the processes.
            stopped: the reason for which this process stops waiting; "" if it does not.
        """

    def begin(self, contents: Contents, place: Store, attempt: str) -> Contents:
        """The contents of this process's state, with the chain that its chunks differ from.

        Without a chain, the chunks have all elements.

        Args:
            contents: without a chain.
            place: the checkpoint's place.
            attempt: name of the attempt.
        """

    def published(self, record: CheckpointRecord) -> None:
        """Note, on the committing process, that the version is the checkpoint."""

    def settle(self) -> None:
        """Do, on the committing process, what remains when all processes know that."""


class KeptChunks:
    """Elements of chunks by key. Threads may use it at the same time, for different chunks."""

    def __init__(self) -> None:
        """Keep nothing yet."""
        self._memory = Arena()  # in large pages chunks are compared faster
        self._unused = 0
        """Bytes of the memory's shared blocks that no chunk needs any more."""
        self._allocating = threading.Lock()
        self._chunks: dict[str, NDArray[np.uint8]] = {}
        self._version_of: dict[str, int] = {}
        """Number of the version that each chunk is of."""
        self._version = 0
        self._differing: Collection[str] = frozenset()
        self.attempt = ""
        """The attempt of the last version, which has these elements, or will have them."""

    def begin(self, attempt: str, differing: Collection[str]) -> None:
        """Begin a version.

        Args:
            attempt: the attempt that will have its elements.
            differing: paths of the arrays whose chunks may be stored as differences from the last
                version. A chunk that this process has not written in that version is stored whole.
        """
        for key in [key for key, version in self._version_of.items() if version != self._version]:
            gone = self._chunks.pop(key).nbytes
            self._unused += gone if Arena.shares_block(gone) else 0
            del self._version_of[key]
        shared = [key for key, kept in self._chunks.items() if Arena.shares_block(kept.nbytes)]
        if self._unused > sum(self._chunks[key].nbytes for key in shared):
            self._memory = Arena()
            self._unused = 0
            for key in shared:
                self._chunks[key] = self._allocate_copy(self._chunks[key], 0)
        self._version += 1
        self.attempt = attempt
        self._differing = differing

    def forget(self) -> None:
        """Forget all chunks: the version that has them was not published, or nothing follows it."""
        self._chunks.clear()
        self._version_of.clear()
        self._memory = Arena()
        self._unused = 0
        self.attempt = ""

    def keep(self, keys: Sequence[str], rows: Rows) -> None:
        """Keep copies of chunks."""
        for key, row in zip(keys, rows, strict=True):
            kept = self._chunks.get(key)
            if kept is None or kept.nbytes != row.nbytes:
                self._chunks[key] = self._allocate_copy(row, 0 if kept is None else kept.nbytes)
            else:
                kept[:] = row  # fresh memory costs more
            self._version_of[key] = self._version

    def _allocate_copy(self, row: NDArray[np.uint8], replaced_bytes: int) -> NDArray[np.uint8]:
        """Copy a row to new memory; `replaced_bytes` of old memory become unused."""
        with self._allocating:
            self._unused += replaced_bytes if Arena.shares_block(replaced_bytes) else 0
            kept = self._memory.array(row.shape, np.uint8).view(np.uint8)
        kept[:] = row
        return kept

    def differences(
        self, keys: Sequence[str], paths: Sequence[str], chunks: Chunks, itemsize: int
    ) -> tuple[list[bytes], int]:
        """The stored form of chunks without checksums, and the bytes of their changed elements.

        From then on the chunks are kept.

        All elements of a chunk count that is not compared.

        Args:
            keys: one per chunk.
            paths: path of each chunk's array.
            chunks: their elements.
            itemsize: bytes of an element.
        """
        stored, compared, changed = [b""] * len(keys), list[int](), 0
        for i, (key, path) in enumerate(zip(keys, paths, strict=True)):
            kept, chunk = self._chunks.get(key), chunks[i]
            if (
                kept is not None
                and path in self._differing
                and self._version_of[key] == self._version - 1
                and kept.nbytes == chunk.nbytes
            ):
                compared.append(i)
                self._version_of[key] = self._version
            else:
                row = _contiguous_bytes(chunk)
                self.keep([key], row[np.newaxis])
                stored[i] = whole(row)
                changed += row.nbytes
        pairs = [(self._chunks[keys[i]], chunks[i]) for i in compared]
        for i, (encoded, count) in zip(compared, _differences(pairs, itemsize), strict=True):
            stored[i] = encoded
            changed += count * itemsize
        return stored, changed


def _contiguous_bytes(chunk: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(chunk).reshape(-1).view(np.uint8)


def _differences(
    pairs: Sequence[tuple[NDArray[np.uint8], NDArray[Any]]], itemsize: int
) -> Iterator[tuple[bytes, int]]:
    """The `difference` of each old and new chunk; the extension compares many with one call."""
    if extension.moving is None or itemsize not in extension.COMPARED:
        yield from (difference(old, _contiguous_bytes(new), itemsize) for old, new in pairs)
        return
    olds = tuple(old for old, _ in pairs)
    news = tuple(new if new.itemsize == itemsize else new.view(f"u{itemsize}") for _, new in pairs)
    nbytes = max((new.nbytes for new in news), default=0)
    elements = nbytes // itemsize
    room = np.empty(
        elements * (1 + itemsize) + 4 * (elements // 256 + 1) + len(pairs) * nbytes // 4, np.uint8
    )
    results = np.empty((len(pairs), 3), np.int64)
    done = 0
    while done < len(pairs):
        ready = done + extension.moving.find_changes(
            olds[done:], news[done:], itemsize, results[done:], room
        )
        at = 0
        for new, (changed, long_gaps, crc) in zip(
            news[done:ready], results[done:ready].tolist(), strict=True
        ):
            body = room[at : (at := at + changed * (1 + itemsize) + 4 * long_gaps)]
            packed = pack_changes(body, changed, long_gaps, new.nbytes, crc) if changed else b""
            yield whole(_contiguous_bytes(new)) if packed is None else packed, changed
        done = ready
