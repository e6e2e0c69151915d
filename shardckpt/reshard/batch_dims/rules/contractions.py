"""Matrix products, convolutions and attention: einsums, each with one letter for the batch.

| where the batch's letter is | the result |
|---|---|
| kept, cut in one operand, absent from the replicated others | cut in that letter's dimension |
| kept, cut in all operands that have it | cut in that letter's dimension |
| summed over | Partial(sum) |
"""

from __future__ import annotations

from typing import Any

from shardckpt.reshard.batch_dims.call import Call, Result, shown
from shardckpt.reshard.batch_dims.layouts import Partial, Replicate, Shard
from shardckpt.reshard.batch_dims.rules.algebra import Known, added, multiplied, position
from shardckpt.reshard.batch_dims.rules.pointwise import aligned
from shardckpt.reshard.batch_dims.sizes import Undecided


def contracted(call: Call, equation: str, *values: Any) -> Known:
    """The layout of an einsum.

    Args:
        call: for the operands' layouts.
        equation: one letter per dimension, "ij,jk->ik".
        values: the operands.

    Raises:
        Undecided: the layouts of the operands are incompatible.
    """
    inputs, result = equation.split("->")
    letters, layouts = inputs.split(","), [call.layout(value) for value in values]
    cut = {
        term[layout.dim]
        for term, layout in zip(letters, layouts, strict=True)
        if isinstance(layout, Shard)
    }
    if not cut:
        return multiplied(layouts)
    if len(cut) > 1:
        raise Undecided(
            "its operands have the batch in unrelated dimensions: every sample is combined with "
            "every other"
        )
    (letter,) = cut
    for term, layout, value in zip(letters, layouts, values, strict=True):
        if letter in term and not isinstance(layout, Shard):
            raise Undecided(
                f"{shown(value)} is {layout}, and another operand is cut in the same dimension; "
                "name it in batch=… if it is cut"
            )
    place = position([Shard(0, layout.outer) for layout in layouts if isinstance(layout, Shard)])
    assert place is not None
    product = multiplied(
        [Shard(*place, layout.power) if isinstance(layout, Shard) else layout for layout in layouts]
    )
    if letter not in result:
        return Partial("sum", product.power)
    return Shard(result.index(letter), place[1], product.power)


def _einsum(equation: str, *names: str) -> Any:
    def rule(call: Call) -> Result:
        return contracted(call, equation, *(call[name] for name in names))

    return rule


def _plus_einsum(equation: str, *names: str) -> Any:
    def rule(call: Call) -> Result:
        factors = [
            call.layout(call[name] if call[name] is not None else 1) for name in ("alpha", "beta")
        ]
        if factors != [Replicate(), Replicate()]:
            raise Undecided("alpha or beta scales with the batch")
        return _plus_bias(
            call, contracted(call, equation, *(call[name] for name in names)), call["self"]
        )

    return rule


def _plus_bias(call: Call, product: Known, bias: Any) -> Known:
    """The layout of a product plus a bias, which is broadcast to the product's dimensions."""
    if bias is None:
        return product
    layout = call.layout(bias)
    if isinstance(layout, Shard) and not isinstance(product, Shard):
        raise Undecided(
            f"{shown(bias)} is {layout}, but is added to a tensor that is {product}; name its "
            "operands in batch=… if they are cut"
        )
    along = frozenset({product.dim}) if isinstance(product, Shard) else frozenset[int]()
    return added(
        [aligned(call, bias, layout, call.out, along), product], [call.is_zero(bias), False]
    )


def _linear(call: Call) -> Result:
    letters = "abcdefgh"[: len(call.shape(call["input"])) - 1]
    return _plus_bias(
        call,
        contracted(call, f"{letters}i,oi->{letters}o", call["input"], call["weight"]),
        call["bias"],
    )


