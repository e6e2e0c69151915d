"""The packed layout's writer: a host's chunks in a few data files, with an OCDBT index.

The chunks lie one after another in the files.

1. `append` adds chunks to the current data file of a thread, in the order of the calls, and starts
   the next file when a chunk does not fit. On a local disk that is one `write` from the caller's
   buffer, or the extension moves the elements there. Elsewhere bytes are collected, because an
   object is written in one request.
2. Full files are made durable in the background while the next one fills: on a local disk one at a
   time for each thread, on an object store as many as memory has room for. There a file is one
   upload, and the unit of a retry.
3. All data files, and a B+tree leaf with the key and place of each chunk, make a *lane*, an OCDBT
   database `hosts/<host>/<n>`, with a manifest. All are complete when the host's record is there. A
   host needs several lanes only if it has more chunks than a leaf should have.
4. The leaf is read back, and must have every key at its place (`commit.index.Lane`).

Memory: none of the data on a local disk. Elsewhere: a buffer for the file that is filled, and one
for each file in flight, which are used again and again, and kept for the next save. All of them are
within `memory_limit`: files are at most a fifth of it. The index takes some 300 bytes per chunk
until `finish`.
"""

from __future__ import annotations

import contextlib
from array import array
from bisect import bisect_right
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.commit.index import Lane
from shardckpt.errors import CommitError, ShardckptError
from shardckpt.io import ocdbt
from shardckpt.io.buffers import KeptBuffers
from shardckpt.io.datafile import BlocksOut, DataFile, create_data_file
from shardckpt.io.store import Store, byte_view
from shardckpt.io.threads import PoolCall, map_on_threads

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from shardckpt.io.datafile import Output

DATA_FILE_BYTES = 256 << 20
"""Bytes of a data file on a local disk: several files of this size are written and read faster than
one large one."""
OBJECT_BYTES = 64 << 20
"""Bytes of a data file on an object store: several uploads are faster than one, and a failed one is
sent again from its start."""
MOST_UPLOADS = 15
"""Most files in flight; one stream to an object store uses a small part of a host's bandwidth."""
object_buffers = KeptBuffers(256 << 20)
"""Memory of data files that are objects: four of the largest are kept from save to save. Fresh
memory costs as much as sending it."""
_LEAST_BUFFERS = 5
"""Least buffers that `memory_limit` has room for."""
LANE_KEYS = 1 << 16
"""Most chunks per lane; keeps the leaf within a few MiB."""


@dataclass(frozen=True, slots=True)
class Extents:
    """The places of n chunks, in the order of the calls of `append`.

    Those of one thread before those of the next.
    """

    files: tuple[str, ...]
    """Data files, relative to the attempt; empty in the plain layout, where each chunk's key names
    its object."""
    file: NDArray[np.uint32]
    """(n,) index into `files`."""
    offset: NDArray[np.uint64]
    """(n,) offset of the first byte."""
    length: NDArray[np.uint64]
    """(n,) stored bytes."""

    def __len__(self) -> int:
        """Number of chunks."""
        return len(self.length)

    @classmethod
    def concatenate(cls, parts: Sequence[Extents]) -> Extents:
        """The extents of several threads, in the same files."""
        return cls(
            parts[0].files,
            *(np.concatenate([getattr(p, c) for p in parts]) for c in ("file", "offset", "length")),
        )


class ExtentLog:
    """A growing list of extents: 20 bytes per chunk, plus its key, which detects duplicate keys."""

    def __init__(self) -> None:
        self.keys: dict[str, None] = {}
        """Keys of the chunks, in their order."""
        self._file = array("I")
        self._offset = array("Q")
        self._length = array("Q")

    def __len__(self) -> int:
        """Number of chunks so far."""
        return len(self._length)

    def add(self, keys: Sequence[str], file: int, offset: int, lengths: Sequence[int]) -> None:
        """Add chunks that lie one after another in a file.

        Args:
            keys: one per chunk.
            file: number of the file.
            offset: offset of the first chunk.
            lengths: bytes of each chunk.

        Raises:
            CommitError: a key was added before, or a chunk has no bytes.
        """
        if not all(lengths):
            raise CommitError(f"chunk {keys[lengths.index(0)]} has no bytes, not even a checksum.")
        before = len(self.keys)
        twice = (
            None
            if self.keys.keys().isdisjoint(keys)
            else next(key for key in keys if key in self.keys)
        )
        self.keys.update(dict.fromkeys(keys))
        if len(self.keys) != before + len(keys):
            raise _twice(twice or next(key for i, key in enumerate(keys) if key in keys[:i]))
        self._file.extend([file] * len(keys))
        self._offset.extend(accumulate(lengths[:-1], initial=offset))
        self._length.extend(lengths)

    def extents(self, files: Sequence[str] = ()) -> Extents:
        """All extents, in files of these names."""
        columns = (
            np.array(self._file, np.uint32),
            np.array(self._offset, np.uint64),
            np.array(self._length, np.uint64),
        )
        return Extents(tuple(files), *columns)


