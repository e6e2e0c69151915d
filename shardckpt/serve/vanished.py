"""Roots that have vanished, as a disk that is not mounted any more.

The first job that writes to a root leaves a small file there, the marker. The journal remembers the
places that had a marker or checkpoints. A root has vanished if its marker is gone, or if it never
had one and all of its checkpoints are gone at once.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException

from shardckpt.commit.publish import RECORD
from shardckpt.errors import StorageError
from shardckpt.io.store import Store
from shardckpt.serve.access.identity import may_read

if TYPE_CHECKING:
    from shardckpt.serve.catalogue.catalogue import Catalogue
    from shardckpt.serve.jobs.journal import Journal
    from shardckpt.serve.roots import Roots

_log = logging.getLogger("shardckpt.serve")
MARKER = "shardckpt-root"
_CONTENT = (
    b"shardckpt serve writes below this directory. Without this file the service takes the "
    b"directory for one that has vanished.\n"
)
_RETRY = {"Retry-After": "30"}
_LOOKS = 16
"""Most checkpoints that are looked for before the first write to a root."""


class RootWatch:
    """The memory of the roots, and the list of those that have vanished."""

    def __init__(self, roots: Roots, catalogue: Catalogue) -> None:
        """Remember nothing before `remember_in`."""
        self._roots, self._catalogue = roots, catalogue
        self._journal: Journal | None = None
        self._marked: dict[str, bool] = {}
        """By place: whether it had a marker; places that had neither a marker nor checkpoints are
        not there."""
        self.vanished: dict[str, str] = {}
        """Reason by the root's name."""

    def remember_in(self, journal: Journal) -> None:
        """Remember in a journal. Raises StorageError."""
        self._journal, self._marked = journal, journal.remembered_roots()

    def lost_marker(self, name: str) -> bool:
        """Whether a root had a marker and has none now. Raises StorageError."""
        place = self._roots.places[name]
        return self._marked.get(str(place), False) and not Store.open(place).exists(MARKER)

    def judge(self, name: str, *, present: bool) -> str | None:
        """Reason for which a root counts as vanished; None: it does not.

        Args:
            name: the root.
            present: whether the scan has found checkpoints in it.

        Raises:
            StorageError: the storage failed.
        """
        place = self._roots.places[name]
        known, marked = self._marked.get(str(place)), Store.open(place).exists(MARKER)
        if marked or (present and not known):
            self._remember(str(place), marked=marked)
            self.vanished.pop(name, None)
            return None
        if known is None:
            return None
        gone = (
            f"the file {MARKER} in it is gone"
            if known
            else "all of its checkpoints are gone at once"
        )
        reason = (
            f"it has vanished: {gone}. Mount it again, or make the file {MARKER} in it if it is "
            "to be empty."
        )
        if name not in self.vanished:
            self.vanished[name] = reason
            _log.error("root vanished", extra={"fields": {"root": name, "reason": reason}})
            if self._journal is not None and self._journal.keeps_notices:
                self._journal.add_notice({"event": "vanished", "root": name, "reason": reason})
        return reason

    def prepare(self, name: str, *, writes: bool) -> None:
        """Check that a root has not vanished before a job uses it.

        Leave the marker before the first write.

        Raises:
            StorageError: it has vanished, or cannot be written.
        """
        place = self._roots.places[name]
        known, store = self._marked.get(str(place)), Store.open(place)
        if self._is_gone(name):
            raise StorageError(
                f"root {name}: it has vanished; nothing is read or written there. Mount it again."
            )
        # A root that is a checkpoint has no room for other files.
        if writes and not known and not store.exists(RECORD):
            store.create(MARKER, _CONTENT)
            self._remember(str(place), marked=True)

    def check(self, *idents: str) -> None:
        """Check that no root of some ids that the user may read has vanished.

        So what is not found there does not count as deleted.

        Raises:
            HTTPException: one has. StorageError: the storage failed.
        """
        for name in sorted({one.partition("/")[0] for one in idents} & self._roots.places.keys()):
            if may_read(name) and self._is_gone(name):
                raise HTTPException(
                    503,
                    f"root {name} has vanished, as a disk that is not mounted; ask again later.",
                    _RETRY,
                )

    def _is_gone(self, name: str) -> bool:
        known, store = (
            self._marked.get(str(self._roots.places[name])),
            Store.open(self._roots.places[name]),
        )
        return name in self.vanished or (
            not store.exists(MARKER) and (known or (known is False and self._none_left(name)))
        )

    def _none_left(self, name: str) -> bool:
        idents = self._catalogue.idents(name, _LOOKS)
        return not any(Store.open(self._roots.locate(ident)).list_children() for ident in idents)

    def _remember(self, place: str, *, marked: bool) -> None:
        if self._marked.get(place) is not marked:
            self._marked[place] = marked
            if self._journal is not None:
                self._journal.remember_root(place, marked=marked)
