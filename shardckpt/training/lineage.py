"""The steps of the current training: the steps that no rollback has superseded.

After a restore of step s, all later steps are superseded: they are replaced when training reaches them again. The manager
knows this at once; the storage records it just before the next save is published (`commit.rollback`), so that a restore
alone changes nothing. A superseded step that is restored belongs to the training again.
"""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from typing import TYPE_CHECKING

from shardckpt.commit.markers import SUPERSEDED, protection, unmark
from shardckpt.commit.publish import published_attempt
from shardckpt.commit.rollback import ROLLBACK, Rollback
from shardckpt.errors import AlreadyExistsError, ShardckptError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from shardckpt.io.store import Store
    from shardckpt.training.resuming import Resumed
    from shardckpt.training.steps import StepInfo


class Lineage:
    """The effects of the last restore; the same on all processes, except that only the leader writes them to the storage."""

    def __init__(self, root: Store, *, overwrites: bool = False) -> None:
        """Begin without a restore; `overwrites`: saves may replace any step."""
        self._root = root
        self._overwrites = overwrites
        self.later: dict[int, str | None] = {}
        """Steps after the restored one that have not been replaced yet, with the attempt in each one's record (None if unreadable)."""
        self._kept: frozenset[int] = frozenset()
        self._pending: Rollback | None = None
        """The rollback that is not recorded in the storage yet."""

    def resume(self, found: Resumed) -> None:
        """Continue after a step that was restored."""
        self.later, self._kept = dict(found.later), found.kept
        self._pending = Rollback(found.step, found.was_superseded, found.later) if found.was_superseded or found.later else None

    def metadata(self) -> dict[str, Any]:
        """Metadata for the next save that records the pending rollback, for the process that publishes the save."""
        pending = self._pending
        return {} if pending is None else {ROLLBACK: pending.to_json()}

    def replaces(self, step: int) -> bool:
        """Whether a save of this step replaces a step from before the rollback."""
        return step in self.later

    def protects(self, step: int) -> bool:
        """Whether the old step was pinned or tagged, or the base of such a step, at the restore; `tell_storage` finds later pins."""
        return step in self._kept

    def tell_storage(self, step: int) -> None:
        """Mark the superseded steps in the storage; runs on the leader just before a step is published.

        Raises:
            AlreadyExistsError: the step would replace one that is pinned or tagged.
            StorageError: the storage failed.
        """
        place = self._root.sub(str(step))
        if step in self.later and (protected := protection(place, self.later[step])):
            raise AlreadyExistsError(f"{place}: the step from before the rollback is {protected}; {protected.undo} lets it be replaced.")
        if self._overwrites and (protected := protection(place, published_attempt(place))):
            raise AlreadyExistsError(f"{place}: the step that is there is {protected}; {protected.undo} lets it be replaced.")
        if self._pending is not None:
            self._pending.tell(self._root)
            self._pending = None

    def replaced(self, step: int, *, leads: bool) -> None:
        """Note that a step is committed."""
        if step in self.later:
            self.later = {later: attempt for later, attempt in self.later.items() if later != step}
            if leads:
                with suppress(ShardckptError):  # the marker names the replaced attempt, so it does no harm if it stays
                    unmark(self._root.sub(str(step)), SUPERSEDED)

    def seen(self, steps: Iterable[StepInfo]) -> list[StepInfo]:
        """Steps as listed from the storage, corrected by the rollback that is not recorded there yet."""
        pending, later = self._pending, self.later

        def now(info: StepInfo) -> StepInfo:
            if pending is not None and info.step in later and later[info.step] == info.attempt:
                return dataclasses.replace(info, state="superseded")
            if pending is not None and info.step == pending.step:
                return dataclasses.replace(info, state="committed")
            return info

        return [now(info) for info in steps]
