"""The choice of the step to resume from, which is the same on all processes.

It is the same even if steps are committed at the same time.

1. The leader commits the complete attempts of an earlier run, lists the steps, and chooses the
   requested step or the latest live one. All processes learn the step and the attempt in its record
   (`Coordinator.agree`).
2. Each process restores the step, and all exchange the outcome (`Coordinator.share`): no process
   continues before all have their state, so that nothing is deleted under a slow process.
3. If one of them found damage, and fallback is allowed, all try the step before, in the same
   manner. Otherwise all raise, including the processes that could read the step.

Nothing is written except commits that were due. The fact that later steps are superseded is kept in
memory, and written to the storage with the first save (`CheckpointManager`): a restore alone
changes nothing.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from shardckpt import errors
from shardckpt.commit.attempts import same_elements
from shardckpt.commit.dependants import users_beside
from shardckpt.commit.fingerprints import recorded_fingerprint
from shardckpt.errors import (
    CorruptionError,
    FormatError,
    NamesMismatchError,
    NotFoundError,
    OptionError,
    ReplacedError,
    ShardckptError,
    VersionError,
    extend,
)
from shardckpt.frameworks.coordination import (
    check_answered,
    check_outcomes,
    first_failure,
    heard_by_all,
)
from shardckpt.frameworks.coordination.names import Agreement
from shardckpt.reading.checkpoint import Checkpoint
from shardckpt.runs.committing import commit_places
from shardckpt.runs.lineage import Resumed
from shardckpt.runs.steps import list_steps, step_numbers
from shardckpt.state.document import leaves_of, stored_names
from shardckpt.state.flatten import StateOwner
from shardckpt.state.select import selector
from shardckpt.text import few
from shardckpt.writing.fingerprint import fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardckpt.frameworks.coordination import Coordinator
    from shardckpt.io.store import Store
    from shardckpt.reading.naming.adapt import Adaptation
    from shardckpt.state.select import Only

T = TypeVar("T")
_log = logging.getLogger("shardckpt")
_BEFORE, _RESUMED = "before a restore", "resumed"
_FAILED = "could not restore:"
_LEVELS = {"committed": logging.INFO, "refused": logging.WARNING}
"""The log level for each outcome of an attempt."""


@dataclass(frozen=True, slots=True)
class Restored:
    """The result of `CheckpointManager.restore`."""

    state: Any
    """The state, as returned by `shardckpt.restore`."""
    step: int
    metadata: dict[str, Any]
    """The metadata of `SaveOptions(metadata=…)`, the step's `metrics`, the `run_id` of the run that
    saved it, and, if it was the first save after a rollback, that `rollback`."""
    notes: tuple[str, ...] = ()
    """A line for each tensor that was renamed, joined, split or fitted."""


def resume(
    root: Store,
    coordinator: Coordinator,
    read: Callable[
        [Checkpoint, Agreement, Callable[[list[str]], None]], tuple[Any, Adaptation | None]
    ],
    *,
    step: int | None = None,
    together: bool = False,
    rolled_back: dict[int, str | None],
    fallback: bool | None = None,
    fell_back: Callable[[int, str], None],
    check: bool = False,
    only: Only | None = None,
) -> Resumed:
    """Agree on a step, and restore it.

    Args:
        root: the root of the run.
        coordinator: connects all processes; all of them call this.
        read: restores the open checkpoint, and may agree on its names; returns the state, and what
            changed on the way. It calls its third argument before the first element is read, with
            the names of the leaves that are filled in place.
        step: the step to restore; None: the latest.
        together: whether `read` waits for the other processes, so that all of them must reach it.
        rolled_back: steps that this run has superseded without recording it in the storage, with
            their attempts.
        fallback: whether to try earlier steps where one is damaged. None does not, and an error
            advises it; after False it advises what else can be done.
        fell_back: called with each damaged step and a description of the damage.
        check: compare the restored tensors with the recorded fingerprint.
        only: the names that `read` restores.

    Returns:
        The restored step; without a step if there is none to restore.

    Raises:
        NotFoundError: there is no such step.
        CorruptionError, FormatError: the step is damaged; with `fallback`: and so are all earlier
            steps.
        NamesMismatchError: an attempt to restore a damaged step may have filled leaves that the
            earlier step leaves as they are.
        OptionError: `check` is set, and no fingerprint was recorded; nothing was read.
        CoordinationError: another process failed, or does not answer.
        ShardckptError: an error of `read`. If an earlier step was tried, the message has the damage
            of the first one, too.
    """
    damaged: Exception | None = None
    below: int | None = None
    overwritten: set[str] = set()
    while True:
        with _because_of(damaged):
            propose = partial(_choose, root, step, below, rolled_back, commits=damaged is None)
            chosen = _agreed(coordinator.agree("resume", propose), damaged)
            later = {int(s): attempt for s, attempt in chosen["later"]}
            kept = frozenset(chosen["kept"])
            if chosen["step"] is None:
                return Resumed(None, None, {}, was_superseded=False, later=later, kept=kept)
            url = str(root.location.join(str(chosen["step"])))
            opened, failure = _try(coordinator, partial(_open, url, chosen["attempt"], check=check))
            worst = _first_failure(coordinator, failure) if together else None
            restored = None
            if worst is None:
                # The state, and what changed on the way.
                read_here = partial(_read, coordinator, opened, failure, read, overwritten, only)
                restored, failure = _try(coordinator, read_here)
            worst = worst or _first_failure(coordinator, failure)
            if worst is None:
                assert opened is not None
                assert restored is not None
                (checkpoint, recorded), (state, adaptation) = opened, restored
                if check:
                    check_restored(checkpoint, recorded, state, coordinator, adaptation, only)
                notes = () if adaptation is None else tuple(adaptation.notes())
                return Resumed(
                    chosen["step"],
                    state,
                    checkpoint.metadata,
                    chosen["superseded"],
                    later,
                    kept,
                    notes,
                )
            error, all_damage = failure or worst[0], worst[1]
            if not all_damage:
                raise error
            if not fallback:
                advice = (
                    "restore(fallback=True) restores the newest sound step before it, "
                    "restore(step=…) a step of your choice."
                    if fallback is None
                    else f"delete it (`shardckpt rm {url}`) to go on from the step before it."
                )
                assert isinstance(error, ShardckptError)  # all damage is
                extend(error, after=f" Step {chosen['step']} is damaged: {advice}")
                raise error
        if opened is not None and restored is not None:
            _note_loaded(overwritten, opened[0], only, restored[0])
        fell_back(chosen["step"], str(error))
        damaged, below = damaged or error, chosen["step"]


def newest_step(
    root: Store, coordinator: Coordinator, rolled_back: dict[int, str | None]
) -> int | None:
    """The step that `resume` restores without a `step`; None if there is none.

    Complete attempts are committed first. All processes call this, and get the same step.
    """
    propose = partial(_choose, root, None, None, rolled_back, commits=True)
    newest: int | None = coordinator.agree("newest", propose)["step"]
    return newest


def _agreed(chosen: dict[str, Any], damaged: Exception | None) -> dict[str, Any]:
    """The choice, if there is a step to choose."""
    if "error" not in chosen:
        return chosen
    if damaged is None:
        raise NotFoundError(chosen["error"])
    damaged.add_note("No earlier step could be restored instead.")
    raise damaged


@contextmanager
def _because_of(damaged: Exception | None) -> Iterator[None]:
    """Add the damage of the first step that was tried to an error about an earlier one."""
    try:
        yield
    except ShardckptError as e:
        if damaged is None or e is damaged:
            raise
        extend(e, after=f" This step was tried because of damage: {damaged}")
        e.__cause__ = e.__cause__ or damaged
        raise


def _note_filled(
    overwritten: set[str], checkpoint: Checkpoint, only: Only | None, filled: list[str]
) -> None:
    """Note the leaves that are about to be filled in place.

    Args:
        overwritten: the leaves that attempts to restore damaged steps may have changed.
        checkpoint: the source.
        only: the names to restore.
        filled: the leaves that are about to be filled.

    Raises:
        NamesMismatchError: the checkpoint leaves some of `overwritten` as they are.
    """
    lost = overwritten.difference(filled)
    if lost and (lost := lost - _names(checkpoint, only)):
        raise NamesMismatchError(
            f"{checkpoint.location} has no {few(sorted(lost))}, so there `like` may keep elements "
            "of a damaged step: make `like` anew and call "
            f"restore(step={checkpoint.location.name})."
        )
    overwritten.update(filled)


def _note_loaded(
    overwritten: set[str], checkpoint: Checkpoint, only: Only | None, state: Any
) -> None:
    """Note the values that the objects of a state have loaded, though another process failed."""
    if isinstance(state, StateOwner):
        overwritten.update(_names(checkpoint, only))


def _names(checkpoint: Checkpoint, only: Only | None) -> set[str]:
    """The names of the stored leaves to restore."""
    selects = selector(only)
    return {leaf.name for leaf in leaves_of(checkpoint.parsed_tree) if selects(leaf.name)}


def check_restored(
    checkpoint: Checkpoint,
    recorded: dict[str, str],
    state: Any,
    coordinator: Coordinator,
    adaptation: Adaptation | None = None,
    only: Only | None = None,
) -> None:
    """Compare the tensors of a restored state with the fingerprint that the save recorded.

    The tensors are compared where they lie now. All processes call this function.

    Tensors that lie in a base, tensors that are only in one of the two, those that `only` leaves
    out, and those that were made of others or fitted, are not compared.

    Raises:
        CorruptionError: tensors differ; names them.
        CoordinationError: another process does not answer.
    """
    if only is not None:
        left_out = set(stored_names(checkpoint.parsed_tree)).difference(
            stored_names(checkpoint.parsed_tree, selector(only))
        )
        recorded = {name: digest for name, digest in recorded.items() if name not in left_out}
    recorded = recorded if adaptation is None else adaptation.expected(recorded)
    actual = fingerprint(state, coordinator=coordinator).tensors
    wrong = [name for name in actual if actual[name] != recorded.get(name, actual[name])]
    if wrong:
        raise CorruptionError(
            f"{checkpoint.location}: {few(wrong)} differ from the saved fingerprint, although "
            "every checksum was right: the restore converted them (cast=), or an object changed "
            "them when it loaded its state (a load_state_dict hook, say), or the program changed "
            "them since. Compare each object's state_dict() before a save and after "
            "load_state_dict()."
        )


def _try(coordinator: Coordinator, act: Callable[[], T]) -> tuple[T, None] | tuple[None, Exception]:
    """The result or the exception of a call.

    The exception is raised later, when the other processes know of it; an interruption at once.
    """
    try:
        return act(), None
    except Exception as e:  # noqa: BLE001
        return None, e
    except BaseException:
        with suppress(Exception):
            coordinator.decline(_RESUMED)
        raise


def _open(url: str, attempt: str | None, *, check: bool) -> tuple[Checkpoint, dict[str, str]]:
    """The checkpoint that the processes agreed on, and with `check` its recorded fingerprint."""
    checkpoint = Checkpoint(url)
    if not same_elements(checkpoint.record.attempt, attempt):
        raise ReplacedError(
            f"{url}: the checkpoint was replaced after the job agreed to resume from it; restart "
            "the job."
        )
    recorded = recorded_fingerprint(checkpoint.place, checkpoint.record) if check else {}
    if check and not recorded:
        raise OptionError(
            f"{url} has no fingerprint, as check= needs: save with "
            "SaveOptions(fingerprint=True), or leave out check=."
        )
    return checkpoint, recorded


def _read(
    coordinator: Coordinator,
    opened: tuple[Checkpoint, dict[str, str]] | None,
    failure: Exception | None,
    read: Callable[[Checkpoint, Agreement, Callable[[list[str]], None]], T],
    overwritten: set[str],
    only: Only | None,
) -> T:
    """The result of `read`. The others do not wait for the names of a process that cannot open."""
    with Agreement(coordinator) as agreement:
        if opened is None:
            assert failure is not None
            raise failure
        checkpoint, _ = opened
        return read(checkpoint, agreement, partial(_note_filled, overwritten, checkpoint, only))


def _choose(
    root: Store,
    step: int | None,
    below: int | None,
    rolled_back: dict[int, str | None],
    *,
    commits: bool,
) -> dict[str, Any]:
    """The leader's choice of a step, as JSON."""
    if commits:
        commit_left(root, step_numbers(root))
    steps = list_steps(root)
    superseded = {
        s.step
        for s in steps
        if not s.live or (s.step in rolled_back and same_elements(rolled_back[s.step], s.attempt))
    }
    known = {s.step: s for s in steps}
    if step is None or below is not None:
        live = [n for n in known if n not in superseded and (below is None or n < below)]
        if not live and below is not None:
            return {"error": f"{root}: there is no step before {below}."}
        chosen_step = max(live, default=-1)
    elif step in known:
        chosen_step = step
    else:
        there = ", ".join(str(n) for n in known) or "none"
        return {"error": f"{root}: there is no step {step}; there are: {there}."}
    later = [s for s in steps if s.step > chosen_step]
    kept = {step for s in steps if s.protected for step in (s.step, *s.bases) if step > chosen_step}
    if later:  # a base of the chosen step, or of a live step before it, stays, too
        kept |= {
            base
            for s in steps
            if s.step == chosen_step or (s.step < chosen_step and s.live)
            for base in s.bases
            if base > chosen_step
        }
        is_used = users_beside(root)
        kept |= {s.step for s in later if is_used(s.step, s.attempt)}
    return {
        "step": None if chosen_step < 0 else chosen_step,
        "attempt": None if chosen_step < 0 else known[chosen_step].attempt,
        "superseded": chosen_step in superseded,
        "later": [[s.step, s.attempt] for s in later],
        "kept": sorted(kept),
    }


