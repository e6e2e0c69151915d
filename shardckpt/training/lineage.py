"""The steps that belong to the current training: those that no rollback has superseded.

After step s was restored, all later ones are superseded: they are replaced when training reaches them again. The manager
knows that at once; the storage is told just before the first save after it is published (`commit.rollback`), so that who only
looks at an old step changes nothing. A superseded step that is restored belongs to the training again.
"""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from typing import TYPE_CHECKING

from shardckpt.commit.markers import PINNED, SUPERSEDED, is_marked, unmark
from shardckpt.commit.publish import published_attempt
from shardckpt.commit.rollback import ROLLBACK, Rollback
from shardckpt.errors import AlreadyExistsError, ShardckptError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from shardckpt.io.store import Store
    from shardckpt.training.resuming import Resumed
    from shardckpt.training.steps import StepInfo

__all__ = ["Lineage"]


class Lineage:
    """What has followed from the last restore; the same on all processes, but that the leader alone tells the storage."""

    def __init__(self, root: Store, *, overwrites: bool = False) -> None:
        """Nothing was restored yet; `overwrites`: saves may replace any step."""
        self._root = root
        self._overwrites = overwrites
        self.later: dict[int, str | None] = {}
        """Steps after the restored one that have not been replaced: the attempt that each one's record names, None where that
        is unreadable."""
        self._kept: frozenset[int] = frozenset()
        self._untold: Rollback | None = None
        """The one of which the storage does not know."""

    def resume(self, found: Resumed) -> None:
        """Training goes on after a step that was restored."""
        self.later, self._kept = dict(found.later), found.kept
        self._untold = Rollback(found.step, found.was_superseded, found.later) if found.was_superseded or found.later else None

    def metadata(self) -> dict[str, Any]:
        """What a save that begins now says of the rollback, for whoever publishes it."""
        untold = self._untold
        return {} if untold is None else {ROLLBACK: untold.to_json()}

    def replaces(self, step: int) -> bool:
        """Whether a save of this step takes the place of one from before the rollback."""
        return step in self.later

    def protects(self, step: int) -> bool:
        """Whether that one was pinned when this run was resumed, or the base of one that was; later pins are found by `tell_storage`."""
        return step in self._kept

    def tell_storage(self, step: int) -> None:
        """On the leader, just before a step is published: mark what was superseded by the restore.

        Raises:
            AlreadyExistsError: the step would replace one that is pinned.
            StorageError: the storage failed.
        """
        place = self._root.sub(str(step))
        if step in self.later and is_marked(place, PINNED, self.later[step]):
            raise AlreadyExistsError(f"{place}: the step from before the rollback is pinned; `shardckpt unpin` lets it be replaced.")
        if self._overwrites and is_marked(place, PINNED, published_attempt(place)):
            raise AlreadyExistsError(f"{place}: the step that is there is pinned; `shardckpt unpin` lets it be replaced.")
        if self._untold is not None:
            self._untold.tell(self._root)
            self._untold = None

    def replaced(self, step: int, *, leads: bool) -> None:
        """A step is committed."""
        if step in self.later:
            self.later = {later: attempt for later, attempt in self.later.items() if later != step}
            if leads:
                with suppress(ShardckptError):  # it speaks of the attempt that was replaced, so it may as well stay
                    unmark(self._root.sub(str(step)), SUPERSEDED)

    def seen(self, steps: Iterable[StepInfo]) -> list[StepInfo]:
        """Steps as the storage shows them, with what it has not been told."""
        untold, later = self._untold, self.later

        def now(info: StepInfo) -> StepInfo:
            if untold is not None and info.step in later and later[info.step] == info.attempt:
                return dataclasses.replace(info, state="superseded")
            if untold is not None and info.step == untold.step:
                return dataclasses.replace(info, state="committed")
            return info

        return [now(info) for info in steps]
