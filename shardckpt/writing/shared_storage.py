"""Proof that all processes of a job share the storage below a root.

Each process finds it once, in its first save there.

Process 0 announces a file that it has written in this save, and the others look for it; a network
file system may show it late. The same commit record proves nothing: hosts may hold copies of one
checkpoint. A process that does not see the file fails before it writes any data, because each host
has a storage of its own under that name; process 0 hears of that as of any other failure.

A process waits for the announcement in its first save alone, and only for a moment: process 0 may
come much later. Then it goes on, and looks again while it waits for the commit. A checkpoint that
was committed proves the same, because process 0 has seen the records of all.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from shardckpt.commit.waiting import pause
from shardckpt.errors import CommitError, CoordinationError
from shardckpt.writing.announcements import BEGUN, Announcements

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardckpt.frameworks.coordination import Coordinator
    from shardckpt.io.store import Store

_MOMENT = 1.0
"""Most seconds that a process waits for the announcement of process 0."""
_VISIBLE = 30.0
"""Most seconds until a network file system shows a file: NFS keeps the attributes of a directory
for 60 s by default, but asks for a name that it has not looked up before at once."""
_FIRST_LOOK, _LAST_LOOK = 0.01, 1.0


class SharedStorage:
    """Knowledge of one process of the storage of one save."""

    def __init__(
        self, coordinator: Coordinator, store: Store, announcements: Announcements
    ) -> None:
        """Nothing is looked at yet."""
        parent = store.location.parent or store.location
        self._coordinator = coordinator
        self._store = store
        self._announcements = announcements
        self._root = str(parent.resolved)
        self._proven: set[str] = coordinator.notes.setdefault("shared roots", set())

    @property
    def proven(self) -> bool:
        """Whether all processes are known to share the root."""
        return self._root in self._proven

    def note(self) -> None:
        """Note that all processes share the root."""
        self._proven.add(self._root)

    def announce(self, attempt: str, file: str) -> None:
        """Announce, as process 0, what it has written.

        Args:
            attempt: name of the attempt.
            file: a file that is complete, relative to the attempt.
        """
        self._announcements.tell(BEGUN, attempt, None, file=file, host=socket.gethostname())

    def check(
        self, attempt: str, stopped: Callable[[], object], *, wait: bool, limit: float
    ) -> None:
        """Look, as another process, whether this process sees what process 0 has announced.

        Do nothing if that is not known.

        Args:
            attempt: name of the attempt.
            stopped: returns whether the process stops waiting.
            wait: whether to wait a moment for the announcement.
            limit: most seconds to wait in all.

        Raises:
            CommitError: the root is not shared.
        """
        began, announcement = time.monotonic(), None
        while (waited := time.monotonic() - began) <= limit and not stopped():
            if announcement is None:
                # The store is gone: the wait for the commit says so.
                with suppress(CoordinationError):
                    announcement = self._announcements.heard(BEGUN, attempt)
                if announcement is None and (not wait or waited > _MOMENT):
                    return
            if announcement is not None:
                if self._store.sub(attempt).exists(announcement["file"]):
                    self.note()
                    return
                if waited > _VISIBLE:
                    break
            time.sleep(pause(waited, _FIRST_LOOK, _LAST_LOOK))
        if announcement is None or stopped():
            return
        us = self._coordinator.world.process
        raise CommitError(
            f"{self._store} is not shared: process {us}, on {socket.gethostname()}, does not see "
            f"{announcement['file']}, which process 0, on {announcement['host']}, has written "
            f"there. {self._store.sharing_advice} "
            f"{'No data was written' if wait else 'Nothing was published'}."
        )
