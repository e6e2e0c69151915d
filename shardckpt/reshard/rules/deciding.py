"""Decisions for tensors: the first step that applies to a tensor decides its layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, TypeAlias

from shardckpt.errors import ShardingError
from shardckpt.layout.partition_spec import PartitionSpec
from shardckpt.reshard.rules.decision import Decision, notices_of, one_element, sharding
from shardckpt.reshard.rules.like import Like
from shardckpt.reshard.rules.parameters import Parameters
from shardckpt.reshard.rules.pattern import Match, literal, match
from shardckpt.reshard.rules.rule import Rule
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from shardckpt.layout.mesh import Mesh

Step: TypeAlias = Rule | Like
"""A rule, or another checkpoint's layouts."""

QUIET = 1 << 14
"""Elements below which an unmatched tensor gets no notice, because its replicas cost nothing."""


@dataclass(frozen=True, slots=True)
class Decided:
    """The decisions for some tensors."""

    decisions: dict[str, Decision]
    """Decision by tensor name."""
    used: frozenset[int]
    """Numbers of the steps that decided for a tensor."""
    unmatched: tuple[str, ...]
    """Names of tensors to which no step applies."""


def decide(steps: Sequence[Step], tensors: Mapping[str, tuple[int, ...]], mesh: Mesh | None, names: Iterable[str] | None = None) -> Decided:
    """Decide the layouts of all tensors, or of some.

    Args:
        steps: the steps in order.
        tensors: shape by name.
        mesh: the mesh for the layouts of rules; None: tensors become plain, unless their layout is copied.
        names: decide for these only; the other tensors may be the parameters that these belong to.

    Raises:
        ShardingError: a tensor cannot be laid out according to the step that applies to it.
    """
    parameters = Parameters(tensors, lambda name: judge.first(name, tuple(tensors[name])) is not None)
    judge = _Judge(steps, [literal(step.pattern) if isinstance(step, Rule) else "" for step in steps], parameters, mesh)
    decisions: dict[str, Decision] = {}
    used: set[int] = set()
    unmatched: list[str] = []
    for name in tensors if names is None else names:
        shape = tuple(tensors[name])
        number = judge.first(name, shape)
        parameter = judge.parameters.of(name) if number is None else None
        if number is not None:
            used.add(number)
        elif parameter is None and not one_element(shape):
            unmatched.append(name)
        decisions[name] = judge.decide(name, shape, number, parameter)
    return Decided(decisions, frozenset(used), tuple(unmatched))


def meaning(step: Step, name: str, ndim: int) -> Match | None:
    """The match of a step with a tensor; None: there is none."""
    if isinstance(step, Like):
        return Match.WHOLE if name in step else None
    return match(step.pattern, name) if step.rank in (None, ndim) else None


@dataclass(frozen=True, slots=True)
class _Judge:
    steps: Sequence[Step]
    literals: Sequence[str]
    """Per step, a text that every name with a match contains."""
    parameters: Parameters
    mesh: Mesh | None

    def first(self, name: str, shape: tuple[int, ...]) -> int | None:
        """The number of the first step that applies to a tensor; None: there is none."""
        for number, text in enumerate(self.literals):
            if text in name and meaning(self.steps[number], name, len(shape)):
                return number
        return None

    def decide(self, name: str, shape: tuple[int, ...], number: int | None, parameter: str | None) -> Decision:
        """Decide for a tensor, given the step that applies to it, or else the parameter that it belongs to."""
        step = None if number is None else self.steps[number]
        if isinstance(step, Like):
            copied = step.layout(name, shape, self.mesh)
            return Decision(copied, f"like {step.origin}", f"{step.origin} has it so", notices_of(copied, shape))
        if one_element(shape):
            return self._replicated(step, "it has one element at most: there is nothing to cut")
        if step is not None:
            return self._by_rule(step, name, shape)
        if parameter is None:
            why = "no rule means it: replicated"
            return self._replicated(None, why, *([why] if prod(shape) >= QUIET else []))
        of_parameter = self.parameters.shape(parameter)
        if of_parameter != shape:
            return self._other_shape(None, parameter, shape)
        same = self.decide(parameter, shape, self.first(parameter, shape), None)
        return replace(same, why=f"it belongs to {shown(parameter)}: {same.why}")

    def _by_rule(self, rule: Rule, name: str, shape: tuple[int, ...]) -> Decision:
        how = meaning(rule, name, len(shape))
        assert how is not None
        fits = len(rule.spec) <= len(shape)
        # The rank may fit a rule by accident: Adafactor's rows of a stacked weight have the rank of a single weight.
        parameter = self.parameters.of(name) if how is Match.BELOW or not fits or rule.rank is not None else None
        if rule.spec.parts and parameter is not None and self.parameters.shape(parameter) != shape:
            return self._other_shape(rule, parameter, shape)
        if not fits and how is Match.WHOLE:
            raise ShardingError(
                f"{rule.title} has {len(rule.spec)} entries, and {shown(name)} has shape {shape}; give at most one per dimension, "
                "or put a rule for this name before it."
            )
        if not fits:
            notice = f"it lies below what {str(rule)!r} means, which has more entries than its {len(shape)} dimensions: replicated"
            return self._replicated(rule, notice, notice)
        layout = sharding(self.mesh, rule.spec)
        why = f"{rule.origin or 'the rule'} matches {how.value}"
        return Decision(layout, str(rule), why, notices_of(layout, shape, rule))

    def _other_shape(self, rule: Rule | None, parameter: str, shape: tuple[int, ...]) -> Decision:
        notice = f"it belongs to a parameter of shape {self.parameters.shape(parameter)} and has shape {shape} itself: replicated"
        return self._replicated(rule, notice, *([notice] if prod(shape) >= QUIET else []))

    def _replicated(self, rule: Rule | None, why: str, *notices: str) -> Decision:
        return Decision(sharding(self.mesh, PartitionSpec()), "" if rule is None else str(rule), why, notices)
