"""The packed layout's writer: a host's chunks one after another in a few data files, and an OCDBT index of them.

1. `put` appends a chunk to the current data file, in the order of the calls, and starts the next file when the
   chunk does not fit. On a local disk that is one `write` from the caller's buffer, or the extension moves the elements
   there (`put_blocks`). Elsewhere bytes are collected,
   because an object is written in one request.
2. Full files are made durable in the background while the next one fills: on a local disk one at a time, on an
   object store as many as memory has room for. There a file is one upload, and the unit of a retry.
3. All data files, and a B+tree leaf with the key and place of each chunk, make a *lane*, an OCDBT database
   `hosts/<host>/<n>`. A lane is complete when its manifest is written, after everything that it points to. A
   host needs several lanes only if it has more chunks than a leaf should have.
4. TensorStore then reads the leaf back, and must find every key at its place.

Memory: none of the data on a local disk. Elsewhere: a buffer for the file that is filled, and one for each file in flight, which
are used again and again, and kept for the next save. All of them are within `memory_limit`: files are at most a fifth of it. The index
takes some 300 bytes per chunk until `finish`.
"""

from __future__ import annotations

import contextlib
from array import array
from bisect import bisect_right
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from threading import Event
from typing import TYPE_CHECKING

import numpy as np
import tensorstore as ts

from shardckpt.errors import CommitError, ShardckptError
from shardckpt.io import ocdbt
from shardckpt.io.buffers import KeptBuffers
from shardckpt.io.datafile import DataFile, create_data_file
from shardckpt.io.failures import storage_errors
from shardckpt.io.store import Data, Store, byte_view, shared_context, with_new_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from shardckpt.io.datafile import BlocksOut

DATA_FILE_BYTES = 256 << 20
"""Bytes of a data file on a local disk: several files of this size are written and read faster than one large one."""
OBJECT_BYTES = 64 << 20
"""Bytes of a data file on an object store: several uploads are faster than one, and a failed one is sent again from its start."""
MOST_UPLOADS = 15
"""Most files in flight; one stream to an object store uses a small part of a host's bandwidth."""
object_buffers = KeptBuffers(256 << 20)
"""Memory of data files that are objects: four of the largest are kept from save to save. Fresh memory costs as much as sending it."""
_LEAST_BUFFERS = 5
"""Least buffers that `memory_limit` has room for."""
LANE_KEYS = 1 << 16
"""Most chunks per lane; keeps the leaf within a few MiB."""
_places_seen = Event()
"""Set when TensorStore has returned the expected places of all chunks of one lane of this process."""
_TREE = "d/tree"
_MANIFEST = "manifest.ocdbt"


@dataclass(frozen=True, slots=True)
class Extents:
    """The places of n chunks, in the order of the calls of `put`."""

    files: tuple[str, ...]
    """Data files, relative to the attempt; empty in the plain layout, where each chunk's key names its object."""
    file: NDArray[np.uint32]
    """(n,) index into `files`."""
    offset: NDArray[np.uint64]
    """(n,) offset of the first byte."""
    length: NDArray[np.uint64]
    """(n,) stored bytes."""

    def __len__(self) -> int:
        """Number of chunks."""
        return len(self.length)


