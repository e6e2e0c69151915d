"""Policies that decide when a training loop saves.

A policy is asked at every step, in two ways.

1. `due(step, previous)` follows from step numbers alone. Every process answers it for itself, and all come to the same.
2. `wanted(moment)` depends on a clock, on a signal or on what is in flight, which processes see differently. Only the
   leader answers it, and announces what follows for a later step (`shardckpt.training`); `by_leader` says that it must be asked.

Policies are values: compare them, print them, combine them with `any_of`. A class of your own derives from `Policy`.
"""

from __future__ import annotations

import signal
from bisect import bisect_right
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from shardckpt.errors import OptionError
from shardckpt.excerpt import excerpt

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable

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
    """What the leader sees when it is asked."""

    step: int
    """The step that training has reached."""
    since_last: float
    """Seconds since the last save was decided on, or training began, by the leader's clock."""
    in_flight: bool
    """Whether a save is under way, or decided on."""
    preempted: bool
    """Whether a notice of preemption has come and has not been acted on."""


class Policy:
    """When to save; this one never does."""

    __slots__ = ()

    def due(self, step: int, previous: int | None) -> bool:
        """Whether step numbers alone say so.

        Args:
            step: the one that training has reached.
            previous: the one at which the policy was asked last, or that was restored; None at the first.
        """
        del step, previous
        return False

    def wanted(self, moment: Moment) -> bool:
        """Whether to save as soon as all processes can do so at the same step; asked of the leader only."""
        del moment
        return False

    @property
    def by_leader(self) -> bool:
        """Whether `wanted` may ever say so."""
        return False

    @property
    def notices(self) -> tuple[OnPreemption, ...]:
        """Where notices of preemption come from."""
        return ()


@dataclass(frozen=True, slots=True)
class EveryCall(Policy):
    """At each step that is asked about, step 0 included: the loop itself decides when it calls `save`."""

    def due(self, step: int, previous: int | None) -> bool:
        """Always true."""
        del step, previous
        return True


@dataclass(frozen=True, slots=True)
class EverySteps(Policy):
    """At each multiple of `n`; where steps are looked at only now and then, at the first one after it. Not at step 0.

    >>> [step for step in range(0, 50, 7) if EverySteps(20).due(step, step - 7)]
    [21, 42]
    """

    n: int
    """Steps, at least 1."""

    def __post_init__(self) -> None:
        """Check it."""
        _whole(self.n, "EverySteps(n", 1)

    def due(self, step: int, previous: int | None) -> bool:
        """Whether a multiple was reached."""
        if previous is None:
            return step > 0 and step % self.n == 0
        return step // self.n > max(previous, 0) // self.n


@dataclass(frozen=True, slots=True)
class AtSteps(Policy):
    """At given steps; where steps are looked at only now and then, at the first one after it."""

    steps: Iterable[int]
    """In any order; kept as an ascending tuple."""

    def __post_init__(self) -> None:
        """Sort them."""
        try:
            steps = list(self.steps)
        except TypeError:
            raise OptionError(f"AtSteps({excerpt(self.steps)}): give the steps, as in AtSteps([100, 1000]).") from None
        for step in steps:
            _whole(step, "AtSteps(…", 0)
        object.__setattr__(self, "steps", tuple(sorted(set(steps))))

    def due(self, step: int, previous: int | None) -> bool:
        """Whether one of them was reached."""
        assert isinstance(self.steps, tuple)
        if previous is None:
            return step in self.steps
        return bisect_right(self.steps, step) > bisect_right(self.steps, previous)


@dataclass(frozen=True, slots=True)
class EverySeconds(Policy):
    """Whenever so much time has passed since the last save was decided on, by the leader's clock."""

    seconds: float
    """More than 0."""

    def __post_init__(self) -> None:
        """Check it."""
        _seconds(self.seconds, "EverySeconds(seconds")

    def wanted(self, moment: Moment) -> bool:
        """Whether it has, and none is in flight."""
        return moment.since_last >= self.seconds and not moment.in_flight

    @property
    def by_leader(self) -> bool:
        """It depends on a clock."""
        return True


