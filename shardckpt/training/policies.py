"""Policies that decide when a training loop saves.

A policy answers two questions at every step.

1. `due(step, previous)` follows from step numbers alone. Every process answers it for itself, and
   all answers are equal.
2. `wanted(moment)` depends on a clock, on a signal or on saves in flight, which differ between
   processes. Only the leader answers it, and announces the result for a later step
   (`shardckpt.training`); `by_leader` says whether it must be asked.

Policies are values: compare them, print them, combine them with `any_of`. A class of your own
derives from `Policy`.
"""

from __future__ import annotations

import os
import signal
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING

from shardckpt.errors import OptionError
from shardckpt.options import check_seconds, check_whole
from shardckpt.text import shorten

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "AnyOf",
    "AtSteps",
    "Continuous",
    "EveryCall",
    "EverySeconds",
    "EverySteps",
    "Moment",
    "OnPreemption",
    "Policy",
    "any_of",
    "as_policy",
]


@dataclass(frozen=True, slots=True)
class Moment:
    """The leader's view of the training at one step."""

    step: int
    """The step that training has reached."""
    since_last: float
    """Seconds since the last save was decided or training began, by the leader's clock."""
    in_flight: bool
    """Whether a save is in flight or decided."""
    preempted: bool
    """Whether a notice of preemption has come and has not been handled."""


class Policy:
    """The base of all policies; this one never saves."""

    __slots__ = ()

    def due(self, step: int, previous: int | None) -> bool:
        """Whether the step numbers alone make this step due.

        Args:
            step: the step that training has reached.
            previous: the step at which the policy was asked last, or the restored step; None at
                first.
        """
        del step, previous
        return False

    def wanted(self, moment: Moment) -> bool:
        """Whether to save as soon as all processes can do so at the same step.

        Asked on the leader only.
        """
        del moment
        return False

    @property
    def by_leader(self) -> bool:
        """Whether `wanted` can ever be true."""
        return False

    @property
    def notices(self) -> tuple[OnPreemption, ...]:
        """The policies that give notices of preemption."""
        return ()


@dataclass(frozen=True, slots=True)
class EveryCall(Policy):
    """Save at each call of `save`, also at step 0."""

    def due(self, step: int, previous: int | None) -> bool:
        """Always true."""
        del step, previous
        return True


@dataclass(frozen=True, slots=True)
class EverySteps(Policy):
    """Save at each multiple of `n`, but not at step 0.

    If the loop skips a multiple, the next step is saved instead.

    Examples:
        >>> [step for step in range(0, 50, 7) if EverySteps(20).due(step, step - 7)]
        [21, 42]
    """

    n: int
    """Steps, at least 1."""

    def __post_init__(self) -> None:
        """Check the number."""
        object.__setattr__(self, "n", check_whole(self.n, "EverySteps(n"))

    def due(self, step: int, previous: int | None) -> bool:
        """Whether a multiple of `n` was reached."""
        if previous is None:
            return step > 0 and step % self.n == 0
        return step // self.n > max(previous, 0) // self.n


@dataclass(frozen=True, slots=True)
class AtSteps(Policy):
    """Save at each given step. If the loop skips it, the next step is saved instead."""

    steps: Iterable[int]
    """The steps in any order; kept as an ascending tuple."""

    def __post_init__(self) -> None:
        """Sort the steps."""
        try:
            steps = list(self.steps)
        except TypeError:
            raise OptionError(
                f"AtSteps({shorten(self.steps)}): give the steps, as in AtSteps([100, 1000])."
            ) from None
        numbers = {check_whole(step, "AtSteps(…", 0) for step in steps}
        object.__setattr__(self, "steps", tuple(sorted(numbers)))

    def due(self, step: int, previous: int | None) -> bool:
        """Whether one of the steps was reached."""
        assert isinstance(self.steps, tuple)
        if previous is None:
            return step in self.steps
        return bisect_right(self.steps, step) > bisect_right(self.steps, previous)


@dataclass(frozen=True, slots=True)
class EverySeconds(Policy):
    """Save this many seconds after the last save was decided, by the leader's clock."""

    seconds: float
    """Seconds, more than 0."""

    def __post_init__(self) -> None:
        """Check the seconds."""
        check_seconds(self.seconds, "EverySeconds(seconds")

    def wanted(self, moment: Moment) -> bool:
        """Whether the time has passed, and no save is in flight."""
        return moment.since_last >= self.seconds and not moment.in_flight

    @property
    def by_leader(self) -> bool:
        """True, because this policy depends on a clock."""
        return True


@dataclass(frozen=True, slots=True)
class Continuous(Policy):
    """Save again as soon as the last save has ended."""

    def wanted(self, moment: Moment) -> bool:
        """Whether no save is in flight."""
        return not moment.in_flight

    @property
    def by_leader(self) -> bool:
        """True, because this policy depends on saves in flight."""
        return True


