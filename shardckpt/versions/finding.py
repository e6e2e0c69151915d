"""The next version of a place that is to be followed, and whether training went back before it.

Also the pauses between two looks for it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

from shardckpt.commit.attempts import unfolded
from shardckpt.commit.markers import is_superseded
from shardckpt.commit.publish import published_attempt
from shardckpt.errors import FormatError
from shardckpt.runs.steps import step_numbers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardckpt.io.store import Store
    from shardckpt.runs.announcing import Listener

    Mode = Literal["newest", "each"]

_FIRST_LOOK, _LAST_LOOK = 0.05, 2.0
"""Seconds between two looks for a new version: least and most; the pause doubles."""
_LOOK_BESIDE_EVENTS = 10.0
"""Most seconds between two looks while a service tells of versions."""


class Pauses:
    """Pauses between two looks; each is longer than the one before."""

    def __init__(self, listener: Listener | None, *, leads: bool) -> None:
        """Begin with a short one.

        Args:
            listener: ends a pause when a service tells of a version.
            leads: whether this process looks; the others wait for it, and do not pause.
        """
        self._listener = listener
        self._leads = leads
        self._seconds = _FIRST_LOOK

    def restart(self) -> None:
        """Make the next pause a short one."""
        self._seconds = _FIRST_LOOK

    def rest(self) -> None:
        """Wait for the time of a pause, or until a version is announced."""
        if self._listener is not None:
            last = _LOOK_BESIDE_EVENTS if self._listener.connected else _LAST_LOOK
            announced = self._listener.wait(self._seconds)
            self._seconds = _FIRST_LOOK if announced else min(2 * self._seconds, last)
        elif self._leads:
            time.sleep(self._seconds)
            self._seconds = min(2 * self._seconds, _LAST_LOOK)


class VersionFinder:
    """Finds the version after the one that was given last."""

    def __init__(self, root: Store, mode: Mode, given: Mapping[int, str]) -> None:
        """Look below `root`; the arguments are those of `Follower`."""
        self._root = root
        self._mode = mode
        self._seen: tuple[int, str] | None = None
        """Step and attempt, before it was folded, of the version given last."""
        self._before: tuple[int, str] | None = None
        """The same of another version that was given before that."""
        self._given = dict(given)
        """Step → attempt, before it was folded, of the versions given so far that are still there;
        only if each is given."""
        self._damaged: set[int] = set()
        """Steps whose record cannot be read; each was an error once, and is passed over then."""

    def gave(self, step: int, attempt: str) -> None:
        """Note the version that was given; `attempt`: before it was folded."""
        if self._seen != (step, attempt):
            self._before, self._seen = self._seen, (step, attempt)
        if self._mode == "each":
            self._given[step] = attempt

    def take_back(self) -> None:
        """Let `next` find the version that was given last again."""
        if self._seen is not None:
            self._given.pop(self._seen[0], None)
        self._seen = self._before

    def next(self) -> tuple[int, bool] | None:
        """The step of the next version, and whether training went back since the one given last.

        Raises:
            FormatError: the record of a version is damaged; the next call passes over it.
        """
        steps = step_numbers(self._root)
        went_back = self._seen is not None and self._is_gone(*self._seen, steps)
        if self._mode == "newest":
            newest = next(
                (step for step in reversed(steps) if self._attempt_of(step) is not None), None
            )
            if newest is None or (
                self._seen is not None and newest <= self._seen[0] and not went_back
            ):
                return None
            return newest, went_back
        self._given = {step: attempt for step, attempt in self._given.items() if step in steps}
        first = 0 if self._seen is None or went_back else self._seen[0] + 1
        for step in steps:
            attempt = self._attempt_of(step) if step >= first else None
            if attempt is not None and attempt != self._given.get(step):
                return step, went_back
        return None

    def _attempt_of(self, step: int) -> str | None:
        """The attempt of a version, before it was folded.

        None if there is none, or it is superseded.
        """
        place, attempt = self._root.sub(str(step)), self._published(step)
        return None if attempt is None or is_superseded(place, attempt) else unfolded(attempt)

    def _published(self, step: int) -> str | None:
        """The attempt of a version as its record names it; None if there is none."""
        try:
            attempt = published_attempt(self._root.sub(str(step)))
        except FormatError:
            if step in self._damaged:
                return None
            self._damaged.add(step)
            raise
        self._damaged.discard(step)
        return attempt

    def _is_gone(self, step: int, attempt: str, steps: Sequence[int]) -> bool:
        """Whether a version was superseded or replaced, or deleted and none is after it.

        One that was deleted before others is too old.
        """
        place, now = self._root.sub(str(step)), self._published(step)
        if step in self._damaged:
            return False
        if now is None:
            return all(self._attempt_of(later) is None for later in reversed(steps) if later > step)
        return unfolded(now) != attempt or is_superseded(place, attempt)
