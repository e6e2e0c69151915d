"""Refuse to publish a complete save that was left unpublished, where publishing it would undo something newer.

Its own committer may have been refused that, so the same is checked here: which run saves to the root now (`job`), and whether
what would be replaced is pinned (`markers`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.commit.attempts import is_reshard
from shardckpt.commit.job import RUN, holder
from shardckpt.commit.markers import PINNED, is_marked
from shardckpt.errors import CommitError, OtherJobError
from shardckpt.io.store import Store

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["check_leftover", "run_root"]


def run_root(place: Store, attempt: str, metadata: Mapping[str, Any]) -> Store | None:
    """The directory of a run's steps that a checkpoint lies in; None where no run has saved it, or a reshard has laid it out anew.

    Args:
        place: the checkpoint's.
        attempt: that would be published.
        metadata: the checkpoint's.
    """
    above = place.location.parent
    return None if above is None or RUN not in metadata or is_reshard(attempt) else Store.open(above)


def check_leftover(place: Store, attempt: str, metadata: Mapping[str, Any], replaces: str | None) -> None:
    """Refuse what its own committer may have been refused.

    Args:
        place: the checkpoint's.
        attempt: that would be published.
        metadata: that it would have.
        replaces: the attempt that is published there now.

    Raises:
        OtherJobError: it is of a run that no longer saves there.
        CommitError: it would replace a checkpoint that is pinned.
        StorageError: the storage failed.
    """
    root = run_root(place, attempt, metadata)
    saved_by, saves = metadata.get(RUN), None if root is None else holder(root)
    if saves not in (None, saved_by):
        raise OtherJobError(f"{place}: run {saved_by} has left the attempt {attempt}, and run {saves} saves there since.")
    if replaces is not None and is_marked(place, PINNED, replaces):
        raise CommitError(f"{place}: the attempt {attempt} would replace a checkpoint that is pinned; `shardckpt unpin` it first.")
