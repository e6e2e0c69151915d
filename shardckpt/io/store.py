"""Keys and bytes at one location, with typed errors: the only storage interface of shardckpt.

A `Store` uses `files` on disk, `buckets` on object stores, and a TensorStore key-value store for `memory://`. It adds:

1. *Reliable conditional writes.* Create-if-absent passes the generation that reading the missing key returned
   (an empty `if_equal` overwrites silently). A lost race shows as an empty generation in the result. If a network
   loses the response to a successful write, the retry finds an object there and looks like a lost race. So after
   a lost race the store reads the object, and counts the write as successful if the bytes are its own.
2. *Typed errors.* A message has the url, then the text of the storage or the system, then what to do.

TensorStore itself (`kvstore`) reads and writes the OCDBT indexes everywhere. All stores of a process share one `ts.Context`; those in
buckets have another one, until settings or keys change. So `memory://` is one memory, and OCDBT databases can be merged by reference.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, lru_cache, wraps
from itertools import count
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from shardckpt.errors import CorruptionError, MissingDataError, StorageError
from shardckpt.format.documents import check_key
from shardckpt.io import files
from shardckpt.io.buckets import cloud, listing
from shardckpt.io.buckets.bucket import Bucket, open_bucket
from shardckpt.io.buckets.rate_limit import ALONE, RequestShare
from shardckpt.io.deletion import delete_objects, remove_tree
from shardckpt.io.failures import begin_use, storage_errors
from shardckpt.io.files import DurableDirectories
from shardckpt.io.locks import remove_directory
from shardckpt.io.requests import Upload
from shardckpt.io.status import is_file
from shardckpt.io.url import Location, parse

if TYPE_CHECKING:
    import builtins
    import os
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from shardckpt.io.buckets.retry import Retry


P = ParamSpec("P")
T = TypeVar("T")
_contexts = count()
_stamps: deque[object] = deque(maxlen=1)
"""The stamp of the newest context for buckets."""
Data = bytes | bytearray | memoryview | NDArray[np.uint8]
"""Contiguous bytes of any kind."""


def shared_context(location: Location) -> ts.Context:
    """The TensorStore context of this process for a location. In buckets, other settings, or keys that were rotated, make a new one."""
    return _common_context() if location.bucket is None else _context(cloud.context_stamp())


@lru_cache(maxsize=4)
def _context(stamp: object) -> ts.Context:
    _stamps.append(stamp)
    return ts.Context(cloud.context(next(_contexts)))


@cache
def _common_context() -> ts.Context:
    return ts.Context()


def with_new_keys(operation: Callable[P, T]) -> Callable[P, T]:
    """Repeat an operation of TensorStore that failed, if the keys for S3 were rotated meanwhile."""

    @wraps(operation)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return operation(*args, **kwargs)
        except StorageError:
            if not _stamps or cloud.context_stamp() == _stamps[-1]:
                raise
            return operation(*args, **kwargs)

    return run


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """Keys and bytes below one location. Keys are relative, with slashes. Safe to use from several threads."""

    location: Location
    """The location that keys are relative to."""
    _directories: DurableDirectories | None = field(repr=False)
    """On disk: creates directories."""
    _share: RequestShare = ALONE
    """This process's share of an object store's request rate."""

    @classmethod
    def open(cls, location: Location | str | os.PathLike[str]) -> Store:
        """Open a location. It need not exist; nothing is created.

        Raises:
            UrlError: the location cannot be used as a storage.
            MissingExtraError: a package that the object store needs is not installed.
            OptionError: an environment variable that configures an object store has an invalid value.
        """
        place = location if isinstance(location, Location) else parse(location)
        store = cls(place, None if place.local is None else DurableDirectories(place.local))
        if place.bucket is not None:
            cloud.prepare(place.scheme)
            store.kvstore()  # for its errors: indexes are written last
        return store

    def sub(self, prefix: str) -> Store:
        """The store of a location below this one."""
        return Store(self.location.join(prefix.rstrip("/")), self._directories, self._share)

    def among(self, process: int, processes: int) -> Store:
        """The same location for one of several processes that use it now; each keeps to its share of an object store's request rate."""
        return dataclasses.replace(self, _share=RequestShare(process, processes))

    def kvstore(self) -> Any:
        """The location as a `ts.KvStore`: for memory, and for operations that only TensorStore has (OCDBT)."""
        begin_use(self.location)
        with storage_errors("open", self.location):
            return ts.KvStore.open(self.location.kvstore(), context=shared_context(self.location)).result()

    def __str__(self) -> str:
        """The location, as a user recognises it."""
        return str(self.location)

    def path_of(self, key: str) -> str:
        """A key's full path or url, for messages."""
        return f"{str(self.location).rstrip('/')}/{key}" if key else str(self.location)

    def local_path(self, key: str) -> Path | None:
        """A key's path ("": the location itself) on this machine's file system; None if it is not there."""
        if self.location.local is None:
            return None
        if not key:
            return self.location.local
        check_key(key.removesuffix("/"), self)
        return self.location.local / key

    def read(self, key: str, start: int | None = None, stop: int | None = None) -> bytes:
        """Read an object's bytes, or its bytes from `start` to `stop`.

        Raises:
            MissingDataError: there is no such object.
            CorruptionError: the object ends before `stop`.
            FormatError: the complete object was requested, and the file on disk has more than `files.LARGEST_WHOLE` bytes.
        """
        data, _ = self._read(key, start, stop)
        if data is None:
            raise self._missing(key)
        return data

    def read_versioned(self, key: str, start: int | None = None, stop: int | None = None) -> tuple[bytes | None, bytes]:
        """Read an object's bytes (None if it does not exist), or those from `start` to `stop`, and its generation, for `replace`.

        On a disk the generation is a digest of the whole file, and a range has none: b"".

        Raises:
            CorruptionError, FormatError: as for `read`.
        """
        data, generation = self._read(key, start, stop)
        if self.location.local is not None and start is None and stop is None:
            generation = files.generation_of(data)
        return data, generation

    def _read(self, key: str, start: int | None, stop: int | None) -> tuple[bytes | None, bytes]:
        """Read an object's bytes, and its generation; b"" on a disk."""
        check_key(key, self)
        with storage_errors("read", self.path_of(key)):
            try:
                if (path := self._file(key)) is not None:
                    data, generation = files.read(path, start or 0, stop), b""
                elif self.location.bucket is not None:
                    return self._bucket.read(self._name(key), start or 0, stop, self._share)
                else:
                    span = None if start is None and stop is None else slice(start or 0, stop)
                    found = self.kvstore().read(key, byte_range=span).result()
                    data, generation = found.value if found.state == "value" else None, found.stamp.generation
            except (ValueError, EOFError) as e:
                if isinstance(e, ValueError) and "OUT_OF_RANGE" not in str(e):
                    raise
                raise self._cut_off(key, stop, e) from e
        if data is not None and stop is not None and len(data) != stop - (start or 0):
            raise self._cut_off(key, stop, f"it gave {len(data)} bytes from {start or 0} on")
        return data, generation

    def read_into(self, key: str, start: int, into: Sequence[memoryview]) -> bytes:
        """Fill buffers, one after another, with the bytes of an object from `start` on; without a copy on object stores.

        Returns:
            The object's generation; b"" on a disk.

        Raises:
            MissingDataError: there is no such object.
            CorruptionError: the object ends before the buffers are full.
        """
        stop = start + sum(map(len, into))
        if self.location.bucket is None:
            data, generation = self._read(key, start, stop)
            if data is None:
                raise self._missing(key)
            rest = memoryview(data)
            for part in into:
                part[:], rest = rest[: len(part)], rest[len(part) :]
            return generation
        check_key(key, self)
        with storage_errors("read", self.path_of(key)):
            try:
                return self._bucket.read_into(self._name(key), start, into, self._share)
            except FileNotFoundError as e:
                raise self._missing(key) from e
            except EOFError as e:
                raise self._cut_off(key, stop, e) from e

    def size(self, key: str) -> int | None:
        """Bytes of the object; None if it does not exist. Reads none of them, except from memory."""
        check_key(key, self)
        with storage_errors("look for", self.path_of(key)):
            if self.location.bucket is not None:
                return self._bucket.stat(self._name(key), self._share)[0]
            if (path := self._file(key)) is not None:
                return path.stat().st_size if is_file(path) else None
        data, _ = self._read(key, None, None)
        return None if data is None else len(data)

    def is_longer(self, key: str, nbytes: int) -> bool:
        """Whether the object exists and has more than `nbytes` bytes."""
        return (self.size(key) or 0) > nbytes

    def exists(self, key: str) -> bool:
        """Whether the object exists; reads none of its bytes."""
        check_key(key, self)
        with storage_errors("look for", self.path_of(key)):
            if self.location.bucket is not None:
                return self._bucket.stat(self._name(key), self._share)[0] is not None
            if (path := self._file(key)) is not None:
                return is_file(path)
            return bool(self.kvstore().list(ts.KvStore.KeyRange(key.encode(), key.encode() + b"\0")).result())

    def change_token(self, key: str) -> object:
        """A value that differs after each write of an object, for comparison in one process; reads no bytes, except from memory."""
        check_key(key, self)
        with storage_errors("look for", self.path_of(key)):
            if self.location.bucket is not None:
                return self._bucket.stat(self._name(key), self._share)[1]
            if (path := self._file(key)) is not None:
                try:
                    found = path.stat()
                except (FileNotFoundError, NotADirectoryError):
                    return None
                return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size
        return self.read_versioned(key)[1]

    def create(self, key: str, data: Data) -> bool:
        """Create an object if it does not exist; durable when this returns.

        Returns:
            Whether the object has these bytes now. If several callers write different bytes, exactly one gets True. Callers with the
            same bytes get the same answer, so bytes that decide which caller may do something must name the caller.
        """
        there, generation = self.read_versioned(key)
        if there is None:
            return self.replace(key, data, generation)
        return _same(there, data)

    def replace(self, key: str, data: Data, generation: bytes) -> bool:
        """Write an object if it still has the generation that `read_versioned` returned; durable when this returns.

        Returns:
            Whether the object has these bytes now, as for `create`. A generation does not exclude an earlier state: "missing" matches
            again after a deletion, and on a disk and on S3 a generation is a digest, which matches again when the same bytes return.
        """
        assert generation, "an empty generation would overwrite whatever is there"
        with storage_errors("write", self.path_of(key)):
            if self._write(key, data, generation):
                return True
        return _same(self.read_versioned(key)[0], data)

    def write(self, key: str, data: Data) -> None:
        """Write an object, and overwrite any object there; durable when this returns."""
        with storage_errors("write", self.path_of(key)):
            self._write(key, data, None)

    def upload(self, key: str, data: Data) -> Upload:
        """Begin to write an object, and overwrite any object there; the buffer must stay as it is until that ends."""
        check_key(key, self)
        return Upload(self.path_of(key), lambda retry: self._write(key, data, None, retry), background=self.location.bucket is not None)

    def delete(self, key: str) -> None:
        """Delete an object, if there is one."""
        check_key(key, self)
        with storage_errors("delete", self.path_of(key)):
            self._delete(key)

    def remove(self, key: str, generation: bytes) -> bool:
        """Delete an object if it still has the generation that `read_versioned` returned.

        Returns:
            Whether this call deleted it. False if the object changed or is gone, and if the storage has no conditional deletion:
            then the object stays.
        """
        assert generation, "an empty generation would delete whatever is there"
        check_key(key, self)
        with storage_errors("delete", self.path_of(key)):
            if self.location.bucket is not None:
                return self._bucket.delete_if(self._name(key), generation)
            if (path := self._file(key)) is not None:
                return files.remove(path, generation)
            return bool(self.kvstore().write(key, None, if_equal=generation).result().generation)

    def remove_empty(self) -> None:
        """On disk: remove the location's directory if it is empty. Object stores have no directories."""
        path = self.local_path("")
        if path is not None:
            with suppress(OSError):
                remove_directory(path)

    def delete_prefix(self, prefix: str = "") -> None:
        """Delete everything below `prefix`: "" (the complete location) or a name that ends in a slash.

        On disk, directories are deleted too. Symbolic links are removed and not followed.
        """
        assert prefix == "" or prefix.endswith("/"), "a prefix without a slash would take its namesakes along: step1, step10"
        with storage_errors("delete", self.path_of(prefix)):
            path = self.local_path(prefix)
            if path is not None:
                remove_tree(path)
            elif self.location.bucket is None:
                self.kvstore().delete_range(_starting_with(prefix)).result()
            else:
                delete_objects(listing.keys(self.location, prefix), self._delete)

    def list(self, prefix: str = "") -> builtins.list[str]:
        """All keys that start with `prefix`, sorted; empty if the location does not exist. For prefixes of a few objects."""
        if self.location.bucket is not None:
            return sorted(listing.keys(self.location, prefix))
        with storage_errors("list", self.path_of(prefix)):
            if (top := self._file("")) is not None:
                return sorted(name for name, _ in files.below(top, prefix))
            return sorted(key.decode() for key in self.kvstore().list(_starting_with(prefix)).result())

    def list_children(self, prefix: str = "") -> builtins.list[str]:
        """The names directly below `prefix` ("" or ending in a slash), sorted; a name that has keys below it ends in a slash.

        On disk, one directory is read, and the name of an empty directory ends in a slash too.
        """
        with storage_errors("list", self.path_of(prefix)):
            if (path := self.local_path(prefix)) is not None:
                return listing.directory(path)
            if self.location.bucket is not None:
                return listing.children(self.location, prefix)
            heads = (key.removeprefix(prefix).partition("/") for key in self.list(prefix))
            return sorted({head + slash for head, slash, _ in heads})

    def sizes(self, prefix: str) -> dict[str, int]:
        """Bytes of every object whose key starts with `prefix`, which may be a complete key.

        On disk, those of the files in one directory; on a web server, that of the file whose key is `prefix`.
        """
        with storage_errors("list", self.path_of(prefix)):
            folder = prefix[: prefix.rfind("/") + 1]
            if (top := self.local_path(folder)) is not None:
                names = [folder + name for name in listing.directory(top) if not name.endswith("/")]
                return {name: (top / name.removeprefix(folder)).stat().st_size for name in names if name.startswith(prefix)}
            if self.location.is_web:
                nbytes, _ = self._bucket.stat(self._name(prefix), self._share)
                return {} if nbytes is None else {prefix: nbytes}
            if self.location.bucket is None:
                return {key: len(self.read(key)) for key in self.list(prefix)}
            return {found.name: found.nbytes for page in listing.pages(self.location, prefix) for found in page.objects}

    def make_parents(self, key: str) -> None:
        """On disk: create the parent directories of a key, durably. Object stores have none."""
        path = self.local_path(key)
        if path is not None:
            with storage_errors("make a directory for", path):
                assert self._directories is not None
                self._directories.make(path.parent)

    def _missing(self, key: str) -> MissingDataError:
        return MissingDataError(f"{self.path_of(key)} is missing; put it back from a backup.")

    def _cut_off(self, key: str, stop: int | None, why: object) -> CorruptionError:
        return CorruptionError(f"{self.path_of(key)} ends before byte {stop}: {why}; replace it with a backup.")

    @property
    def _bucket(self) -> Bucket:
        """Requests about the objects of the location's bucket."""
        begin_use(self.location)
        return open_bucket(self.location)

    def _file(self, key: str) -> Path | None:
        """Note the use (`begin_use`), and return the key's path; None if the location is not on disk."""
        begin_use(self.location)
        return self.local_path(key)

    def _name(self, key: str) -> str:
        """An object's name in its bucket."""
        return self.location.object_prefix + key

    def _write(self, key: str, data: Data, generation: bytes | None, retry: Retry | None = None) -> bool:
        """Write; False if the object no longer has `generation`."""
        check_key(key, self)
        if self.location.bucket is not None:
            view = byte_view(data)
            return bool(self._bucket.write(self._name(key), [view], generation=generation, share=self._share, retry=retry))
        if (path := self._file(key)) is not None:
            self.make_parents(key)
            return files.replace(path, byte_view(data), generation)
        value = data if isinstance(data, (bytes, bytearray)) else bytes(byte_view(data))
        return bool(self.kvstore().write(key, value, if_equal=generation).result().generation)

    def _delete(self, key: str) -> None:
        """Delete an object, if there is one."""
        if self.location.bucket is not None:
            self._bucket.delete(self._name(key), self._share)
        elif (path := self._file(key)) is not None:
            files.delete(path)
        else:
            self.kvstore().write(key, None).result()


def _same(there: bytes | None, data: Data) -> bool:
    return there is not None and memoryview(there) == byte_view(data)


def byte_view(data: Data) -> memoryview:
    """A flat byte view of contiguous bytes of any kind, without a copy."""
    view = memoryview(data)  # type: ignore[arg-type]  # an ndarray is a buffer; its types say so from Python 3.12 on
    return view.cast("B") if view.nbytes else memoryview(b"")


def _starting_with(prefix: str) -> Any:
    """The range of keys that start with `prefix`; "" means all keys."""
    first = prefix.encode()
    return ts.KvStore.KeyRange(first, first[:-1] + bytes([first[-1] + 1]) if first else b"")
