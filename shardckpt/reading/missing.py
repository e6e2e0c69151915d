"""Errors about a place without a checkpoint: what is there instead, and the nearest steps."""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

from shardckpt.commit.attempts import is_attempt, step_of
from shardckpt.commit.publish import RECORD, published_attempt
from shardckpt.errors import NotFoundError, ShardckptError, UncommittedError
from shardckpt.io.store import Store
from shardckpt.state import names as naming
from shardckpt.text import few

if TYPE_CHECKING:
    from shardckpt.format.record import Tombstone

_NEAREST = 4
"""Most steps that are named in place of a missing one."""
_MOST_LOOKS = 16
"""Most directories that are looked at for them."""


def no_checkpoint(store: Store, found: Tombstone | None) -> ShardckptError:
    """The error that says what is at a place without a commit record, or with a tombstone.

    NotFoundError names the nearest checkpoints; UncommittedError says that a save began there and did not finish.
    """
    children = [child.removesuffix("/") for child in store.list_children() if child.endswith("/")]
    if found is not None and not found.begun:
        return NotFoundError(f"{store}: the checkpoint was deleted ({found.reason}).")
    if any(is_attempt(store, child) for child in children):
        return UncommittedError(
            f"{store}: a save was begun there and never committed; if its data is complete, `shardckpt commit` commits it."
        )
    inside = [child for child in children if store.exists(f"{child}/{RECORD}")]
    if inside:
        return NotFoundError(f"{store}: no checkpoint there; did you mean {store}/{max(inside, key=naming.natural_key)}?")
    beside = _steps_beside(store)
    return NotFoundError(f"{store}: no checkpoint there{f'; the nearest steps are {few(beside)}' if beside else ''}.")


def _steps_beside(store: Store) -> list[str]:
    """The steps that are nearest to a missing one; none if the place is not named like a step, or the storage cannot be listed."""
    step, parent = step_of(store.location.name), store.location.parent
    if step is None or parent is None:
        return []
    with suppress(ShardckptError):
        root = Store.open(parent)
        there = [other for child in root.list_children() if (other := step_of(child.removesuffix("/"))) is not None]
        nearest = sorted(there, key=lambda other: abs(other - step))[:_MOST_LOOKS]
        found = islice((other for other in nearest if published_attempt(root.sub(str(other))) is not None), _NEAREST)
        return [str(other) for other in sorted(found)]
    return []
