"""Text on one tensor's layout: every rule tested, the rule that decided, and the shards.

'model/layers.0.w1.weight', shape (14, 8)

    rule 1   **/*norm.weight=(data)               does not match
  → rule 2   **/layers.*.w1.weight=(data,model)   matches its name
    1 rule after it is not tested

dimension 0   14 in 4 parts of 4 over data=4
dimension 1   8 in 2 parts of 4 over model=2
each of 8 devices holds (4, 4), 32 bytes

notice: dimension 0 is uneven: 14 in 4 parts (data=4) are 3 of 4, one of 2
"""

from __future__ import annotations

from itertools import groupby
from math import prod
from typing import TYPE_CHECKING

from shardckpt.layout.sharding import Sharding
from shardckpt.reshard.rules.decisions import meaning
from shardckpt.reshard.rules.pattern import match
from shardckpt.reshard.rules.rule import Rule
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardckpt.reshard.rules.decisions import Decision, Step

FEW = 4
"""Below this number, rules that do not match are listed individually."""
_NO = "does not match"


def explanation(
    name: str, shape: tuple[int, ...], steps: Sequence[Step], decision: Decision, itemsize: int
) -> str:
    """The explanation of a tensor's decision, given all candidate steps.

    The module's docstring shows its format.
    """
    decisive = next(
        (number for number, step in enumerate(steps) if meaning(step, name, len(shape))), None
    )
    tested = steps if decisive is None else steps[: decisive + 1]
    rows = list(
        _joined_rows(
            [(_origin(step), _text(step), _answer(step, name, len(shape))) for step in tested]
        )
    )
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    lines = [f"{shown(name)}, shape {shape}", ""]
    for number, (origin, text, answer) in enumerate(rows, 1):
        mark = "→" if decisive is not None and number == len(rows) else " "
        lines.append(f"  {mark} {origin:{widths[0]}}   {text:{widths[1]}}   {answer}")
    rest = len(steps) - len(tested)
    if rest:
        lines.append(f"    {_rules(rest)} after it {'are' if rest > 1 else 'is'} not tested")
    if decision.why not in decision.notices and (
        decisive is None or not decision.why.endswith(rows[-1][2])
    ):
        lines.append(f"    {decision.why}")
    lines += ["", *_outcome(shape, decision, itemsize)]
    if decision.notices:
        lines += ["", *(f"notice: {notice}" for notice in decision.notices)]
    return "\n".join(lines)


def _joined_rows(rows: list[tuple[str, str, str]]) -> Iterator[tuple[str, str, str]]:
    """Yield the rows.

    Many non-matching rules of one origin become one row, because a preset has dozens of rules.
    """
    for (origin, answer), run in groupby(rows, lambda row: (row[0], row[2])):
        same = list(run)
        yield from (
            same if answer != _NO or len(same) < FEW else [(origin, _rules(len(same)), answer)]
        )


def _rules(count: int) -> str:
    return f"{count} rule{'s' * (count > 1)}"


def _origin(step: Step) -> str:
    return step.origin or "rule"


def _text(step: Step) -> str:
    return str(step) if isinstance(step, Rule) else f"the layouts of {len(step.tensors):,} tensors"


def _answer(step: Step, name: str, ndim: int) -> str:
    how = meaning(step, name, ndim)
    if not isinstance(step, Rule):
        return "has it" if how else "does not have it"
    if how:
        return f"matches {how.value}"
    return (
        f"is for {step.rank} dimension{'s' * (step.rank != 1)}"
        if match(step.pattern, name)
        else _NO
    )


def _outcome(shape: tuple[int, ...], decision: Decision, itemsize: int) -> Iterator[str]:
    layout = decision.layout
    if not isinstance(layout, Sharding):
        yield "plain: no device holds a part of it" if layout is None else f"laid out as {layout}"
        return
    tile, parts = layout.tile(shape), layout.parts(len(shape))
    sizes = layout.mesh.axis_sizes
    for dim, axes in enumerate(layout.spec.axes[: len(shape)]):
        over = ", ".join(f"{axis}={sizes[str(axis)]}" for axis in axes)
        yield f"dimension {dim}   {shape[dim]:,}" + (
            f" in {parts[dim]} parts of {tile[dim]:,} over {over}" if axes else " whole"
        )
    copies = layout.num_devices // prod(parts)
    alike = f"; {copies} devices hold the same" if copies > 1 else ""
    yield (
        f"each of {layout.num_devices:,} devices holds {tile}, {prod(tile) * itemsize:,} "
        f"bytes{alike}"
    )
