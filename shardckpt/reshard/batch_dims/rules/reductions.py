"""Operations along dimensions: within a sample they leave the batch alone.

Across samples some make partial results.

| operators | across samples |
|---|---|
| sum; mean | Partial(sum); Partial(mean) |
| amax, max, any; amin, min, all | Partial(max); Partial(min) |
| softmax, cumsum, sort, topk, argmax, var, norms, … | Unknown: not determined element by element |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.reshard.batch_dims.layouts import Partial, Replicate, Shard
from shardckpt.reshard.batch_dims.rules.algebra import Known, multiplied
from shardckpt.reshard.batch_dims.rules.views import untouched
from shardckpt.reshard.batch_dims.sizes import Undecided

if TYPE_CHECKING:
    from shardckpt.reshard.batch_dims.call import Call, Result


def _after_reduction(layout: Shard, dims: tuple[int, ...], keepdim: bool) -> Shard:
    """The layout after other dimensions have been reduced."""
    gone = 0 if keepdim else sum(d < layout.dim for d in dims)
    return Shard(layout.dim - gone, layout.outer, layout.power)


def _reduced_dims(call: Call) -> tuple[int, ...]:
    return call.dims(call["dim"], len(call.shape(call["self"])))


def _total(power: int) -> Any:
    """The rule of sum and mean.

    Mean divides by the number of elements, and so by the batch if the reduction includes it.
    """

    def rule(call: Call) -> Result:
        layout, dims = call.layout(call["self"]), _reduced_dims(call)
        if isinstance(layout, Shard):
            if layout.dim not in dims:
                return _after_reduction(layout, dims, bool(call["keepdim"]))
            if call.assume.even_counts and not power and _counts(call):
                return Replicate(1)
            return Partial("sum", layout.power + power)
        if isinstance(layout, Partial) and layout.reduction != "sum":
            raise Undecided(f"it adds up elements of {layout}, which must be reduced before")
        return layout

    return rule


def _counts(call: Call) -> bool:
    """Whether the call counts the true elements of a complete mask."""
    return (
        all(size == 1 for size in call.out) and str(call["self"].meta["val"].dtype) == "torch.bool"
    )


def _extreme(reduction: str) -> Any:
    def rule(call: Call) -> Result:
        if call["other"] is not None:
            raise Undecided("it compares two tensors")
        layout, dims = call.layout(call["self"]), _reduced_dims(call)
        single = len(call.outs) == 1
        if single and layout == Partial(reduction):
            return layout
        layout = call.steady(call["self"])
        if not isinstance(layout, Shard):
            return call.each_result(layout)
        if layout.dim in dims:
            where = Partial(reduction)
            if single:
                return where
            raise Undecided("it finds the position of an extreme across samples")
        kept = _after_reduction(layout, dims, bool(call["keepdim"]))
        return call.each_result(kept)

    return rule


def _within(call: Call) -> Result:
    """The rule of a reduction that is supported only within a sample."""
    layout, dims = call.steady(call["self"]), _reduced_dims(call)
    untouched(layout, dims, "it reduces")
    kept = (
        _after_reduction(layout, dims, bool(call["keepdim"]))
        if isinstance(layout, Shard)
        else layout
    )
    return call.each_result(kept)


def _along(call: Call) -> Result:
    """The rule of operations that keep the shape and combine elements along a dimension."""
    value = call["self"] if call["self"] is not None else call["input"]
    ndim = len(call.shape(value))
    layout: Known = call.steady(value)
    untouched(layout, (call.dim(-1 if call["dim"] is None else call["dim"], ndim),), "it operates")
    return call.each_result(layout)


def _running_sum(call: Call) -> Result:
    layout = call.layout(call["self"])
    if isinstance(layout, Partial) and layout.reduction != "sum":
        raise Undecided(f"it adds up elements of {layout}, which must be reduced before")
    return untouched(layout, (call.dim(call["dim"], len(call.out)),), "it adds up")


def _softmax_backward(call: Call) -> Result:
    gradient, output = call.layout(call["grad_output"]), call.steady(call["output"])
    dim = call.dim(call["dim"], len(call.out))
    for layout in (gradient, output):
        untouched(layout, (dim,), "it operates")
    if isinstance(gradient, Shard) != isinstance(output, Shard):
        raise Undecided("its gradient and its output are not cut alike")
    return multiplied([gradient, output])


RULES = {
    "sum": _total(0),
    "mean": _total(-1),
    **dict.fromkeys(["amax", "max", "any"], _extreme("max")),
    **dict.fromkeys(["amin", "min", "all"], _extreme("min")),
    **dict.fromkeys(
        [
            "prod",
            "var",
            "std",
            "var_mean",
            "argmax",
            "argmin",
            "linalg_vector_norm",
            "norm",
            "logsumexp",
        ],
        _within,
    ),
    **dict.fromkeys(
        [
            "_softmax",
            "_log_softmax",
            "softmax",
            "log_softmax",
            "cumprod",
            "logcumsumexp",
            "sort",
            "topk",
            "argsort",
        ],
        _along,
    ),
    "cumsum": _running_sum,
    **dict.fromkeys(["_softmax_backward_data", "_log_softmax_backward_data"], _softmax_backward),
}
"""ATen operator → rule."""
