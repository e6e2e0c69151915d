"""Choosing the step to resume from, the same on all processes whatever is committed meanwhile.

1. The leader commits what an earlier run has left complete, lists the steps, and takes the one that was asked for, or the
   latest live one. All are told which (`Coordinator.agree`), with the attempt that its record names.
2. Each process restores it, and all tell each other how that went (`Coordinator.share`): nobody goes on before all have
   their state, so that nothing is deleted under a process that is slow.
3. Where one of them found it damaged, and falling back is allowed, all try the step before, likewise. Otherwise
   all raise: those that could read it, too.

Nothing is written but commits that were due. That steps after the restored one are superseded is remembered, and told to
the storage with the first save (`CheckpointManager`): who only looks at an old step changes nothing.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from shardckpt import errors
from shardckpt.commit.committing import commit_places
from shardckpt.errors import CorruptionError, FormatError, NotFoundError, ReplacedError, ShardckptError, VersionError
from shardckpt.reading.checkpoint import Checkpoint
from shardckpt.training.steps import list_steps, step_numbers

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardckpt.frameworks.coordination import Coordinator
    from shardckpt.io.store import Store

__all__ = ["Restored", "Resumed", "resume"]

T = TypeVar("T")
_log = logging.getLogger("shardckpt")
_LEVELS = {"committed": logging.INFO, "refused": logging.WARNING}
"""Of the log, by what became of an attempt."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What `CheckpointManager.restore` returns."""

    state: Any
    """As `shardckpt.restore` returns it."""
    step: int
    metadata: dict[str, Any]
    """What was given to `SaveOptions(metadata=…)`, the step's `metrics`, the `run_id` of the run that saved it, and the `rollback` that
    it was the first save after."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """What was agreed on, and restored."""

    step: int
    state: Any
    metadata: dict[str, Any]
    was_superseded: bool
    """Whether the restored step was, until now."""
    later: dict[int, str | None]
    """Steps after it: the attempt that each one's record names, None where that is unreadable."""
    kept: frozenset[int]
    """Those among them that are pinned, or hold tensors of one that is."""


def resume(
    root: Store,
    coordinator: Coordinator,
    read: Callable[[Checkpoint], Any],
    *,
    step: int | None = None,
    together: bool = False,
    rolled_back: dict[int, str | None],
    fallback: bool = False,
    fell_back: Callable[[int, str], None],
) -> Resumed | None:
    """Agree on a step, and restore it.

    Args:
        root: of the run.
        coordinator: of all processes, which all call this.
        read: restores the open checkpoint.
        step: the one to restore; None: the latest.
        together: whether `read` waits for the other processes, so that all have to come as far as that.
        rolled_back: steps that this run has superseded without having told the storage, with their attempts.
        fallback: whether to try earlier steps where one is damaged.
        fell_back: told of each damaged step, and what is wrong with it.

    Returns:
        None where nothing is to be restored: no step is there.

    Raises:
        NotFoundError: there is no such step.
        CorruptionError, FormatError: it is damaged, and so are all before it where `fallback` is set.
        CoordinationError: another process failed, or does not answer.
        ShardckptError: what `read` raises.
    """
    damaged: Exception | None = None
    below: int | None = None
    while True:
        propose = partial(_choose, root, step, below, rolled_back, commits=damaged is None)
        chosen = coordinator.agree("resume", propose)
        if "error" in chosen:
            if damaged is None:
                raise NotFoundError(chosen["error"])
            damaged.add_note("No earlier step could be restored instead.")
            raise damaged
        if chosen["step"] is None:
            return None
        url = str(root.location.join(str(chosen["step"])))
        checkpoint, failure = _tried(partial(_opened, url, chosen["attempt"]))
        worst = _first_failure(coordinator, failure) if together else None
        restored = None
        if failure is None and worst is None:
            assert checkpoint is not None
            restored, failure = _tried(partial(read, checkpoint))
        worst = worst or _first_failure(coordinator, failure)
        if worst is None:
            assert checkpoint is not None
            later = {int(s): attempt for s, attempt in chosen["later"]}
            return Resumed(chosen["step"], restored, checkpoint.metadata, chosen["superseded"], later, frozenset(chosen["kept"]))
        error, all_damage = failure or worst[0], worst[1]
        if not all_damage:
            raise error
        if not fallback:
            raise type(error)(
                f"{error} restore(fallback=True) goes back from step {chosen['step']}, which is damaged, to the newest one that is sound, "
                f"restore(step=…) to one of your choice."
            ) from error
        fell_back(chosen["step"], str(error))
        damaged, below = damaged or error, chosen["step"]


