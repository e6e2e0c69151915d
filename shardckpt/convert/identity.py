"""Is a foreign checkpoint still the one that it was? A digest over its files' names and when they were written says so."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from shardckpt.io.listing import modification_times

if TYPE_CHECKING:
    from shardckpt.io.store import Store

__all__ = ["identity_of"]


def identity_of(place: Store, prefix: str = "") -> str:
    """A digest that differs when a file below `prefix` ("", a name that ends in a slash, or a file's) was added, removed or written anew.

    Raises:
        StorageError: the storage failed or refused.
    """
    digest = hashlib.sha256()
    path = place.local_path(prefix) if prefix and not prefix.endswith("/") else None
    if path is not None:
        return hashlib.sha256(f"{prefix} {path.stat().st_mtime_ns} {path.stat().st_size}".encode()).hexdigest()
    for key, time in sorted(modification_times(place, prefix)):
        # memory:// keeps no times
        digest.update(f"{key} {time!r}\n".encode() if place.location.scheme != "memory" else place.read(key))
    return digest.hexdigest()
