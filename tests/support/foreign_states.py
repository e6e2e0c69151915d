"""States as plain data, by which two processes can compare what they have read."""

from __future__ import annotations

import numpy as np

from shardckpt.layout.dtypes import by_name


def described(value):
    """A state as JSON has it, by which states of equal bits, dtypes and containers are equal."""
    if isinstance(value, dict):
        return {f"{type(key).__name__} {key}": described(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, [described(child) for child in value]]
    if isinstance(value, np.ndarray):
        return [str(value.dtype), list(value.shape), np.ascontiguousarray(value).tobytes().hex()]
    return [type(value).__name__, repr(value)]


def without_torch(value):
    """A state with numpy arrays in place of torch's tensors."""
    import torch

    if isinstance(value, dict):
        return {key: without_torch(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(without_torch(child) for child in value)
    if not isinstance(value, torch.Tensor):
        return value
    dtype = by_name(str(value.dtype).removeprefix("torch."))
    flat = value.detach().cpu().contiguous().reshape(-1)
    bits = (
        flat
        if hasattr(np, dtype.name)
        else flat.view(torch.uint8 if dtype.itemsize == 1 else torch.int16)
    )
    return bits.numpy().view(dtype.numpy).reshape(value.shape)
