"""Keys and bytes at one location, with typed errors: all that shardckpt asks of a storage.

A `Store` is a thin layer over TensorStore's key-value stores. It adds three things.

1. *Conditional writes that hold.* Create-if-absent passes the generation that reading the missing key returned
   (an empty `if_equal` overwrites silently); a lost race shows as an empty generation in the result.
2. *Durability on a local disk.* TensorStore syncs each file and the directory it lies in, but not the directories
   that it makes on the way. The store makes those itself, and syncs each one's parent, so that after a power cut
   a file is not only whole but also to be found.
3. *Errors of ours.* What TensorStore or the system says is kept in the message, with the url before it and what to
   do after it.

All stores of a process share one `ts.Context`: `memory://` then is one memory, and OCDBT databases can be merged
by reference.
"""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from shardckpt.errors import CorruptionError, MissingDataError, ShardckptError, StorageError
from shardckpt.io.url import Location, check_key, parse

if TYPE_CHECKING:
    import builtins
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["Data", "Store", "byte_view", "shared_context", "storage_errors", "sync_directory"]

Data = bytes | bytearray | memoryview | NDArray[np.uint8]
"""Contiguous bytes of any kind."""
LOCK_SUFFIX = ".__lock"
"""What TensorStore's file driver calls a file while it writes it."""

_ADVICE = {
    "permission denied": "give this user the right to write there",
    "read-only file system": "it is mounted read-only; choose another place",
    "no space left": "the disk is full; make room or choose another place",
    "quota": "the quota is used up; make room or choose another place",
    "not a directory": "a file stands where a directory is needed; choose another place",
    "file exists": "a file stands where a directory is needed; choose another place",
    "file name too long": "a name on the way is too long for the file system; choose a shorter path",
    "too many open files": "raise the limit of open files (ulimit -n)",
    "file too large": "the file system or ulimit -f allows no file of that size",
    "input/output error": "the device failed; check it before you trust what it holds",
}
"""A part of the system's message → what to do."""


@cache
def shared_context() -> ts.Context:
    """The one TensorStore context of this process."""
    return ts.Context()


