"""The packed layout's writer: a host's chunks one after another in a few data files, and an OCDBT index of them.

1. `put` appends a chunk to the current data file, in the order of the calls, and starts the next file when the
   chunk does not fit. On a local disk that is one `write` from the caller's buffer; elsewhere bytes are collected,
   because an object is written whole.
2. A full file is made durable on a background thread while the next one fills; never more than one waits.
3. All data files, and a B+tree leaf with the key and place of each chunk, make a *lane*, an OCDBT database
   `hosts/<host>/<n>`. A lane is complete when its manifest is written, after everything that it points to. A
   host needs more than one lane only for more chunks than a leaf should have.
4. TensorStore then reads the leaf back, and must see every key where it was put.

Memory: none of the data on a local disk; elsewhere at most three data files (one that fills, one that waits, and
TensorStore's copy of it), together within `memory_limit`. The index takes some 300 bytes per chunk until `finish`.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import tensorstore as ts

from shardckpt.errors import CommitError, ShardckptError
from shardckpt.io import ocdbt
from shardckpt.io.datafile import DataFile, create_data_file
from shardckpt.io.placements import PlacementLog, Placements
from shardckpt.io.store import Data, Store, byte_view, shared_context, storage_errors

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = ["DATA_FILE_BYTES", "LANE_KEYS", "PackedWriter"]

DATA_FILE_BYTES = 256 << 20
"""Several files of this size are written and read faster than one large one, and one is a unit of retry."""
LANE_KEYS = 1 << 16
"""Chunks per lane: keeps the leaf within a few MiB."""
_TREE = "d/tree"
_MANIFEST = "manifest.ocdbt"


class PackedWriter:
    """Writes one host's chunks; `finish` or `abort` ends it. For one thread."""

    def __init__(
        self,
        store: Store,
        host: int,
        *,
        memory_limit: int = 3 * DATA_FILE_BYTES,
        data_file_bytes: int = DATA_FILE_BYTES,
        lane_keys: int = LANE_KEYS,
    ) -> None:
        """Write below `store`, the attempt; nothing is created before the first chunk.

        Args:
            store: the attempt's place.
            host: this writer's number.
            memory_limit: bytes, see the module's docstring; a chunk larger than a third of it is let through.
            data_file_bytes: a data file ends before the chunk that would take it beyond this many bytes.
            lane_keys: chunks per lane, at most 2**20.
        """
        assert 0 < lane_keys <= ocdbt.MOST_KEYS, "TensorStore reads no larger leaf"
        self.lanes: list[str] = []
        """OCDBT databases, relative to the attempt."""
        self._store = store
        self._prefix = f"hosts/{host:05d}"
        self._data_file_bytes = data_file_bytes if store.location.local is not None else min(data_file_bytes, memory_limit // 3)
        self._lane_keys = lane_keys
        self._log = PlacementLog()
        self._lane: _Lane | None = None
        self._file: DataFile | None = None
        self._size = 0
        self._failed = False
        self._background = ThreadPoolExecutor(1, "shardckpt-packed")
        self._waiting: Future[None] | None = None

    def put(self, key: str, data: Data) -> None:
        """Append one encoded chunk; the buffer is the caller's again when this returns.

        Args:
            key: the chunk's zarr key below the root of the arrays, `model/w/c/0/1`.
            data: its bytes, as they are to be stored.

        Raises:
            CommitError: the key was put before, or there are no bytes.
            StorageError: this chunk, or one before it, could not be written.
        """
        self._begin()
        length = byte_view(data).nbytes
        if self._file is not None and self._size + length > self._data_file_bytes:
            self._end_file()
        if self._lane is not None and len(self._lane.keys) >= self._lane_keys:
            self._end_lane()
        lane, file = self._place()
        self._log.add(key, self._size, length)
        lane.add(key, self._size, length)
        file.append(data)
        self._size += length
        self._failed = False

    def finish(self) -> Placements:
        """Wait until everything is durable.

        Returns:
            Where each chunk is, in the order in which they were put; `lanes` names the databases.

        Raises:
            StorageError: something could not be written.
            CommitError: TensorStore does not find every chunk where it was put.
        """
        self._begin()
        self._end_lane()
        self._settle()
        self._background.shutdown()
        return self._log.placements()

    def abort(self) -> None:
        """Give up: stop writing and delete what this host has written so far; what cannot be deleted goes with the attempt."""
        self._background.shutdown()  # the one task that may wait closes its file
        if self._file is not None:
            self._file.abandon()
            self._file = None
        self._lane = None
        with contextlib.suppress(ShardckptError):  # the error that made the caller give up is the one to tell
            for lane in self.lanes:
                self._store.delete_prefix(f"{lane}/")

    def _begin(self) -> None:
        """Count the call as failed until it has gone well, so that no later one can succeed after an error."""
        if self._failed:
            raise CommitError(f"{self._store}: a chunk of this host could not be written, and the caller was told; call abort().")
        self._failed = True

    def _place(self) -> tuple[_Lane, DataFile]:
        """The lane and the data file for the next chunk."""
        if self._lane is None:
            name = f"{self._prefix}/{len(self.lanes)}"
            self.lanes.append(name)
            self._lane = _Lane(self._store.sub(name))
        if self._file is None:
            name = self._lane.next_file()
            self._file, self._size = create_data_file(self._lane.store, name), 0
            self._log.files.append(f"{self.lanes[-1]}/{name}")
        return self._lane, self._file

    def _end_file(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            self._later(file.close)

    def _end_lane(self) -> None:
        self._end_file()
        if self._lane is not None:
            lane, self._lane = self._lane, None
            self._later(lane.seal)

    def _later(self, task: Callable[[], None]) -> None:
        """Run a task in the background, after the one before it, whose error is raised here."""
        self._settle()
        self._waiting = self._background.submit(task)

    def _settle(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.result()


class _Lane:
    """The index of one OCDBT database, until it is written."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.keys: list[bytes] = []
        self._files: list[str] = []
        self._places: list[tuple[int, int, int]] = []

    def next_file(self) -> str:
        """Name one more data file, relative to the lane."""
        self._files.append(f"d/{len(self._files):05d}")
        return self._files[-1]

    def add(self, key: str, offset: int, length: int) -> None:
        """Note a chunk in the last of the files."""
        self.keys.append(key.encode())
        self._places.append((len(self._files) - 1, offset, length))

    def seal(self) -> None:
        """Write the leaf and then the manifest; have TensorStore read them."""
        order = sorted(range(len(self.keys)), key=self.keys.__getitem__)
        keys = [self.keys[i] for i in order]
        places = np.array(self._places, np.int64)[order]
        node = ocdbt.leaf_node(keys, self._files, *places.T)
        self.store.write(_TREE, node)
        self.store.write(_MANIFEST, ocdbt.manifest(_TREE, len(node), len(keys), int(places[:, 2].sum())))
        self._check(keys, places)

    def _check(self, keys: list[bytes], places: NDArray[np.int64]) -> None:
        """Compare what TensorStore reads with what was put."""
        base = self.store.kvstore()
        with storage_errors("read back", self.store):
            root = ts.ocdbt.dump(base, context=shared_context()).result()["versions"][-1]["root"]
            entries = ts.ocdbt.dump(base, root["location"], context=shared_context()).result()["entries"]
        found = [(e["key"], e.get("indirect_value")) for e in entries]
        wanted = [
            (key, f"value::{self._files[file]}:{offset}:{length}")
            for key, (file, offset, length) in zip(keys, places.tolist(), strict=True)
        ]
        if found != wanted:
            raise CommitError(f"{self.store}: TensorStore finds {len(found)} chunks where {len(wanted)} were put, or not in their places.")
