"""Pinning a checkpoint: neither a `CheckpointManager` nor `shardckpt rm` deletes it until it is unpinned.

See `commit.markers` for why a pin that was set is effective.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.commit.collect import renew
from shardckpt.commit.markers import PINNED, is_marked, mark, unmark
from shardckpt.commit.publish import published_attempt
from shardckpt.errors import NotFoundError
from shardckpt.io.store import Store
from shardckpt.io.url import parse

if TYPE_CHECKING:
    import os


def pin(url: str | os.PathLike[str]) -> None:
    """Pin a checkpoint; when this returns, nothing deletes it any more.

    A save that is about to replace it at this moment fails with an error.

    Raises:
        NotFoundError: there is no checkpoint, or it has just been deleted.
        FormatError: its record is damaged.
        StorageError: the storage failed.
    """
    store = Store.open(parse(url))
    attempt = published_attempt(store)
    if attempt is not None:
        mark(store, PINNED, attempt)
        if renew(store, attempt):
            return
        unmark(store, PINNED)
        store.remove_empty()
    raise NotFoundError(f"{store}: no checkpoint there to pin; `shardckpt ls` lists those that are.")


def unpin(url: str | os.PathLike[str]) -> bool:
    """Allow a checkpoint to be deleted again; return whether it was pinned.

    Raises:
        NotFoundError: no checkpoint there.
        StorageError: the storage failed.
    """
    store = Store.open(parse(url))
    attempt = published_attempt(store)
    if attempt is None:
        raise NotFoundError(f"{store}: no checkpoint there to unpin; `shardckpt ls` lists those that are.")
    was_pinned = is_marked(store, PINNED, attempt)
    unmark(store, PINNED)
    return was_pinned
