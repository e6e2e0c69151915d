"""Normalisations, losses with a reduction, and pooling.

| operators | rule |
|---|---|
| native_layer_norm, native_group_norm | each sample by itself |
| their backward functions | of the weights: Partial(sum) |
| batch normalisation at inference | a function of each sample and of replicated statistics |
| batch normalisation in training | the running mean: Partial(mean); all else: Unknown |
| pooling, upsampling | each sample by itself |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.reshard.batch_dims.layouts import Layout, Partial, Replicate, Shard, Unknown
from shardckpt.reshard.batch_dims.rules.algebra import added, multiplied, position
from shardckpt.reshard.batch_dims.sizes import Undecided

if TYPE_CHECKING:
    from shardckpt.reshard.batch_dims.call import Call, Result


def _layer_norm(call: Call) -> Result:
    for name in ("weight", "bias"):
        call.replicated(call[name])
    layout = call.steady(call["input"])
    _refuse_inside(call, layout)
    return (layout,) * 3


def _refuse_inside(call: Call, layout: Layout) -> None:
    own = len(call.shape(call["input"])) - len(call["normalized_shape"])
    if isinstance(layout, Shard) and layout.dim >= own:
        raise Undecided("it normalises across samples")


def _layer_norm_backward(call: Call) -> Result:
    gradient, others = (
        call.layout(call["grad_out"]),
        [call.steady(call[name]) for name in ("input", "mean", "rstd")],
    )
    weight = call.replicated(call["weight"])
    place = position([gradient, *others])
    if place is None or not all(isinstance(layout, Shard) for layout in (gradient, *others)):
        raise Undecided("its gradient, its input and its statistics are not all cut")
    _refuse_inside(call, others[0])
    return (
        multiplied([gradient, weight]),
        Partial("sum", gradient.power),
        Partial("sum", gradient.power),
    )


def _group_norm(call: Call) -> Result:
    layout = call.steady(call["input"])
    for name in ("weight", "bias"):
        call.replicated(call[name])
    if isinstance(layout, Shard) and (layout.dim or layout.outer > 1):
        raise Undecided("it normalises across samples")
    return (layout,) * 3


def _refuse_image(layout: Layout, *, batched: bool = True) -> None:
    if isinstance(layout, Shard) and (layout.dim or not batched):
        raise Undecided("the batch is in its channels or along the image")


def _batch_norm_inference(call: Call) -> Result:
    layout = call.steady(call["input"])
    for name in ("weight", "bias", "running_mean", "running_var"):
        call.replicated(call[name])
    _refuse_image(layout)
    return layout, *(Replicate() for _ in call.outs[1:])


def _batch_norm(call: Call) -> Result:
    if call["training"] is False:
        return _batch_norm_inference(call)
    layout = call.steady(call["input"])
    for name in ("weight", "bias"):
        call.replicated(call[name])
    functional = len(call.outs) > 3  # it returns the running statistics too
    if not isinstance(layout, Shard):
        return (layout,) * 3 + (
            tuple(_after_update(call, name, layout) for name in ("running_mean", "running_var"))
            if functional
            else ()
        )
    _refuse_image(layout)
    coupled = Unknown(
        "batch normalisation couples samples: every process normalises by the mean and variance "
        "of its own part",
        call.node.name,
    )
    mean = Partial("sum", -1)
    layouts: list[Layout] = [layout if call.assume.local_batch_norm else coupled, mean, coupled]
    if functional:
        layouts.append(_after_update(call, "running_mean", mean))
        layouts.append(
            Unknown(
                "the variances of the parts do not make the variance of the batch", call.node.name
            )
        )
    return tuple(layouts)


def _after_update(call: Call, name: str, towards: Replicate | Partial) -> Layout:
    """The layout of running statistics after an update with the statistics of this call."""
    layout = call.known(call[name])
    return layout if isinstance(layout, Unknown) else added([towards, call.layout(call[name])])


def _each_sample(*names: str) -> Any:
    """A rule for operations on images: dimension 0 is unchanged, whatever happens to the others."""

    def rule(call: Call) -> Result:
        value = next(call[name] for name in names if call[name] is not None)
        layout = call.steady(value)
        _refuse_image(layout, batched=len(call.shape(value)) >= 4)
        return call.each_result(layout)

    return rule


RULES = {
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "native_group_norm": _group_norm,
    "_native_batch_norm_legit_no_training": _batch_norm_inference,
    **dict.fromkeys(
        ["native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional"],
        _batch_norm,
    ),
    **dict.fromkeys(
        [
            "avg_pool2d",
            "max_pool2d_with_indices",
            "_adaptive_avg_pool2d",
            "upsample_nearest2d",
            "upsample_bilinear2d",
            "pixel_shuffle",
        ],
        _each_sample("self", "input"),
    ),
}
"""ATen operator → rule."""
