"""Which steps of a run are deleted for good, so that nobody need look at them one by one?

Tombstones stay for ever (`collect`), and on an object store a look at each takes a request: a run that has deleted a
thousand steps would begin with thousands. So `deleted.json` in the run's root sums them up. Where it names a step, that
place holds no checkpoint, and none that lacks only its publication. It is kept so by an order of writes:

- Who sums up (`sum_up`) first writes that it is about to; then makes each tombstone another version of itself, so that no
  save that began before can publish; then writes that it is done, if the file is still the one of before.
- Who begins a save and finds a tombstone takes the step out (`strike`), before it writes anything.

A save that found the tombstone of before publishes nothing. One that found the new version looks at the file after the first
write: so it changes the file before the last write, which then fails, or takes the step out again after it.

Who publishes where there was no record at all takes the step out, too: somebody may have removed the tombstone by hand.

On a disk a look costs little, and people put checkpoints into directories by hand: there is no such file.
"""

from __future__ import annotations

import re
import secrets
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardckpt.errors import FormatError, StorageError
from shardckpt.fields import Fields
from shardckpt.io.store import Store
from shardckpt.record import open_envelope, seal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["DELETED", "LARGEST_STEP", "deleted_steps", "step_of", "strike", "sum_up"]

DELETED = "deleted.json"
"""Relative to the run's root."""
_STEP = re.compile(r"0|[1-9]\d{0,18}", re.ASCII)
LARGEST_STEP = (1 << 63) - 1
"""The largest step number that a run can have: a signed 64-bit integer."""
_ROUNDS = 10
"""How often to begin anew because the file has changed."""


@dataclass(frozen=True, slots=True)
class _Ledger:
    """`deleted.json` at one moment."""

    done: frozenset[int]
    """Steps that are deleted for good."""
    begun: frozenset[int]
    """Steps that somebody is about to sum up."""
    data: bytes | None
    generation: bytes

    @classmethod
    def read(cls, root: Store) -> _Ledger:
        """What is there; nothing is, and what is damaged says nothing."""
        data, generation = root.read_versioned(DELETED)
        said: dict[str, frozenset[int]] = {}
        if data is not None:
            where = root.path_of(DELETED)
            with suppress(FormatError):
                read = Fields(open_envelope(data, where), where)
                said = {key: frozenset(step for step in read.sequence(key) if type(step) is int) for key in ("done", "begun")}
        return cls(said.get("done", frozenset()), said.get("begun", frozenset()), data, generation)

    def replaced(self, root: Store, done: frozenset[int], begun: frozenset[int]) -> bool:
        """Write another one in its place; whether it was still this one. No two are alike: some storages know versions by contents."""
        data = seal({"done": sorted(done), "begun": sorted(begun), "nonce": secrets.token_hex(8)})
        return root.create(DELETED, data) if self.data is None else root.replace(DELETED, data, self.generation)


def step_of(name: str) -> int | None:
    """The step whose checkpoint's directory has that name: the number in plain decimal; None: it is no step's."""
    step = int(name) if _STEP.fullmatch(name) else None
    return step if step is not None and step <= LARGEST_STEP else None


def deleted_steps(root: Store) -> frozenset[int]:
    """The steps below a run's root that are deleted for good; others may be deleted, too.

    Raises:
        StorageError: the storage failed.
    """
    return frozenset() if root.location.local is not None else _Ledger.read(root).done


def sum_up(root: Store, steps: Iterable[int], fence: Callable[[Store], bool]) -> None:
    """Sum up those of some steps that are deleted, and where nobody saves now.

    Args:
        root: the run's.
        steps: that may be deleted.
        fence: makes the tombstone at a place another version of itself; whether there is one, and nothing else.

    Raises:
        StorageError: the storage failed.
    """
    if root.location.local is not None:
        return
    for _ in range(_ROUNDS):
        before = _Ledger.read(root)
        begun = frozenset(steps) - before.done
        if not begun or not before.replaced(root, before.done, before.begun | begun):
            return
        now = _Ledger.read(root)
        buried = {step for step in begun & now.begun if fence(root.sub(str(step)))}
        if now.replaced(root, now.done | buried, now.begun - begun):
            return


def strike(place: Store) -> None:
    """Take a step out, because a save begins there.

    Args:
        place: of the checkpoint, which may be no step of a run.

    Raises:
        StorageError: the storage failed.
    """
    step, above = step_of(place.location.name), place.location.parent
    if step is None or above is None or above.local is not None:
        return
    root = Store.open(above)
    for _ in range(_ROUNDS):
        there = _Ledger.read(root)
        if step not in there.done | there.begun or there.replaced(root, there.done - {step}, there.begun - {step}):
            return
    raise StorageError(f"cannot write {root.path_of(DELETED)}: it changes all the time; save again.")
