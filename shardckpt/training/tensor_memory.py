"""Memory of torch tensors: replacing, comparing and filling it, also where tensors share it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardckpt.frameworks.numpy import overlaps_itself
from shardckpt.frameworks.torch import addresses
from shardckpt.state import leaves

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def replace_memory(own: Any, value: Any, replaced: dict[int, Any]) -> bool:
    """Replace the tensor of a Parameter or buffer that is on the meta device or of torch_xla.

    It gets the first value of several names.

    Args:
        own: the Parameter or buffer.
        value: the value of one of its names.
        replaced: the values that were given so far, by the id of their Parameter or buffer.

    Returns:
        Whether it has that value now.
    """
    first = replaced.setdefault(id(own), value)
    if first is not value:
        return is_same(own.cpu(), value.cpu())
    if own.is_meta:
        torch.utils.swap_tensors(
            own,
            torch.nn.Parameter(value, own.requires_grad)
            if isinstance(own, torch.nn.Parameter)
            else value,
        )
    elif own.device.type == "xla":
        own.data = value
    return True


def allocate(own: Any) -> torch.Tensor:
    """Give a meta tensor memory; return the meta tensor."""
    device = own.device_mesh.device_type if hasattr(own, "device_mesh") else "cpu"
    new = torch.empty_like(own, device=device)
    swapped = (
        torch.nn.Parameter(new, own.requires_grad) if isinstance(own, torch.nn.Parameter) else new
    )
    torch.utils.swap_tensors(own, swapped)
    return swapped


def version_of(tensor: torch.Tensor) -> int:
    """A number that changes when a tensor is written.

    Of inference tensors, whose writes torch does not count, always -1.
    """
    return -1 if tensor.is_inference() else tensor._version  # noqa: SLF001  (torch's own documents it)


def _local(tensor: Any) -> Any:
    """The memory of a tensor: of a DTensor its local part."""
    return getattr(tensor, "_local_tensor", tensor)


def local_bytes(tensor: Any) -> int:
    """Bytes of the elements that this process has, of sparse tensors as if they were dense."""
    local = _local(tensor)
    return int(local.numel() * local.element_size())


def storage_of(value: Any) -> int | None:
    """The memory that a tensor lies in, by a number; None for anything else."""
    local = _local(value)
    if not isinstance(local, torch.Tensor):
        return None
    return local.untyped_storage()._cdata if local.layout is torch.strided else id(local)  # noqa: SLF001  (empty ones share an address)


def shares_memory(own: Any, value: Any, storages: Mapping[int | None, int]) -> bool:
    """Whether elements of a tensor share memory with each other, or with another tensor.

    Its value fits it otherwise.
    """
    if not isinstance(value, torch.Tensor) or value.shape != own.shape or value.dtype != own.dtype:
        return False  # load_state_dict has a message for that, or converts it
    return storages[storage_of(own)] > 1 or overlaps_itself(addresses(_local(own)))


def fill(own: Any, value: Any) -> None:
    """Write a value into a tensor; elements that share memory get one of the values for it."""
    own, value = _local(own), _local(value)
    if not overlaps_itself(addresses(own)):
        own.copy_(value)
        return
    span = 1 + sum((n - 1) * stride for n, stride in zip(own.shape, own.stride(), strict=True))
    places = torch.arange(span, device=own.device).as_strided(own.shape, own.stride())
    own.as_strided((span,), (1,))[places.reshape(-1)] = value.reshape(-1).to(own.device)


def disturbs(own: Any, value: Any, filled: Iterable[Any]) -> bool:
    """Whether writing a value into a tensor changes memory of tensors that are filled already."""
    storage, own = storage_of(own), _local(own)
    changed = _bytes(own) != _bytes(_local(value).to(own.device))
    marks = torch.zeros(own.untyped_storage().nbytes(), dtype=torch.bool, device=own.device)
    for other in filled:
        if storage_of(other) == storage:
            _bytes_of(marks, _local(other)).fill_(True)
    return bool((_bytes_of(marks, own) & changed).any())


def _bytes_of(storage: torch.Tensor, tensor: Any) -> torch.Tensor:
    """The bytes of a tensor, in a tensor with an element for each byte of its storage."""
    size = tensor.itemsize
    return storage.as_strided(
        (*tensor.shape, size),
        (*(size * n for n in tensor.stride()), 1),
        size * tensor.storage_offset(),
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return (
        tensor.detach()
        .resolve_conj()
        .resolve_neg()
        .contiguous()
        .reshape(-1)
        .view(torch.uint8)
        .reshape(*tensor.shape, tensor.itemsize)
    )


def is_same(a: Any, b: Any) -> bool:
    """Whether two entries of a state are equal, tensors bit by bit."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return leaves.is_small(a) and bool(a == b)
    a, b = _local(a).detach(), _local(b).detach()
    if a.shape != b.shape or a.dtype != b.dtype or a.is_meta:
        return False
    return bool(torch.equal(_bytes(a), _bytes(b.to(a.device))))
