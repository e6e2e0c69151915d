"""The placeholder that a killed save leaves as `checkpoint.json` when it has published nothing."""

from __future__ import annotations

import hashlib

from shardckpt.commit.assemble import finished_hosts
from shardckpt.commit.publish import RECORD, published_attempt
from shardckpt.format.documents import format_version, open_envelope, seal
from shardckpt.format.record import Tombstone
from shardckpt.io.store import Store

__all__ = ["put_placeholder", "undo_commit"]

PLACEHOLDER = seal(Tombstone("a save was begun here", "1", begun=True).to_json())


def put_placeholder(url):
    """Put it there before a save, which takes it for its own; after the save, this undoes the
    commit and nothing else."""
    Store.open(url).write(RECORD, PLACEHOLDER)


def undo_commit(url):
    """Make a checkpoint what it was before its commit; the attempt's name."""
    store = Store.open(url)
    attempt = published_attempt(store)
    place = store.sub(attempt)
    for host in finished_hosts(place):
        key = f"records/{host:05d}.json"
        data = place.read(key)
        place.write(
            key,
            seal(
                {**open_envelope(data, key), "prior": hashlib.sha256(PLACEHOLDER).hexdigest()},
                format_version(data, key),
            ),
        )
    put_placeholder(url)
    return attempt
