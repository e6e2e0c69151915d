"""Kinds of torch tensors: which can be stored and filled, and which share memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

from shardckpt.errors import LeafError
from shardckpt.frameworks.numpy import overlaps_itself
from shardckpt.state.leaves import is_small
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from collections.abc import Hashable

CLASSES = frozenset((torch.Tensor, torch.nn.Parameter))
"""Classes of tensors that are no more than their elements; `torch.owns` decides for their
instances."""


def check_kind(name: str, leaf: Any) -> None:
    """Raise LeafError unless the leaf is only elements, all in memory or all missing (meta)."""
    reason = _unstorable(leaf)
    if reason is None and type(leaf) not in CLASSES:
        if isinstance(leaf, torch.nn.parameter.UninitializedTensorMixin):
            reason = "this parameter has no shape and no data yet; run its module once"
        else:
            reason = _more_than_elements(leaf)
    if reason is None and not leaf.is_meta:
        reason = _without_memory(leaf)
    if reason is not None:
        raise LeafError(f"{shown(name)}: {reason}.")


def _unstorable(leaf: Any) -> str | None:
    """The reason why a kind of tensor cannot be stored, and what to do; None if it can."""
    if leaf.is_nested:
        return "nested tensors cannot be stored; store their .values() and .offsets()"
    if leaf.is_quantized:
        return (
            "quantized tensors cannot be stored; store their .int_repr() with scale and zero point"
        )
    if leaf.layout is not torch.strided:
        return (
            f"tensors of layout {leaf.layout} cannot be stored; store .to_dense(), or indices and "
            "values"
        )
    return None


def _without_memory(leaf: Any) -> str | None:
    """The reason why not all elements of a strided tensor are in memory, and what to do.

    None if they are.
    """
    if leaf._is_zerotensor():
        return "this tensor represents zeros without memory of its own; pass leaf.clone()"
    if torch._is_functional_tensor(leaf):
        return (
            "this tensor is one of torch.func.functionalize, without memory of its own; pass it "
            "outside of torch.func transforms"
        )
    try:
        held = leaf.untyped_storage().nbytes()
    except NotImplementedError as e:
        return (
            f"this tensor has no memory of its own ({e}); pass it outside of torch.func transforms"
        )
    if leaf.numel() == 0:
        return None
    if leaf.is_contiguous():
        last = leaf.storage_offset() + leaf.numel() - 1
    else:
        last = leaf.storage_offset() + sum(
            (n - 1) * stride for n, stride in zip(leaf.shape, leaf.stride(), strict=True)
        )
    needed = (last + 1) * leaf.itemsize
    if needed <= held:
        return None
    return (
        f"this tensor's elements take {needed} bytes of its storage, which has {held}: its memory "
        "was freed, as FSDP and offloading do with untyped_storage().resize_(0); restore its "
        "memory first, or pass the tensor that has the data now"
    )


def _more_than_elements(leaf: Any) -> str | None:
    """The reason why a subclass of a tensor is more than its elements, and what to do.

    None if it is not.
    """
    kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
    advice = "call shardckpt.register_tensor for its class, or pass the plain tensors it is made of"
    if type(leaf).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return (
            f"the tensor subclass {kind} computes its elements, and has no __tensor_flatten__; "
            f"{advice}"
        )
    more = [
        key
        for key, value in vars(leaf).items()
        if not (is_small(value) or callable(value) or isinstance(value, tuple | list | dict))
    ]
    more += [key for key, value in vars(leaf).items() if isinstance(value, torch.Tensor)]
    return (
        f"this {kind} has the attribute {more[0]!r} beside its elements, which would be lost; "
        f"{advice}"
        if more
        else None
    )


def is_elements(leaf: Any) -> bool:
    """Whether a tensor is of a subclass that leaves all operations to torch."""
    return (
        type(leaf) not in CLASSES
        and type(leaf).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    )


def elements_of(leaf: Any) -> Any:
    """A tensor of a subclass as a plain tensor over the same memory; any other unchanged."""
    if type(leaf) in CLASSES:
        return leaf
    with torch._C.DisableTorchFunctionSubclass():
        return leaf.as_subclass(torch.Tensor)


def check_fillable(name: str, tensor: Any) -> None:
    """Raise LeafError unless each element of a tensor has its own memory that holds its value."""
    if tensor.is_conj() or tensor.is_neg():
        raise LeafError(
            f"{shown(name)}: this tensor is a lazily conjugated or negated view, which cannot be "
            "restored into; give leaf.resolve_conj().resolve_neg()."
        )
    # The array is never read; it only has the tensor's strides, for any device.
    if not tensor.is_contiguous() and overlaps_itself(
        as_strided(np.empty(1, np.uint8), tuple(tensor.shape), tensor.stride())
    ):
        raise LeafError(
            f"{shown(name)}: elements of this tensor share memory, so it cannot be restored into; "
            "give leaf.clone()."
        )


def memory_key(tensor: Any) -> tuple[Hashable, ...] | None:
    """A key that is equal for tensors over the same memory in the same form.

    None for tensors without memory.
    """
    return _memory(tensor) if _has_memory(tensor) else None


def _has_memory(tensor: Any) -> bool:
    """Whether a tensor is a plain one, and has elements that are in memory."""
    if (
        type(tensor) not in CLASSES
        or _unstorable(tensor) is not None
        or tensor.is_meta
        or tensor.numel() == 0
    ):
        return False
    return _without_memory(tensor) is None


def _memory(tensor: Any) -> tuple[Hashable, ...]:
    seen = (
        str(tensor.device),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )
    # XLA's tensors tell no address.
    address = tensor.data_ptr() or ("storage", tensor.untyped_storage()._cdata)
    return address, *seen
