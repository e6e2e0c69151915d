"""Seconds since the last write below a location, by the storage's own clock.

Machines' clocks differ, and data that is removed for its age must be old for certain. So both times come from the storage.

1. *Now* is read first, so that slow requests do not make data look older than it is.
2. *Last written* is the newest modification time of all objects below. Directories count only if there are no
   files: they show that a save has just begun, but removing a file changes them, too.
"""

from __future__ import annotations

import os
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from shardckpt.io import files
from shardckpt.io.buckets.listing import PROBE, pages
from shardckpt.io.failures import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardckpt.io.store import Store


def idle_seconds(store: Store, prefixes: Iterable[str]) -> dict[str, float | None]:
    """Prefix → seconds since the last write below it; None if that is not known (`last_written`).

    Args:
        store: a location that this process may write to, in order to read the storage's clock.
        prefixes: each ends in a slash, or is the key of an object.

    Raises:
        StorageError: the storage failed or refused.
    """
    now = storage_now(store)
    last = {prefix: last_written(store, prefix) for prefix in prefixes}
    return {prefix: None if time is None else max(0.0, now - time) for prefix, time in last.items()}


def last_written(store: Store, prefix: str) -> float | None:
    """Time of the last write below `prefix`: POSIX seconds by the storage's clock.

    Returns:
        None if the storage keeps no times (`memory://`), or nothing is there.

    Raises:
        StorageError: the storage failed or refused.
    """
    if store.location.scheme == "memory":
        return None
    newest = max((time for _, time in modification_times(store, prefix)), default=None)
    path = store.local_path(prefix)
    if newest is not None or path is None:
        return newest
    with storage_errors("look for changes in", path):
        return max((_modified(directory) for directory, _, _ in os.walk(path)), default=None)


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
            for page in pages(store.location, prefix):
                yield from ((found.name, found.time) for found in page.objects)


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


def _modified(directory: str) -> float:
    try:
        return Path(directory).stat().st_mtime
    except FileNotFoundError:
        return 0.0  # deleted by another process at this moment