@dataclass(frozen=True, slots=True)
class Continuous(Policy):
    """Again as soon as the last save is done."""

    def wanted(self, moment: Moment) -> bool:
        """Whether none is in flight."""
        return not moment.in_flight

    @property
    def by_leader(self) -> bool:
        """It depends on what is in flight."""
        return True


@dataclass(frozen=True, slots=True)
class OnPreemption(Policy):
    """Once, when this job is about to be stopped: at the same step on all processes, whichever of them was told.

    Each source is looked at once per step, on every process.
    """

    signals: tuple[signal.Signals, ...] = (signal.SIGTERM,)
    """Signals that say so; handlers that were there before are called as well, and come back when the manager is closed.
    Without one the signal no longer ends the process: end the loop when `CheckpointManager.reached_preemption` says so."""
    file: str | os.PathLike[str] | None = None
    """A file that says so by being there, as a maintenance notice that a side-car writes."""
    when: Callable[[], bool] | None = field(default=None, compare=False)
    """A function that says so, quickly: it is called in the training loop."""

    def __post_init__(self) -> None:
        """Check that there is a source."""
        try:
            object.__setattr__(self, "signals", tuple(signal.Signals(number) for number in self.signals))
        except (TypeError, ValueError) as e:
            raise OptionError(f"OnPreemption(signals={excerpt(self.signals)}): {e}; give signals, as in (signal.SIGTERM,).") from e
        if self.when is not None and not callable(self.when):
            raise OptionError(f"OnPreemption(when={excerpt(self.when)}): a {type(self.when).__name__} is no function of nothing.")
        if not self.signals and self.file is None and self.when is None:
            raise OptionError("OnPreemption(signals=()): nothing could ever give notice; give signals, a file or a function.")

    def wanted(self, moment: Moment) -> bool:
        """Whether there is a notice."""
        return moment.preempted

    @property
    def by_leader(self) -> bool:
        """It depends on what one process alone may have been told."""
        return True

    @property
    def notices(self) -> tuple[OnPreemption, ...]:
        """This one."""
        return (self,)


@dataclass(frozen=True, slots=True)
class AnyOf(Policy):
    """Whenever one of several policies says so."""

    policies: tuple[Policy, ...]

    def due(self, step: int, previous: int | None) -> bool:
        """Whether one of them is."""
        return any(policy.due(step, previous) for policy in self.policies)

    def wanted(self, moment: Moment) -> bool:
        """Whether one of them wants it."""
        return any(policy.wanted(moment) for policy in self.policies)

    @property
    def by_leader(self) -> bool:
        """Whether one of them is."""
        return any(policy.by_leader for policy in self.policies)

    @property
    def notices(self) -> tuple[OnPreemption, ...]:
        """Those of all."""
        return tuple(notice for policy in self.policies for notice in policy.notices)


def any_of(*policies: Policy | int) -> Policy:
    """Save whenever one of these says so; a number is every so many steps.

    >>> any_of(1000, EverySeconds(600)).due(2000, 1999)
    True
    """
    return AnyOf(tuple(as_policy(policy) for policy in policies))


def as_policy(every: Policy | int | None) -> Policy:
    """What a user gave to say when: a policy, every so many steps, or None: never by itself.

    Raises:
        OptionError: neither.
    """
    if every is None:
        return Policy()
    if isinstance(every, int) and not isinstance(every, bool):
        return EverySteps(every)
    if not isinstance(every, Policy):
        raise OptionError(
            f"every={excerpt(every)}: a {type(every).__name__} is no policy; give steps, or one of shardckpt.training.policies."
        )
    return every


def _whole(value: object, what: str, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(f"{what}={excerpt(value)}): give a whole number of at least {least}.")


def _seconds(value: object, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
        raise OptionError(f"{what}={excerpt(value)}): give a positive number of seconds.")
