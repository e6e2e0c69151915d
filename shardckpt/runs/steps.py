"""Listing the steps of a run.

A step is a checkpoint at `<root>/<step>`, where the number is plain decimal. Only the commit record
and two markers of each step are read; directories with other names are ignored.
"""

from __future__ import annotations

import operator
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Literal

from shardckpt.commit.attempts import LARGEST_STEP, step_of
from shardckpt.commit.base_places import base_url
from shardckpt.commit.markers import is_superseded, protection, read_sealed
from shardckpt.commit.publish import RECORD
from shardckpt.errors import FormatError, OptionError
from shardckpt.format.bases import bases_of, names_beside
from shardckpt.io.failures import reading_takes_threads
from shardckpt.io.threads import map_on_threads
from shardckpt.io.url import parse
from shardckpt.runs.measured import METRICS, decode_metrics
from shardckpt.runs.retention import SavedStep
from shardckpt.text import shorten

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from shardckpt.format.documents import Fields
    from shardckpt.io.store import Store


@dataclass(frozen=True, slots=True)
class StepInfo:
    """One step of a run."""

    step: int
    state: Literal["committed", "superseded", "unreadable"]
    """`superseded`: training went back to an earlier step. `unreadable`: the commit record is
    damaged, or its version is newer."""
    attempt: str | None = None
    """The attempt in the commit record; None if that is unreadable."""
    created: str = ""
    """Time of the commit: UTC, ISO 8601, by the committer's clock."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The metrics of `CheckpointManager.save(metrics=…)`."""
    pinned: bool = False
    tags: tuple[str, ...] = ()
    """Names given by `shardckpt tag`; they protect the step as a pin does."""
    bases: frozenset[int] = frozenset()
    """Other steps of this run that hold tensors of this one."""

    @property
    def live(self) -> bool:
        """Whether training could continue from this step, as far as is known."""
        return self.state != "superseded"

    @property
    def protected(self) -> bool:
        """Whether a pin or a tag protects this step from deletion."""
        return self.pinned or bool(self.tags)

    def saved(self) -> SavedStep:
        """The step as retention rules see it."""
        age = 0.0
        with suppress(ValueError, OverflowError):
            age = time.time() - datetime.fromisoformat(self.created).timestamp()
        return SavedStep(self.step, age, self.metrics)


def step_numbers(root: Store) -> list[int]:
    """The steps that have a directory below `root`, ascending."""
    return sorted(steps_named(child[:-1] for child in root.list_children() if child.endswith("/")))


def steps_among(root: Store, urls: Iterable[str | os.PathLike[str]]) -> frozenset[int]:
    """The steps of a run among some checkpoints, given by path or url.

    Raises:
        OptionError: a checkpoint is in another kind of storage.
    """
    beside = root.location.join(secrets.token_hex(8))  # a name that none of them has
    relative = (base_url(beside, parse(url)) for url in urls)
    return frozenset(steps_named(names_beside(relative)))


def steps_named(names: Iterable[str]) -> Iterator[int]:
    """The step numbers among some names."""
    return (step for step in map(step_of, names) if step is not None)


def list_steps(root: Store) -> list[StepInfo]:
    """The steps below `root` that hold a checkpoint, ascending.

    Raises:
        StorageError: the storage failed, or the interpreter is shutting down and starts no threads.
    """
    numbers = step_numbers(root)
    with reading_takes_threads(root):
        while True:
            steps = [
                info
                for info in map_on_threads(partial(read_step, root), numbers)
                if info is not None
            ]
            if steps or not numbers:
                return steps
            # The run may have deleted them in the meantime, which it does only after it has saved
            # another step.
            listed, numbers = numbers, step_numbers(root)
            if numbers == listed:
                return steps


def latest_step(root: Store, counts: Callable[[StepInfo], bool]) -> int | None:
    """The latest step below `root` that holds a checkpoint and counts; None if there is none.

    Only the latest steps are read, until one counts.

    Raises:
        StorageError: as for `list_steps`.
    """
    numbers = step_numbers(root)
    with reading_takes_threads(root):
        while numbers:
            left, at_once = numbers, 1
            while left:
                infos = map_on_threads(partial(read_step, root), left[-at_once:])
                live = [info.step for info in infos if info is not None and counts(info)]
                if live:
                    return max(live)
                left, at_once = left[:-at_once], 2 * at_once
            # As in `list_steps`.
            listed, numbers = numbers, step_numbers(root)
            if numbers == listed:
                break
    return None


def read_step(root: Store, step: int) -> StepInfo | None:
    """Information about one step; None if there is no checkpoint."""
    store = root.sub(str(step))
    try:
        record = read_record(root, step)
        if record is None:
            return None
        attempt, created, metrics = (
            record.string("attempt"),
            record.string("created"),
            decode_metrics(record.mapping("metadata").get(METRICS)),
        )
        urls = (base.url for base in bases_of(record.doc, record.where))
        bases = frozenset(steps_named(names_beside(urls)))
    except FormatError:
        state: Literal["committed", "superseded", "unreadable"] = (
            "superseded" if is_superseded(store, None) else "unreadable"
        )
        marks = protection(store, None)
        return StepInfo(step, state, pinned=marks.pinned, tags=marks.tags)
    state, marks = (
        "superseded" if is_superseded(store, attempt) else "committed",
        protection(store, attempt),
    )
    return StepInfo(step, state, attempt, created, metrics, marks.pinned, marks.tags, bases)


def read_record(root: Store, step: int) -> Fields | None:
    """A step's commit record; None if there is no checkpoint. Raises FormatError if damaged."""
    record = read_sealed(root.sub(str(step)), RECORD)
    return None if record is None or "tombstone" in record.doc else record


def check_step(step: object) -> int:
    """A step number as an int, from an integer of any type.

    It may be an integer of Python, of numpy, or an array without dimensions of any framework.

    Raises:
        OptionError: `step` is not an integer from 0 to 2**63 - 1.
    """
    number = -1
    if (
        not isinstance(step, bool)
        and getattr(step, "shape", ()) == ()
        and "bool" not in str(getattr(step, "dtype", ""))
    ):
        with suppress(TypeError, RuntimeError):
            number = operator.index(step)  # type: ignore[arg-type]
    if not 0 <= number <= LARGEST_STEP:
        raise OptionError(f"step={shorten(step)}: give an int from 0 to 2**63 - 1.")
    return number
