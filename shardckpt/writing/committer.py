"""Wait for the committer's word on an attempt, by the other processes of a job.

The committer announces that it has committed, or why it has not. Where no announcement can come,
the storage shows whether the attempt is published.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from shardckpt.commit.publish import published_attempt
from shardckpt.commit.waiting import pause
from shardckpt.errors import (
    CommitError,
    CoordinationError,
    OptionError,
    OtherJobError,
    ShardckptError,
)
from shardckpt.frameworks.coordination import ALL_MUST_CALL, SilentStoreError, WaitNotice
from shardckpt.writing.announcements import WORD

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardckpt.io.store import Store
    from shardckpt.writing.announcements import Announcements
    from shardckpt.writing.turns import Turns

COMMITTER = 0
"""The process that commits."""
_FIRST_LOOK, _LAST_LOOK = 0.01, 1.0
"""Seconds between two checks for the committer's word: least and most. Between these limits an
eighth of the time waited so far."""
_STORAGE_LOOK = 10.0
"""Seconds until the first check whether the storage shows a commit without announcement; the time
until each next check doubles."""
_COMMITTING = 60.0
"""Seconds that the committer may take after the last host has finished."""


class CommitterWord:
    """The committer's announcements about the attempts at one place, as one process hears them."""

    def __init__(
        self,
        store: Store,
        process: int,
        turns: Turns,
        announcements: Announcements,
        timeout: float,
    ) -> None:
        """Nothing is heard yet.

        Args:
            store: the checkpoint's place.
            process: this process.
            turns: its calls to the place.
            announcements: those about the attempts there.
            timeout: seconds for which processes wait for others.
        """
        self.late = False
        """Whether the others had given up the attempt before this process began it."""
        self.timeout = timeout
        self._store = store
        self._process = process
        self._turns = turns
        self._announcements = announcements

    def wait(self, attempt: str, stopped: Callable[[], str], look: Callable[[], None]) -> None:
        """Wait for the committer's announcement that an attempt is published.

        Args:
            attempt: name of the attempt.
            stopped: the reason for which this process stops waiting; "" if it does not.
            look: called from time to time.

        Raises:
            CommitError: the committer could not commit, or announces nothing for too long.
        """
        began, silent, notice = time.monotonic(), "", WaitNotice(str(self._store))
        storage_look = began + _STORAGE_LOOK
        while (waited := time.monotonic() - began) < (
            timeout := self.timeout + (0 if silent else _COMMITTING)
        ):
            if (reason := self._why_none(attempt, waited, stopped())) is not None:
                raise CommitError(
                    f"{self._store}: process {COMMITTER} has not committed yet, and {reason}"
                )
            try:
                word, silent = self.heard(attempt), ""
            except SilentStoreError as e:
                # The committer may have stopped, or only the store: the storage shows which.
                word, silent = False, f" ({str(e).rstrip('.')})"
            except CoordinationError as e:
                # The committer's process has ended, perhaps after the commit: the storage shows
                # which.
                why = f"and does not answer ({str(e).rstrip('.')})"
                break
            if word:
                return
            look()
            if (now := time.monotonic()) > storage_look:
                # A later save overwrites the word, and a process that reaches the place by another
                # name than the committer gets none.
                with suppress(ShardckptError):
                    if published_attempt(self._store) == attempt:
                        return
                storage_look = now + (now - began)
            notice.look(lambda: f"process {COMMITTER} to commit the save")
            time.sleep(pause(waited, _FIRST_LOOK, _LAST_LOOK))
        else:
            why = f"within {timeout:g} s{silent}"
        if published_attempt(self._store) != attempt:
            self._tell_in_vain(attempt)
            raise CommitError(
                f"{self._store}: this process has written its share, and process {COMMITTER} has "
                f"not committed {why}. {ALL_MUST_CALL} If process {COMMITTER} is gone, `shardckpt "
                "commit` publishes the save."
            )

    def heard(self, attempt: str) -> bool:
        """Whether the committer has announced the commit.

        Raises its error if it has given up the attempt.
        """
        word = self._announcements.heard(WORD, attempt)
        # A process that is not the committer has only waited in vain.
        if word is None or (word["error"] is not None and word["process"] != COMMITTER):
            return False
        if word["error"] is not None:
            kind = next(
                (kind for kind in (OtherJobError, OptionError) if word.get("code") == kind.code),
                CommitError,
            )
            raise kind(
                f"{self._store}: process {COMMITTER} did not commit the save: {word['error']}"
            )
        return True

    def _why_none(self, attempt: str, waited: float, stopped: str) -> str | None:
        """The reason for which no announcement will come, or is not awaited.

        None if there is none.
        """
        if stopped:
            return stopped
        closed = self._turns.why_closed() if waited > _LAST_LOOK else None
        if closed is None:
            return None
        # It announces an attempt's end before it closes the series: this may be why it has.
        with suppress(CoordinationError):
            if self.heard(attempt):
                return None
        return f"it has given up another save to this place: {closed}"

    def _tell_in_vain(self, attempt: str) -> None:
        """Announce that this process has stopped waiting.

        So a late process does not complete the attempt with newer data.
        """
        self._announcements.tell(
            WORD,
            attempt,
            CommitError(f"process {self._process} does not wait for it any more."),
        )

    def goes_on(self, failed: str) -> bool:
        """Whether a failed attempt was published, or another process waited for it in vain.

        The attempt failed on this process, and the committer may have published it.
        """
        with suppress(ShardckptError):
            word = self._announcements.heard(WORD, failed)
            if word is not None:
                return word["error"] is None or word["process"] != COMMITTER
            return published_attempt(self._store) == failed
        return False

    def check_not_given_up(self, attempt: str) -> None:
        """Refuse an attempt that other processes have given up before this process begins it.

        The attempt's name comes from a counter. A process that has missed a save gets the name of
        an attempt that the others have left behind, perhaps with all their records. Its own record
        would complete that attempt with the values of another save.
        """
        commits = self._process == COMMITTER
        why, refused = None, False
        # No process can be asked, so none has left it behind and gone on.
        with suppress(CoordinationError):
            word = self._announcements.heard(WORD, attempt)
            why = None if word is None else word["error"]
            refused = word is not None and word.get("code") == OptionError.code
        if why is None and not commits:
            why = self._turns.why_closed()
        if why is not None:
            us, self.late = f"process {self._process}", True
            if not commits:
                self._turns.report(
                    "it has missed a save to this place, or began it after the others had given "
                    "it up"
                )
            if refused:
                raise OptionError(
                    f"{self._store}: process {COMMITTER} did not begin the save: {why}"
                )
            raise CommitError(
                f"{self._store}: the other processes gave up this save before {us} began it: {why} "
                f"All processes must make the same saves, and {us} has missed one or is late. The "
                "next save that all of them make here is a new attempt."
            )
