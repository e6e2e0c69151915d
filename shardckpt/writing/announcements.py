"""Announcements of a job's processes about the attempts at one place; nobody waits for them.

A job of any length keeps few keys: an announcement replaces earlier ones under the same key, and
names the attempt that it is about.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any
from zlib import crc32

from shardckpt.errors import CoordinationError, ShardckptError

if TYPE_CHECKING:
    from shardckpt.frameworks.coordination import Coordinator
    from shardckpt.io.store import Store

WORD, FAILURE, BEGUN = "word", "failure", "begun"
"""Kinds of announcements: the committer's word on an attempt (or the word of a process that gave up
waiting for it), the failure of a process that could not write its share; and what the committer has
written first (`shared_storage`)."""
_KEYS = 64
"""Number of keys per kind of announcement."""


class Announcements:
    """Announcements about the attempts at one place."""

    def __init__(self, coordinator: Coordinator, store: Store) -> None:
        """Nothing is announced yet."""
        self._coordinator = coordinator
        self._place = store.location.name

    def tell(
        self, what: str, attempt: str, error: BaseException | None, **facts: str | None
    ) -> None:
        """Announce an event without waiting, with facts about it.

        An unreachable coordination store changes nothing.
        """
        with suppress(ShardckptError):
            failure = {
                "error": None if error is None else in_words(error),
                "code": getattr(error, "code", None),
            }
            save = self._save(attempt)
            self._coordinator.announce(
                _key(what, save),
                {"save": save, "process": self._coordinator.world.process, **failure, **facts},
            )

    def heard(self, what: str, attempt: str) -> dict[str, Any] | None:
        """The announcement of that kind about an attempt, or None.

        Raises:
            CoordinationError: the store is gone, or silent.
        """
        save = self._save(attempt)
        announcement: Any = self._coordinator.peek(_key(what, save))
        return (
            announcement
            if isinstance(announcement, dict) and announcement.get("save") == save
            else None
        )

    def failed_host(self, attempt: str) -> str | None:
        """A sentence on a process that could not write its share; None if none has said so.

        None also if no announcement can be read: the records show the rest.
        """
        heard = None
        with suppress(CoordinationError):
            heard = self.heard(FAILURE, attempt)
        return (
            None
            if heard is None
            else f"process {heard['process']} could not write its share: {heard['error']}"
        )

    def _save(self, attempt: str) -> str:
        """A name that distinguishes the save with that attempt from all others of the job."""
        return f"{self._place}/{attempt}"


def _key(what: str, save: str) -> str:
    return f"{what}/{crc32(save.encode()) % _KEYS}"


def in_words(error: BaseException) -> str:
    """An error as text for the announcement to other processes."""
    if isinstance(error, ShardckptError):
        return str(error)
    return f"{type(error).__name__}{f': {error}' if str(error) else ''}."
