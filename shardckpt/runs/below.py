"""The runs in a directory: subdirectories that hold checkpoints, each with its newest one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardckpt.commit.attempts import is_attempt_name
from shardckpt.errors import ShardckptError
from shardckpt.io.failures import reading_takes_threads
from shardckpt.io.store import Store
from shardckpt.io.threads import map_on_threads
from shardckpt.io.url import parse
from shardckpt.runs.catalog import catalog
from shardckpt.state.names import natural_key

if TYPE_CHECKING:
    import os
    from collections.abc import Collection


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A directory of checkpoints in short; as JSON it has the keys of a service's runs."""

    run: str
    """Name relative to the root."""
    checkpoints: int
    """Number of committed checkpoints."""
    last_step: int | None
    """The newest one's step; None: its name has no number."""
    last_name: str
    """The newest one's name, relative to the run."""
    stored_bytes: int
    """Bytes of all chunks of all checkpoints."""
    created: str | None
    """Time of the newest commit."""


def runs_below(root: str | os.PathLike[str], known: Collection[str] = ()) -> list[RunSummary]:
    """The runs directly below `root`, in natural order of their names.

    Directories that cannot be read are left out: `catalog` of such a directory gives the reason.

    Args:
        root: a directory.
        known: names below it that are not runs.

    Raises:
        StorageError: the storage failed.
    """
    store = Store.open(parse(root))
    names = [name.removesuffix("/") for name in store.list_children() if name.endswith("/")]
    with reading_takes_threads(store):
        summaries = map_on_threads(
            lambda name: _summary(store, name),
            [name for name in names if name not in known and not is_attempt_name(name)],
        )
    return sorted(
        (one for one in summaries if one is not None), key=lambda one: natural_key(one.run)
    )


def _summary(store: Store, name: str) -> RunSummary | None:
    try:
        entries = catalog(str(store.sub(name).location))
    except ShardckptError:
        return None
    steps = [entry for entry in entries if entry.state == "committed" and entry.name != "."]
    if not steps:
        return None
    newest = max(
        steps, key=lambda entry: (-1 if entry.step is None else entry.step, entry.created or "")
    )
    created = max((entry.created for entry in steps if entry.created is not None), default=None)
    return RunSummary(
        name,
        len(steps),
        newest.step,
        newest.name,
        sum(entry.stored_bytes or 0 for entry in steps),
        created,
    )
