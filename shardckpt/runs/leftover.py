"""Refusal to publish a complete but unpublished save if that would undo something newer.

Its own committer may have been refused for the same reasons: another run saves to the root now, or
a `Publisher` has it (`job`), or the checkpoint that would be replaced is pinned or tagged
(`markers`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.commit.attempts import is_reshard
from shardckpt.commit.markers import protection
from shardckpt.errors import CommitError, OtherJobError
from shardckpt.io.store import Store
from shardckpt.runs.job import PUBLISHED, RUN, claim_of

if TYPE_CHECKING:
    from collections.abc import Mapping


def run_root(place: Store, attempt: str, metadata: Mapping[str, Any]) -> Store | None:
    """The root directory of the run that saved a checkpoint.

    None if no run saved it, or if it comes from a reshard.

    Args:
        place: the checkpoint's place.
        attempt: the attempt to be published.
        metadata: the checkpoint's metadata.
    """
    above = place.location.parent
    return (
        None if above is None or RUN not in metadata or is_reshard(attempt) else Store.open(above)
    )


def check_leftover(
    place: Store, attempt: str, metadata: Mapping[str, Any], replaces: str | None
) -> None:
    """Refuse an attempt for reasons for which its own committer may have been refused.

    Args:
        place: the checkpoint's place.
        attempt: the attempt to be published.
        metadata: its metadata.
        replaces: the attempt that is published there now.

    Raises:
        OtherJobError: it comes from a run that no longer saves there.
        CommitError: it would replace a checkpoint that is pinned or tagged; or a manager has saved
            it where a `Publisher` keeps its versions, or the reverse.
        StorageError: the storage failed.
    """
    root = run_root(place, attempt, metadata)
    saved_by, claim = metadata.get(RUN), None if root is None else claim_of(root)
    if claim is not None and claim.run_id != saved_by:
        raise OtherJobError(
            f"{place}: the attempt {attempt} belongs to run {saved_by}, but run {claim.run_id} "
            "saves there now; it is not published."
        )
    if claim is not None and claim.publishes != (PUBLISHED in metadata):
        raise CommitError(
            f"{place}: the attempt {attempt} is not a version, but a Publisher keeps its versions "
            "there; it is not published."
            if claim.publishes
            else f"{place}: the attempt {attempt} is a version, but a CheckpointManager keeps its "
            "run there; it is not published."
        )
    if replaces is not None and (protected := protection(place, replaces)):
        raise CommitError(
            f"{place}: the attempt {attempt} would replace a checkpoint that is {protected}; "
            f"{protected.undo} it first."
        )