def _convolution(call: Call) -> Result:
    image, weight = call.layout(call["input"]), call.layout(call["weight"])
    if any(isinstance(layout, Shard) and layout.dim for layout in (image, weight)) or isinstance(
        weight, Shard
    ):
        raise Undecided("the batch is in its channels, its kernel or along the image")
    bias = call.layout(call["bias"])
    if isinstance(bias, Shard):
        raise Undecided("the batch is in its channels")
    product = multiplied([image, weight])
    return product if call["bias"] is None else added([product, bias])


def _convolution_backward(call: Call) -> Result:
    gradient, image, weight = (
        call.layout(call[name]) for name in ("grad_output", "input", "weight")
    )
    if (
        not (
            isinstance(gradient, Shard)
            and isinstance(image, Shard)
            and isinstance(weight, Replicate)
        )
        or gradient.dim
        or image.dim
    ):
        raise Undecided(
            f"its gradient is {gradient}, its image {image} and its kernel {weight}: only cut "
            "images with a replicated kernel are supported"
        )
    position([gradient, image])
    return (
        multiplied([gradient, weight]),
        Partial("sum", gradient.power + image.power),
        Partial("sum", gradient.power),
    )


def _attention(call: Call) -> Result:
    """The layout of attention, which handles each head of each sample alone.

    All dimensions but the last two are batch or heads.
    """
    tensors = [call.steady(call[name]) for name in ("query", "key", "value")]
    mask = call["attn_mask"] if call["attn_mask"] is not None else call["attn_bias"]
    place, ndim = position(tensors), len(call.shape(call["query"]))
    if place is None and call["dropout_p"]:
        raise Undecided(
            "it draws random numbers, which are the same in all processes only if their "
            "generators are"
        )
    if place is not None and (
        place[0] >= ndim - 2 or not all(isinstance(layout, Shard) for layout in tensors)
    ):
        raise Undecided("queries, keys and values are not all cut in their batch or their heads")
    if mask is not None:
        _check_mask(call, mask, place, ndim)
    result: Known = Replicate() if place is None else Shard(*place)
    return (
        result
        if len(call.outs) == 1
        else tuple(
            result if shape is not None and len(shape) > 2 else Replicate() for shape in call.outs
        )
    )


def _check_mask(call: Call, mask: Any, place: tuple[int, int] | None, ndim: int) -> None:
    """Check that a mask is cut like the queries, or has one row for all samples."""
    layout = call.steady(mask)
    along = frozenset() if place is None else frozenset({place[0]})
    of_mask = aligned(call, mask, layout, (1,) * ndim, along)
    if isinstance(of_mask, Shard) and (of_mask.dim, of_mask.outer) != place:
        raise Undecided(f"{shown(mask)} is {layout}, cut elsewhere than the queries")


def _attention_backward(call: Call) -> Result:
    gradient = call.layout(call["grad_out"])
    others = [call.steady(call[name]) for name in ("query", "key", "value", "out", "logsumexp")]
    place = position([gradient, *others])
    if (
        place is None
        or place[0] > 1
        or not all(isinstance(layout, Shard) for layout in (gradient, *others))
    ):
        raise Undecided(
            "its gradient, queries, keys and values are not all cut in their batch or their heads"
        )
    if call["attn_mask"] is not None:
        _check_mask(call, call["attn_mask"], place, 4)
    return (Shard(*place, gradient.power),) * len(call.outs)


RULES = {
    "mm": _einsum("ij,jk->ik", "self", "mat2"),
    "bmm": _einsum("bij,bjk->bik", "self", "mat2"),
    "mv": _einsum("ij,j->i", "self", "vec"),
    "dot": _einsum("i,i->", "self", "tensor"),
    "addmm": _plus_einsum("ij,jk->ik", "mat1", "mat2"),
    "baddbmm": _plus_einsum("bij,bjk->bik", "batch1", "batch2"),
    "linear": _linear,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    **dict.fromkeys(
        ["_scaled_dot_product_flash_attention_for_cpu", "scaled_dot_product_attention"], _attention
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}
"""ATen operator → rule."""