@dataclass(frozen=True, slots=True)
class OnPreemption(Policy):
    """Save once before the job is stopped.

    If any process gets a notice, all processes save the same step. Every process checks each source
    once per step.
    """

    signals: tuple[signal.Signals, ...] = (signal.SIGTERM,)
    """Signals that give notice. Earlier handlers are called too, and are restored when the manager
    is closed. A signal without an earlier handler no longer ends the process: end the loop when
    `CheckpointManager.reached_preemption` is true."""
    file: str | os.PathLike[str] | None = None
    """A file whose existence gives notice. A sidecar may write it, for example."""
    when: Callable[[], bool] | None = field(default=None, compare=False)
    """A function that returns true to give notice. It must be fast, because the training loop calls
    it."""

    def __post_init__(self) -> None:
        """Check that there is a source."""
        try:
            object.__setattr__(
                self, "signals", tuple(signal.Signals(number) for number in self.signals)
            )
        except (TypeError, ValueError) as e:
            raise OptionError(
                f"OnPreemption(signals={shorten(self.signals)}): {e}; give signals, as in "
                "(signal.SIGTERM,)."
            ) from e
        if unseen := {signal.SIGKILL, signal.SIGSTOP}.intersection(self.signals):
            raise OptionError(
                f"OnPreemption(signals=…): no process can handle {min(unseen).name}; leave it out."
            )
        if self.file is not None and not _is_local_path(self.file):
            raise OptionError(
                f"OnPreemption(file={shorten(self.file)}): give the path of a file on this machine."
            )
        if self.when is not None and not callable(self.when):
            raise OptionError(
                f"OnPreemption(when={shorten(self.when)}): expected a function without "
                f"parameters, found a {type(self.when).__name__}."
            )
        if not self.signals and self.file is None and self.when is None:
            raise OptionError(
                "OnPreemption(signals=()): nothing could ever give notice; give signals, a file "
                "or a function."
            )

    def wanted(self, moment: Moment) -> bool:
        """Whether there is a notice."""
        return moment.preempted

    @property
    def by_leader(self) -> bool:
        """True, because one process alone may get the notice."""
        return True

    @property
    def notices(self) -> tuple[OnPreemption, ...]:
        """This policy."""
        return (self,)


def _is_local_path(file: object) -> bool:
    """Whether a value is a path, and not a url."""
    path = os.fspath(file) if isinstance(file, str | os.PathLike) else None
    # pathlib makes "gs:/bucket" of "gs://bucket".
    return isinstance(path, str) and path != "" and not path.partition("/")[0].endswith(":")


@dataclass(frozen=True, slots=True)
class AnyOf(Policy):
    """Save when at least one of several policies saves."""

    policies: tuple[Policy, ...]
    """The policies."""

    def __post_init__(self) -> None:
        """Check the policies."""
        policies = self.policies if isinstance(self.policies, Iterable) else ()
        object.__setattr__(self, "policies", tuple(map(as_policy, policies)))
        if not self.policies:
            raise OptionError(
                "any_of(): give policies, each a number of steps or one of "
                "shardckpt.training.policies; every=None never saves."
            )

    def due(self, step: int, previous: int | None) -> bool:
        """Whether one of the policies is due."""
        return any(policy.due(step, previous) for policy in self.policies)

    def wanted(self, moment: Moment) -> bool:
        """Whether one of the policies wants to save."""
        return any(policy.wanted(moment) for policy in self.policies)

    @property
    def by_leader(self) -> bool:
        """Whether one of the policies needs the leader."""
        return any(policy.by_leader for policy in self.policies)

    @property
    def notices(self) -> tuple[OnPreemption, ...]:
        """The notices of all policies."""
        return tuple(notice for policy in self.policies for notice in policy.notices)


def any_of(*policies: Policy | int) -> Policy:
    """Save when at least one of these policies saves; a number `n` stands for `EverySteps(n)`.

    Raises:
        OptionError: an argument is not a policy, or there are no arguments.

    Examples:
        >>> any_of(1000, EverySeconds(600)).due(2000, 1999)
        True
    """
    return AnyOf(policies)  # type: ignore[arg-type]


def as_policy(every: Policy | int | None) -> Policy:
    """The policy for the argument `every`.

    Args:
        every: a policy; a number `n`, for `EverySteps(n)`; or None, for a policy that never saves.

    Raises:
        OptionError: `every` is none of these.
    """
    if every is None:
        return Policy()
    if isinstance(every, Policy):
        return every
    number: object = every
    if isinstance(number, bool) or not isinstance(number, Integral):
        raise OptionError(
            f"every={shorten(every)}: give a number of steps, or one of "
            "shardckpt.training.policies."
        )
    return EverySteps(every)
