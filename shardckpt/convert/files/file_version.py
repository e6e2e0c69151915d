"""One version of a file that another program wrote.

The file is read unchanged since it was first opened, or not at all.

On a local disk its size and time are compared each time that it is opened, and before it is closed.
On an object store the generation comes with every response; by fsspec it is asked for afterwards. A
file that is overwritten with as many bytes, and gets its former time, is not detected.
"""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from shardckpt.errors import (
    CorruptionError,
    FormatError,
    MissingDataError,
    ReplacedError,
    StorageError,
)
from shardckpt.format.documents import document_digest
from shardckpt.io.failures import storage_errors
from shardckpt.io.files import OpenFile
from shardckpt.io.status import is_directory, status
from shardckpt.io.store import Store
from shardckpt.reading.fetch import scatter_read

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from shardckpt.io.url import Location

    Bytes = NDArray[np.uint8]


class FileVersion:
    """A version of a file. Safe to use from several threads."""

    def __init__(self, store: Store, key: str) -> None:
        """Record the current version of the file at a key.

        Raises:
            MissingDataError: there is no such file.
            StorageError: its metadata cannot be read, or it is not a regular file.
        """
        self.store, self.key = store, key
        self._path = store.local_path(key)
        self._known: tuple[int, int] | bytes
        if self._path is None:
            data, self._known = store.read_versioned(key, 0, 0)
            if data is None:
                raise MissingDataError(f"{self} is missing; put it back from a backup.")
            return
        now = status(self._path)
        if now is None:
            raise MissingDataError(f"{self} is missing; put it back from a backup.")
        with storage_errors("look at", self):
            if not stat.S_ISREG(now.st_mode):
                raise OSError("it is not a regular file")
        self._known = _version(now)

    def __str__(self) -> str:
        """The file's path or url."""
        return self.store.path_of(self.key)

    @property
    def identity(self) -> list[Any]:
        """JSON that differs between versions of the file.

        It is the same on every machine that sees the file, or a copy with its times.
        """
        return [
            self.key,
            self._known.hex() if isinstance(self._known, bytes) else list(self._known),
        ]

    def read(self, start: int, stop: int) -> Bytes:
        """Read bytes `start` to `stop`.

        Raises:
            ReplacedError: the file has changed, or is gone.
            CorruptionError: the file ends before `stop`.
            StorageError: the file cannot be read.
        """
        buffer = np.empty(stop - start, np.uint8)
        self.read_into(start, [buffer.data])
        return buffer

    def read_into(self, start: int, vectors: Sequence[memoryview]) -> None:
        """Read bytes from `start` on into several buffers, one after the other.

        Raises the errors of `read`.
        """
        if self._path is not None:
            self._of_file(start, vectors)
        else:
            self._of_object(start, vectors)

    def read_whole(self, most: int) -> bytes:
        """Read all bytes.

        Raises:
            ReplacedError, StorageError: as for `read`.
            FormatError: the file has more than `most` bytes.
        """
        if (
            self._known[0] > most
            if isinstance(self._known, tuple)
            else self.store.is_longer(self.key, most)
        ):
            raise FormatError(
                f"{self} has more than {most} bytes; it is not the kind of file that its name says."
            )
        if isinstance(self._known, tuple):
            return self.read(0, self._known[0]).tobytes()
        data, version = self.store.read_versioned(self.key)
        if data is None or version != self._known:
            raise self._replacement_error()
        return data

    def require_length(self, nbytes: int) -> None:
        """Check that the file has exactly `nbytes` bytes.

        Raises:
            FormatError: the file has more or fewer.
        """
        if isinstance(self._known, tuple):
            if self._known[0] == nbytes:
                return
            has = f"{self._known[0]} bytes"
        elif self.store.is_longer(self.key, nbytes):
            has = "more"
        elif nbytes == 0 or self.store.is_longer(self.key, nbytes - 1):
            return
        else:
            has = "fewer"
        raise FormatError(
            f"{self} should have {nbytes} bytes according to its contents, but has {has}; it is "
            "damaged or cut off: get another copy."
        )

    def _of_file(self, start: int, vectors: Sequence[memoryview]) -> None:
        length = sum(map(len, vectors))
        with storage_errors("read", self):
            try:
                # Without O_NONBLOCK, opening a pipe that has replaced the file would block.
                file = OpenFile(str(self._path), os.O_RDONLY | os.O_NONBLOCK)
            except (FileNotFoundError, NotADirectoryError) as e:
                raise self._replacement_error() from e
            with file as fd:
                if _version(os.fstat(fd)) != self._known:
                    raise self._replacement_error()
                ended = length > 0 and not _fill(fd, start, length, vectors)
                if _version(os.fstat(fd)) != self._known:
                    raise self._replacement_error()
        if ended:
            raise CorruptionError(f"{self} ends before byte {start + length}; get another copy.")

    def _of_object(self, start: int, vectors: Sequence[memoryview]) -> None:
        try:
            version = (
                self.store.read_into(self.key, start, vectors)
                if any(map(len, vectors))
                else self.store.read_versioned(self.key, 0, 0)[1]
            )
        except (CorruptionError, MissingDataError) as e:
            if (
                isinstance(e, MissingDataError)
                or self.store.read_versioned(self.key, 0, 0)[1] != self._known
            ):
                raise self._replacement_error() from e
            raise
        if (version or self.store.change_token(self.key)) != self._known:
            raise self._replacement_error()

    def _replacement_error(self) -> ReplacedError:
        return ReplacedError(
            f"{self} was changed, replaced or deleted while it was being read; try again when no "
            "process writes there."
        )


