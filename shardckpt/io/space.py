"""Is there room for what is about to be saved, where the storage can tell?

A local disk can (`statvfs`); buckets and memory cannot, nor can file systems that report no size at all. What other
processes write to the same disk meanwhile nobody knows, so an answer of yes is no promise.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from shardckpt.errors import StorageError
from shardckpt.excerpt import file_size

if TYPE_CHECKING:
    from shardckpt.io.store import Store

__all__ = ["check_space", "free_bytes"]


def check_space(store: Store, nbytes: int) -> None:
    """Refuse a save for which there is no room.

    Args:
        store: where to; nothing needs to be there yet, and nothing is created.
        nbytes: bytes that the save will take there.

    Raises:
        StorageError: fewer are free; names the place, both numbers and what to do.
    """
    free = free_bytes(store)
    if free is not None and free < nbytes:
        raise StorageError(
            f"{store}: this save takes {file_size(nbytes)} and the disk has {file_size(free)} free, {file_size(nbytes - free)} too little; "
            f"make room (keep fewer checkpoints, delete what failed saves left with `shardckpt gc`), or save elsewhere."
        )


def free_bytes(store: Store) -> int | None:
    """Bytes that may still be written there by this user; None where the storage does not say."""
    path = store.local_path("")
    if path is None:
        return None
    for existing in (path, *path.parents):
        try:
            found = os.statvfs(existing)
        except FileNotFoundError:  # the save will make it, on the disk of the nearest directory that is there
            continue
        except OSError:  # what is wrong there, the save itself says better
            return None
        return found.f_bavail * found.f_frsize if found.f_blocks else None
    return None
