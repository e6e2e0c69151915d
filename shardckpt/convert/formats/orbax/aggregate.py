"""Parser of the file `checkpoint` (msgpack) of older Orbax checkpoints.

The file is the tree in msgpack, as flax writes it: dicts, lists, small values, arrays that are kept
together in this file, and placeholder texts with the names of arrays that are stored elsewhere.
(Orbax: `msgpack_utils.py`, `utils.py`.)
"""

from __future__ import annotations

from math import prod
from typing import Any

import ml_dtypes  # noqa: F401  # numpy then knows bfloat16 and its kin by name
import numpy as np

from shardckpt.convert.formats.orbax.metadata import Leaf
from shardckpt.errors import FormatError, MissingExtraError
from shardckpt.text import install_command, shorten

_PLACEHOLDERS = ("PLACEHOLDER://", "AGGREGATED://")
_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3
"""Codes of msgpack's extension type."""
_CHUNKED = "__msgpack_chunked_array__"


def read_aggregate(data: bytes, where: str) -> object:
    """Parse the tree: containers of arrays, small values, and a `Leaf` for each other array.

    The other arrays are stored elsewhere, and their `Leaf` is of the kind "Unknown".

    Args:
        data: the file.
        where: its name, for messages.

    Raises:
        FormatError: the file is malformed.
        MissingExtraError: msgpack is not installed.
    """
    try:
        import msgpack
    except ImportError:
        raise MissingExtraError(
            f"{where} is in msgpack; install it with `{install_command('convert')}`."
        ) from None

    def extension(code: int, content: bytes) -> object:
        if code == _COMPLEX:
            return complex(*msgpack.unpackb(content))
        if code not in {_ARRAY, _SCALAR}:
            raise ValueError(f"unknown extension {code}")
        shape, dtype, elements = msgpack.unpackb(content)
        array = np.frombuffer(elements, np.dtype(dtype)).reshape(shape)
        return array[()] if code == _SCALAR else array

    try:
        return _unpack(msgpack.unpackb(data, ext_hook=extension, strict_map_key=False))
    except (LookupError, RecursionError, TypeError, ValueError, msgpack.UnpackException) as e:
        raise FormatError(
            f"{where} is not a tree in msgpack ({shorten(str(e))}); replace it with a backup."
        ) from e


def _unpack(node: Any) -> object:
    """The tree with `Leaf`s in place of placeholders, and with the parts of large arrays joined."""
    if isinstance(node, dict):
        if _CHUNKED in node:
            shape, parts = (
                [numbered[str(i)] for i in range(len(numbered))]
                for numbered in (node["shape"], node["chunks"])
            )
            flat = np.concatenate(parts)
            if flat.size != prod(shape):
                raise ValueError(f"an array of shape {shorten(shape)} has {flat.size} elements")
            return flat.reshape(shape)
        return {key: _unpack(child) for key, child in node.items()}
    if isinstance(node, list):
        return [_unpack(child) for child in node]
    if isinstance(node, str) and node.startswith(_PLACEHOLDERS):
        return Leaf(node.partition("://")[2], "Unknown")
    return node
