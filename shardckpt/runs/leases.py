"""Leases of readers: while one lasts, the steps that it names are neither pruned nor collected.

A lease is a small object below the root, `leases/<id>.json`, with the steps. It lasts for `SECONDS` after it was written. A follower writes
one before it reads the steps, and again and again while it reads. So the lease of a reader that dies ends by itself.

Rules of retention and collections ask for leases before they delete. A deletion on request (`shardckpt rm`) and a save over a step do not.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

from shardckpt.commit.markers import read_sealed
from shardckpt.errors import FormatError, ShardckptError
from shardckpt.format.documents import seal
from shardckpt.io.ages import idle_seconds
from shardckpt.io.threads import map_on_threads

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from shardckpt.io.store import Store

LEASES = "leases/"
"""The folder of the leases, relative to the root."""
SECONDS = 600.0
"""Time that a lease lasts after it was written, by the storage's clock."""
_LONG_AGO = 24 * 3600.0
"""Seconds after which a lease is removed."""
_log = logging.getLogger("shardckpt")


@contextmanager
def leased(root: Store, steps: Collection[int]) -> Iterator[bool]:
    """Hold a lease on steps while the block lasts; yield whether it could be written.

    Args:
        root: the place of all steps.
        steps: the steps.
    """
    key = f"{LEASES}{secrets.token_hex(8)}.json"
    over = threading.Event()

    data = seal({"steps": sorted(steps), "holder": socket.gethostname()})

    def write() -> None:
        root.write(key, data)

    def renew() -> None:
        while not over.wait(SECONDS / 3):
            with suppress(ShardckptError):  # the lease still lasts, and is written again
                write()

    try:
        write()
    except ShardckptError as e:
        if str(root) not in _refused:
            _refused.add(str(root))
            _log.warning("%s: no lease can be written there, so what this process reads may be pruned while it reads: %s", root.location, e)
        yield False
        return
    renewing = threading.Thread(target=renew, name="shardckpt-lease", daemon=True)
    renewing.start()
    try:
        yield True
    finally:
        over.set()
        renewing.join()
        with suppress(ShardckptError):  # it ends by itself
            root.delete(key)


_refused: set[str] = set()
"""Places where a lease was refused; each is named in the log once."""


def leased_steps(root: Store) -> frozenset[int]:
    """The steps on which a lease lasts; leases that ended long ago are removed.

    Raises:
        StorageError: the storage failed.
    """
    keys = [f"{LEASES}{name}" for name in root.list_children(LEASES) if name.endswith(".json")]
    idle = idle_seconds(root, keys) if keys else {}
    for key, seconds in idle.items():
        if seconds is not None and seconds > _LONG_AGO:
            root.delete(key)
    held = [key for key, seconds in idle.items() if seconds is None or seconds < SECONDS]
    return frozenset(step for steps in map_on_threads(partial(_steps_of, root), held) for step in steps)


def _steps_of(root: Store, key: str) -> Collection[int]:
    try:
        found = read_sealed(root, key)
        return () if found is None else [step for step in found.sequence("steps") if type(step) is int]
    except FormatError:
        return ()  # no lease of ours
