"""Addresses, strides and indices of tensors in memory."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


def storage_address(tensor: torch.Tensor) -> int:
    """Identifies a tensor's storage while it exists.

    This includes a storage on the meta device, which has no memory.
    """
    storage = tensor.untyped_storage()
    if tensor.device.type == "meta":
        return -int(storage._cdata)  # noqa: SLF001  (torch has no other name for it)
    return int(storage.data_ptr())


def lacks_memory(tensor: torch.Tensor) -> bool:
    """Whether an operation on a tensor's elements would end the process: it has none."""
    return bool(
        type(tensor).__torch_dispatch__ == torch.Tensor.__torch_dispatch__
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.numel() > 0
        and tensor.data_ptr() == tensor.storage_offset() * tensor.itemsize
    )


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, in elements."""
    return tuple(prod(shape[d + 1 :]) for d in range(len(shape)))


def index_at(offset: int, strides: Sequence[int]) -> list[int]:
    """The index of the element at an offset of a contiguous tensor."""
    index = []
    for stride in strides:
        at, offset = divmod(offset, stride)
        index.append(at)
    return index


def are_apart(places: Sequence[torch.Tensor]) -> list[bool]:
    """For each place, whether no other one shares memory with it.

    If none does, the places may be filled in any order.
    """
    bounds = []
    for i, place in enumerate(places):
        last = (
            sum((n - 1) * stride for n, stride in zip(place.shape, place.stride(), strict=True))
            if place.numel()
            else 0
        )
        bounds.append((place.data_ptr(), place.data_ptr() + (last + 1) * place.itemsize, i))
    apart = [True] * len(places)
    bounds.sort()
    end, holder = -1, -1
    for begin, stop, i in bounds:
        if begin < end:
            apart[i] = apart[holder] = False
        if stop > end:
            end, holder = stop, i
    return apart