def _twice(key: str) -> CommitError:
    claims = "two tensors, or two boxes of one, claim the same chunk."
    return CommitError(f"chunk {key} was put twice by one host; {claims}")


class PackedWriter:
    """Writes one host's chunks until `finish` or `abort`.

    Each of its threads has data files of its own.
    """

    def __init__(
        self,
        store: Store,
        host: int,
        *,
        folder: str | None = None,
        memory_limit: int = 8 * OBJECT_BYTES,
        data_file_bytes: int | None = None,
        lane_keys: int = LANE_KEYS,
        threads: int = 1,
    ) -> None:
        """Write below `store`, the attempt; nothing is created before the first chunk.

        Args:
            store: the attempt's place.
            host: this writer's number.
            folder: folder of its files, relative to the attempt; None: `hosts/` and its number.
            memory_limit: bytes, see the module's docstring; a chunk larger than a fifth of it is
                allowed.
            data_file_bytes: most bytes of a data file, unless one chunk has more; by default
                `DATA_FILE_BYTES` or `OBJECT_BYTES`.
            lane_keys: chunks per lane, at most 2**20.
            threads: threads that may append at a time. Elsewhere than on a local disk they share
                the memory.
        """
        self._store = store
        if store.appends:
            data_file_bytes, most_waiting = data_file_bytes or DATA_FILE_BYTES, 1
        else:
            memory_limit //= threads
            data_file_bytes = max(
                1, min(data_file_bytes or OBJECT_BYTES, memory_limit // _LEAST_BUFFERS)
            )
            most_waiting = max(1, min(MOST_UPLOADS // threads, memory_limit // data_file_bytes - 1))
        self._lanes = _Lanes(store, folder or f"hosts/{host:05d}", lane_keys)
        self._files = [
            _DataFiles(store, self._lanes, data_file_bytes, most_waiting) for _ in range(threads)
        ]
        self._failed = False

    @property
    def lanes(self) -> list[str]:
        """OCDBT databases, relative to the attempt."""
        return self._lanes.names

    def room(self, nbytes: int) -> NDArray[np.uint8] | None:
        """Memory in which the next chunks may be laid out, so that `append` need not copy them.

        None if there is none for so many.
        """
        alone = not self._store.appends and len(self._files) == 1
        return self._files[0].room(nbytes) if alone else None

    def append(
        self,
        keys: Sequence[str],
        data: Output,
        lengths: Sequence[int] | None = None,
        *,
        thread: int = 0,
    ) -> None:
        """Append encoded chunks; the caller may reuse the buffers when this returns.

        Args:
            keys: the chunks' zarr keys below the root of the arrays, `model/w/c/0/1`.
            data: a list with the stored bytes of each chunk; or, one after another, the bytes of
                all in one buffer, or blocks.
            lengths: bytes of each chunk; None: those of the list's buffers.
            thread: number of the thread that calls.

        Raises:
            CommitError: a key was put before, or a chunk has no bytes.
            StorageError: these chunks, or earlier ones, could not be written.
        """
        if self._failed:
            raise self._unusable()
        try:
            if isinstance(data, list):
                data = [*map(byte_view, data)]
                lengths = [*map(len, data)]
            assert lengths is not None, "only a list says where each chunk ends"
            self._files[thread].append(keys, data, lengths)
        except BaseException:
            self._failed = True
            raise

    def finish(self) -> Extents:
        """Wait until everything is durable.

        Returns:
            The place of each chunk; `lanes` names the databases.

        Raises:
            StorageError: a file could not be written.
            CommitError: TensorStore does not find every chunk at its place, or two threads have put
                the same chunk.
        """
        extents = self.end()
        self._failed = True  # until this call succeeds
        self.wait()
        for lane in self.lanes_of(extents):
            lane.write(self._store)
        self._failed = False
        return extents

    def end(self) -> Extents:
        """End all data files: the place of each chunk. `wait` waits until they are durable."""
        if self._failed:
            raise self._unusable()
        self._failed = True  # until this call succeeds
        for files in self._files:
            files.end()
        logs = [files.log for files in self._files]
        first = logs[0].keys
        for log in logs[1:]:
            if not first.keys().isdisjoint(log.keys):
                raise _twice(next(key for key in log.keys if key in first))
            first.update(log.keys)
        extents = Extents.concatenate([log.extents(self._lanes.files) for log in logs])
        self._failed = False
        return extents

    def wait(self) -> None:
        """After `end`: wait until all data files are durable, or will be with `sync`."""
        map_on_threads(_DataFiles.wait, self._files)

    def lanes_of(self, extents: Extents) -> Iterator[Lane]:
        """After `end`: the databases over the data files, to be written."""
        return self._lanes.laid_out([*self._files[0].log.keys], extents)

    def stop(self) -> None:
        """Stop writing; the files stay."""
        self._failed = True
        for files in self._files:
            files.abandon()

    def abort(self) -> None:
        """Stop writing and delete this host's files.

        Files that cannot be deleted are removed with the attempt.
        """
        self.stop()
        # The caller reports the error that made it give up.
        with contextlib.suppress(ShardckptError):
            for lane in self.lanes:
                self._store.delete_prefix(f"{lane}/")

    def _unusable(self) -> CommitError:
        return CommitError(f"{self._store}: an earlier write of this host failed; call abort().")


class _DataFiles:
    """The data files of one thread, one after another."""

    def __init__(self, store: Store, lanes: _Lanes, most_bytes: int, most_waiting: int) -> None:
        self.log = ExtentLog()
        self._store = store
        self._lanes = lanes
        self._most_bytes = most_bytes
        self._most_waiting = most_waiting
        self._file: DataFile | None = None
        self._number = 0
        """Number of the current file."""
        self._size = 0
        self._buffer: NDArray[np.uint8] | None = None
        """The memory of the file that is filled, if it is an object."""
        self._background = ThreadPoolExecutor(most_waiting, "shardckpt-packed")
        self._waiting: deque[tuple[PoolCall[None], DataFile, NDArray[np.uint8] | None]] = deque()

    def room(self, nbytes: int) -> NDArray[np.uint8] | None:
        """Memory of the current file for the next chunks.

        None if it has no room for so many bytes.
        """
        self._settle_ended()
        if nbytes > self._most_bytes - (0 if self._file is None else self._size):
            return None
        return self._current().room(nbytes)

    def append(self, keys: Sequence[str], data: Output, lengths: Sequence[int]) -> None:
        """See `PackedWriter.append`."""
        self._settle_ended()
        ends = list(accumulate(lengths))
        first = begin = 0
        while first < len(keys):
            if self._file is not None and self._size + lengths[first] > self._most_bytes:
                self._end_file()
            file = self._current()
            fitting = bisect_right(ends, begin + self._most_bytes - self._size)
            last = first + self._lanes.add(self._number, max(1, fitting - first))
            if last == first:  # the lane is full
                self._end_file()
                continue
            end = ends[last - 1]
            self.log.add(keys[first:last], self._number, self._size, lengths[first:last])
            file.append(_between(data, slice(first, last), slice(begin, end)))
            self._size += end - begin
            first, begin = last, end

    def end(self) -> None:
        """End the current file, if it is an object: it is sent."""
        if not self._store.appends:
            self._end_file()

    def wait(self) -> None:
        """Wait until all files are durable, or will be with the store's `sync`."""
        while self._waiting:
            self._settle_one()
        if self._file is not None:  # without a thread: a small save starts none
            self._file.wait()
            self._file = None
        self._background.shutdown()

    def abandon(self) -> None:
        """Stop writing."""
        for _, file, _ in self._waiting:
            file.interrupt()
        self._background.shutdown(cancel_futures=True)
        for file in [
            *(file for _, file, _ in self._waiting),
            *([self._file] if self._file is not None else []),
        ]:
            file.abandon()
        self._waiting.clear()
        self._file = self._buffer = None

    def _current(self) -> DataFile:
        """The data file for the next chunk."""
        if self._file is None:
            self._number, lane, name = self._lanes.new_file()
            if not self._store.appends:
                self._buffer = object_buffers.take(self._most_bytes)
            self._file, self._size = create_data_file(lane, name, self._buffer), 0
        return self._file

    def _end_file(self) -> None:
        """Make the current file durable in the background, once there is room for one more."""
        if self._file is not None:
            while len(self._waiting) >= self._most_waiting:
                self._settle_one()
            (file, self._file), (buffer, self._buffer) = (self._file, None), (self._buffer, None)
            file.seal()
            self._waiting.append((PoolCall(self._background, file.wait), file, buffer))

    def _settle_ended(self) -> None:
        """Give back buffers of files that have arrived; not while bytes in them are appended."""
        while self._waiting and self._waiting[0][0].done():
            self._settle_one()

    def _settle_one(self) -> None:
        """Wait for the file that has waited longest, and raise its error."""
        waiting, _, buffer = self._waiting[0]
        waiting.result()  # after Ctrl-C here, `abandon` ends it, too
        self._waiting.popleft()
        if buffer is not None:
            object_buffers.give_back(buffer)


def _between(data: Output, chunks: slice, span: slice) -> Output:
    """The part of `data` with these chunks, which are these bytes of it."""
    if isinstance(data, BlocksOut):
        return replace(data, first=chunks.start, last=chunks.stop)
    return data[chunks] if isinstance(data, list) else byte_view(data)[span]


class _Lanes:
    """The OCDBT databases of a host, and the names of its data files.

    Safe to use from several threads.
    """

    def __init__(self, store: Store, folder: str, most_keys: int) -> None:
        assert 0 < most_keys <= ocdbt.MOST_KEYS, "TensorStore reads no larger leaf"
        self.names: list[str] = []
        """Databases, relative to the attempt."""
        self.files: list[str] = []
        """Data files, relative to the attempt."""
        self._store = store
        self._folder = folder
        self._most_keys = most_keys
        self._lane_of: list[int] = []
        """The lane of each file."""
        self._keys: list[int] = []
        """Number of keys of each lane."""
        self._changing = Lock()

    def new_file(self) -> tuple[int, Store, str]:
        """A data file in the newest lane that has room.

        The result is its number, the lane's place, and the file's name there.
        """
        with self._changing:
            if not self._keys or self._keys[-1] >= self._most_keys:
                self.names.append(f"{self._folder}/{len(self.names)}")
                self._keys.append(0)
            lane = len(self.names) - 1
            name = f"d/{self._lane_of.count(lane):05d}"
            self.files.append(f"{self.names[lane]}/{name}")
            self._lane_of.append(lane)
            return len(self.files) - 1, self._store.sub(self.names[lane]), name

    def add(self, file: int, keys: int) -> int:
        """Note up to `keys` further keys in a file; return how many its lane has room for."""
        with self._changing:
            lane = self._lane_of[file]
            count = min(keys, self._most_keys - self._keys[lane])
            self._keys[lane] += count
            return count

    def laid_out(self, keys: Sequence[str], extents: Extents) -> Iterator[Lane]:
        """All databases, of all chunks and their places."""
        lanes = np.array(self._lane_of, np.int64)
        places = np.stack([extents.file, extents.offset, extents.length], axis=1).astype(np.int64)
        for lane, name in enumerate(self.names):
            rows = np.flatnonzero(lanes[extents.file] == lane)
            order = sorted(rows.tolist(), key=keys.__getitem__)
            first = int(np.searchsorted(lanes, lane))
            files = [
                file.removeprefix(f"{name}/")
                for file in self.files[first : int(np.searchsorted(lanes, lane, "right"))]
            ]
            yield Lane(
                name, [keys[i].encode() for i in order], files, places[order] - (first, 0, 0)
            )