def commit_left(root: Store, steps: Sequence[int]) -> bool:
    """Commit the steps that an earlier run, or a failed save, has left complete.

    Return whether there were any.

    A process with read access only leaves them as they are.

    Raises:
        StorageError: the storage failed, so that the latest step may be unknown.
    """
    outcomes = commit_places(root, [(str(step), root.sub(str(step))) for step in steps])
    for outcome in outcomes:
        level = _LEVELS.get(outcome.state, logging.DEBUG)
        _log.log(
            level,
            "%s: the unpublished attempt %s: %s %s",
            outcome.location,
            outcome.attempt,
            outcome.state,
            outcome.reason,
        )
    return any(outcome.state == "committed" for outcome in outcomes)


def raise_together(coordinator: Coordinator, act: Callable[[], object]) -> None:
    """Call a function on all processes; if it fails on one of them, raise an error on all.

    A process on which it fails waits for nobody: another one may have ended.
    """
    with heard_by_all(coordinator, _BEFORE):
        act()
    check_outcomes(coordinator.share(_BEFORE, {}), _FAILED)


def _first_failure(
    coordinator: Coordinator, failure: Exception | None
) -> tuple[ShardckptError, bool] | None:
    """The first process's failure as an error of this process, and whether all failures are damage.

    None if no process failed. An interruption is not damage.

    Raises:
        CoordinationError: not all processes answered in time, or none failed and one was
            interrupted.
    """
    mine: dict[str, Any] = {}
    if failure is not None:
        mine = errors.error_document(failure) | {"damage": _is_damage(failure)}
    failures = coordinator.share(_RESUMED, mine)
    error = first_failure(failures, _FAILED)
    if error is None:
        check_answered(failures)
        return None
    return error, all(one is not None and one.get("damage", True) for one in failures)


def _is_damage(error: Exception | None) -> bool:
    """Whether the error means a damaged checkpoint, rather than a problem of the reader."""
    return isinstance(error, CorruptionError | FormatError) and not isinstance(error, VersionError)
