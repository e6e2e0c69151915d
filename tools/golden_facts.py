"""Facts about a state, as JSON that can be compared.

They are types, keys, order, every bit, and which tensors are the same.

`tools/make_golden.py` wrote these facts of the states that it saved; `tests/golden/test_golden.py`
compares them with those of the states that are restored. Nothing of shardckpt is imported here.
"""

import hashlib
import struct

import numpy as np

__all__ = ["Interval", "facts", "layout_facts"]


class Interval:
    """A class that registers itself as a leaf."""

    def __init__(self, low, high):
        self.low = low
        self.high = high


def facts(state):
    """All about a state."""
    return _facts(state, "", {})


def layout_facts(layout, shape):
    """Facts about a recorded layout of a tensor.

    They are XLA's text or DTensor's placements, and the boxes that every device holds.

    (Without boxes, if the layout does not say of how many devices it is.)
    """
    if hasattr(layout, "placements"):
        devices, boxes = layout.boxes(shape)
        return {
            "placements": [str(p) for p in layout.placements],
            "boxes": [devices.tolist(), boxes.start.tolist(), boxes.stop.tolist()],
        }
    op_sharding = layout.op_sharding(len(shape)) if hasattr(layout, "op_sharding") else layout
    if str(op_sharding) == "{replicated}":
        return {"op_sharding": "{replicated}"}
    held = layout.device_boxes(shape)
    boxes = [held.device_ids.tolist(), held.boxes.start.tolist(), held.boxes.stop.tolist()]
    return {"op_sharding": str(op_sharding), "boxes": boxes}


def _facts(value, path, tensors):
    """All about what is at `path`; `tensors` are those that came before."""
    if isinstance(value, dict):
        return {
            "dict": [
                [_leaf(key), _facts(child, f"{path}/{i}", tensors)]
                for i, (key, child) in enumerate(value.items())
            ]
        }
    if type(value) in (list, tuple):
        return {
            type(value).__name__: [
                _facts(child, f"{path}/{i}", tensors) for i, child in enumerate(value)
            ]
        }
    if isinstance(value, np.ndarray):
        if id(value) in tensors:
            return {"the same tensor as": tensors[id(value)][0]}
        # The value is kept with its path, so that its id stays its own.
        tensors[id(value)] = path, value
        return {
            "tensor": [
                value.dtype.name,
                list(value.shape),
                hashlib.sha256(value.tobytes()).hexdigest(),
            ]
        }
    if type(value).__qualname__ == "Tensor":
        return {"torch": _facts(value.numpy(), path, tensors)}
    return _leaf(value)


def _leaf(value):
    for kind, content in _KINDS.items():
        if isinstance(value, kind):
            return {kind.__name__: content(value)}
    return {type(value).__qualname__: str(value)}


def _bits(value):
    return struct.pack(">d", value).hex()


_KINDS = {
    Interval: lambda value: [str(value.low), str(value.high)],
    # Before Python's own: some of numpy's scalars are also those.
    np.generic: lambda value: [str(value.dtype), value.tobytes().hex()],
    complex: lambda value: [_bits(value.real), _bits(value.imag)],
    float: _bits,
    bytes: bytes.hex,
    str: lambda value: value.encode("utf-8", "surrogatepass").hex(),
}
