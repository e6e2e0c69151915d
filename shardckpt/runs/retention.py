"""Rules that decide which steps to keep.

A rule gets all steps that could be deleted and returns the steps to keep; `any_of` keeps every step
that one of several rules keeps. Rules are values without side effects: `cleaning` adds the steps
that are never deleted. A custom rule derives from `Retention`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf, isnan
from numbers import Integral
from typing import TYPE_CHECKING, Literal

from shardckpt.errors import OptionError
from shardckpt.options import check_whole
from shardckpt.text import shorten

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "Best",
    "EveryKth",
    "KeepAnyOf",
    "Latest",
    "Retention",
    "SavedStep",
    "Younger",
    "any_of",
    "as_retention",
    "best",
]


@dataclass(frozen=True, slots=True)
class SavedStep:
    """A committed step, as rules see it."""

    step: int
    """The number of the step."""
    age: float = 0.0
    """Seconds since the commit: the leader's clock minus the committer's clock. Before a step is
    deleted, its age is at most that of its record by the storage's clock."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The metrics of `CheckpointManager.save(metrics=…)`."""


class Retention(ABC):
    """A rule that chooses the steps to keep."""

    __slots__ = ()

    @abstractmethod
    def kept(self, steps: Sequence[SavedStep]) -> set[int]:
        """The steps to keep among these; all others may be deleted.

        Args:
            steps: all steps, ascending.
        """

    @property
    def measures(self) -> tuple[Best, ...]:
        """The `Best` rules in this rule."""
        return ()


@dataclass(frozen=True, slots=True)
class Latest(Retention):
    """Keep the latest `n` steps."""

    n: int
    """Number of steps, at least 1."""

    def __post_init__(self) -> None:
        """Check the number."""
        object.__setattr__(self, "n", check_whole(self.n, "Latest(n"))

    def kept(self, steps: Sequence[SavedStep]) -> set[int]:
        """The last `n` steps."""
        return {s.step for s in steps[-self.n :]}


@dataclass(frozen=True, slots=True)
class Best(Retention):
    """Keep the best `n` steps by a metric.

    Of equal steps the later is better. The rule does not keep steps without the metric, or with
    NaN.
    """

    n: int
    """Number of steps, at least 1."""
    metric: str
    """A key of `CheckpointManager.save(metrics=…)`."""
    mode: Literal["min", "max"] = "min"
    """Whether the smallest or the largest value is best."""

    def __post_init__(self) -> None:
        """Check the fields."""
        object.__setattr__(self, "n", check_whole(self.n, "Best(n"))
        if not isinstance(self.metric, str):
            raise OptionError(f"Best(metric={shorten(self.metric)}): give the name of a metric.")
        if self.mode not in ("min", "max"):
            raise OptionError(f'Best(mode={shorten(self.mode)}): give "min" or "max".')

    def kept(self, steps: Sequence[SavedStep]) -> set[int]:
        """The best `n` steps."""
        return {s.step for s in self.ranked(steps)[: self.n]}

    def ranked(self, steps: Sequence[SavedStep]) -> list[SavedStep]:
        """The steps that have the metric, best first."""
        sign = 1 if self.mode == "min" else -1
        having = [s for s in steps if not isnan(s.metrics.get(self.metric, float("nan")))]
        return sorted(having, key=lambda s: (sign * s.metrics[self.metric], -s.step))

    @property
    def measures(self) -> tuple[Best, ...]:
        """This rule."""
        return (self,)


@dataclass(frozen=True, slots=True)
class EveryKth(Retention):
    """Keep the steps whose number is a multiple of `k`, for ever."""

    k: int
    """Steps, at least 1."""

    def __post_init__(self) -> None:
        """Check the number."""
        object.__setattr__(self, "k", check_whole(self.k, "EveryKth(k"))

    def kept(self, steps: Sequence[SavedStep]) -> set[int]:
        """The multiples of `k`."""
        return {s.step for s in steps if s.step % self.k == 0}


@dataclass(frozen=True, slots=True)
class Younger(Retention):
    """Keep the steps committed less than this many seconds ago."""

    seconds: float
    """Seconds, more than 0."""

    def __post_init__(self) -> None:
        """Check the seconds."""
        if (
            isinstance(self.seconds, bool)
            or not isinstance(self.seconds, int | float)
            or not 0 < self.seconds < inf
        ):
            raise OptionError(
                f"Younger(seconds={shorten(self.seconds)}): give a positive number of seconds."
            )

    def kept(self, steps: Sequence[SavedStep]) -> set[int]:
        """The steps younger than `seconds`."""
        return {s.step for s in steps if s.age < self.seconds}


@dataclass(frozen=True, slots=True)
class KeepAnyOf(Retention):
    """Keep the steps that at least one of several rules keeps."""

    rules: tuple[Retention, ...]
    """The rules."""

    def __post_init__(self) -> None:
        """Check the rules."""
        made = [*map(as_retention, self.rules)] if isinstance(self.rules, Iterable) else []
        if not made or None in made:
            raise OptionError(
                f"any_of: give rules, not {shorten(self.rules)}: each is a number of steps or one "
                "of shardckpt.training.retention; None would keep all."
            )
        object.__setattr__(self, "rules", tuple(made))

    def kept(self, steps: Sequence[SavedStep]) -> set[int]:
        """The union of the rules' steps."""
        return set().union(*(rule.kept(steps) for rule in self.rules))

    @property
    def measures(self) -> tuple[Best, ...]:
        """The `Best` rules in all rules."""
        return tuple(best for rule in self.rules for best in rule.measures)


def any_of(*rules: Retention | int) -> Retention:
    """Keep the steps that at least one of these rules keeps; a number `n` stands for `Latest(n)`.

    Raises:
        OptionError: an argument is not a rule, or there are no arguments.

    Examples:
        >>> sorted(any_of(2, EveryKth(1000)).kept([SavedStep(n) for n in (1000, 1500, 1600, 1700)]))
        [1000, 1600, 1700]
    """
    return KeepAnyOf(rules)  # type: ignore[arg-type]


def as_retention(keep: Retention | int | None) -> Retention | None:
    """The rule for the argument `keep`.

    Args:
        keep: a rule; a number `n`, for `Latest(n)`; or None, which keeps everything.

    Raises:
        OptionError: `keep` is none of these.
    """
    if keep is None or isinstance(keep, Retention):
        return keep
    number: object = keep
    if isinstance(number, bool) or not isinstance(number, Integral):
        raise OptionError(
            f"keep={shorten(keep)}: a {type(keep).__name__} is not a rule; give a number of steps, "
            "or one of shardckpt.training.retention."
        )
    return Latest(keep)


def best(steps: Sequence[SavedStep], metric: str, mode: Literal["min", "max"]) -> int | None:
    """The step with the best metric; None if no step has the metric."""
    ranked = Best(1, metric, mode).ranked(steps)
    return ranked[0].step if ranked else None
