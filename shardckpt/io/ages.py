"""Seconds since the last write below a location, by the storage's own clock.

Machines' clocks differ, and data that is removed for its age must be old for certain. So both times
come from the storage.

1. *Now* is read first, so that slow requests do not make data look older than it is.
2. *Last written* is the newest modification time of all objects below. Directories count only if
   there are no files: they show that a save has just begun, but removing a file changes them, too.
"""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from shardckpt.io.buckets.listing import PROBE
from shardckpt.io.failures import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardckpt.io.store import Store

_LONGEST_LOOK = 3600.0
"""Seconds after which nobody looks at a probe any more."""


def idle_seconds(store: Store, prefixes: Iterable[str]) -> dict[str, float | None]:
    """Prefix → seconds since the last write below it; None if that is not known (`last_written`).

    Args:
        store: a location that this process may write to, in order to read the storage's clock.
        prefixes: each ends in a slash, or is the key of an object.

    Raises:
        StorageError: the storage failed or refused.
    """
    if not store.has_directory():  # the object that tells the time would make it
        return dict.fromkeys(prefixes)
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
    if not store.keeps_times:
        return None
    newest = max((time for _, time in store.modification_times(prefix)), default=None)
    path = store.local_path(prefix)
    if newest is not None or path is None:
        return newest
    with storage_errors("look for changes in", path):
        return max(
            (_modification_time(directory) for directory, _, _ in os.walk(path)), default=None
        )


def storage_now(store: Store) -> float:
    """The current time by the storage's own clock, in POSIX seconds.

    This is the modification time of a small object written for this purpose.

    Raises:
        StorageError: nothing can be written there.
    """
    key = PROBE + secrets.token_hex(8)
    store.write(key, b"")
    try:
        with storage_errors("look at", store.path_of(key)):
            times = dict(store.modification_times(key))
            if key not in times:
                raise FileNotFoundError(errno.ENOENT, "it was removed meanwhile", key)
            return times[key]
    finally:
        store.delete(key)


def is_probe(name: str) -> bool:
    """Whether an object is one that `storage_now` writes for a moment."""
    return name.startswith(PROBE)


def remove_old_probes(store: Store, names: Iterable[str]) -> None:
    """Remove the probes among the objects of a place that killed processes have left.

    Raises:
        StorageError: the storage failed.
    """
    probes = [name for name in names if is_probe(name)]
    for probe, idle in (idle_seconds(store, probes) if probes else {}).items():
        if idle is not None and idle > _LONGEST_LOOK:
            store.delete(probe)


def _modification_time(directory: str) -> float:
    try:
        return Path(directory).stat().st_mtime
    except FileNotFoundError:
        return 0.0  # deleted by another process at this moment
