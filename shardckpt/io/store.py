"""Keys and bytes at one location, with typed errors: all that shardckpt asks of a storage.

A `Store` is a thin layer over TensorStore's key-value stores. It adds these.

1. *Conditional writes that hold.* Create-if-absent passes the generation that reading the missing key returned
   (an empty `if_equal` overwrites silently); a lost race shows as an empty generation in the result. A network may
   lose the answer to a write that happened, and the second try then finds "somebody else's" object: who loses a
   race therefore reads what is there, and has won it after all if those are its own bytes.
2. *Durability on a local disk.* TensorStore syncs each file and the directory it lies in, but not the directories
   that it makes on the way. The store makes those itself, and syncs each one's parent, so that after a power cut
   a file is not only whole but also to be found. (An object store answers when an object is durable.)
3. *Retries and a rate limit.* Requests to an object store are tried again (`cloud` says when and for how long). The few kinds
   of broken answers that TensorStore takes for final are asked for again here, where that does no harm. The rate at which
   requests begin is limited, and each of several processes has a share of it (`pace`).
4. *Nothing of a killed write in the next one*, see `failures`.
5. *Complete listings*, see `listing`: TensorStore's own are empty where GCS refuses them.
6. *Typed errors.* The message keeps what TensorStore or the system says, with the url before it and what to do after it.

All stores of a process share one `ts.Context`: `memory://` then is one memory, OCDBT databases can be merged by
reference, and limits on requests hold for all of them together.
"""

from __future__ import annotations

import dataclasses
import os
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from shardckpt.errors import CorruptionError, FormatError, MissingDataError, StorageError
from shardckpt.format.documents import check_key
from shardckpt.io.buckets import cloud, listing
from shardckpt.io.buckets.pace import ALONE, RequestShare
from shardckpt.io.deletion import delete_objects, remove_tree
from shardckpt.io.failures import begin_use, forget_interrupted_write, storage_errors
from shardckpt.io.requests import Upload, repeat_broken
from shardckpt.io.url import Location, parse

if TYPE_CHECKING:
    import builtins
    from collections.abc import Callable
    from pathlib import Path


Data = bytes | bytearray | memoryview | NDArray[np.uint8]
"""Contiguous bytes of any kind."""
LARGEST_WHOLE = 1 << 30
"""Bytes of a file on disk that is read as a whole: of records, tables and indexes. TensorStore ends the process where it gets
no memory, and a file that is all hole can be of any size."""


