"""Getting rid of what is no checkpoint, and of checkpoints: what users ask for.

`io.collect` says how one place is collected, and why nothing that is removed can be published afterwards. Here
are the places: a directory of checkpoints, or one of them.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from shardckpt.errors import FormatError, NotFoundError, OptionError, StorageError
from shardckpt.excerpt import excerpt
from shardckpt.io import collect as at_one_place
from shardckpt.io.attempts import places
from shardckpt.io.collect import Collected
from shardckpt.io.store import Store
from shardckpt.io.url import parse

if TYPE_CHECKING:
    import os

__all__ = ["GRACE", "Collected", "collect", "delete"]

GRACE = 24 * 3600.0
"""Seconds for which nothing may have been written into an attempt that is collected, unless told otherwise."""
_AT_ONCE = 16
"""Places that are looked at together: on an object store each question takes a round trip."""


def collect(root: str | os.PathLike[str], *, grace: float = GRACE, dry_run: bool = False) -> list[Collected]:
    """Remove the attempts at saving that nobody will finish, at `root` and directly below it.

    An attempt goes if no commit record names it and nothing has been written into it for the grace period, by the
    storage's own clock. Where another attempt is younger, a save may be under way, and all stay.

    Args:
        root: a checkpoint, or a directory of them: a path or url.
        grace: seconds. Longer than any save is silent; 0 takes all attempts, those of saves under way, too.
        dry_run: only tell what would be done.

    Returns:
        What became of each attempt that is no checkpoint. A place that could not be read is one entry without an attempt,
        and keeps no other from being collected.

    Raises:
        UrlError: `root` is no place.
        NotFoundError: there is no such directory.
        OptionError: `grace` is no number of seconds.
    """
    _check_seconds(grace)
    location = parse(root)
    store = Store.open(location)
    children = store.list_children()
    if not children and (location.local is None or not location.local.exists()):
        raise NotFoundError(f"{location}: no such directory.")

    def at(place: Store) -> list[Collected]:
        try:
            return at_one_place.collect(place, grace=grace, dry_run=dry_run)
        except FormatError as e:
            return [Collected(place.location, None, "kept", reason=str(e))]
        except StorageError as e:
            return [Collected(place.location, None, "failed", reason=str(e))]

    with ThreadPoolExecutor(_AT_ONCE, "shardckpt-collect") as pool:
        return [one for some in pool.map(at, [place for _, place in places(store, children)]) for one in some]


def delete(url: str | os.PathLike[str], *, reason: str = "on request", grace: float = GRACE) -> list[Collected]:
    """Delete a checkpoint. Saves to the same place that began before it can publish nothing any more.

    Also collects the attempts there that are older than the grace period. Of the place a tombstone stays. Deleting a checkpoint again
    is no error.

    Args:
        url: where it is.
        reason: for people who look for it later; the time is put before it.
        grace: as for `collect`; the checkpoint itself goes whatever its age.

    Returns:
        What became of other attempts there; and of the checkpoint's own data, if it could not be removed.

    Raises:
        NotFoundError: no checkpoint there.
        ReplacedError: another one took its place just now; nothing was deleted.
        VersionError: it is a newer version's.
        StorageError: the storage failed; where the message does not speak of deleting the record, it is deleted and data may be left.
    """
    _check_seconds(grace)
    return at_one_place.delete(Store.open(parse(url)), reason=reason, grace=grace)


def _check_seconds(grace: object) -> None:
    if isinstance(grace, bool) or not isinstance(grace, int | float) or not 0 <= grace < math.inf:
        raise OptionError(f"grace={excerpt(grace)}: give seconds, 0 or more.")
