"""Rollbacks, which the first save afterwards declares.

So the process that publishes that save makes the rollback known.

Training that continues from an earlier step supersedes the later steps. The first save after the
rollback declares this in its metadata. Just before that save is published, by the run itself or by
a process that found it complete, each later step gets its marker (`markers`), in ascending order:
while one of them lacks it, the latest step stays the one from before the rollback.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from shardckpt.commit.attempts import is_reshard, same_elements, step_of
from shardckpt.commit.markers import SUPERSEDED, is_superseded, supersedes
from shardckpt.commit.publish import RECORD
from shardckpt.commit.remove import CONTENDED, ROUNDS, StoredRecord
from shardckpt.errors import FormatError, StorageError
from shardckpt.format.documents import seal
from shardckpt.format.record import CheckpointRecord
from shardckpt.io.threads import map_on_threads

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardckpt.commit.publish import Prior
    from shardckpt.io.store import Store

ROLLBACK = "rollback"
"""The member of a checkpoint's metadata for the rollback."""


@dataclass(frozen=True, slots=True)
class Rollback:
    """The declaration that training continued from a step although later ones exist."""

    step: int
    """The step that training continued from."""
    revived: bool
    """Whether that step was superseded before."""
    later: Mapping[int, str | None]
    """The later steps → the attempt that each one's record names, None if the record is
    unreadable."""

    @property
    def neighbours(self) -> dict[str, str | None]:
        """The later steps by the names of their places, with their attempts."""
        return {str(step): attempt for step, attempt in self.later.items()}

    def to_json(self) -> dict[str, Any]:
        """JSON form."""
        return {"to": self.step, "revived": self.revived, "supersedes": self.neighbours}

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> Self | None:
        """Read the rollback in a checkpoint's metadata.

        None if there is none, or the member is a user's own.
        """
        match metadata.get(ROLLBACK):
            case {"to": int(step), "revived": bool(revived), "supersedes": dict(supersedes)}:
                named = (
                    (step_of(key), attempt if isinstance(attempt, str) else None)
                    for key, attempt in supersedes.items()
                )
                return cls(
                    step, revived, {later: attempt for later, attempt in named if later is not None}
                )
        return None

    def tell(self, root: Store) -> None:
        """Mark the steps below the run's root. Repeating it changes nothing.

        Raises:
            StorageError: the storage failed.
        """
        if self.revived:
            root.sub(str(self.step)).delete(SUPERSEDED)
        supersede(root, self.neighbours)


def keep_superseded(store: Store, record: CheckpointRecord, prior: Prior) -> None:
    """Mark a reshard in place of its source as superseded, if the source is, before publication.

    The marker names the source as well. So the step stays superseded whether or not the reshard is
    published.

    Args:
        store: the checkpoint's place.
        record: the record that will be published.
        prior: the commit record that it replaces.

    Raises:
        StorageError: the storage failed.
    """
    before = prior.record
    if (
        is_reshard(record.attempt)
        and isinstance(before, CheckpointRecord)
        and before.metadata == record.metadata
        and is_superseded(store, before.attempt)
    ):
        store.write(SUPERSEDED, seal({"attempt": record.attempt, "replaces": before.attempt}))


def supersede(root: Store, steps: Mapping[str, str | None]) -> None:
    """Mark the steps that are still there as superseded, in ascending order.

    A step that was replaced since, and its marker, stay as they are.

    Args:
        root: their place.
        steps: name → the attempt that the record names, None if the record is unreadable.

    Raises:
        StorageError: the storage failed.
    """
    names = sorted(steps, key=int)
    looks = map_on_threads(lambda name: _unmarked(root.sub(name), steps[name]), names)
    for name, unmarked in zip(names, looks, strict=True):
        _supersede(root.sub(name), steps[name], unmarked)


def _supersede(place: Store, attempt: str | None, unmarked: bytes | None) -> None:
    """Mark a step; `unmarked` is the result of `_unmarked` just now."""
    marker = seal({"attempt": attempt or ""})
    for _ in range(ROUNDS):
        if unmarked is None:
            return
        if not place.replaces:
            place.write(SUPERSEDED, marker)
            return
        if place.replace(SUPERSEDED, marker, unmarked):
            return
        unmarked = _unmarked(place, attempt)
    raise StorageError(f"cannot write {place.path_of(SUPERSEDED)}: {CONTENDED}; try again.")


def _unmarked(place: Store, attempt: str | None) -> bytes | None:
    """The generation of the marker to replace; None: the step needs no marker."""
    data, generation = place.read_versioned(SUPERSEDED)
    if supersedes(place, data, attempt or ""):
        return None
    try:
        record = StoredRecord.of(place, *place.read_versioned(RECORD))
        named = record.attempt(place)
    except FormatError:  # damaged, perhaps since then
        return generation
    is_there = record.doc is not None and not record.is_tombstone
    return generation if is_there and same_elements(named, attempt) else None
