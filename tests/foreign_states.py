"""All of a foreign checkpoint, read chunk by chunk as an import does, and states as plain data that two processes can compare."""

from __future__ import annotations

import numpy as np

from shardckpt.box import Box
from shardckpt.dtypes import by_name
from shardckpt.planning.plan import chunk_boxes
from shardckpt.tree import unflatten


def tensor_of(foreign, name):
    """One tensor, of all of its chunks."""
    tensor = foreign.structure.tensors[name]
    whole = np.full(tensor.shape, 99, tensor.dtype.storage)
    for piece in tensor.pieces:
        boxes = chunk_boxes(piece, np.arange(piece.num_chunks))
        for start, stop in zip(boxes.start.tolist(), boxes.stop.tolist(), strict=True):
            chunk = foreign.read(tensor, piece, Box(tuple(start), tuple(stop)))
            assert (chunk.shape, chunk.dtype) == (tuple(b - a for a, b in zip(start, stop, strict=True)), tensor.dtype.storage)
            whole[tuple(map(slice, start, stop))] = chunk
    return whole.view(tensor.dtype.numpy)


def state_of(foreign):
    """The state, with numpy arrays."""
    return unflatten(foreign.structure.tree, {name: tensor_of(foreign, name) for name in foreign.structure.tensors})


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
    bits = flat if hasattr(np, dtype.name) else flat.view(torch.uint8 if dtype.itemsize == 1 else torch.int16)
    return bits.numpy().view(dtype.numpy).reshape(value.shape)