@cache
def shared_context() -> ts.Context:
    """The one TensorStore context of this process."""
    return ts.Context(cloud.context())


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """Keys and bytes below one location. Keys are relative, with slashes. Safe to use from several threads."""

    location: Location
    """What keys are relative to."""
    _opened: Any
    """The `ts.KvStore` of that location."""
    _top: Path | None
    """On disk: the location that was opened first; directories from here down are always synced."""
    _synced: set[Path] = field(repr=False)
    """Directories whose entry in their parent is durable."""
    _share: RequestShare = ALONE
    """Of an object store's pace."""

    @classmethod
    def open(cls, location: Location | str | os.PathLike[str]) -> Store:
        """Open a place, which need not exist; nothing is created.

        Raises:
            UrlError: it is no place that we can store to.
            MissingExtraError: what an object store needs is not installed.
            OptionError: an environment variable that an object store goes by makes no sense.
        """
        place = location if isinstance(location, Location) else parse(location)
        if place.bucket is not None:
            cloud.prepare(place.scheme)
        return cls(place, _open(place.kvstore(), place), place.local, set())

    def sub(self, prefix: str) -> Store:
        """The store of the location below."""
        place = self.location.join(prefix.rstrip("/"))
        return Store(place, _open(place.kvstore(), place), self._top, self._synced, self._share)

    def among(self, process: int, processes: int) -> Store:
        """The same place for one of several processes that all use it now: of an object store's pace each keeps to its share."""
        return dataclasses.replace(self, _share=RequestShare(process, processes))

    def kvstore(self) -> Any:
        """The `ts.KvStore` itself, for what only TensorStore can do (OCDBT)."""
        begin_use(self.location)
        return self._opened

    def __str__(self) -> str:
        """The location, as a user recognises it."""
        return str(self.location)

    def path_of(self, key: str) -> str:
        """A key's full path or url, for messages."""
        return f"{str(self.location).rstrip('/')}/{key}" if key else str(self.location)

    def local_path(self, key: str) -> Path | None:
        """Where a key ("": the location itself) lies on this machine's file system, None if it does not."""
        if self.location.local is None:
            return None
        if not key:
            return self.location.local
        check_key(key.removesuffix("/"), self)
        return self.location.local / key

    def read(self, key: str, start: int | None = None, stop: int | None = None) -> bytes:
        """The bytes of an object, or those from `start` to `stop`.

        Raises:
            MissingDataError: there is no such object.
            CorruptionError: it ends before `stop`.
            FormatError: on disk: all of it was asked for, and it has more than `LARGEST_WHOLE` bytes.
        """
        data, _ = self.read_versioned(key, start, stop)
        if data is None:
            raise MissingDataError(f"{self.path_of(key)} is missing; restore it from a copy.")
        return data

    def read_versioned(self, key: str, start: int | None = None, stop: int | None = None) -> tuple[bytes | None, bytes]:
        """An object's bytes, or those from `start` to `stop`, None where there is none; and the generation to hand to `replace`.

        Raises:
            CorruptionError, FormatError: as for `read`.
        """
        span = None if start is None and stop is None else slice(start or 0, stop)
        check_key(key, self)
        self._refuse_special(key, whole=span is None)
        with storage_errors("read", self.path_of(key)):
            try:
                found = self._fetch(key, span)
            except ValueError as e:
                if "OUT_OF_RANGE" not in str(e):
                    raise
                raise CorruptionError(f"{self.path_of(key)} ends before byte {stop}: {e}; restore it from a copy.") from e
        data: bytes | None = found.value if found.state == "value" else None
        if data is not None and stop is not None and len(data) != stop - (start or 0):
            raise CorruptionError(
                f"{self.path_of(key)}: asked for bytes {start or 0} to {stop}, got {len(data)} bytes; restore it from a copy."
            )
        return data, found.stamp.generation

    def is_longer(self, key: str, nbytes: int) -> bool:
        """Whether there is such an object, of more than that many bytes; reads no more than one of them."""
        path = self.local_path(key)
        if path is not None:
            with storage_errors("look for", path):
                try:
                    return path.stat().st_size > nbytes
                except FileNotFoundError:
                    return False
        try:
            return bool(self.read(key, nbytes, nbytes + 1))
        except CorruptionError:
            return False

    def exists(self, key: str) -> bool:
        """Whether there is such an object; reads none of it."""
        check_key(key, self)
        with storage_errors("look for", self.path_of(key)):
            if self.location.bucket is not None:
                return bool(self._fetch(key, slice(0, 0)).state == "value")
            return bool(self.kvstore().list(ts.KvStore.KeyRange(key.encode(), key.encode() + b"\0")).result())

    def create(self, key: str, data: Data) -> bool:
        """Write an object unless there is one; durable when it returns.

        Returns:
            Whether these bytes are there now. Of several callers with different bytes exactly one gets True; those with
            the same get the same answer, so bytes that decide who may do something must name the caller.
        """
        there, generation = self.read_versioned(key)
        if there is None:
            if self.replace(key, data, generation):
                return True
            if not self.exists(key):  # TensorStore tells a refusal with status 404 like a race that was lost
                raise StorageError(f"cannot create {self.path_of(key)}: the storage refuses, and nothing is there; does the bucket exist?")
            return False
        return _same(there, data)

    def replace(self, key: str, data: Data, generation: bytes) -> bool:
        """Write an object if it still has the generation that `read_versioned` gave; durable when it returns.

        Returns:
            Whether these bytes are there now, as for `create`. A generation is no fence against the past: "missing" is
            true again after a deletion, and on S3 a generation is a digest, true again when the bytes come back.
        """
        assert generation, "an empty generation would overwrite whatever is there"
        with storage_errors("write", self.path_of(key)):
            stamp = self._begin(key, data, generation).result()
            while stamp.generation and self._has_a_foreign_end(key, data, stamp.generation):
                stamp = self._begin(key, data, stamp.generation).result()
            if stamp.generation:
                return True
        return _same(self.read_versioned(key)[0], data)

    def write(self, key: str, data: Data) -> None:
        """Write an object, whatever was there; durable when it returns."""
        with storage_errors("write", self.path_of(key)):
            self._finish(lambda: self._begin(key, data, None))

    def upload(self, key: str, data: Data) -> Upload:
        """Begin to write an object, whatever was there; the buffer is the caller's again when this returns.

        The bytes are copied: until the upload has ended there is memory for them besides.
        """
        with storage_errors("write", self.path_of(key)):
            return Upload(self.path_of(key), self._begin(key, data, None))

    def delete(self, key: str) -> None:
        """Delete an object, if there is one."""
        check_key(key, self)
        with storage_errors("delete", self.path_of(key)):
            self._finish(lambda: self._begin_deletion(key))

    def remove(self, key: str, generation: bytes) -> bool:
        """Delete an object if it still has the generation that `read_versioned` gave.

        Returns:
            Whether this deleted it. False, too, where it is another one or gone, and where the storage cannot delete on
            condition: then it stays.
        """
        assert generation, "an empty generation would delete whatever is there"
        check_key(key, self)
        with storage_errors("delete", self.path_of(key)):
            if self.location.scheme == "s3":  # TensorStore 0.1.86 looks first, and then deletes whatever is there
                from shardckpt.io.buckets.conditional_delete import delete_if_match  # botocore is there where the extra is

                return delete_if_match(self.location, key, generation)
            if self.location.bucket is not None:
                cloud.pace("write", self._share)
            return bool(self.kvstore().write(key, None, if_equal=generation).result().generation)

    def remove_empty(self) -> None:
        """On disk: remove the location's directory, if nothing is in it. Elsewhere there are none."""
        path = self.local_path("")
        if path is not None:
            with suppress(OSError):
                path.rmdir()

    def delete_prefix(self, prefix: str = "") -> None:
        """Delete everything below `prefix`: "" (the whole location) or a name that ends in a slash.

        On disk directories go too, links are removed and not followed.
        """
        assert prefix == "" or prefix.endswith("/"), "a prefix without a slash would take its namesakes along: step1, step10"
        with storage_errors("delete", self.path_of(prefix)):
            path = self.local_path(prefix)
            if path is not None:
                remove_tree(path)
            elif self.location.bucket is None:
                self.kvstore().delete_range(_starting_with(prefix)).result()
            else:
                delete_objects(listing.keys(self.location, prefix), self._begin_deletion)

    def list(self, prefix: str = "") -> builtins.list[str]:
        """All keys that start with `prefix`, sorted; empty where there is no such place. For prefixes of a few objects."""
        if self.location.bucket is not None:
            return sorted(listing.keys(self.location, prefix))
        with storage_errors("list", self.path_of(prefix)):
            return sorted(key.decode() for key in self.kvstore().list(_starting_with(prefix)).result())

    def list_children(self, prefix: str = "") -> builtins.list[str]:
        """The names directly below `prefix` ("" or ending in a slash), sorted; those with more below end in a slash.

        On disk one directory is read, and an empty directory counts as one with more below.
        """
        return listing.children(self, prefix)

    def make_parents(self, key: str) -> None:
        """On disk: make the directories that a key needs, durably. Elsewhere there is nothing to make."""
        path = self.local_path(key)
        if path is not None:
            with storage_errors("make a directory for", path):
                self._make_directory(path.parent)

    def forget_interrupted_write(self, key: str) -> None:
        """On disk: see to it that the next write of an object takes over nothing of one that was killed. Elsewhere nothing is left."""
        path = self.local_path(key)
        if path is not None:
            forget_interrupted_write(path)

    def _has_a_foreign_end(self, key: str, data: Data, generation: bytes) -> bool:
        """On disk: whether what was just written ends in bytes of a write that was killed at the same moment."""
        if self.location.local is None or not self.is_longer(key, len(byte_view(data))):
            return False
        return self.read_versioned(key)[1] == generation  # else it is somebody's who was next

    def _refuse_special(self, key: str, *, whole: bool) -> None:
        """On disk: raise StorageError for a pipe, say, in place of a file, which could take for ever; FormatError for too large a file."""
        path = self.local_path(key)
        if path is not None:
            with storage_errors("read", path), suppress(FileNotFoundError, NotADirectoryError):
                found = path.stat()
                if not stat.S_ISREG(found.st_mode):
                    raise OSError(f"{path} is no file, but a directory, pipe or device")
                if whole and found.st_size > LARGEST_WHOLE:
                    raise FormatError(
                        f"{path} has {found.st_size} bytes, and what is read as a whole at most {LARGEST_WHOLE}; it is not ours."
                    )

    def _make_directory(self, path: Path) -> None:
        """Make a directory, and make sure that its parent has it on disk."""
        if path in self._synced and path.is_dir():
            return
        assert self._top is not None
        # Below the top another process may have made it a moment ago and not have synced it yet.
        ours = self._top in (path, *path.parents) or not path.is_dir()
        if not ours:
            return
        if path.parent != path:
            self._make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)
        self._synced.add(path)

    def _fetch(self, key: str, span: slice | None = None) -> Any:
        """What TensorStore reads of an object."""

        def begin() -> Any:
            if self.location.bucket is not None:
                cloud.pace("read", self._share)
            return self.kvstore().read(key, byte_range=span)

        return self._finish(begin)

    def _finish(self, begin: Callable[[], Any]) -> Any:
        """The result of a request, which may be repeated."""
        return begin().result() if self.location.bucket is None else repeat_broken(begin)

    def _begin(self, key: str, data: Data, generation: bytes | None) -> Any:
        """Begin to write; the future of the new generation, which is empty if `generation` is no longer the present one."""
        check_key(key, self)
        self.make_parents(key)
        self.forget_interrupted_write(key)
        value = data if isinstance(data, (bytes, bytearray)) else bytes(byte_view(data))
        if self.location.bucket is not None:
            cloud.pace("write", self._share)
        return self.kvstore().write(key, value, if_equal=generation)

    def _begin_deletion(self, key: str) -> Any:
        """Begin to delete an object, if there is one."""
        if self.location.bucket is not None:
            cloud.pace("write", self._share)
        return self.kvstore().write(key, None)


def _same(there: bytes | None, data: Data) -> bool:
    return there is not None and memoryview(there) == byte_view(data)


def byte_view(data: Data) -> memoryview:
    """Contiguous bytes of any kind as a flat view of bytes; nothing is copied."""
    view = memoryview(data)  # type: ignore[arg-type]  # an ndarray is a buffer; its types say so from Python 3.12 on
    return view.cast("B") if view.nbytes else memoryview(b"")


def sync_directory(path: Path) -> None:
    """Make the entries of a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _open(spec: dict[str, Any], place: object) -> Any:
    """Open a TensorStore key-value store in the shared context."""
    with storage_errors("open", place):
        return ts.KvStore.open(spec, context=shared_context()).result()


def _starting_with(prefix: str) -> Any:
    """The range of keys that start with `prefix`; "" is all keys."""
    first = prefix.encode()
    return ts.KvStore.KeyRange(first, first[:-1] + bytes([first[-1] + 1]) if first else b"")
