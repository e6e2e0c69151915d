"""Markers on a committed checkpoint: pinned or tagged, or superseded.

A marker is a small object beside the commit record, and names the attempt that it applies to. So it
does not apply to a later checkpoint at the same place, even if it was not removed. It applies to an
attempt that holds the same elements anew (`unfolded`).

A tag is a name on a checkpoint, and protects it as a pin does. Both are in one marker, which
earlier versions of shardckpt take for a pin. Every change of it is conditional (`runs.pinning`), so
changes at the same time do not undo each other.

A pin and a deletion may run at the same time. The deletion reads the commit record, then looks for
the pin, then replaces the record on condition that it still has that version. Pinning writes the
pin, then makes a new version of the record. One of them loses the race and notices. So a pin that
was set successfully always protects.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardckpt.commit.attempts import same_elements, unfolded
from shardckpt.errors import FormatError, MissingDataError
from shardckpt.format.documents import Fields, open_envelope, seal

if TYPE_CHECKING:
    from shardckpt.io.store import Store

PINNED = "pinned.json"
"""Marker that protects the checkpoint against deletion, with its tags; key relative to the
checkpoint."""
SUPERSEDED = "superseded.json"
"""Marker after training went back to an earlier step and no longer includes this one; key relative
to the checkpoint."""

MARKERS = frozenset({PINNED, SUPERSEDED})


def is_superseded(store: Store, attempt: str | None) -> bool:
    """Whether an attempt is marked as superseded.

    None: the attempt is not known (the commit record is unreadable), and any counts.
    """
    try:
        return supersedes(store, store.read_versioned(SUPERSEDED)[0], attempt)
    except FormatError:  # too large to be read
        return False


def supersedes(store: Store, data: bytes | None, attempt: str | None) -> bool:
    """Whether a marker's bytes (None: there is no marker) say that an attempt is superseded.

    Arguments otherwise as for `is_superseded`.
    """
    if data is None:
        return False
    where = store.path_of(SUPERSEDED)
    try:
        marker = Fields(open_envelope(data, where), where)
        # A reshard in place names the attempt that it replaces, too (`runs.rollback`).
        names = [marker.string("attempt"), marker.doc.get("replaces")]
    except FormatError:
        return False
    return attempt is None or any(
        isinstance(name, str) and same_elements(name, attempt) for name in names
    )


TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
"""The names that a tag may have."""
MOST_TAGS = 32
"""Most tags of a checkpoint."""


@dataclass(frozen=True, slots=True)
class Protection:
    """Markers that protect a checkpoint from deletion; false if there are none."""

    pinned: bool = False
    tags: tuple[str, ...] = ()
    """Distinct names, sorted."""

    def __bool__(self) -> bool:
        return self.pinned or bool(self.tags)

    def __str__(self) -> str:
        """A description such as "pinned and tagged best", for messages."""
        return " and ".join(
            [
                *(["pinned"] if self.pinned else []),
                *(["tagged " + ", ".join(self.tags)] if self.tags else []),
            ]
        )

    @property
    def undo(self) -> str:
        """The commands that end it, for messages."""
        commands = [
            *(["`shardckpt unpin`"] if self.pinned else []),
            *(f"`shardckpt untag {tag}`" for tag in self.tags),
        ]
        return " and ".join(commands)

    def sealed(self, attempt: str) -> bytes:
        """The marker for an attempt."""
        return seal({"attempt": attempt, "pinned": self.pinned, "tags": list(self.tags)})


def protection(store: Store, attempt: str | None) -> Protection:
    """The protection of an attempt from deletion.

    None: the attempt is not known (the commit record is unreadable), and any marker counts.

    A damaged marker counts as a pin: it still protects.
    """
    try:
        return protection_of(store, store.read_versioned(PINNED)[0], attempt)
    except FormatError:  # too large to be read
        return Protection(pinned=True)


def protection_of(store: Store, data: bytes | None, attempt: str | None) -> Protection:
    """The protection that a marker's bytes (None: there is no marker) give to an attempt.

    Arguments otherwise as for `protection`.
    """
    if data is None:
        return Protection()
    where = store.path_of(PINNED)
    try:
        marker = Fields(open_envelope(data, where), where)
        if attempt is not None and unfolded(attempt) != unfolded(marker.string("attempt")):
            return Protection()
        # Earlier versions wrote neither.
        pinned, tags = marker.doc.get("pinned", True), marker.doc.get("tags", [])
        known = (
            isinstance(tags, list)
            and len(tags) <= MOST_TAGS
            and all(isinstance(tag, str) and TAG.fullmatch(tag) for tag in tags)
        )
        if not isinstance(pinned, bool) or not known:
            marker.fail("it is not a marker of a pin and of tags")
        return Protection(pinned, tuple(sorted(set(tags))))
    except FormatError:
        return Protection(pinned=True)


def read_sealed(store: Store, key: str) -> Fields | None:
    """Read a small sealed file; None if there is none. Raises FormatError if it is damaged."""
    try:
        data = store.read(key)
    except MissingDataError:
        return None
    where = store.path_of(key)
    return Fields(open_envelope(data, where), where)
