"""What is in a state, as JSON that can be compared: types, keys, order, every bit, which tensors are one.

`tools/make_golden.py` wrote these facts of the states that it saved; `tests/test_golden.py` compares them with those of
the states that are restored. Nothing of shardckpt is used here.
"""

import hashlib
import struct

import numpy as np

__all__ = ["Interval", "facts"]


class Interval:
    """A class that registers itself as a leaf."""

    def __init__(self, low, high):
        self.low = low
        self.high = high


def facts(state):
    """All about a state."""
    return _facts(state, "", {})


def _facts(value, path, tensors):
    """All about what is at `path`; `tensors` are those that came before."""
    if isinstance(value, dict):
        return {"dict": [[_leaf(key), _facts(child, f"{path}/{i}", tensors)] for i, (key, child) in enumerate(value.items())]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_facts(child, f"{path}/{i}", tensors) for i, child in enumerate(value)]}
    if isinstance(value, np.ndarray):
        if id(value) in tensors:
            return {"the same tensor as": tensors[id(value)][0]}
        # The value is kept with its path, so that its id stays its own.
        tensors[id(value)] = path, value
        return {"tensor": [value.dtype.name, list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]}
    return _leaf(value)


def _leaf(value):
    if isinstance(value, Interval):
        return {"Interval": [_leaf(value.low), _leaf(value.high)]}
    if isinstance(value, np.generic):
        return {f"numpy {value.dtype}": value.tobytes().hex()}
    if isinstance(value, complex):
        return {"complex": [_bits(value.real), _bits(value.imag)]}
    if isinstance(value, float):
        return {"float": _bits(value)}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, str):
        return {"str": value.encode("utf-8", "surrogatepass").hex()}
    return {type(value).__qualname__: str(value)}


def _bits(value):
    return struct.pack(">d", value).hex()
