"""Errors about a place without a checkpoint: what is there instead, or took its place."""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from shlex import quote
from typing import TYPE_CHECKING

from shardckpt.commit.attempts import is_attempt, step_of
from shardckpt.commit.publish import RECORD, published_attempt
from shardckpt.errors import (
    FormatError,
    NotFoundError,
    ReplacedError,
    ShardckptError,
    StorageError,
    UncommittedError,
)
from shardckpt.format.record import CheckpointRecord, parse_checkpoint
from shardckpt.io.store import Store
from shardckpt.state import names as naming
from shardckpt.text import few

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardckpt.format.record import Tombstone
    from shardckpt.io.url import Location

_NEAREST = 4
"""Most steps that are named in place of a missing one."""
_OTHERS = {
    ".metadata": "one of torch.distributed.checkpoint (DCP)",
    "_CHECKPOINT_METADATA": "one of Orbax",
    "_METADATA": "one of Orbax",
    ".safetensors": "one of safetensors",
    ".pt": "a torch file",
    ".pth": "a torch file",
    ".bin": "a torch file",
    ".ckpt": "a torch file",
    "zarr.json": "a zarr group",
    ".zgroup": "a zarr group",
}
"""Names, or their ends, that checkpoints of other formats have."""
_MOST_LOOKS = 16
"""Most directories of steps that are looked at for a checkpoint."""


def no_checkpoint(store: Store, tombstone: Tombstone | None) -> ShardckptError:
    """The error that says what is at a place without a commit record, or with a tombstone.

    NotFoundError names the nearest checkpoints; UncommittedError says that a save began there and
    did not finish.
    """
    try:
        names = store.list_children()
    except StorageError as e:
        is_file = isinstance(e.__cause__, NotADirectoryError)
        other = other_format([store.location.name]) if is_file else None
        if other is None:
            raise
        return _foreign(store, other)
    children = [child.removesuffix("/") for child in names if child.endswith("/")]
    if tombstone is not None and not tombstone.begun:
        return NotFoundError(f"{store}: the checkpoint was deleted ({tombstone.reason}).")
    if any(is_attempt(store, child) for child in children):
        return UncommittedError(
            f"{store}: a save was begun there and never committed; if its data is complete, "
            "`shardckpt commit` commits it."
        )
    latest = sorted(
        children,
        key=lambda child: (step_of(child) is not None, naming.natural_key(child)),
        reverse=True,
    )[:_MOST_LOOKS]
    # One by one: of a run the first look finds one.
    inside = next((child for child in latest if store.exists(f"{child}/{RECORD}")), None)
    if inside is not None:
        return NotFoundError(f"{store}: no checkpoint there; did you mean {store.sub(inside)}?")
    if other := other_format(names):
        return _foreign(store, other)
    beside = _steps_beside(store)
    hint = (
        f"; the nearest {'step is' if len(beside) == 1 else 'steps are'} {few(beside)}"
        if beside
        else ""
    )
    if children and not hint:
        hint = f"; `shardckpt ls {quote(str(store))}` lists what is directly below it"
    return NotFoundError(f"{store}: no checkpoint there{hint}.")


def replaced_error(store: Store, location: Location, attempt: str) -> ReplacedError | None:
    """The error about a checkpoint whose data is missing because it was replaced or deleted.

    None if its record is still there, or a damaged one.

    Args:
        store: the checkpoint's place.
        location: the same, for the message.
        attempt: the attempt that it had when it was opened.
    """
    data, _ = store.read_versioned(RECORD)
    try:
        now = None if data is None else parse_checkpoint(data, f"{store}/{RECORD}")
    except FormatError:
        return None
    if isinstance(now, CheckpointRecord) and now.attempt == attempt:
        return None
    what = "replaced" if isinstance(now, CheckpointRecord) else "deleted"
    return ReplacedError(
        f"{location}: the checkpoint was {what} while it was being read; open it again."
    )


def _steps_beside(store: Store) -> list[str]:
    """The steps that are nearest to a missing one.

    None if the place is not named like a step, or the storage cannot be listed.
    """
    step, parent = step_of(store.location.name), store.location.parent
    if step is None or parent is None:
        return []
    with suppress(ShardckptError):
        root = Store.open(parent)
        there = [
            other
            for child in root.list_children()
            if (other := step_of(child.removesuffix("/"))) is not None
        ]
        nearest = sorted(there, key=lambda other: abs(other - step))[:_MOST_LOOKS]
        published = islice(
            (other for other in nearest if published_attempt(root.sub(str(other))) is not None),
            _NEAREST,
        )
        return [str(other) for other in sorted(published)]
    return []


def other_format(names: Iterable[str]) -> str | None:
    """The format of another program, by the names of files; None: not known."""
    return next(
        (what for end, what in _OTHERS.items() for name in names if name.endswith(end)), None
    )


def _foreign(store: Store, what: str) -> ShardckptError:
    return NotFoundError(
        f"{store}: no checkpoint of shardckpt there, but {what}: shardckpt.open reads it where it "
        "lies, and `shardckpt import` makes a checkpoint of it that restores onto any mesh."
    )