class ExtentLog:
    """A growing list of extents: 20 bytes per chunk, plus its key, which detects duplicate keys."""

    def __init__(self) -> None:
        self.files: list[str] = []
        """Data files so far, relative to the attempt."""
        self._keys: set[str] = set()
        self._file = array("I")
        self._offset = array("Q")
        self._length = array("Q")

    def __len__(self) -> int:
        """Number of chunks so far."""
        return len(self._length)

    def add(self, keys: Sequence[str], offset: int, lengths: Sequence[int]) -> None:
        """Add chunks that lie one after another in the last file.

        Args:
            keys: one per chunk.
            offset: offset of the first chunk.
            lengths: bytes of each chunk.

        Raises:
            CommitError: a key was added before, or a chunk has no bytes.
        """
        if not all(lengths):
            raise CommitError(f"chunk {keys[lengths.index(0)]} has no bytes, not even a checksum.")
        before = len(self._keys)
        twice = None if self._keys.isdisjoint(keys) else next(key for key in keys if key in self._keys)
        self._keys.update(keys)
        if len(self._keys) != before + len(keys):
            twice = twice or next(key for i, key in enumerate(keys) if key in keys[:i])
            raise CommitError(f"chunk {twice} was put twice by one host; two tensors, or two boxes of one, claim the same chunk.")
        self._file.extend([max(0, len(self.files) - 1)] * len(keys))
        self._offset.extend(accumulate(lengths[:-1], initial=offset))
        self._length.extend(lengths)

    def extents(self, first: int = 0) -> Extents:
        """All extents from row `first` on."""
        columns = (
            np.array(self._file[first:], np.uint32),
            np.array(self._offset[first:], np.uint64),
            np.array(self._length[first:], np.uint64),
        )
        return Extents(tuple(self.files), *columns)


