"""Operations that move or leave out elements and compute nothing: partial tensors stay partial.

| operators | rule |
|---|---|
| view, reshape, squeeze, unsqueeze, … | all of the batch must stay in one dimension |
| permute, t, transpose | the dimension moves |
| expand, repeat | new dimensions in front; a replicated tensor is cut where it meets the batch |
| slice, select, split, unbind, flip, roll, tril, triu | the batch must stay complete |
| cat, stack | along the batch: runs of it behind one another |
| slice_scatter, select_scatter, constant_pad_nd | a sum of terms |
"""

from __future__ import annotations

from math import prod
from typing import Any

from shardckpt.reshard.batch_dims.call import Call, Result, shown
from shardckpt.reshard.batch_dims.layouts import Replicate, Shard
from shardckpt.reshard.batch_dims.rules.algebra import Known, added
from shardckpt.reshard.batch_dims.sizes import Undecided

MOVES = frozenset(
    {
        "view",
        "_unsafe_view",
        "reshape",
        "squeeze",
        "unsqueeze",
        "permute",
        "t",
        "transpose",
        "expand",
        "slice",
    }
) | {
    "clone",
    "alias",
    "detach",
    "_to_copy",
}
"""Operators that pass elements on unchanged, each within its sample."""


def untouched(layout: Known, dims: tuple[int, ...], what: str) -> Known:
    """The layout unchanged, if no dimension in which it is cut is among `dims`.

    Raises:
        Undecided: the operation goes across samples.
    """
    if isinstance(layout, Shard) and layout.dim in dims:
        raise Undecided(
            f"{what} along dimension {layout.dim}, the batch dimension: it mixes samples"
        )
    return layout