@contextmanager
def storage_errors(action: str, place: object) -> Iterator[None]:
    """Turn what TensorStore and the system raise into `StorageError("cannot <action> <place>: …")`."""
    try:
        yield
    except ShardckptError:
        raise
    except (OSError, ValueError, RuntimeError, LookupError) as e:
        said = str(e).replace("\0", "/") or type(e).__name__
        advice = next((what for part, what in _ADVICE.items() if part in said.lower()), "see the storage's own message")
        raise StorageError(f"cannot {action} {place}: {said}; {advice}.") from e


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """Keys and bytes below one location. Keys are relative, with slashes. Safe to use from several threads."""

    location: Location
    """What keys are relative to."""
    _kv: Any
    """The `ts.KvStore` of that location."""
    _top: Path | None
    """On disk: the location that was opened first; directories from here down are always synced."""
    _synced: set[Path] = field(repr=False)
    """Directories whose entry in their parent is durable."""

    @classmethod
    def open(cls, location: Location | str | os.PathLike[str]) -> Store:
        """Open a place, which need not exist; nothing is created.

        Raises:
            UrlError: it is no place that we can store to.
        """
        place = location if isinstance(location, Location) else parse(location)
        return cls(place, _open(place.kvstore(), place), place.local, set())

    def sub(self, prefix: str) -> Store:
        """The store of the location below."""
        place = self.location.join(prefix.rstrip("/"))
        return Store(place, _open(place.kvstore(), place), self._top, self._synced)

    def kvstore(self) -> Any:
        """The `ts.KvStore` itself, for what only TensorStore can do (OCDBT)."""
        return self._kv

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
        """
        span = None if start is None and stop is None else slice(start or 0, stop)
        check_key(key, self)
        self._refuse_special(key)
        with storage_errors("read", self.path_of(key)):
            try:
                found = self._kv.read(key, byte_range=span).result()
            except ValueError as e:
                if "OUT_OF_RANGE" not in str(e):
                    raise
                raise CorruptionError(f"{self.path_of(key)} ends before byte {stop}: {e}; restore it from a copy.") from e
        if found.state != "value":
            raise MissingDataError(f"{self.path_of(key)} is missing; restore it from a copy.")
        data: bytes = found.value
        if stop is not None and len(data) != stop - (start or 0):
            raise CorruptionError(
                f"{self.path_of(key)}: asked for bytes {start or 0} to {stop}, got {len(data)} bytes; restore it from a copy."
            )
        return data

    def read_versioned(self, key: str) -> tuple[bytes | None, bytes]:
        """An object's bytes, None where there is none, and the generation to hand to `replace`."""
        check_key(key, self)
        self._refuse_special(key)
        with storage_errors("read", self.path_of(key)):
            found = self._kv.read(key).result()
        return (found.value if found.state == "value" else None), found.stamp.generation

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
            return bool(self._kv.list(ts.KvStore.KeyRange(key.encode(), key.encode() + b"\0")).result())

    def create(self, key: str, data: Data) -> bool:
        """Write an object unless there is one; durable when it returns.

        Returns:
            Whether this call wrote it; of several callers at once exactly one gets True.
        """
        there, generation = self.read_versioned(key)
        return there is None and self.replace(key, data, generation)

    def replace(self, key: str, data: Data, generation: bytes) -> bool:
        """Write an object if it still has the generation that `read_versioned` gave; durable when it returns.

        Returns:
            Whether this call wrote it. A generation of "missing" is no fence: after a deletion it is true again.
        """
        assert generation, "an empty generation would overwrite whatever is there"
        return bool(self._write(key, data, generation))

    def write(self, key: str, data: Data) -> None:
        """Write an object, whatever was there; durable when it returns."""
        self._write(key, data, None)

    def delete(self, key: str) -> None:
        """Delete an object, if there is one."""
        check_key(key, self)
        with storage_errors("delete", self.path_of(key)):
            self._kv.write(key, None).result()

    def delete_prefix(self, prefix: str = "") -> None:
        """Delete everything below `prefix`: "" (the whole location) or a name that ends in a slash.

        On disk directories go too, links are removed and not followed.
        """
        assert prefix == "" or prefix.endswith("/"), "a prefix without a slash would take its namesakes along: step1, step10"
        with storage_errors("delete", self.path_of(prefix)):
            path = self.local_path(prefix)
            if path is not None:
                _remove_tree(path)
            else:
                self._kv.delete_range(_starting_with(prefix)).result()

    def list(self, prefix: str = "") -> builtins.list[str]:
        """All keys that start with `prefix`, sorted; empty where there is no such place."""
        with storage_errors("list", self.path_of(prefix)):
            return sorted(key.decode() for key in self._kv.list(_starting_with(prefix)).result())

    def list_children(self, prefix: str = "") -> builtins.list[str]:
        """The names directly below `prefix` ("" or ending in a slash), sorted; those with more below end in a slash.

        On disk one directory is read, and an empty directory counts as one with more below.
        """
        with storage_errors("list", self.path_of(prefix)):
            path = self.local_path(prefix)
            if path is not None:
                return _children(path)
            heads = (key.removeprefix(prefix).partition("/") for key in self.list(prefix))
            return sorted({head + slash for head, slash, _ in heads})

    def make_parents(self, key: str) -> None:
        """On disk: make the directories that a key needs, durably. Elsewhere there is nothing to make."""
        path = self.local_path(key)
        if path is not None:
            with storage_errors("make a directory for", path):
                self._make_directory(path.parent)

    def _refuse_special(self, key: str) -> None:
        """On disk: raise StorageError for a pipe, say, in place of a file: opening it could take for ever."""
        path = self.local_path(key)
        if path is not None:
            with storage_errors("read", path), suppress(FileNotFoundError, NotADirectoryError):
                if not stat.S_ISREG(path.stat().st_mode):
                    raise OSError(f"{path} is no file, but a directory, pipe or device")

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

    def _write(self, key: str, data: Data, generation: bytes | None) -> bytes:
        """Write and return the new generation, empty if `generation` was no longer the present one."""
        check_key(key, self)
        self.make_parents(key)
        with storage_errors("write", self.path_of(key)):
            value = data if isinstance(data, (bytes, bytearray)) else bytes(byte_view(data))
            stamp: bytes = self._kv.write(key, value, if_equal=generation).result().generation
            return stamp


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


def _children(path: Path) -> list[str]:
    """A directory's entries, directories with a slash; none where there is no directory."""
    try:
        with os.scandir(path) as entries:
            return sorted(e.name + "/" if e.is_dir() else e.name for e in entries if not e.name.endswith(LOCK_SUFFIX))
    except FileNotFoundError:
        return []


def _remove_tree(path: Path) -> None:
    """Remove a directory and all below it; a link is removed, what it points to stays."""
    if path.is_symlink():
        path.unlink()
        return
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        # Gone already; or somebody else is deleting it, too, and then what is left goes in a second round.
        shutil.rmtree(path, ignore_errors=True)
