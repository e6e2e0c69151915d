"""A storage that a file system of the library fsspec reaches: `fsspec+PROTOCOL://…`.

It is used as far as its client is conditional.

1. *Creation.* A save needs that of several writers of a missing object exactly one succeeds. fsspec
   has `mode="create"` for that, but by default it looks first and then writes, so that both writers
   succeed. So a protocol is written to only if tests have proved with two processes, on a real
   server, that its client sends the condition (`FSSPEC_WRITTEN`). All others are read only.
2. *Replacement.* No client has a write in fsspec's interface that depends on the version. It is
   never emulated by reading first. So a checkpoint is created here and stays: what would replace or
   delete a record is refused (`Store.check_replaces`).

Protocols of local files, of memory, and of shardckpt's own views, and chained urls (`::`), are
refused.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from shardckpt.errors import MissingExtraError, StorageError, UrlError
from shardckpt.io.buckets.bucket import ABSENT
from shardckpt.io.deletion import delete_objects
from shardckpt.io.failures import begin_use
from shardckpt.io.files import check_whole
from shardckpt.io.store import Store, byte_view
from shardckpt.io.url import FSSPEC_WRITTEN, NOT_BY_FSSPEC
from shardckpt.text import install_command

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardckpt.io.store import Data
    from shardckpt.io.url import Location

_VERSIONS = (
    "generation",
    "ETag",
    "etag",
    "e_tag",
    "md5",
    "Content-MD5",
    "Digest",
    "checksum",
    "blob_id",
    "xet_hash",
    "sha",
    "hex",
    "mtime",
    "modificationTime",
    "modify",
    "updated",
    "last_modified",
    "LastModified",
    "Last-Modified",
    "created",
    "size",
)
"""Names of details of an object that tell its versions apart; file systems have some of them."""


class FsspecReader(Store):
    """Objects of a file system of fsspec, to read."""

    __slots__ = ("_above", "_files", "_root")
    writable = False
    replaces = False
    keeps_times = False
    uploads_on_threads = True

    def __init__(self, location: Location, files: Any) -> None:
        """Keys are relative to `location`; `files` is fsspec's file system."""
        super().__init__(location)
        self._files = files
        # With a slash, some roots have a name that they otherwise lack.
        path = files._strip_protocol(f"{_url(location)}/")  # noqa: SLF001  (how fsspec makes a path of a url)
        self._root = path.rstrip("/")
        self._above = f"{self._root}/" if path else ""
        """The part of a path before a key: empty where the root of the file system has no name."""

    @classmethod
    def at(cls, location: Location) -> FsspecReader:
        """See `Store`."""
        begin_use(location)
        host = location.path.partition("/")[0]
        return cls(location, _file_system(location.scheme, host, frozenset(os.environ.items())))

    def _moved(self, location: Location) -> FsspecReader:
        return type(self)(location, self._files)

    def _path(self, key: str) -> str:
        begin_use(self.location)
        return f"{self._above}{key}" if key else self._root

    def _read(
        self, key: str, start: int | None, stop: int | None, *, versioned: bool
    ) -> tuple[bytes | None, bytes]:
        empty = start is not None and start == stop
        if empty or stop is None:
            info = self._info(key)
            if info is None:
                return None, ABSENT
            if empty:
                if _length(info) < (start or 0):
                    raise EOFError(f"it has only {_length(info)} bytes")
                return b"", _version(info)
            if info.get("size") is not None:
                check_whole(_length(info) - (start or 0), self.path_of(key))
        try:
            with _errors():
                data = self._files.cat_file(self._path(key), start=start, end=stop)
        except FileNotFoundError:
            return None, ABSENT
        except OSError:
            now = self._info(key) or {}
            if now.get("size") is not None and max(start or 0, stop or 0) > _length(now):
                raise EOFError(f"it has only {_length(now)} bytes") from None
            raise
        # After the bytes: the version is then another one if the object was replaced meanwhile.
        version = self._version(key) if versioned else b""
        return (None if version == ABSENT else bytes(data)), version

    def _info(self, key: str) -> dict[str, Any] | None:
        try:
            with _errors():
                info: dict[str, Any] = self._files.info(self._path(key))
        except FileNotFoundError:
            return None
        return info if info.get("type") != "directory" else None

    def _version(self, key: str) -> bytes:
        info = self._info(key)
        return ABSENT if info is None else _version(info)

    def _size(self, key: str) -> int | None:
        info = self._info(key)
        return None if info is None else _length(info)

    def _exists(self, key: str) -> bool:
        return self._info(key) is not None

    def _change_token(self, key: str) -> object:
        return self._version(key)

    def _write(self, key: str, data: Data, generation: bytes | None) -> bool:
        del key, data, generation
        raise self._read_only()

    def _delete(self, key: str) -> None:
        del key
        raise self._read_only()

    def _remove(self, key: str, generation: bytes) -> bool:
        del key, generation
        return False

    def _read_only(self) -> StorageError:
        known = ", ".join(f"fsspec+{protocol}://" for protocol in FSSPEC_WRITTEN)
        return StorageError(
            f"{self}: this place is read only, because it is not proved that its client creates "
            f"objects conditionally. Write by a url of another kind, or by one of {known}."
        )

    def _list(self, prefix: str) -> Iterable[str]:
        return (key for key, _ in self._entries(prefix))

    def _sizes(self, prefix: str) -> dict[str, int]:
        return {key: _length(info) for key, info in self._entries(prefix)}

    def _entries(self, prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Every object whose key starts with `prefix`, and its details.

        The file system lists directories alone.
        """
        folder, slash, name = prefix.rpartition("/")
        if not name:
            yield from self._below(folder)
            return
        for key, info in self._children(folder + slash):
            if key.startswith(prefix):
                yield from [(key, info)] if info["type"] != "directory" else self._below(key)

    def _below(self, folder: str) -> Iterator[tuple[str, dict[str, Any]]]:
        try:
            with _errors():
                files = self._files.find(self._path(folder), detail=True)
        except FileNotFoundError:
            return
        yield from self._inside(folder, files.items())

    def _children(self, prefix: str) -> list[tuple[str, dict[str, Any]]]:
        folder = prefix.rstrip("/")
        try:
            with _errors():
                listing = self._files.ls(self._path(folder), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [*self._inside(folder, ((info["name"].rstrip("/"), info) for info in listing))]

    def _inside(
        self, folder: str, listing: Iterable[tuple[str, dict[str, Any]]]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Keys and details of the objects of a listing by path, as far as they are in a folder."""
        begin = f"{self._path(folder)}/" if folder else self._above
        return (
            (path.removeprefix(self._above), info)
            for path, info in listing
            if path.startswith(begin)
        )

    def _list_children(self, prefix: str) -> list[str]:
        slash = {True: "/", False: ""}
        return sorted(
            key.removeprefix(prefix) + slash[info["type"] == "directory"]
            for key, info in self._children(prefix)
        )


class FsspecStore(FsspecReader):
    """Objects of a file system of fsspec whose client creates objects conditionally.

    None is replaced.
    """

    __slots__ = ()
    writable = True

    def _write(self, key: str, data: Data, generation: bytes | None) -> bool:
        if generation not in (None, ABSENT):
            self.check_replaces(f"replace {key} at")
        mode = "overwrite" if generation is None else "create"
        try:
            with _errors():
                self._files.pipe_file(self._path(key), bytes(byte_view(data)), mode=mode)
        except FileExistsError:
            return False
        return True

    def _delete(self, key: str) -> None:
        try:
            with _errors():
                self._files.rm_file(self._path(key))
        except FileNotFoundError:
            pass

    def _delete_below(self, prefix: str) -> None:
        delete_objects(self._list(prefix), self._delete)


def _version(info: dict[str, Any]) -> bytes:
    """The version of an object with these details."""
    return repr([(name, info[name]) for name in _VERSIONS if name in info]).encode()


def _length(info: dict[str, Any]) -> int:
    """Bytes of an object with these details."""
    if info.get("size") is None:
        raise OSError("the place does not say how long the object is")
    return int(info["size"])


def _url(location: Location) -> str:
    return f"{location.scheme.removeprefix('fsspec+')}://{location.path}"


@lru_cache(maxsize=8)
def _file_system(scheme: str, host: str, _environment: frozenset[tuple[str, str]]) -> Any:
    """The file system for all threads; another one if the environment changes, which configures it.

    Raises:
        MissingExtraError: fsspec, or the package with the protocol, is not installed.
        UrlError: fsspec does not know the protocol, or it is one of those that are refused.
        StorageError: the file system cannot be opened.
    """
    protocol = scheme.removeprefix("fsspec+")
    try:
        import fsspec
    except ImportError as e:
        raise MissingExtraError(
            f"{scheme}:// needs fsspec; install it with `{install_command('fsspec')}`."
        ) from e
    try:
        kind = fsspec.get_filesystem_class(protocol)
    except ImportError as e:
        raise MissingExtraError(
            f"{scheme}:// needs the package of fsspec's protocol {protocol} ({e}); install it."
        ) from e
    except ValueError as e:
        raise UrlError(
            f"{scheme}://: fsspec knows no protocol {protocol!r}; check its name, or install the "
            "package that has it. What a program registers itself is known to no other process."
        ) from e
    names = {kind.protocol} if isinstance(kind.protocol, str) else {*kind.protocol}
    if names & NOT_BY_FSSPEC.keys():
        raise UrlError(f"{scheme}://: {NOT_BY_FSSPEC[min(names & NOT_BY_FSSPEC.keys())]}.")
    try:
        options = kind._get_kwargs_from_urls(f"{protocol}://{host}/")  # noqa: SLF001  (as fsspec.core.url_to_fs does)
        return kind(**options, use_listings_cache=False, skip_instance_cache=True)
    except Exception as e:
        raise StorageError(
            f"cannot open {scheme}://{host}: {type(e).__name__}: {e}; see the documentation of "
            "that protocol."
        ) from e


@contextmanager
def _errors() -> Iterator[None]:
    """Turn the errors of any client into OSErrors."""
    try:
        yield
    except OSError:
        raise
    except Exception as e:
        raise OSError(f"{type(e).__name__}: {e}") from e
