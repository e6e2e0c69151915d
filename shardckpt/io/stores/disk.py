"""A storage on this machine's file system: files below a directory."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from shardckpt.format.documents import check_key
from shardckpt.io import files
from shardckpt.io.buckets import listing
from shardckpt.io.datafile import begin_write_back
from shardckpt.io.deletion import delete_file, remove_empty_directory, remove_file, remove_tree
from shardckpt.io.failures import begin_use, storage_errors
from shardckpt.io.files import DurableDirectories
from shardckpt.io.status import is_directory, is_file, status
from shardckpt.io.store import Store, byte_view

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shardckpt.io.store import Data
    from shardckpt.io.url import Location


class DiskStore(Store):
    """Files below a directory."""

    __slots__ = ("_directories", "_top")
    near = True
    has_paths = True
    appends = True
    has_locks = True
    durable_when_visible = False
    has_driver = True
    sharing_advice = (
        "Each host has a disk of its own there: mount one shared file system on all hosts, or "
        "save to a bucket."
    )

    def __init__(self, location: Location, directories: DurableDirectories) -> None:
        """Keys are relative to `location`; `directories` creates directories."""
        super().__init__(location)
        assert location.local_path is not None
        self._top = location.local_path
        self._directories = directories

    @classmethod
    def at(cls, location: Location) -> DiskStore:
        """See `Store`."""
        assert location.local_path is not None
        return cls(location, DurableDirectories(location.local_path))

    def _moved(self, location: Location) -> DiskStore:
        return DiskStore(location, self._directories)

    def local_path(self, key: str) -> Path:
        """See `Store`."""
        if not key:
            return self._top
        check_key(key.removesuffix("/"), self)
        return self._top / key

    def has_directory(self) -> bool:
        """See `Store`."""
        return is_directory(self._top)

    def remove_empty(self) -> None:
        """See `Store`."""
        with suppress(OSError):
            remove_empty_directory(self._top)

    def make_parents(self, key: str) -> None:
        """See `Store`."""
        path = self.local_path(key)
        with storage_errors("make a directory for", path):
            self._directories.make(path.parent)

    def synced_later(self) -> DiskStore:
        """See `Store`."""
        return DiskStore(self.location, self._directories.later())

    def sync(self) -> None:
        """See `Store`."""
        kept = self._directories.take_kept()
        for _, file in kept:  # all at once, so that a journal takes them together
            begin_write_back(file.fileno(), 0, 0)
        for path, file in kept:
            with storage_errors("write", path), file as fd:
                os.fsync(fd)
        with storage_errors("write", self._top):
            self._directories.sync_all()

    def note_unsynced(self, path: Path) -> bool:
        """See `Store`."""
        return self._directories.keep(path, path)

    def sync_name(self, path: Path) -> None:
        """See `Store`."""
        self._directories.sync(path.parent)

    def _file(self, key: str) -> Path:
        """Note the use of the storage, and return the key's path."""
        begin_use(self.location)
        return self.local_path(key)

    def _read(
        self, key: str, start: int | None, stop: int | None, *, versioned: bool
    ) -> tuple[bytes | None, bytes]:
        data = files.read(self._file(key), start or 0, stop)
        if data == b"" and start and (self._size(key) or 0) < start:
            raise EOFError("the file is shorter than that")
        return data, files.generation_of(
            data
        ) if versioned and start is None and stop is None else b""

    def _size(self, key: str) -> int | None:
        path = self._file(key)
        return path.stat().st_size if is_file(path) else None

    def _exists(self, key: str) -> bool:
        return is_file(self._file(key))

    def _change_token(self, key: str) -> object:
        try:
            status = self._file(key).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size

    def _write(self, key: str, data: Data, generation: bytes | None) -> bool:
        path = self._file(key)
        self.make_parents(key)
        return files.replace(path, byte_view(data), generation, self._directories)

    def _delete(self, key: str) -> None:
        delete_file(self._file(key))

    def _remove(self, key: str, generation: bytes) -> bool:
        return remove_file(self._file(key), generation)

    def _delete_below(self, prefix: str) -> None:
        # First: file systems that keep a deleted file while it is open keep its directory, too.
        self._directories.forget(self.local_path(prefix))
        remove_tree(self.local_path(prefix))

    def _list(self, prefix: str) -> Iterator[str]:
        return (name for name, _ in below(self._file(""), prefix))

    def _times(self, prefix: str) -> Iterator[tuple[str, float]]:
        path = self.local_path(prefix)
        if prefix and not prefix.endswith("/"):
            with suppress(FileNotFoundError):
                yield prefix, path.stat(follow_symlinks=False).st_mtime
            return
        for name, entry in below(path):
            with suppress(FileNotFoundError):
                yield prefix + name, entry.stat(follow_symlinks=False).st_mtime

    def _list_children(self, prefix: str) -> list[str]:
        return listing.directory(self.local_path(prefix))

    def _sizes(self, prefix: str) -> dict[str, int]:
        folder = prefix[: prefix.rfind("/") + 1]
        top = self.local_path(folder)
        names = [folder + name for name in listing.directory(top) if not name.endswith("/")]
        entries = {
            name: status(top / name.removeprefix(folder))
            for name in names
            if name.startswith(prefix)
        }
        return {name: entry.st_size for name, entry in entries.items() if entry is not None}


def below(top: Path, prefix: str = "") -> Iterator[tuple[str, os.DirEntry[str]]]:
    """All files below `top` whose names relative to it start with `prefix`.

    Each file is given by its name and directory entry. Links are not followed.

    A file deleted during the listing may be left out.
    """
    above = prefix.rpartition("/")[0]
    try:
        with os.scandir(top / above) as listing:
            entries = list(listing)
    except FileNotFoundError:
        return
    for entry in entries:
        name = f"{above}/{entry.name}" if above else entry.name
        if not name.startswith(prefix):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from below(top, f"{name}/")
        elif not files.is_transient(entry.name):
            yield name, entry
