"""The plain layout's writer: every chunk an object of its own, `zarr/<array path>/c/0/1`.

`append` writes chunks, and a few threads make them durable, because that is slow on a disk and
needs a round trip elsewhere. Memory: none of the data on a local disk (the bytes are in the file
when `append` returns); elsewhere `in_flight_bytes`, for the copies of chunks in flight.
"""

from __future__ import annotations

import contextlib
import resource
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from shardckpt.errors import CommitError, ShardckptError, StorageError
from shardckpt.format.zarr_arrays import plain_key
from shardckpt.io.datafile import BlocksOut, DataFile, create_data_file
from shardckpt.io.status import is_file
from shardckpt.io.store import Store, byte_view
from shardckpt.io.threads import PoolCall
from shardckpt.writing.packed import ExtentLog, Extents

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from shardckpt.io.datafile import Output

_THREADS = 16
_MOST_OPEN = 256
"""Most files waiting to be made durable; each is open on a local disk, and a thread also has the
file's directory open."""


def most_open() -> int:
    """Most files that may wait: a quarter of the process's file descriptors.

    So files and directories use at most half of the descriptors.
    """
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        _MOST_OPEN if allowed == resource.RLIM_INFINITY else max(1, min(_MOST_OPEN, allowed // 4))
    )


class PlainWriter:
    """Writes one host's chunks until `finish` or `abort`. For one thread."""

    def __init__(
        self,
        store: Store,
        *,
        in_flight_bytes: int = 64 << 20,
        drafts: str | None = None,
        shared: bool = False,
        place: Callable[[str], str] = plain_key,
    ) -> None:
        """Write below `store`, the attempt; nothing is created before the first chunk.

        Args:
            store: the attempt's place.
            in_flight_bytes: see the module's docstring; a larger chunk is sent alone.
            drafts: directory, relative to the attempt, where chunks are written on a local disk
                before they replace any file of their names; None: no such file may exist.
            shared: whether all chunks go to `drafts`, because other writers may have written the
                same ones. If not, only those do that another process has written, against the
                plan: the committer refuses both, and says why.
            place: the object of each key, relative to `store`.
        """
        self._store = store
        self._limit = in_flight_bytes
        self._drafts = drafts
        self._all_drafted = self._any_drafted = shared
        self._place = place
        self._log = ExtentLog()
        self._most_open = most_open()
        self._pool = ThreadPoolExecutor(min(_THREADS, self._most_open), "shardckpt-plain")
        self._waiting: deque[tuple[PoolCall[None], DataFile, int]] = deque()
        self._in_flight = 0
        self._failed = False

    def room(self, _nbytes: int) -> None:
        """None: each chunk is an object of its own."""

    def append(
        self,
        keys: Sequence[str],
        data: Output,
        lengths: Sequence[int] | None = None,
        *,
        thread: int = 0,
    ) -> None:
        """Write encoded chunks, each to an object; like `PackedWriter.append`."""
        assert thread == 0, "this writer is for one thread"
        assert not isinstance(data, BlocksOut), "each chunk is an object"
        if isinstance(data, list):
            chunks: Iterable[memoryview] = map(byte_view, data)
        else:
            assert lengths is not None, "only a list says where each chunk ends"
            view, ends = byte_view(data), [*accumulate(lengths, initial=0)]
            chunks = (view[begin:end] for begin, end in pairwise(ends))
        for key, chunk in zip(keys, chunks, strict=True):
            self._append(key, chunk)

    def _append(self, key: str, chunk: memoryview) -> None:
        self._begin()
        self._log.add([key], 0, 0, [chunk.nbytes])
        while self._waiting and (
            self._in_flight + chunk.nbytes > self._limit or len(self._waiting) >= self._most_open
        ):
            self._settle_one()
        file = self._create(self._place(key))
        try:
            file.append(chunk)
            file.seal()
        except BaseException:
            file.abandon()
            raise
        self._waiting.append((PoolCall(self._pool, file.wait), file, chunk.nbytes))
        self._in_flight += chunk.nbytes
        self._failed = False

    def _create(self, name: str) -> DataFile:
        if not self._all_drafted:
            try:
                return create_data_file(self._store, name)
            except StorageError as e:
                exists = isinstance(e.__cause__, FileExistsError | NotADirectoryError)
                if self._drafts is None or not exists or not self._is_there(name):
                    raise
                path = self._store.local_path(name)
                if path is None or not is_file(path):
                    raise CommitError(
                        f"{self._store}: another process has written chunks of other dimensions "
                        f"where {name} belongs; give tensors that differ names of their own."
                    ) from e
        self._any_drafted = True
        return create_data_file(self._store, name, draft=f"{self._drafts}/{len(self._log)}")

    def _is_there(self, name: str) -> bool:
        """Whether an existing file, or a part of its path, has that name to the letter.

        Where file systems ignore case, it may be the chunk of another tensor.
        """
        folder = ""
        for part in name.split("/"):
            children = self._store.list_children(folder)
            if part in children:  # a file
                return True
            if f"{part}/" not in children:
                return False
            folder += f"{part}/"
        return True

    def finish(self) -> Extents:
        """Wait until everything is durable.

        Returns:
            The length of each chunk, in the order of the calls; each chunk is an object, so there
            are no files.

        Raises:
            StorageError: a chunk could not be written.
        """
        self._begin()
        while self._waiting:
            self._settle_one()
        self._pool.shutdown()
        self._remove_drafts()
        return self._log.extents()

    def abort(self) -> None:
        """Stop writing.

        This host's chunks lie among other hosts' chunks and are removed with the attempt.
        """
        for _, file, _ in self._waiting:
            file.interrupt()
        self._pool.shutdown(cancel_futures=True)
        for _, file, _ in self._waiting:
            file.abandon()
        self._waiting.clear()
        # The caller reports the error that made it give up.
        with contextlib.suppress(ShardckptError):
            self._remove_drafts()

    def _remove_drafts(self) -> None:
        if self._any_drafted:
            self._store.delete_prefix(f"{self._drafts}/")

    def _begin(self) -> None:
        """Mark the writer as failed until the call succeeds.

        So no later call can succeed after an error.
        """
        if self._failed:
            raise CommitError(f"{self._store}: an earlier write of this host failed; call abort().")
        self._failed = True

    def _settle_one(self) -> None:
        waiting, _, length = self._waiting[0]
        waiting.result()  # after Ctrl-C here, `abort` ends it, too
        self._waiting.popleft()
        self._in_flight -= length
