"""Operators that create tensors.

| operators | rule |
|---|---|
| full, zeros, ones, empty, …_like | replicated; cut in a dimension of the batch's size |
| arange | replicated; of the batch's length Numbered: every process counts samples from 0 |
| rand, bernoulli, native_dropout, … | cut: each sample draws its own; Unknown if all draw alike |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.reshard.batch_dims.layouts import Numbered, Partial, Replicate, Shard
from shardckpt.reshard.batch_dims.sizes import Undecided

if TYPE_CHECKING:
    from shardckpt.reshard.batch_dims.call import Call, Result


def _filled(call: Call) -> Result:
    value = call["fill_value"] if call["fill_value"] is not None else call["s"]
    power = call.layout(value).power if value is not None else 0
    like = (
        call.layout(call["self"])
        if call["self"] is not None and call.shape(call["self"]) == call.out
        else None
    )
    if isinstance(like, Shard):
        return Shard(like.dim, like.outer, power)
    cut = [d for d, size in enumerate(call.out) if call.batch.divides(size)]
    if not cut or (isinstance(like, Replicate | Partial) and call.batch.literal_sizes):
        return Replicate(power)
    if call.batch.literal_sizes:
        raise Undecided(
            f"the size {call.out[cut[0]]} may have been derived from the batch of "
            f"{call.batch.value}; export with a dynamic batch dimension"
        )
    if len(cut) > 1:
        raise Undecided("the batch's size is in several of its dimensions")
    return Shard(cut[0], 1, power)


def _counted(call: Call) -> Result:
    if (
        call.out == (call.batch.value,)
        and not call.batch.literal_sizes
        and call["start"] in (None, 0)
        and call["step"] in (None, 1)
    ):
        return Numbered(0)
    if any(call.batch.divides(size) for size in call.out):
        raise Undecided("it counts the samples, and every process starts at 0")
    for name in ("start", "end", "step"):
        if call[name] is not None and call.batch.power(call[name]):
            raise Undecided("where it begins or ends depends on the size of the part")
    return Replicate()


def _drawn(call: Call) -> Result:
    values = [value for value in call.operands if call.shape(value) == call.out]
    layout = call.steady(values[0]) if values else _filled(call)
    if isinstance(layout, Shard):
        return call.each_result(layout)
    raise Undecided(
        "it draws random numbers, which are the same in all processes only if their generators are"
    )


def _dropout(call: Call) -> Result:
    layout = call.layout(call["input"])
    if not call["train"] and call["train"] is not None:
        return (layout,) * len(call.outs)
    if not isinstance(layout, Shard):
        raise Undecided(
            "it draws random numbers, which are the same in all processes only if their "
            "generators are"
        )
    return layout, Shard(layout.dim, layout.outer)


RULES = {
    **dict.fromkeys(
        ["full", "zeros", "ones", "scalar_tensor", "full_like", "zeros_like", "ones_like"], _filled
    ),
    **dict.fromkeys(["new_full", "new_zeros", "new_ones"], _filled),
    **dict.fromkeys(
        [
            "empty",
            "empty_like",
            "empty_permuted",
            "empty_strided",
            "new_empty",
            "new_empty_strided",
        ],
        _filled,
    ),
    "arange": _counted,
    **dict.fromkeys(["rand", "randn", "rand_like", "randn_like", "bernoulli"], _drawn),
    "native_dropout": _dropout,
}
"""ATen operator → rule."""
