"""Rules that decide nothing: their names do not exist, or earlier rules match first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.errors import OptionError
from shardckpt.reshard.rules.deciding import meaning
from shardckpt.reshard.rules.like import Like
from shardckpt.reshard.rules.pattern import match
from shardckpt.reshard.rules.preset import Preset
from shardckpt.reshard.rules.rule import Rule
from shardckpt.state.names import nearest, shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardckpt.reshard.rules.deciding import Step
    from shardckpt.reshard.rules.entry import Entry

EVERYTHING = "**"
"""The pattern for all remaining tensors; it may match none."""


def refuse_unused(entries: Sequence[Entry], steps: Sequence[Step], used: frozenset[int], tensors: Mapping[str, tuple[int, ...]]) -> None:
    """Raise unless every rule, preset and copied checkpoint has decided for some tensor.

    Args:
        entries: the user's entries.
        steps: the steps of these entries, in order.
        used: numbers of the steps that have decided for a tensor.
        tensors: shape by name.

    Raises:
        OptionError: an entry decided for no tensor; the message gives the reason.
    """
    if not tensors:
        return
    for number, step in enumerate(steps):
        if number not in used and isinstance(step, Rule) and not step.may_match_nothing and step.pattern != EVERYTHING:
            raise OptionError(_why_unused(step, steps[:number], tensors))
    deciding = [steps[number] for number in used]
    for entry in entries:
        if isinstance(entry, Preset) and not any(isinstance(step, Rule) and step.origin == entry.origin for step in deciding):
            raise OptionError(
                f"{entry.origin} means none of the {len(tensors):,} tensors, such as {shown(next(iter(tensors)))}; "
                "choose the family by which they are named."
            )
        if isinstance(entry, Like) and entry not in deciding:
            raise OptionError(f"{entry.origin} has none of the {len(tensors):,} tensors, such as {shown(next(iter(tensors)))}.")


def _why_unused(rule: Rule, before: Sequence[Step], tensors: Mapping[str, tuple[int, ...]]) -> str:
    for name, shape in tensors.items():
        if meaning(rule, name, len(shape)):
            first = next(step for step in before if meaning(step, name, len(shape)))
            other = first.title if isinstance(first, Rule) else first.origin
            return f"{rule.title} decides nothing: others come first wherever it matches, as {other} for {shown(name)}; put it before them."
    for wider in (f"**/{rule.pattern}", f"**/*{rule.pattern}", f"{rule.pattern}/**", f"{rule.pattern}*", f"**/*{rule.pattern}*"):
        found = next((name for name in tensors if match(wider, name)), None)
        if found is not None:
            return f"{rule.title} matches no tensor; patterns are matched with whole names, and {wider!r} would match {shown(found)}."
    like = nearest(rule.pattern, tensors) or next(iter(tensors))
    return f"{rule.title} matches no tensor; patterns are matched with whole names, such as {shown(like)}."
