"""Rollbacks, which the first save afterwards declares.

So the process that publishes that save makes the rollback known.

Training that continues from an earlier step supersedes the later steps. The first save after the
rollback declares this in its metadata. Just before that save is published, by the run itself or by
a process that found it complete, each later step gets its marker (`markers`), in ascending order:
while one of them lacks it, the latest step stays the one from before the rollback.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from shardckpt.commit.attempts import is_reshard, same_elements, step_of
from shardckpt.commit.markers import SUPERSEDED, is_superseded, mark, read_sealed, unmark
from shardckpt.commit.publish import RECORD, is_published
from shardckpt.commit.remove import CONTENDED, ROUNDS
from shardckpt.errors import FormatError, ShardckptError, StorageError
from shardckpt.format.documents import seal
from shardckpt.format.record import CheckpointRecord

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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
            unmark(root.sub(str(self.step)), SUPERSEDED)
        supersede(root, self.neighbours)


@contextmanager
def stays_superseded(store: Store, record: CheckpointRecord, prior: Prior) -> Iterator[None]:
    """In the block, a reshard in place of its source is published: superseded, if that was.

    Args:
        store: the checkpoint's place.
        record: the record that is published.
        prior: the commit record that it replaces.

    Raises:
        StorageError: the storage failed.
    """
    before = prior.record
    superseded = (
        is_reshard(record.attempt)
        and isinstance(before, CheckpointRecord)
        and before.metadata == record.metadata
        and is_superseded(store, before.attempt)
    )
    if not superseded:
        yield
        return
    mark(store, SUPERSEDED, record.attempt)  # before: a later mark could be missing for ever
    try:
        yield
    except BaseException:
        with suppress(ShardckptError):
            if prior.attempt is not None and is_published(store, prior.attempt):
                mark(store, SUPERSEDED, prior.attempt)
        raise


def supersede(root: Store, steps: Mapping[str, str | None]) -> None:
    """Mark the steps that are still there as superseded, in ascending order.

    A step that was replaced since, and its marker, stay as they are.

    Args:
        root: their place.
        steps: name → the attempt that the record names, None if the record is unreadable.

    Raises:
        StorageError: the storage failed.
    """
    for name in sorted(steps, key=int):
        _supersede(root.sub(name), steps[name])


def _supersede(place: Store, attempt: str | None) -> None:
    for _ in range(ROUNDS):
        data, generation = place.read_versioned(SUPERSEDED)
        try:
            record = read_sealed(place, RECORD)
            if record is None or "tombstone" in record.doc:
                return
            if not same_elements(record.string("attempt"), attempt):
                return
        except FormatError:  # damaged, perhaps since then
            pass
        if not place.replaces:
            mark(place, SUPERSEDED, attempt or "")
            return
        marker = seal({"attempt": attempt or ""})
        if data == marker or place.replace(SUPERSEDED, marker, generation):
            return
    raise StorageError(f"cannot write {place.path_of(SUPERSEDED)}: {CONTENDED}; try again.")
