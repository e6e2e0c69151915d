"""Decisions for tensors: the first step that applies to a tensor decides its layout.

A tensor of an optimizer's state belongs to a parameter. Frameworks keep state under the parameter's
own path, somewhere else in the tree:

    model/layers.0.w1.weight   optimizer/state/layers.0.w1.weight/exp_avg          (torch, by name)
    params/layers_0/wq/kernel  opt_state/0/mu/layers_0/wq/kernel                   (optax)
    model/layers.0.w1.weight   optim/state.layers.0.w1.weight.exp_avg              (DCP, flattened)

So a parameter's path is its name without the first component. A tensor belongs to the parameter
whose path is a proper suffix of the tensor's name, or of the name directly above the tensor. The
longest such path counts. If several parameters share a path, such as a model's weights and their
moving averages, the first one that a rule matches is the parameter, wherever the others are in the
tree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import TYPE_CHECKING, TypeAlias

from shardckpt.errors import ShardingError
from shardckpt.layout.partition_spec import PartitionSpec
from shardckpt.layout.sharding import Sharding
from shardckpt.reshard.rules.like import Like
from shardckpt.reshard.rules.pattern import Match, literal, match, owners
from shardckpt.reshard.rules.rule import Rule
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from shardckpt.format.structure import StoredLayout
    from shardckpt.layout.mesh import Mesh

Step: TypeAlias = Rule | Like
"""A rule, or another checkpoint's layouts."""

QUIET = 1 << 14
"""Elements below which a tensor without a rule gets no notice, because its replicas cost
nothing."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The layout of one tensor, and why."""

    layout: StoredLayout | None
    """The layout; None: a plain host tensor, outside any mesh."""
    rule: str
    """The text of the rule that decided; empty if none did."""
    why: str
    """The reason as a sentence, for people."""
    notices: tuple[str, ...] = ()
    """Possible surprises, without the tensor's name, so that equal notices are shown once."""


@lru_cache(maxsize=256)
def sharding(mesh: Mesh | None, spec: PartitionSpec) -> Sharding | None:
    """The spec over the mesh; None without a mesh.

    Equal shardings are one object, so that comparing them is cheap.
    """
    return None if mesh is None else Sharding(mesh, spec)


def notices_of(
    layout: StoredLayout | None, shape: tuple[int, ...], rule: Rule | None = None
) -> tuple[str, ...]:
    """Notices about a tensor of a shape in a layout; `rule` may know the units of a dimension."""
    notices: list[str] = []
    if not isinstance(layout, Sharding):
        return ()
    for dim, (size, parts) in enumerate(zip(shape, layout.parts(len(shape)), strict=True)):
        if parts == 1 or size == 0:
            continue
        over = "×".join(
            f"{axis}={layout.mesh.axis_sizes[str(axis)]}" for axis in layout.spec.axes[dim]
        )
        if size % parts:
            notices.append(_uneven(dim, size, parts, over))
        if (
            rule is not None
            and rule.units is not None
            and rule.units.dim == dim
            and rule.units.count % parts
        ):
            notices.append(
                f"dimension {dim}: {rule.units.count} {rule.units.what} do not divide into "
                f"{parts} parts ({over}): some are cut"
            )
        if rule is not None and rule.packed is not None and rule.packed[0] == dim:
            notices.append(
                f"dimension {dim} concatenates {rule.packed[1]}: a part ({over}) is a slice of "
                "all together, not a slice of each"
            )
    return tuple(notices)