def _tried(act: Callable[[], T]) -> tuple[T, None] | tuple[None, Exception]:
    """What it returns, or raises: that is raised when the others know."""
    try:
        return act(), None
    except Exception as e:  # noqa: BLE001
        return None, e


def _opened(url: str, attempt: str | None) -> Checkpoint:
    """The checkpoint that was agreed on."""
    checkpoint = Checkpoint(url)
    if checkpoint.record.attempt != attempt:
        raise ReplacedError(f"{url}: the checkpoint was replaced after the job agreed to resume from it; start anew.")
    return checkpoint


def _choose(root: Store, step: int | None, below: int | None, rolled_back: dict[int, str | None], *, commits: bool) -> dict[str, Any]:
    """The leader's choice, as JSON."""
    if commits:
        _commit_left(root)
    steps = list_steps(root)
    superseded = {s.step for s in steps if not s.live or (s.step in rolled_back and rolled_back[s.step] == s.attempt)}
    known = {s.step: s for s in steps}
    if step is None or below is not None:
        live = [n for n in known if n not in superseded and (below is None or n < below)]
        if not live:
            return {"error": f"{root}: there is no step before {below}."} if below is not None else {"step": None}
        taken = max(live)
    elif step in known:
        taken = step
    else:
        there = ", ".join(str(n) for n in known) or "none"
        return {"error": f"{root}: there is no step {step}; there are: {there}."}
    later = [s for s in steps if s.step > taken]
    kept = {step for s in steps if s.pinned for step in (s.step, *s.bases) if step > taken}
    return {
        "step": taken,
        "attempt": known[taken].attempt,
        "superseded": taken in superseded,
        "later": [[s.step, s.attempt] for s in later],
        "kept": sorted(kept),
    }


def _commit_left(root: Store) -> None:
    """Commit the steps that an earlier run has left complete; a process that may only read leaves them.

    Raises:
        StorageError: the storage failed, so that the latest step may be one that is not known.
    """
    for outcome in commit_places(root, [(str(step), root.sub(str(step))) for step in step_numbers(root)]):
        level = _LEVELS.get(outcome.state, logging.DEBUG)
        _log.log(level, "%s: an earlier run's attempt %s: %s %s", outcome.location, outcome.attempt, outcome.state, outcome.reason)


def _first_failure(coordinator: Coordinator, failure: Exception | None) -> tuple[ShardckptError, bool] | None:
    """How it went on all processes: the error of the first that failed as one of this process, and whether all errors are damage."""
    mine = None
    if failure is not None:
        mine = {"code": getattr(failure, "code", None), "message": f"{failure}", "damage": _is_damage(failure)}
    told = coordinator.share("resumed", mine)
    failed = [(process, what) for process, what in enumerate(told) if what is not None]
    if not failed:
        return None
    process, what = failed[0]
    return errors.by_code(what["code"])(f"process {process} could not restore: {what['message']}"), all(
        what["damage"] for _, what in failed
    )


def _is_damage(error: Exception | None) -> bool:
    """Whether the checkpoint is at fault, not who reads it."""
    return isinstance(error, CorruptionError | FormatError) and not isinstance(error, VersionError)
