"""Listings of the keys below a location, with their times.

On an object store a listing is paged, and most of a checkpoint's objects are data that no listing needs. So `children`
asks for one level (a *delimited* listing): an attempt of a million chunks is one entry. `keys` and
`modification_times` go through everything below a prefix, page by page, and are for locations with few objects or
that are to be deleted.

Ages are differences between times of one clock, the storage's own: `modification_times` returns the time of an object's
last write, `storage_now` the current time there.
"""

from __future__ import annotations

import errno
import os
import secrets
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from shardckpt.io import files
from shardckpt.io.buckets.bucket import Page, open_bucket
from shardckpt.io.failures import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shardckpt.io.store import Store
    from shardckpt.io.url import Location

PROBE = ".now-"
"""Prefix of the names of the objects that `storage_now` writes and deletes; one that is left behind has no meaning."""


def children(store: Store, prefix: str = "") -> list[str]:
    """The names directly below `prefix` ("" or ending in a slash), sorted; a name that has keys below it ends in a slash.

    On disk, one directory is read, and the name of an empty directory ends in a slash too. A web server shows nothing.

    Raises:
        StorageError: the storage failed or refused.
    """
    with storage_errors("list", store.path_of(prefix)):
        path = store.local_path(prefix)
        if path is not None:
            return _directory(path)
        if store.location.is_web:
            return []
        if store.location.bucket is None:
            heads = (key.removeprefix(prefix).partition("/") for key in store.list(prefix))
            return sorted({head + slash for head, slash, _ in heads})
        found: set[str] = set()
        for page in _pages(store.location, prefix, delimiter="/"):
            found.update(name.removeprefix(prefix) for name in page.prefixes)
            found.update(file.name.removeprefix(prefix) for file in page.objects)
        return sorted(found - {""})


def keys(location: Location, prefix: str = "") -> Iterator[str]:
    """All keys on an object store that start with `prefix`, in order; each page shows the keys at the time of its request.

    Raises:
        StorageError: the storage failed or refused.
    """
    with storage_errors("list", f"{location}/{prefix}"):
        for page in _pages(location, prefix):
            yield from (found.name for found in page.objects)


def modification_times(store: Store, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Every object below `prefix` ("", a complete key, or ending in a slash), and the time of its last write.

    Args:
        store: the location.
        prefix: prefix of the keys.

    Yields:
        Key, and POSIX seconds by the storage's clock (S3 has no fractions). On disk in no particular order; links
        are not followed. Memory keeps no times, so the current time is returned for every object.

    Raises:
        StorageError: the storage failed or refused.
    """
    with storage_errors("list", store.path_of(prefix)):
        path = store.local_path(prefix)
        if path is not None and prefix and not prefix.endswith("/"):
            with suppress(FileNotFoundError):
                yield prefix, path.stat(follow_symlinks=False).st_mtime
        elif path is not None:
            for name, entry in files.below(path):
                with suppress(FileNotFoundError):
                    yield prefix + name, entry.stat(follow_symlinks=False).st_mtime
        elif store.location.bucket is None:
            yield from ((key, time.time()) for key in store.list(prefix))
        else:
            for page in _pages(store.location, prefix):
                yield from ((found.name, found.time) for found in page.objects)


def sizes(store: Store, prefix: str) -> dict[str, int]:
    """Bytes of every object whose key starts with `prefix`, which may be a complete key.

    On disk, those of the files in one directory; on a web server, that of the file whose key is `prefix`.

    Raises:
        StorageError: the storage failed or refused.
    """
    with storage_errors("list", store.path_of(prefix)):
        above = prefix.rpartition("/")[0]
        path = store.local_path(above + "/" if above else "")
        if path is not None:
            names = [above + "/" * bool(above) + name for name in _directory(path) if not name.endswith("/")]
            return {name: (store.location.local / name).stat().st_size for name in names if name.startswith(prefix)}  # type: ignore[operator]
        if store.location.is_web:
            nbytes, _ = open_bucket(store.location).stat(store.location.object_prefix + prefix)
            return {} if nbytes is None else {prefix: nbytes}
        if store.location.bucket is None:
            return {key: len(store.read(key)) for key in store.list(prefix)}
        return {found.name: found.nbytes for page in _pages(store.location, prefix) for found in page.objects}


def storage_now(store: Store) -> float:
    """The current time by the storage's own clock, in POSIX seconds: the modification time of a small object written for this purpose.

    Raises:
        StorageError: nothing can be written there.
    """
    key = PROBE + secrets.token_hex(8)
    store.write(key, b"")
    try:
        path = store.local_path(key)
        with storage_errors("look at", store.path_of(key)):
            return path.stat().st_mtime if path is not None else dict(modification_times(store, key))[key]
    finally:
        store.delete(key)


def _pages(location: Location, prefix: str, delimiter: str = "") -> Iterator[Page]:
    """The pages of a listing on an object store, with names relative to the location."""
    below = location.object_prefix
    strip = len(below)
    for page in open_bucket(location).pages(below + prefix, delimiter):
        objects = [replace(found, name=found.name[strip:]) for found in page.objects]
        yield Page(objects, [name[strip:] for name in page.prefixes], page.token)


def _directory(path: Path) -> list[str]:
    """A directory's entries, directories with a slash; empty if there is no directory."""
    try:
        with os.scandir(path) as entries:
            return sorted(e.name + "/" if _is_directory(e) else e.name for e in entries if not e.name.endswith(files.LOCK_SUFFIX))
    except FileNotFoundError:
        return []


def _is_directory(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a directory or a link to one; False for a link cycle."""
    try:
        return entry.is_dir()
    except OSError as e:
        if e.errno == errno.ELOOP:
            return False
        raise