def _reshaped(call: Call) -> Result:
    if call["dtype"] is not None:  # reinterpreted bits: not valid for partial tensors
        call.steady(call["self"])
    layout, before, after = call.layout(call["self"]), call.shape(call["self"]), call.out
    if not isinstance(layout, Shard):
        return layout
    outside = prod(before[: layout.dim]) * layout.outer
    passed = 1
    for dim, size in enumerate(after):
        if not outside or not size:  # no elements, so every layout would fit, and most mislead
            break
        if outside % passed == 0 and size % (outside // passed * call.batch.value) == 0:
            return Shard(dim, outside // passed, layout.power)
        passed *= size
    raise Undecided(f"it becomes {_named_sizes(call)}, which splits the batch dimension")


def _named_sizes(call: Call) -> str:
    """The result's shape, with the graph's own symbols."""
    return f"[{', '.join(map(str, call.node.meta['val'].shape))}]"


def _permuted(call: Call) -> Result:
    layout, ndim = call.layout(call["self"]), len(call.out)
    if not isinstance(layout, Shard):
        return layout
    order = list(range(ndim))
    if call["dims"] is not None:
        order = list(call.dims(call["dims"], ndim))
    elif ndim > 1:  # transpose, and t, which has no arguments
        a, b = (
            call.dim(call[name] if call[name] is not None else d, ndim)
            for name, d in (("dim0", 0), ("dim1", 1))
        )
        order[a], order[b] = b, a
    return Shard(order.index(layout.dim), layout.outer, layout.power)


def _expanded(call: Call) -> Result:
    layout, before, after = call.layout(call["self"]), call.shape(call["self"]), call.out
    shift = len(after) - len(before)
    new = [
        d
        for d, size in enumerate(after)
        if call.batch.divides(size) and (d < shift or before[d - shift] != size)
    ]
    if new and (call.batch.literal_sizes or len(new) > 1 or not isinstance(layout, Replicate)):
        raise Undecided(
            f"{shown(call['self'])} is {layout} and is repeated as often as there are samples, "
            "perhaps by coincidence"
        )
    if isinstance(layout, Shard):
        return Shard(layout.dim + shift, layout.outer, layout.power)
    return Shard(new[0], 1, layout.power) if new else layout


def _repeated(call: Call) -> Result:
    layout, before, after = call.layout(call["self"]), call.shape(call["self"]), call.out
    shift = len(after) - len(before)
    if any(
        call.batch.divides(size) and (d < shift or before[d - shift] != size)
        for d, size in enumerate(after)
    ):
        raise Undecided("it repeats the samples, or repeats something once per sample")
    return (
        Shard(layout.dim + shift, layout.outer, layout.power)
        if isinstance(layout, Shard)
        else layout
    )


def _sliced(call: Call) -> Result:
    layout = call.layout(call["self"])
    dim = call.dim(call["dim"], len(call.out))
    complete = call["step"] in (None, 1) and call.out == call.shape(call["self"])
    return layout if complete else untouched(layout, (dim,), "it selects elements")


def _selected(call: Call) -> Result:
    before = call.shape(call["self"])
    dim = call.dim(call["dim"], len(before))
    return _without(untouched(call.layout(call["self"]), (dim,), "it selects an index"), dim)


def _without(layout: Known, dim: int) -> Known:
    if isinstance(layout, Shard) and layout.dim > dim:
        return Shard(layout.dim - 1, layout.outer, layout.power)
    return layout


def _with(layout: Known, dim: int) -> Known:
    if isinstance(layout, Shard) and layout.dim >= dim:
        return Shard(layout.dim + 1, layout.outer, layout.power)
    return layout


def _split(call: Call) -> Result:
    dim = call.dim(call["dim"] or 0, len(call.shape(call["self"])))
    return (untouched(call.layout(call["self"]), (dim,), "it splits"),) * len(call.outs)


def _unbound(call: Call) -> Result:
    dim = call.dim(call["dim"] or 0, len(call.shape(call["self"])))
    return (_without(untouched(call.layout(call["self"]), (dim,), "it splits"), dim),) * len(
        call.outs
    )


def _moved_within(call: Call) -> Result:
    """The layout of flip and roll; without dims they move all elements."""
    return untouched(
        call.layout(call["self"]), call.dims(call["dims"], len(call.out)), "it moves elements"
    )


def _triangle(call: Call) -> Result:
    ndim = len(call.out)
    return untouched(call.layout(call["self"]), (ndim - 2, ndim - 1), "it keeps a triangle")


def _joined(call: Call) -> Result:
    values = [value for value in call["tensors"] if call.shape(value) != (0,)]
    layouts = [call.layout(value) for value in values]
    dim = call.dim(call["dim"] or 0, len(call.out))
    if not any(isinstance(layout, Shard) and layout.dim == dim for layout in layouts):
        return _choice_of(call, values, layouts)
    runs = [
        call.shape(v)[dim] // la.outer
        for v, la in zip(values, layouts, strict=True)
        if isinstance(la, Shard) and la.dim == dim
    ]
    if len(set(runs)) > 1 or len(runs) < len(values):
        raise Undecided("it concatenates samples with other elements")
    outer = sum(layout.outer for layout in layouts if isinstance(layout, Shard))
    place = added(
        [Shard(dim, 1, layout.power) for layout in layouts],
        [call.is_zero(value) for value in values],
    )
    return Shard(dim, outer, place.power)


def _stacked(call: Call) -> Result:
    values, dim = list(call["tensors"]), call.dim(call["dim"] or 0, len(call.out))
    return _choice_of(call, values, [_with(call.layout(value), dim) for value in values])


def _choice_of(call: Call, values: list[Any], layouts: list[Known]) -> Known:
    """The layout of tensors placed side by side: all cut alike, or none."""
    if any(isinstance(layout, Shard) for layout in layouts) and any(
        isinstance(layout, Replicate) for layout in layouts
    ):
        raise Undecided(
            "some of its operands are cut and others are not; name those in batch=… if they are cut"
        )
    if len({*layouts}) == 1:
        return layouts[0]
    return added(layouts, [call.is_zero(value) for value in values])


def _scattered(call: Call) -> Result:
    base, part = call.layout(call["self"]), call.layout(call["src"])
    dim = call.dim(call["dim"] or 0, len(call.out))
    if str(call.node.target).startswith("aten.select_scatter"):
        part = _with(part, dim)
    if call.shape(call["src"]) != call.out:
        for layout in (base, part):
            untouched(layout, (dim,), "it writes")
    if isinstance(base, Shard) != isinstance(part, Shard):
        raise Undecided(
            f"{shown(call['self'])} is {base} and {shown(call['src'])} is {part}: only one of "
            "them is cut"
        )
    return added([base, part], [call.is_zero(call["self"]), call.is_zero(call["src"])])


def _padded(call: Call) -> Result:
    layout, ndim, pad = call.layout(call["self"]), len(call.out), call["pad"]
    touched = tuple(ndim - 1 - i // 2 for i, amount in enumerate(pad) if amount != 0)
    untouched(layout, touched, "it pads")
    return added([layout, Replicate()], [False, call.is_zero(call["value"])])


RULES = {
    **dict.fromkeys(
        ["view", "_unsafe_view", "reshape", "squeeze", "unsqueeze", "flatten", "unflatten"],
        _reshaped,
    ),
    **dict.fromkeys(["permute", "t", "transpose"], _permuted),
    "expand": _expanded,
    "repeat": _repeated,
    "slice": _sliced,
    "select": _selected,
    **dict.fromkeys(["split", "split_with_sizes", "chunk"], _split),
    "unbind": _unbound,
    **dict.fromkeys(["flip", "roll"], _moved_within),
    **dict.fromkeys(["tril", "triu"], _triangle),
    "cat": _joined,
    "stack": _stacked,
    **dict.fromkeys(["slice_scatter", "select_scatter"], _scattered),
    "constant_pad_nd": _padded,
}
"""ATen operator → rule."""
