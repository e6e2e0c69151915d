"""The rollback that the first save after it declares, so that whoever publishes the save makes it known.

Training that goes on from an earlier step supersedes the later ones. It says so with its first save, in the checkpoint's
metadata. Just before that save is published, by the run itself or by somebody who found it complete, each later step gets
its marker (`markers`), in ascending order: as long as one of them lacks it, the latest step is the one of before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from shardckpt.commit.attempts import step_of
from shardckpt.commit.markers import SUPERSEDED, mark, unmark

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardckpt.io.store import Store

__all__ = ["ROLLBACK", "Rollback"]

ROLLBACK = "rollback"
"""The member of a checkpoint's metadata."""


@dataclass(frozen=True, slots=True)
class Rollback:
    """That training went on from a step, although others are there."""

    step: int
    """The one that it went on from."""
    revived: bool
    """Whether that was superseded before."""
    later: Mapping[int, str | None]
    """The steps after it: the attempt that each one's record names, None where that is unreadable."""

    def to_json(self) -> dict[str, Any]:
        """JSON form."""
        return {"to": self.step, "revived": self.revived, "supersedes": {str(step): attempt for step, attempt in self.later.items()}}

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> Self | None:
        """What a checkpoint's metadata says; None where that is nothing, or is a user's own and something else."""
        match metadata.get(ROLLBACK):
            case {"to": int(step), "revived": bool(revived), "supersedes": dict(supersedes)}:
                named = ((step_of(key), attempt if isinstance(attempt, str) else None) for key, attempt in supersedes.items())
                return cls(step, revived, {later: attempt for later, attempt in named if later is not None})
        return None

    def tell(self, root: Store) -> None:
        """Mark the steps below the run's root. Doing it again changes nothing.

        Raises:
            StorageError: the storage failed.
        """
        if self.revived:
            unmark(root.sub(str(self.step)), SUPERSEDED)
        for step, attempt in sorted(self.later.items()):
            mark(root.sub(str(step)), SUPERSEDED, attempt or "")