def _uneven(dim: int, size: int, parts: int, over: str) -> str:
    tile = -(-size // parts)
    full, last = divmod(size, tile)
    ends = f"{full} of {tile}" + (f", one of {last}" if last else "")
    empty = parts - full - bool(last)
    return f"dimension {dim} is uneven: {size} in {parts} parts ({over}) are {ends}" + (
        f", {empty} empty" if empty else ""
    )


def one_element(shape: tuple[int, ...]) -> bool:
    """Whether a shape has at most one element, so that nothing can be cut."""
    return prod(shape) <= 1


@dataclass(frozen=True, slots=True)
class Decided:
    """The decisions for some tensors."""

    decisions: dict[str, Decision]
    """Decision by tensor name."""
    used: frozenset[int]
    """Numbers of the steps that decided for a tensor."""
    undecided: tuple[str, ...]
    """Names of tensors to which no step applies."""


def decide(
    steps: Sequence[Step],
    tensors: Mapping[str, tuple[int, ...]],
    mesh: Mesh | None,
    names: Iterable[str] | None = None,
) -> Decided:
    """Decide the layouts of all tensors, or of some.

    Args:
        steps: the steps in order.
        tensors: shape by name.
        mesh: the mesh for the layouts of rules; None: tensors become plain, unless their layout is
            copied.
        names: decide for these only; the other tensors may be the parameters that these belong to.

    Raises:
        ShardingError: a tensor cannot be laid out according to the step that applies to it.
    """
    tensors = {name: tuple(shape) for name, shape in tensors.items()}
    decider = _Decider(steps, tensors, mesh)
    decisions: dict[str, Decision] = {}
    used: set[int] = set()
    undecided: list[str] = []
    for name in tensors if names is None else names:
        number = decider.first_step(name)
        parameter = decider.parameter_of(name) if number is None else None
        if number is not None:
            used.add(number)
        elif parameter is None and not one_element(tensors[name]):
            undecided.append(name)
        decisions[name] = decider.decide(name, number, parameter)
    return Decided(decisions, frozenset(used), tuple(undecided))


def meaning(step: Step, name: str, ndim: int) -> Match | None:
    """The match of a step with a tensor; None: there is none."""
    if isinstance(step, Like):
        return Match.WHOLE if name in step else None
    return match(step.pattern, name) if step.rank in (None, ndim) else None


class _Decider:
    """The steps, and all tensors by name and by path."""

    def __init__(
        self, steps: Sequence[Step], tensors: Mapping[str, tuple[int, ...]], mesh: Mesh | None
    ) -> None:
        self._steps = steps
        self._tensors = tensors
        self._mesh = mesh
        self._literals = [literal(step.pattern) if isinstance(step, Rule) else "" for step in steps]
        """Per step, a text that every name with a match contains."""

    def first_step(self, name: str) -> int | None:
        """The number of the first step that applies to a tensor; None: there is none."""
        for number, text in enumerate(self._literals):
            if text in name and meaning(self._steps[number], name, len(self._tensors[name])):
                return number
        return None

    @cached_property
    def _parameters(self) -> dict[str, str]:
        """Path → parameter."""
        alike: dict[str, list[str]] = {}
        for name in self._tensors:
            alike.setdefault(name.partition("/")[2] or name, []).append(name)
        return {
            path: names[0] if len(names) == 1 else next(filter(self._is_matched, names), names[0])
            for path, names in alike.items()
        }

    def _is_matched(self, name: str) -> bool:
        return self.first_step(name) is not None

    def parameter_of(self, name: str) -> str | None:
        """The name of the parameter that a tensor belongs to; None: there is none."""
        ends = [
            end
            for text in (name, *owners(name))
            for end in _ends(text)
            if self._parameters.get(end, name) != name
        ]
        return self._parameters[max(ends, key=len)] if ends else None

    def decide(self, name: str, number: int | None, parameter: str | None) -> Decision:
        """Decide for a tensor by the step that applies to it, or else by its parameter.

        The parameter is the one that the tensor belongs to.
        """
        step, shape = None if number is None else self._steps[number], self._tensors[name]
        if isinstance(step, Like):
            copied = step.layout(name, shape, self._mesh)
            return Decision(
                copied,
                f"like {step.origin}",
                f"{step.origin} has this layout",
                notices_of(copied, shape),
            )
        if one_element(shape):
            return self._replicate(step, "it has one element at most: there is nothing to cut")
        if step is not None:
            return self._apply(step, name, shape)
        if parameter is None:
            why = "no rule matches it: replicated"
            return self._replicate(None, why, *([why] if prod(shape) >= QUIET else []))
        if self._tensors[parameter] != shape:
            return self._replicate_other_shape(None, parameter, shape)
        same = self.decide(parameter, self.first_step(parameter), None)
        return replace(same, why=f"it belongs to {shown(parameter)}: {same.why}")

    def _apply(self, rule: Rule, name: str, shape: tuple[int, ...]) -> Decision:
        matched = meaning(rule, name, len(shape))
        assert matched is not None
        fits = len(rule.spec) <= len(shape)
        # The rank may fit a rule by accident: Adafactor's rows of a stacked weight have the rank of
        # a single weight.
        parameter = (
            self.parameter_of(name)
            if matched is Match.BELOW or not fits or rule.rank is not None
            else None
        )
        if rule.spec.parts and parameter is not None and self._tensors[parameter] != shape:
            return self._replicate_other_shape(rule, parameter, shape)
        if not fits and matched is Match.WHOLE:
            raise ShardingError(
                f"{rule.title} has {len(rule.spec)} entries, and {shown(name)} has shape {shape}; "
                "give at most one per dimension, or put a rule for this name before it."
            )
        if not fits:
            notice = (
                f"{str(rule)!r} matches the name above it, but has more entries than its "
                f"{len(shape)} dimensions: replicated"
            )
            return self._replicate(rule, notice, notice)
        layout = sharding(self._mesh, rule.spec)
        why = f"{rule.origin or 'the rule'} matches {matched.value}"
        return Decision(layout, str(rule), why, notices_of(layout, shape, rule))

    def _replicate_other_shape(
        self, rule: Rule | None, parameter: str, shape: tuple[int, ...]
    ) -> Decision:
        notice = (
            f"it belongs to a parameter of shape {self._tensors[parameter]} and has shape {shape} "
            "itself: replicated"
        )
        return self._replicate(rule, notice, *([notice] if prod(shape) >= QUIET else []))

    def _replicate(self, rule: Rule | None, why: str, *notices: str) -> Decision:
        return Decision(
            sharding(self._mesh, PartitionSpec()), "" if rule is None else str(rule), why, notices
        )


def _ends(name: str) -> list[str]:
    """The name without its first component, without its first two, and so on."""
    return [name[at + 1 :] for at, character in enumerate(name) if character == "/"]
