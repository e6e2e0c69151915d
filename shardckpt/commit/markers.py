"""Markers on a committed checkpoint: pinned, or superseded.

A marker is a small object beside the commit record, and names the attempt that it is about. So it says nothing of the
checkpoint that takes that one's place, whoever forgets to remove it.

A pin and a deletion may cross. Who deletes reads the commit record, then looks for the pin, then replaces the record on
condition that it is still that version. Who pins writes the pin, then makes the record another version of itself. One of
the two comes too late, and sees so: a pin that was put in place holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.errors import FormatError, MissingDataError
from shardckpt.format.documents import Fields, open_envelope, seal

if TYPE_CHECKING:
    from shardckpt.io.store import Store

__all__ = ["PINNED", "SUPERSEDED", "is_marked", "mark", "read_sealed", "unmark"]

PINNED = "pinned.json"
"""The checkpoint is not deleted; relative to it."""
SUPERSEDED = "superseded.json"
"""Training went back to an earlier step; this one is no longer a part of it. Relative to the checkpoint."""


def mark(store: Store, marker: str, attempt: str) -> None:
    """Say it of an attempt.

    Args:
        store: the checkpoint's place.
        marker: `PINNED` or `SUPERSEDED`.
        attempt: the one that the commit record names.
    """
    store.write(marker, seal({"attempt": attempt}))


def is_marked(store: Store, marker: str, attempt: str | None) -> bool:
    """Whether it is said of this attempt.

    Of one that is not known (None: the commit record is unreadable), or by a marker that is unreadable, it counts as said: a
    damaged pin still pins.
    """
    try:
        said = read_sealed(store, marker)
        return said is not None and attempt in (None, said.string("attempt"))
    except FormatError:
        return marker == PINNED


def read_sealed(store: Store, key: str) -> Fields | None:
    """What a small sealed file says; None where there is none. Raises FormatError for one that is damaged."""
    try:
        data = store.read(key)
    except MissingDataError:
        return None
    where = store.path_of(key)
    return Fields(open_envelope(data, where), where)


def unmark(store: Store, marker: str) -> None:
    """Say it no more; that it was never said is no error."""
    store.delete(marker)
