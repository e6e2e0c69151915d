"""Listings of the keys below a location: of an object store's pages, and of a directory on disk.

On an object store a listing is paged, and most of a checkpoint's objects are data that no listing
needs. So `children` asks for one level (a *delimited* listing): an attempt of a million chunks is
one entry. `keys` and `pages` go through everything below a prefix, page by page, and are for
locations with few objects or that are to be deleted.
"""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from shardckpt.io import files
from shardckpt.io.buckets.bucket import Page, open_bucket
from shardckpt.io.failures import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shardckpt.io.url import Location

PROBE = ".now-"
"""Prefix of the names of the objects that `ages.storage_now` writes and deletes; one that is left
behind has no meaning."""


def children(location: Location, prefix: str = "") -> list[str]:
    """The names directly below `prefix` on an object store, as `Store.list_children` has them."""
    names: set[str] = set()
    for page in pages(location, prefix, delimiter="/"):
        names.update(name.removeprefix(prefix) for name in page.prefixes)
        names.update(file.name.removeprefix(prefix) for file in page.objects)
    return sorted(names - {""})


def keys(location: Location, prefix: str = "") -> Iterator[str]:
    """All names on an object store that start with `prefix`, in the service's order.

    Each page shows the names at the time of its request. Not each is a key (`is_key`).

    Raises:
        StorageError: the storage failed or refused.
    """
    with storage_errors("list", f"{location}/{prefix}"):
        for page in pages(location, prefix):
            yield from (file.name for file in page.objects)


def is_key(name: str) -> bool:
    """Whether the name of an object is a key; that of a folder which a console has made is not."""
    return name != "" and not name.endswith("/")


def pages(location: Location, prefix: str, delimiter: str = "") -> Iterator[Page]:
    """The pages of a listing on an object store, with names relative to the location."""
    below = location.object_prefix
    strip = len(below)
    for page in open_bucket(location).pages(below + prefix, delimiter):
        objects = [replace(file, name=file.name[strip:]) for file in page.objects]
        yield Page(objects, [name[strip:] for name in page.prefixes], page.token)


def directory(path: Path) -> list[str]:
    """A directory's entries, directories with a slash; empty if there is no directory."""
    try:
        with os.scandir(path) as entries:
            return sorted(
                e.name + "/" if _is_directory(e) else e.name
                for e in entries
                if not files.is_transient(e.name)
            )
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
