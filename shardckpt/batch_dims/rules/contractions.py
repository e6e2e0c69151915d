"""Products of matrices, convolutions and attention: einsums, in each of which the batch has one letter.

| where the batch's letter is | the result |
|---|---|
| kept, cut in one operand, absent from the others, which are replicated | cut in that letter's dimension |
| kept, cut in all operands that have it | likewise |
| summed over | Partial(sum) |
"""

from __future__ import annotations

from typing import Any

from shardckpt.batch_dims.call import Call, Result, shown
from shardckpt.batch_dims.layouts import Partial, Replicate, Shard
from shardckpt.batch_dims.rules.algebra import Known, added, multiplied, position
from shardckpt.batch_dims.rules.pointwise import operands
from shardckpt.batch_dims.sizes import Undecided

__all__ = ["RULES"]


def contracted(call: Call, equation: str, *values: Any) -> Known:
    """The layout of an einsum.

    Args:
        call: for the operands' layouts.
        equation: one letter per dimension, "ij,jk->ik".
        values: the operands.

    Raises:
        Undecided: the operands do not go together.
    """
    inputs, result = equation.split("->")
    letters, layouts = inputs.split(","), [call.layout(value) for value in values]
    cut = {term[layout.dim] for term, layout in zip(letters, layouts, strict=True) if isinstance(layout, Shard)}
    if not cut:
        return multiplied(layouts)
    if len(cut) > 1:
        raise Undecided("its operands have the batch in dimensions that have nothing to do with each other: every sample meets every other")
    (letter,) = cut
    for term, layout, value in zip(letters, layouts, values, strict=True):
        if letter in term and not isinstance(layout, Shard):
            raise Undecided(
                f"{shown(value)} is {layout}, and another operand is cut in the same dimension; name it in batch=… if it is cut"
            )
    place = position([Shard(0, layout.outer) for layout in layouts if isinstance(layout, Shard)])
    assert place is not None
    product = multiplied([Shard(*place, layout.power) if isinstance(layout, Shard) else layout for layout in layouts])
    if letter not in result:
        return Partial("sum", product.power)
    return Shard(result.index(letter), place[1], product.power)


def _einsum(equation: str, *names: str) -> Any:
    def rule(call: Call) -> Result:
        return contracted(call, equation, *(call[name] for name in names))

    return rule


def _plus_einsum(equation: str, *names: str) -> Any:
    def rule(call: Call) -> Result:
        factors = [call.layout(call[name] if call[name] is not None else 1) for name in ("alpha", "beta")]
        if factors != [Replicate(), Replicate()]:
            raise Undecided("alpha or beta scales with the batch")
        product = contracted(call, equation, *(call[name] for name in names))
        (bias,) = operands(call, [call["self"]])
        if isinstance(product, Shard) and not isinstance(bias, Shard):
            shift, shape = len(call.out) - len(call.shape(call["self"])), call.shape(call["self"])
            if product.dim >= shift and shape[product.dim - shift] != 1:
                raise Undecided(f"{shown(call['self'])} is {bias} and has elements along the batch; name it in batch=… if it is cut")
        return added([bias, product], [call.is_zero(call["self"]), False])

    return rule


def _linear(call: Call) -> Result:
    letters = "abcdefgh"[: len(call.shape(call["input"])) - 1]
    product = contracted(call, f"{letters}i,oi->{letters}o", call["input"], call["weight"])
    return product if call["bias"] is None else added([product, call.layout(call["bias"])])


def _convolution(call: Call) -> Result:
    image, weight = call.layout(call["input"]), call.layout(call["weight"])
    if any(isinstance(layout, Shard) and layout.dim for layout in (image, weight)) or isinstance(weight, Shard):
        raise Undecided("the batch is in its channels, its kernel or along the image")
    product = multiplied([image, weight])
    return product if call["bias"] is None else added([product, call.layout(call["bias"])])


def _convolution_backward(call: Call) -> Result:
    gradient, image, weight = (call.layout(call[name]) for name in ("grad_output", "input", "weight"))
    if not (isinstance(gradient, Shard) and isinstance(image, Shard) and isinstance(weight, Replicate)) or gradient.dim or image.dim:
        raise Undecided(f"its gradient is {gradient}, its image {image} and its kernel {weight}: only images that are cut are understood")
    position([gradient, image])
    return (
        multiplied([gradient, weight]),
        Partial("sum", gradient.power + image.power),
        Partial("sum", gradient.power),
    )


def _attention(call: Call) -> Result:
    """Each head of each sample by itself: dimensions 0 and 1 are batch and heads, of the mask as well."""
    tensors = [call.steady(call[name]) for name in ("query", "key", "value")]
    mask = call["attn_mask"] if call["attn_mask"] is not None else call["attn_bias"]
    place = position(tensors)
    if place is not None and (place[0] > 1 or not all(isinstance(layout, Shard) for layout in tensors)):
        raise Undecided("queries, keys and values are not all cut in their batch or their heads")
    if mask is not None:
        layout, shape = call.steady(mask), call.shape(mask)
        shift = 4 - len(shape)
        if isinstance(layout, Shard):
            if (layout.dim + shift, layout.outer) != place:
                raise Undecided("its mask is cut elsewhere than its queries")
        elif place is not None and place[0] >= shift and shape[place[0] - shift] != 1:
            raise Undecided(f"{shown(mask)} is {layout} and has elements along the batch; name it in batch=… if it is cut")
    found: Known = Replicate() if place is None else Shard(*place)
    return found if len(call.outs) == 1 else tuple(found if shape is not None and len(shape) > 2 else Replicate() for shape in call.outs)


def _attention_backward(call: Call) -> Result:
    gradient = call.layout(call["grad_out"])
    others = [call.steady(call[name]) for name in ("query", "key", "value", "out", "logsumexp")]
    place = position([gradient, *others])
    if place is None or place[0] > 1 or not all(isinstance(layout, Shard) for layout in (gradient, *others)):
        raise Undecided("its gradient, queries, keys and values are not all cut in their batch or their heads")
    mask = call["attn_mask"]
    if mask is not None and (call.replicated(mask) and any(call.batch.divides(size) for size in call.shape(mask))):
        raise Undecided(f"{shown(mask)} has elements along the batch")
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
    **dict.fromkeys(["_scaled_dot_product_flash_attention_for_cpu", "scaled_dot_product_attention"], _attention),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}
"""ATen operator → rule."""
