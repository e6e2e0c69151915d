"""Operations on elements, with broadcasting: the result is cut where the operands are.

| operators | rule |
|---|---|
| add, sub, rsub, where, masked_fill, copy | a sum of terms (`algebra.added`) |
| mul, div, backward functions of activations | a product (`algebra.multiplied`) |
| maximum, minimum | `algebra.extreme` |
| clone, alias, detach, neg, `_to_copy`, … | as their operand |
| all others that ATen tags as pointwise | cut or replicated operands only |
"""

from __future__ import annotations

from typing import Any

from shardckpt.reshard.batch_dims.call import Call, Result, is_node, shown
from shardckpt.reshard.batch_dims.layouts import Partial, Replicate, Shard
from shardckpt.reshard.batch_dims.rules.algebra import Known, added, extreme, multiplied
from shardckpt.reshard.batch_dims.sizes import Undecided


def aligned(
    call: Call, value: Any, layout: Known, out: tuple[int, ...], batch_dims: frozenset[int]
) -> Known:
    """An operand's layout, expressed in the dimensions to which it is broadcast.

    Args:
        call: the call.
        value: the operand.
        layout: layout of the operand.
        out: the shape to which it is broadcast.
        batch_dims: dimensions of `out` in which an operand is cut.

    Raises:
        Undecided: the operand is not cut, but has an element for each sample.
    """
    shape = call.shape(value)
    shift = len(out) - len(shape)
    if isinstance(layout, Shard):
        return Shard(layout.dim + shift, layout.outer, layout.power)
    for d in batch_dims:
        if d >= shift and shape[d - shift] != 1:
            raise Undecided(
                f"{shown(value)} is {layout} and has {shape[d - shift]} elements along the batch; "
                "name it in batch=… if it is cut"
            )
    return layout


def operands(call: Call, values: list[Any], out: tuple[int, ...] | None = None) -> list[Known]:
    """The layouts of operands that are broadcast together, in the dimensions of the result."""
    out = call.out if out is None else out
    layouts = [call.layout(value) for value in values]
    cut = frozenset(
        layout.dim + len(out) - len(call.shape(value))
        for value, layout in zip(values, layouts, strict=True)
        if isinstance(layout, Shard)
    )
    return [
        aligned(call, value, layout, out, cut)
        for value, layout in zip(values, layouts, strict=True)
    ]


def is_pointwise(node: Any) -> bool:
    """Whether ATen tags an operator as elementwise, and as not random."""
    tags = {str(tag).rpartition(".")[2] for tag in getattr(node.target, "tags", ())}
    return "pointwise" in tags and "nondeterministic_seeded" not in tags


def pointwise(call: Call) -> Result:
    """The layout of any elementwise operation."""
    numbers = [
        a for a in (*call.node.args, *call.node.kwargs.values()) if isinstance(a, int | float)
    ]
    values = [*call.operands, *numbers]
    for value in values:
        call.steady(value)
    return added(operands(call, values))


def _sum(call: Call) -> Result:
    if call.layout(call["alpha"]) != Replicate():
        raise Undecided("a multiple of its operand that scales with the batch is added")
    values = [call["self"], call["other"]]
    layouts = operands(call, values)
    if (
        any(isinstance(layout, Partial) and layout.reduction != "sum" for layout in layouts[1:])
        and call["alpha"] != 1
    ):
        raise Undecided("a multiple of a partial extreme is added")
    return added(layouts, [call.is_zero(value) for value in values])


def _difference(call: Call) -> Result:
    for value in (call["self"], call["other"]):
        layout = call.layout(value)
        if isinstance(layout, Partial) and layout.reduction != "sum":
            raise Undecided(f"{shown(value)} is {layout}: it must be reduced before a difference")
    return _sum(call)


def _choice(call: Call) -> Result:
    values = [call["self"], call["other"]]
    call.steady(call["condition"])
    condition, *terms = operands(call, [call["condition"], *values])
    return added([condition, *terms], [True, *(call.is_zero(value) for value in values)])


def _masked_fill(call: Call) -> Result:
    call.steady(call["mask"])
    mask, *terms = operands(call, [call["mask"], call["self"], call["value"]])
    return added([mask, *terms], [True, call.is_zero(call["self"]), call.is_zero(call["value"])])


def _copy(call: Call) -> Result:
    return added(operands(call, [call["self"], call["src"]]), [True, call.is_zero(call["src"])])


def _product(call: Call) -> Result:
    return multiplied(operands(call, [call["self"], call["other"]]))


def _quotient(call: Call) -> Result:
    if call["rounding_mode"] is not None:
        return pointwise(call)
    above, below = operands(call, [call["self"], call["other"]])
    if isinstance(below, Partial):
        raise Undecided(
            f"it divides by {shown(call['other'])}, which is {below}: the quotient of sums is not "
            "a sum of quotients"
        )
    inverse = (
        Replicate(-below.power)
        if isinstance(below, Replicate)
        else Shard(below.dim, below.outer, -below.power)
    )
    return multiplied([above, inverse])


def _linear_in_first(call: Call) -> Result:
    """The layout of a backward function: the gradient times a function of the other operands."""
    first, *others = [argument for argument in call.node.args if is_node(argument)]
    for other in others:
        call.steady(other)
    return multiplied(operands(call, [first, *others]))


def _same(call: Call) -> Result:
    return call.layout(call["self"])


def _negated(call: Call) -> Result:
    layout = call.layout(call["self"])
    if isinstance(layout, Partial) and layout.reduction != "sum":
        return Partial({"max": "min", "min": "max"}[layout.reduction], layout.power)
    return layout


def _cast(call: Call) -> Result:
    to = call.node.meta["val"].dtype
    loses = not (to.is_floating_point or to.is_complex) and to != call["self"].meta["val"].dtype
    return call.steady(call["self"]) if loses else call.layout(call["self"])


def _extreme(reduction: str) -> Any:
    def rule(call: Call) -> Result:
        return extreme(operands(call, [call["self"], call["other"]]), reduction)

    return rule


RULES = {
    "add": _sum,
    "sub": _difference,
    "rsub": _difference,
    "where": _choice,
    "masked_fill": _masked_fill,
    "copy": _copy,
    "mul": _product,
    "div": _quotient,
    "maximum": _extreme("max"),
    "minimum": _extreme("min"),
    "neg": _negated,
    "_to_copy": _cast,
    **dict.fromkeys(
        ["clone", "alias", "detach", "lift_fresh_copy", "contiguous", "positive"], _same
    ),
    **dict.fromkeys(
        [
            "threshold_backward",
            "gelu_backward",
            "silu_backward",
            "tanh_backward",
            "sigmoid_backward",
            "hardtanh_backward",
            "elu_backward",
        ],
        _linear_in_first,
    ),
}
"""ATen operator → rule."""
