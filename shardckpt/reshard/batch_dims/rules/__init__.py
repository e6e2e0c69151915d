"""Rules of ATen operators for layouts: one module per family, each with a table of its operators.

The operators are those of functional ATen graphs, as produced by
`ExportedProgram.run_decompositions` (the Core ATen IR) and `make_fx`. An operator that is in no
table, and that ATen does not tag as pointwise, has no rule: its result is Unknown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.reshard.batch_dims.call import Call, Result, op_name
from shardckpt.reshard.batch_dims.rules import (
    contractions,
    factories,
    lookups,
    norms,
    pointwise,
    reductions,
    views,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def _same_numbers(rule: Callable[[Call], Result]) -> Callable[[Call], Result]:
    """Wrap a rule that uses only tensors, to check the operator's numeric arguments.

    The wrapper is for operators whose numeric arguments must not depend on the batch.
    """

    def guarded(call: Call) -> Result:
        call.refuse_counts()
        return rule(call)

    return guarded


_OF_TENSORS = (views, reductions, contractions, lookups, norms)

RULES: dict[str, Callable[[Call], Result]] = {
    **pointwise.RULES,
    **{name: _same_numbers(rule) for family in _OF_TENSORS for name, rule in family.RULES.items()},
    **factories.RULES,
}
"""ATen operator, without its overload → rule."""


def rule_of(node: Any) -> Callable[[Call], Result] | None:
    """The rule of the operator that a node calls; None if it has none."""
    if not str(node.target).startswith("aten."):
        return None
    return RULES.get(op_name(node)) or (
        pointwise.pointwise if pointwise.is_pointwise(node) else None
    )
