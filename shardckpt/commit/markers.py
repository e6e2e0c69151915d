"""Markers on a committed checkpoint: pinned, or superseded.

A marker is a small object beside the commit record, and names the attempt that it applies to. So it does not apply to a
later checkpoint at the same place, even if it was not removed.

A pin and a deletion may run at the same time. The deletion reads the commit record, then looks for the pin, then replaces the
record on condition that it still has that version. Pinning writes the pin, then makes a new version of the record. One of
the two comes too late, and detects it: a pin that was set is effective.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.errors import FormatError, MissingDataError
from shardckpt.format.documents import Fields, open_envelope, seal

if TYPE_CHECKING:
    from shardckpt.io.store import Store

PINNED = "pinned.json"
"""Marker that protects the checkpoint against deletion; key relative to the checkpoint."""
SUPERSEDED = "superseded.json"
"""Marker after training went back to an earlier step and no longer includes this one; key relative to the checkpoint."""


def mark(store: Store, marker: str, attempt: str) -> None:
    """Set a marker for an attempt.

    Args:
        store: the checkpoint's place.
        marker: `PINNED` or `SUPERSEDED`.
        attempt: the attempt that the commit record names.
    """
    store.write(marker, seal({"attempt": attempt}))


def is_marked(store: Store, marker: str, attempt: str | None) -> bool:
    """Whether a marker is set for this attempt.

    If the attempt is not known (None: the commit record is unreadable), the marker counts for any attempt. An unreadable pin counts as
    set: a damaged pin still protects.
    """
    try:
        said = read_sealed(store, marker)
        return said is not None and attempt in (None, said.string("attempt"))
    except FormatError:
        return marker == PINNED


def read_sealed(store: Store, key: str) -> Fields | None:
    """Read a small sealed file; None if there is none. Raises FormatError if it is damaged."""
    try:
        data = store.read(key)
    except MissingDataError:
        return None
    where = store.path_of(key)
    return Fields(open_envelope(data, where), where)


def unmark(store: Store, marker: str) -> None:
    """Remove a marker, if it is set."""
    store.delete(marker)
