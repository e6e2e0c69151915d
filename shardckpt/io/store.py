"""Keys and bytes at one location, with typed errors: the only storage interface of shardckpt.

A kind of storage is a subclass of `Store` with the methods that begin with an underscore, in a
module of `stores`. The class itself adds:

1. *Reliable conditional writes.* Create-if-absent passes the generation that reading the missing
   key returned (an empty `if_equal` overwrites silently). A lost race shows as an empty generation
   in the result. If a network loses the response to a successful write, the retry finds an object
   there and looks like a lost race. So after a lost race the store reads the object, and counts the
   write as successful if the bytes are its own.
2. *Typed errors.* A message has the url, then the text of the storage or the system, then what to
   do.

TensorStore itself (`kvstore`) reads and writes the OCDBT indexes everywhere. All stores of a
process share one `ts.Context`; those in buckets have another one, until settings or keys change. So
`memory://` is one memory, and OCDBT databases can be merged by reference.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from shardckpt.errors import CorruptionError, MissingDataError
from shardckpt.format.documents import check_key
from shardckpt.io.capabilities import Capabilities
from shardckpt.io.failures import begin_use, storage_errors
from shardckpt.io.requests import Upload, Uploads, read_together
from shardckpt.io.url import Location, parse, store_class

if TYPE_CHECKING:
    import builtins
    import os
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from shardckpt.io.buckets.retry import Retry
    from shardckpt.io.requests import ObjectWriter


T = TypeVar("T")
Data = bytes | bytearray | memoryview | NDArray[np.uint8]
"""Contiguous bytes of any kind."""


@cache
def _context() -> ts.Context:
    return ts.Context()


def kind_of(location: Location) -> type[Store]:
    """The kind of storage of a location, to ask for a capability where no store is at hand.

    Makes no request.
    """
    module, name = store_class(location.scheme, location.url)
    kind: type[Store] = getattr(import_module(module), name)
    return kind


class Store(Capabilities, ABC):
    """Keys and bytes below one location.

    Keys are relative, with slashes. Safe to use from several threads.
    """

    __slots__ = ("location",)

    def __init__(self, location: Location) -> None:
        """Keys are relative to `location`; nothing is read or created."""
        self.location = location

    @classmethod
    def open(cls, location: Location | str | os.PathLike[str]) -> Store:
        """Open a location. It need not exist; nothing is created.

        Raises:
            UrlError: the location cannot be used as a storage.
            MissingExtraError: a package that the object store needs is not installed.
            OptionError: an environment variable that configures an object store has an invalid
                value.
        """
        place = parse(location)
        return kind_of(place).at(place)

    def sub(self, prefix: str) -> Store:
        """The store of a location below this one."""
        return self._moved(self.location.join(prefix.rstrip("/")))

    def among(self, process: int, processes: int) -> Store:
        """The same location for one of several processes that use it now.

        Each keeps to its share of an object store's request rate.
        """
        del process, processes
        return self

    def kvstore(self) -> Any:
        """The location as a `ts.KvStore`.

        This is for memory, and for operations that only TensorStore has (OCDBT).

        Raises:
            StorageError: TensorStore has no driver for the kind of storage (`has_driver`), or
                cannot open the place.
        """
        begin_use(self.location)
        with storage_errors("open", self.location):
            return ts.KvStore.open(self.location.kvstore(), context=self.context()).result()

    def context(self) -> ts.Context:
        """TensorStore's context for the location.

        All places of this process share one context, except those with keys or settings that
        change.
        """
        return _context()

    def with_new_keys(self, operation: Callable[[], T]) -> T:
        """The result of a TensorStore operation, repeated if it failed while keys were rotated.

        The keys are the keys for the storage.
        """
        return operation()

    def __str__(self) -> str:
        """The location, as a user recognises it."""
        return str(self.location)

    def path_of(self, key: str) -> str:
        """A key's full path or url, for messages."""
        return f"{str(self.location).rstrip('/')}/{key}" if key else str(self.location)

    def read(self, key: str, start: int | None = None, stop: int | None = None) -> bytes:
        """Read an object's bytes, or its bytes from `start` to `stop`.

        Raises:
            MissingDataError: there is no such object.
            CorruptionError: the object ends before `start` or `stop`.
            FormatError: the complete object was requested, and has more than `files.LARGEST_WHOLE`
                bytes; not in memory.
        """
        data, _ = self._read_checked(key, start, stop, versioned=False)
        if data is None:
            raise self._missing(key)
        return data

    def read_versioned(
        self, key: str, start: int | None = None, stop: int | None = None
    ) -> tuple[bytes | None, bytes]:
        """Read an object's bytes, or those from `start` to `stop`, and its generation.

        The bytes are None if the object does not exist. The generation is for `replace`.

        On a disk the generation is a digest of the whole file, and a range has none: b"".

        Raises:
            CorruptionError, FormatError: as for `read`.
        """
        return self._read_checked(key, start, stop, versioned=True)

    def _read_checked(
        self, key: str, start: int | None, stop: int | None, *, versioned: bool
    ) -> tuple[bytes | None, bytes]:
        """Read all of an object's bytes that are asked for, and its generation if asked for."""
        check_key(key, self)
        end = start if stop is None else stop
        with storage_errors("read", self.path_of(key)), self._ends_too_early(key, end):
            data, generation = self._read(key, start, stop, versioned=versioned)
        if data is not None and stop is not None and len(data) != stop - (start or 0):
            raise self._cut_off(key, stop, f"it gave {len(data)} bytes from {start or 0} on")
        return data, generation

    def read_into(self, key: str, start: int, into: Sequence[memoryview]) -> bytes:
        """Fill buffers, one after another, with the bytes of an object from `start` on.

        On object stores, the bytes are not copied.

        Returns:
            The object's generation; b"" where that needs a further request or all bytes.

        Raises:
            MissingDataError: there is no such object.
            CorruptionError: the object ends before the buffers are full.
        """
        check_key(key, self)
        with (
            storage_errors("read", self.path_of(key)),
            self._ends_too_early(key, start + sum(map(len, into))),
        ):
            try:
                return self._read_into(key, start, into)
            except FileNotFoundError as e:
                raise self._missing(key) from e

    def size(self, key: str) -> int | None:
        """Bytes of the object; None if it does not exist.

        Reads none of them, except from memory.
        """
        check_key(key, self)
        with storage_errors("look for", self.path_of(key)):
            return self._size(key)

    def is_longer(self, key: str, nbytes: int) -> bool:
        """Whether the object exists and has more than `nbytes` bytes."""
        return (self.size(key) or 0) > nbytes

    def exists(self, key: str) -> bool:
        """Whether the object exists; reads none of its bytes."""
        check_key(key, self)
        with storage_errors("look for", self.path_of(key)):
            return self._exists(key)

    def change_token(self, key: str) -> object:
        """A value that differs after each write of an object, for comparison in one process.

        Reads no bytes, except from memory.

        It is the generation of `read_versioned`, unless the kind is `near`.
        """
        check_key(key, self)
        with storage_errors("look for", self.path_of(key)):
            return self._change_token(key)

    def create(self, key: str, data: Data) -> bool:
        """Create an object if it does not exist; durable when this returns.

        Returns:
            Whether the object has these bytes now. If several callers write different bytes,
            exactly one gets True. Callers with the same bytes get the same answer, so bytes that
            decide which caller may do something must name the caller.
        """
        there, generation = self.read_versioned(key)
        if there is None:
            return self.replace(key, data, generation)
        return _same(there, data)

    def replace(self, key: str, data: Data, generation: bytes) -> bool:
        """Write an object if it still has the generation that `read_versioned` returned.

        Durable when this returns.

        Returns:
            Whether the object has these bytes now, as for `create`. A generation does not exclude
            an earlier state: "missing" matches again after a deletion, and on a disk and on S3 a
            generation is a digest, which matches again when the same bytes return.
        """
        assert generation, "an empty generation would overwrite whatever is there"
        check_key(key, self)
        with storage_errors("write", self.path_of(key)):
            if self._write(key, data, generation):
                return True
        return _same(self.read_versioned(key)[0], data)

    def create_anew(self, key: str, make: Callable[[], bytes], generation: bytes) -> bool:
        """Create a missing object with a generation that never occurs again.

        The generation never occurs again even if the request is repeated.

        Args:
            key: key of the object.
            make: makes the object's bytes; never the same twice.
            generation: generation of the missing object, from `read_versioned`.

        Returns:
            Whether this call created the object that is there. False if another one is there, maybe
            from an earlier try.
        """
        return self.replace(key, make(), generation)

    def write(self, key: str, data: Data) -> None:
        """Write an object, and overwrite any object there; durable when this returns."""
        check_key(key, self)
        with storage_errors("write", self.path_of(key)):
            self._write(key, data, None)

    def upload(self, key: str, data: Data, crc: int | None = None) -> Upload:
        """Begin to write an object, and overwrite any object there.

        The buffer must stay as it is until that ends. `crc` is the crc32c of its bytes, if known.
        """
        check_key(key, self)
        return Upload(
            self.path_of(key),
            lambda retry: self._upload(key, data, crc, retry),
            background=self.uploads_on_threads,
        )

    def uploads(self) -> AbstractContextManager[ObjectWriter]:
        """A context whose `write` begins to write a small object; at its end all are durable.

        An error gives up what is left.
        """
        return Uploads(self.upload) if self.uploads_on_threads else nullcontext(self)

    def read_together(self, reads: Sequence[Callable[[], T]]) -> builtins.list[T]:
        """The results of small independent reads, in order; some at a time unless they are `near`.

        None may write into memory of the caller, as it may go on after an error of another one.
        """
        return [read() for read in reads] if self.near else read_together(reads)

    def delete(self, key: str) -> None:
        """Delete an object, if there is one."""
        check_key(key, self)
        with storage_errors("delete", self.path_of(key)):
            self._delete(key)

    def remove(self, key: str, generation: bytes) -> bool:
        """Delete an object if it still has the generation that `read_versioned` returned.

        Returns:
            Whether this call deleted it. False if the object changed or is gone, and if the storage
            has no conditional deletion: then the object stays.
        """
        assert generation, "an empty generation would delete whatever is there"
        check_key(key, self)
        with storage_errors("delete", self.path_of(key)):
            return self._remove(key, generation)

    def synced_later(self) -> Store:
        """The same location, where new files become durable only with `sync`.

        This applies to a disk, where `sync` syncs them together, and each directory once. What is
        written on a condition is synced before it gets its name, as others rely on it.
        """
        return self

    def delete_prefix(self, prefix: str = "") -> None:
        """Delete everything below `prefix`: "" (whole location) or a name ending in a slash.

        On disk, directories are deleted too. Symbolic links are removed and not followed.
        """
        assert prefix == "" or prefix.endswith("/"), (
            "a prefix without a slash would take its namesakes along: step1, step10"
        )
        with storage_errors("delete", self.path_of(prefix)):
            self._delete_below(prefix)

    def list(self, prefix: str = "") -> builtins.list[str]:
        """All keys that start with `prefix`, sorted; empty if the location does not exist.

        For prefixes of a few objects.
        """
        with storage_errors("list", self.path_of(prefix)):
            return sorted(self._list(prefix))

    def list_children(self, prefix: str = "") -> builtins.list[str]:
        """The names directly below `prefix` ("" or ending in a slash), sorted.

        A name that has keys below it ends in a slash.

        On disk, one directory is read, and the name of an empty directory ends in a slash too.
        """
        with storage_errors("list", self.path_of(prefix)):
            return self._list_children(prefix)

    def sizes(self, prefix: str) -> dict[str, int]:
        """Bytes of every object whose key starts with `prefix`, which may be a complete key.

        On disk, those of the files in one directory; on a web server, that of the file whose key is
        `prefix`.
        """
        with storage_errors("list", self.path_of(prefix)):
            return self._sizes(prefix)

    def modification_times(self, prefix: str = "") -> Iterator[tuple[str, float]]:
        """Every object below `prefix`, and the time of its last write.

        `prefix` is "", a complete key, or ends in a slash.

        Yields:
            Key, and POSIX seconds by the storage's clock (S3 has no fractions). On disk in no
            particular order; links are not followed. The current time for every object of a storage
            that keeps no times.
        """
        with storage_errors("list", self.path_of(prefix)):
            yield from self._times(prefix)

    def _missing(self, key: str) -> MissingDataError:
        return MissingDataError(f"{self.path_of(key)} is missing; put it back from a backup.")

    @contextmanager
    def _ends_too_early(self, key: str, stop: int | None) -> Iterator[None]:
        """Raise CorruptionError if the storage says that an object ends before `stop`."""
        try:
            yield
        except (ValueError, EOFError) as e:
            if isinstance(e, ValueError) and "OUT_OF_RANGE" not in str(e):
                raise
            raise self._cut_off(key, stop, e) from e

    def _cut_off(self, key: str, stop: int | None, why: object) -> CorruptionError:
        return CorruptionError(
            f"{self.path_of(key)} ends before byte {stop}: {why}; replace it with a backup."
        )

    # --- a kind of storage; keys are checked, and errors of the system are typed by the caller

    @classmethod
    @abstractmethod
    def at(cls, location: Location) -> Store:
        """A store of this kind; raises what `open` raises."""

    @abstractmethod
    def _moved(self, location: Location) -> Store:
        """The store of another location in the same storage."""

    @abstractmethod
    def _read(
        self, key: str, start: int | None, stop: int | None, *, versioned: bool
    ) -> tuple[bytes | None, bytes]:
        """Read bytes (None: no object) and the generation, which may be b"" unless `versioned`.

        Raises:
            EOFError, ValueError("OUT_OF_RANGE…"): the object ends before `start` or `stop`.
        """

    def _read_into(self, key: str, start: int, into: Sequence[memoryview]) -> bytes:
        """Fill buffers; FileNotFoundError or EOFError where that is impossible."""
        nbytes = sum(map(len, into))
        data, generation = self._read(key, start, start + nbytes, versioned=False)
        if data is None:
            raise FileNotFoundError(key)
        if len(data) != nbytes:
            raise EOFError(f"it gave {len(data)} bytes from {start} on")
        rest = memoryview(data)
        for part in into:
            part[:], rest = rest[: len(part)], rest[len(part) :]
        return generation

    @abstractmethod
    def _size(self, key: str) -> int | None: ...

    def _exists(self, key: str) -> bool:
        return self._size(key) is not None

    @abstractmethod
    def _change_token(self, key: str) -> object: ...

    @abstractmethod
    def _write(self, key: str, data: Data, generation: bytes | None) -> bool:
        """Write; False if the object no longer has `generation`."""

    def _upload(self, key: str, data: Data, crc: int | None, retry: Retry) -> None:
        """Write, and stop as soon as `retry` is given up."""
        del crc, retry
        self._write(key, data, None)

    @abstractmethod
    def _delete(self, key: str) -> None: ...

    @abstractmethod
    def _remove(self, key: str, generation: bytes) -> bool: ...

    def _delete_below(self, prefix: str) -> None:
        for key in [*self._list(prefix)]:
            self._delete(key)

    @abstractmethod
    def _list(self, prefix: str) -> Iterable[str]: ...

    def _times(self, prefix: str) -> Iterable[tuple[str, float]]:
        """Keys and times of their last write.

        The current time for each, unless the kind `keeps_times`.
        """
        return ((key, time.time()) for key in self._list(prefix))

    def _list_children(self, prefix: str) -> builtins.list[str]:
        heads = (key.removeprefix(prefix).partition("/") for key in self._list(prefix))
        return sorted({head + slash for head, slash, _ in heads})

    def _sizes(self, prefix: str) -> dict[str, int]:
        return {key: size for key in self._list(prefix) if (size := self._size(key)) is not None}


def _same(there: bytes | None, data: Data) -> bool:
    return there is not None and memoryview(there) == byte_view(data)


def byte_view(data: Data) -> memoryview:
    """A flat byte view of contiguous bytes of any kind, without a copy."""
    view = memoryview(data)  # type: ignore[arg-type]  # an ndarray is a buffer; its types say so from Python 3.12 on
    return view.cast("B") if view.nbytes else memoryview(b"")