def file_at(location: Location) -> FileVersion | None:
    """The file at a location; None if there is a directory or nothing.

    Raises:
        StorageError: its metadata cannot be read, or it is a pipe or device.
    """
    above = location.parent
    if above is None or is_directory(location.local_path):
        return None
    try:
        return FileVersion(Store.open(above), location.name)
    except MissingDataError:
        return None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A location that may have a checkpoint of some format."""

    location: Location
    file: FileVersion | None
    """The file there; None: there is a directory, or nothing."""
    names: Sequence[str]
    """The names in the directory; none if its storage lists no names."""

    @classmethod
    def at(cls, location: Location) -> Self:
        """Look at a location; StorageError as in `file_at`."""
        file, store = file_at(location), Store.open(location)
        return cls(location, file, store.list_children() if file is None and store.lists else [])


def identity_of(location: Location, files: Iterable[FileVersion]) -> str:
    """A digest of 64 hex digits that changes whenever one of the files at a location changes."""
    return document_digest([str(location), *(file.identity for file in files)])


def identity_below(store: Store, within: Container[str] = ("",)) -> str:
    """A digest of 64 hex digits that changes whenever any file below a location changes.

    Links to directories are followed. Where no times are kept, the contents are hashed.

    Args:
        store: the location.
        within: the directories, relative to it, whose files count.

    Raises:
        StorageError: there is a pipe or device, or the storage does not list its files.
    """
    files: list[tuple[str, object]] = []
    folders, linked = [""], set[str]()
    while folders:
        for key, time in store.modification_times(folders.pop()):
            path = store.local_path(key)
            now = status(path)
            if path is not None and now is not None and stat.S_ISDIR(now.st_mode):  # a link
                if (target := os.path.realpath(path)) not in linked:
                    linked.add(target)
                    folders.append(f"{key}/")
            elif not any(key[:end] in within for end in _ends_of_parents(key)):
                continue
            elif path is None or now is None:
                known = time if store.keeps_times else hashlib.sha256(store.read(key)).hexdigest()
                files.append((key, known))
            elif stat.S_ISREG(now.st_mode):
                files.append((key, _version(now)))
            else:
                raise StorageError(
                    f"{path} is a pipe or device, not a file, and TensorStore would wait for it; "
                    "remove it."
                )
    digest = hashlib.sha256(str(store).encode())
    for file in sorted(files):
        digest.update(f"{file}\n".encode())
    return digest.hexdigest()


def _ends_of_parents(key: str) -> Iterator[int]:
    """The length of the path of each directory that a key lies in, the location's own first."""
    yield 0
    yield from (i for i, character in enumerate(key) if character == "/")


def _version(entry: os.stat_result) -> tuple[int, int]:
    return entry.st_size, entry.st_mtime_ns


def _fill(fd: int, start: int, length: int, vectors: Sequence[memoryview]) -> bool:
    """Fill all vectors from a file; return whether it has enough bytes."""
    try:
        scatter_read(fd, start, length, vectors)
    except EOFError:
        return False
    return True
