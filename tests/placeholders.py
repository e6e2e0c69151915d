"""What a save leaves of `checkpoint.json` that was killed before it published anything."""

from __future__ import annotations

from shardckpt.io.commit import RECORD
from shardckpt.io.store import Store
from shardckpt.record import Tombstone, seal

__all__ = ["put_placeholder"]


def put_placeholder(url):
    """Put it there before a save, which takes it for its own; after the save, this undoes the commit and nothing else."""
    Store.open(url).write(RECORD, seal(Tombstone("a save was begun here", "1", begun=True).to_json()))