class PackedWriter:
    """Writes one host's chunks until `finish` or `abort`. For one thread."""

    def __init__(
        self,
        store: Store,
        host: int,
        *,
        folder: str | None = None,
        memory_limit: int = 8 * OBJECT_BYTES,
        data_file_bytes: int | None = None,
        lane_keys: int = LANE_KEYS,
        among: tuple[int, int] = (0, 1),
    ) -> None:
        """Write below `store`, the attempt; nothing is created before the first chunk.

        Args:
            store: the attempt's place.
            host: this writer's number.
            folder: folder of its files, relative to the attempt; None: `hosts/` and its number.
            memory_limit: bytes, see the module's docstring; a chunk larger than a fifth of it is allowed.
            data_file_bytes: most bytes of a data file, unless one chunk has more; by default
                `DATA_FILE_BYTES` or `OBJECT_BYTES`.
            lane_keys: chunks per lane, at most 2**20.
            among: (i, n): this is writer i of n in that folder, and uses every n-th lane number.
        """
        assert 0 < lane_keys <= ocdbt.MOST_KEYS, "TensorStore reads no larger leaf"
        self.lanes: list[str] = []
        """OCDBT databases, relative to the attempt."""
        self._store = store
        self._prefix = folder or f"hosts/{host:05d}"
        if store.location.local is not None:
            self._data_file_bytes, self._most_waiting = data_file_bytes or DATA_FILE_BYTES, 1
        else:
            self._data_file_bytes = max(1, min(data_file_bytes or OBJECT_BYTES, memory_limit // _LEAST_BUFFERS))
            self._most_waiting = max(1, min(MOST_UPLOADS, memory_limit // self._data_file_bytes - 1))
        self._lane_keys = lane_keys
        self._among = among
        self._log = ExtentLog()
        self._lane: _Lane | None = None
        self._file: DataFile | None = None
        self._size = 0
        self._failed = False
        self._buffer: NDArray[np.uint8] | None = None
        """The memory of the file that is filled, if it is an object."""
        self._background = ThreadPoolExecutor(self._most_waiting, "shardckpt-packed")
        self._waiting: deque[tuple[Future[None], DataFile, NDArray[np.uint8] | None]] = deque()

    def room(self, nbytes: int) -> NDArray[np.uint8] | None:
        """Memory in which the next chunks may be laid out, so that `put_all` need not copy them; None if there is none for so many."""
        if self._store.location.local is not None or nbytes > self._data_file_bytes - (0 if self._file is None else self._size):
            return None
        return self._place()[1].room(nbytes)

    @property
    def takes_blocks(self) -> bool:
        """Whether `put_blocks` may be called."""
        return self._store.location.local is not None

    def put_blocks(self, keys: Sequence[str], size: int, blocks: BlocksOut) -> None:
        """Append raw chunks of blocks; like `put_all`, but the extension copies the elements straight to the file.

        Args:
            keys: as for `put_all`, in the order of the blocks' chunks.
            size: stored bytes of each chunk.
            blocks: the elements; their checksums are known when this returns.
        """
        self._put(keys, [size] * len(keys), lambda file, begin, end, some: file.append_blocks(blocks, some.start, some.stop, end - begin))

    def put(self, key: str, data: Data) -> None:
        """Append one encoded chunk; like `put_all`."""
        view = byte_view(data)
        self.put_all([key], view, [view.nbytes])

    def put_all(self, keys: Sequence[str], data: Data, lengths: Sequence[int]) -> None:
        """Append encoded chunks; the caller may reuse the buffer when this returns.

        Args:
            keys: the chunks' zarr keys below the root of the arrays, `model/w/c/0/1`.
            data: their stored bytes, one after another.
            lengths: bytes of each.

        Raises:
            CommitError: a key was put before, or a chunk has no bytes.
            StorageError: these chunks, or earlier ones, could not be written.
        """
        view = byte_view(data)
        self._put(keys, lengths, lambda file, begin, end, _some: file.append(view[begin:end]))

    def put_each(self, keys: Sequence[str], chunks: Sequence[memoryview]) -> None:
        """Append encoded chunks, each from a buffer of its own; like `put_all`."""
        self._put(keys, list(map(len, chunks)), lambda file, _begin, _end, some: file.append_all(chunks[some]))

    def _put(self, keys: Sequence[str], lengths: Sequence[int], append: Callable[[DataFile, int, int, slice], None]) -> None:
        """Append encoded chunks; `append` gets a file, the first and last byte (among all chunks) for it, and the slice of chunks."""
        self._begin()
        ends = list(accumulate(lengths))
        first = begin = 0
        while first < len(keys):
            if self._file is not None and self._size + lengths[first] > self._data_file_bytes:
                self._end_file()
            if self._lane is not None and len(self._lane.keys) >= self._lane_keys:
                self._end_lane()
            lane, file = self._place()
            fitting = bisect_right(ends, begin + self._data_file_bytes - self._size)
            last = max(first + 1, min(fitting, first + self._lane_keys - len(lane.keys)))
            end = ends[last - 1]
            self._log.add(keys[first:last], self._size, lengths[first:last])
            lane.keys += map(str.encode, keys[first:last])
            append(file, begin, end, slice(first, last))
            self._size += end - begin
            first, begin = last, end
        self._failed = False

    def finish(self) -> Extents:
        """Wait until everything is durable.

        Returns:
            The place of each chunk, in the order of the calls; `lanes` names the databases.

        Raises:
            StorageError: a file could not be written.
            CommitError: TensorStore does not find every chunk at its place.
        """
        self._begin()
        self._end_lane()
        self._background.shutdown()
        return self._log.extents()

    def abort(self) -> None:
        """Stop writing and delete this host's files; files that cannot be deleted are removed with the attempt."""
        for _, file, _ in self._waiting:
            file.interrupt()
        self._background.shutdown(cancel_futures=True)
        for file in [*(file for _, file, _ in self._waiting), *([self._file] if self._file is not None else [])]:
            file.abandon()
        self._waiting.clear()
        self._file = self._buffer = None
        self._lane = None
        with contextlib.suppress(ShardckptError):  # the caller reports the error that made it give up
            for lane in self.lanes:
                self._store.delete_prefix(f"{lane}/")

    def _begin(self) -> None:
        """Mark the writer as failed until the call succeeds, so that no later call can succeed after an error."""
        if self._failed:
            raise CommitError(f"{self._store}: an earlier write of this host failed; call abort().")
        self._failed = True

    def _place(self) -> tuple[_Lane, DataFile]:
        """The lane and the data file for the next chunk."""
        if self._lane is None:
            first, step = self._among
            name = f"{self._prefix}/{first + step * len(self.lanes)}"
            self.lanes.append(name)
            self._lane = _Lane(self._store.sub(name), len(self._log))
        if self._file is None:
            name = self._lane.next_file()
            if self._store.location.local is None:
                self._buffer = object_buffers.take(self._data_file_bytes)
            self._file, self._size = create_data_file(self._lane.store, name, self._buffer), 0
            self._log.files.append(f"{self.lanes[-1]}/{name}")
        return self._lane, self._file

    def _end_file(self) -> None:
        """Make the current file durable in the background, as soon as there is room for one more."""
        if self._file is not None:
            while len(self._waiting) >= self._most_waiting:
                self._settle_one()
            (file, self._file), (buffer, self._buffer) = (self._file, None), (self._buffer, None)
            file.seal()
            self._waiting.append((self._background.submit(file.wait), file, buffer))

    def _end_lane(self) -> None:
        self._end_file()
        while self._waiting:
            self._settle_one()
        if self._lane is not None:
            lane, self._lane = self._lane, None
            lane.seal(self._log.extents(lane.first))

    def _settle_one(self) -> None:
        """Wait for the file that has waited longest, and raise its error."""
        waiting, _, buffer = self._waiting.popleft()
        waiting.result()
        if buffer is not None:
            object_buffers.give_back(buffer)


class _Lane:
    """The index of one OCDBT database until it is written."""

    def __init__(self, store: Store, first: int) -> None:
        self.store = store
        self.first = first
        """Number of chunks that were put before its first one."""
        self.keys: list[bytes] = []
        self._files: list[str] = []

    def next_file(self) -> str:
        """The name of one more data file, relative to the lane."""
        self._files.append(f"d/{len(self._files):05d}")
        return self._files[-1]

    def seal(self, extents: Extents) -> None:
        """Write the leaf and then the manifest; read them back with TensorStore.

        Args:
            extents: places of its chunks; the last of the files are its own.
        """
        order = sorted(range(len(self.keys)), key=self.keys.__getitem__)
        keys = [self.keys[i] for i in order]
        before = len(extents.files) - len(self._files)
        places = np.stack([extents.file - np.uint32(before), extents.offset, extents.length], axis=1).astype(np.int64)[order]
        node = ocdbt.leaf_node(keys, self._files, *places.T)
        self.store.write(_TREE, node)
        self.store.write(_MANIFEST, ocdbt.manifest(_TREE, len(node), len(keys), int(places[:, 2].sum())))
        self._check(keys, places)

    @with_new_keys
    def _check(self, keys: list[bytes], places: NDArray[np.int64]) -> None:
        """Compare TensorStore's view with the chunks that were put: keys always, places only the first time in a process.

        `ts.ocdbt.dump`, which shows places, leaks some 500 bytes per key each time (0.1.86).
        """
        base = self.store.kvstore()
        if _places_seen.is_set():
            with storage_errors("read back", self.store):
                database = ts.KvStore.open({"driver": "ocdbt", "base": base.spec()}, context=shared_context(self.store.location)).result()
                listed = database.list().result()
            if listed != keys:
                raise CommitError(f"{self.store}: TensorStore finds {len(listed)} chunks where {len(keys)} were put.")
            return
        with storage_errors("read back", self.store):
            root = ts.ocdbt.dump(base, context=shared_context(self.store.location)).result()["versions"][-1]["root"]
            entries = ts.ocdbt.dump(base, root["location"], context=shared_context(self.store.location)).result()["entries"]
        found = [(e["key"], e.get("indirect_value")) for e in entries]
        wanted = [
            (key, f"value::{self._files[file]}:{offset}:{length}")
            for key, (file, offset, length) in zip(keys, places.tolist(), strict=True)
        ]
        if found != wanted:
            raise CommitError(f"{self.store}: TensorStore finds {len(found)} chunks where {len(wanted)} were put, or not in their places.")
        _places_seen.set()
