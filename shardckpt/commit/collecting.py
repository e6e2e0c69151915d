"""Removal of unfinished attempts and of checkpoints, as users call it.

`commit.collect` handles one place, and explains why removed data can never be published afterwards. This module handles
a directory of checkpoints, or one checkpoint.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from shardckpt.commit import collect as at_one_place
from shardckpt.commit.attempts import places
from shardckpt.commit.collect import Collected
from shardckpt.commit.dependants import Dependants
from shardckpt.commit.publish import RECORD, published_attempt
from shardckpt.errors import FormatError, NotFoundError, OptionError, StorageError
from shardckpt.excerpt import excerpt
from shardckpt.io.failures import check_fork, reading_takes_threads
from shardckpt.io.status import exists
from shardckpt.io.store import Store
from shardckpt.io.threads import map_on_threads
from shardckpt.io.url import parse

if TYPE_CHECKING:
    import os

GRACE = 24 * 3600.0
"""Default for the seconds without any write after which an attempt may be collected."""


def collect(root: str | os.PathLike[str], *, grace: float = GRACE, dry_run: bool = False) -> list[Collected]:
    """Remove the attempts at `root` and directly below it that no save will finish; publish those that are complete.

    An attempt is removed if no commit record names it and nothing has been written into it for the grace period, by the
    storage's own clock. If another attempt of the same checkpoint is younger, a save may be in progress, and all stay.

    Args:
        root: a checkpoint, or a directory of them: a path or url.
        grace: seconds; longer than any pause between the writes of a save. 0 removes all attempts, even those of saves in progress.
        dry_run: only report what would be done.

    Returns:
        The outcome for each attempt that is not a checkpoint. A place that could not be read is one entry without an attempt,
        and does not stop the collection of the others.

    Raises:
        UrlError: `root` is not a valid path or url.
        NotFoundError: there is no such directory.
        OptionError: `grace` is not a valid number of seconds.
    """
    _check_seconds(grace)
    location = parse(root)
    check_fork(location)  # its errors would be reported place by place
    store = Store.open(location)
    children = store.list_children()
    if not children and (location.local is None or not exists(location.local)):
        raise NotFoundError(f"{location}: no such directory.")

    def at(place: Store) -> list[Collected]:
        try:
            return at_one_place.collect(place, grace=grace, dry_run=dry_run)
        except FormatError as e:
            return [Collected(place.location, None, "kept", reason=str(e))]
        except StorageError as e:
            return [Collected(place.location, None, "failed", reason=str(e))]

    with reading_takes_threads(store):
        return [one for some in map_on_threads(at, (place for _, place in places(store, children))) for one in some]


def delete(url: str | os.PathLike[str], *, reason: str = "on request", grace: float = GRACE, attempt: str | None = None) -> list[Collected]:
    """Delete a checkpoint. Saves to the same place that began before it can publish nothing any more.

    Also collects the attempts there that are older than the grace period; if none is younger, nothing stays.

    Args:
        url: location of the checkpoint.
        reason: for people who look for it later; the time is put before it.
        grace: as for `collect`; the checkpoint itself is deleted whatever its age.
        attempt: the attempt that is to be deleted; None: whichever is there.

    Returns:
        The outcome for other attempts there; and for the checkpoint's own data, if it could not be removed.

    Raises:
        NotFoundError: no checkpoint there.
        OptionError: it is pinned or tagged, or checkpoints beside it have left tensors in it; the message names them.
        ReplacedError: another checkpoint has replaced it; nothing was deleted.
        VersionError: it was written by a newer version.
        StorageError: the storage failed; unless the message is about deleting the record, the record is deleted and data may be left.
    """
    _check_seconds(grace)
    store = Store.open(parse(url))
    _check_no_base(store)
    return at_one_place.delete(store, reason=reason, grace=grace, attempt=attempt)


def check_exists(url: str | os.PathLike[str]) -> None:
    """Refuse a place without a commit record, before somebody is asked whether it may be deleted.

    Raises:
        NotFoundError: no checkpoint there.
    """
    store = Store.open(parse(url))
    if not store.exists(RECORD):
        raise NotFoundError(at_one_place.NO_CHECKPOINT.format(store))


def _check_no_base(store: Store) -> None:
    """Refuse to delete a checkpoint that others in the same directory name as their base. Others elsewhere are not found."""
    try:
        attempt = published_attempt(store)
        if attempt is None:
            return
    except FormatError:
        attempt = None  # not known: any checkpoint that names this place counts
    Dependants(store).check_unused(attempt, "deleted")


def _check_seconds(grace: object) -> None:
    if isinstance(grace, bool) or not isinstance(grace, int | float) or not 0 <= grace < math.inf:
        raise OptionError(f"grace={excerpt(grace)}: give seconds, 0 or more.")
