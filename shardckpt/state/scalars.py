"""Bit-exact JSON encoding of numpy and ml_dtypes scalars.

A scalar is written as two texts: its dtype, and its bytes in little-endian order in hex. The dtype
is one that tensors can have (`shardckpt.layout.dtypes`), `datetime64[unit]` or `timedelta64[unit]`,
or `str` (UTF-8, surrogates as three bytes each) or `bytes`, of any length.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt.errors import DtypeError, LeafError
from shardckpt.layout import dtypes
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from collections.abc import Sequence


def encode_scalar(value: np.generic, where: str) -> list[Any]:
    """Encode a scalar as two texts.

    >>> encode_scalar(np.float32(1), "lr")
    ['float32', '0000803f']

    Raises:
        LeafError: tensors cannot have the scalar's dtype; `where` names the leaf.
    """
    if isinstance(value, np.str_):
        return ["str", str(value).encode("utf-8", "surrogatepass").hex()]
    if isinstance(value, np.bytes_):
        return ["bytes", bytes(value).hex()]
    array = np.asarray(value).reshape(1)
    if array.dtype.kind in "mM":
        return [
            str(array.dtype.newbyteorder("=")),
            array.astype(array.dtype.newbyteorder("<")).tobytes().hex(),
        ]
    try:
        name = dtypes.of_numpy(array.dtype).name
    except DtypeError as error:
        raise LeafError(f"{shown(where)} is a numpy scalar: {error}") from None
    return [name, _swap(array).tobytes().hex()]


def decode_scalar(content: object) -> np.generic:
    """Decode a scalar from two texts.

    Raises:
        ValueError: the content is not an encoded scalar.
        DtypeError: its dtype is unknown.
    """
    if not isinstance(content, list) or len(content) != 2 or not isinstance(content[0], str):
        raise ValueError
    name, data = content[0], from_hex(content[1])
    if name == "str":
        return np.str_(data.decode("utf-8", "surrogatepass"))
    if name == "bytes":
        return np.bytes_(data)
    scalar = (
        _time(np.dtype(name), data)
        if _TIME.fullmatch(name)
        else _number(dtypes.by_name(name).numpy, data)
    )
    # Bytes that do not encode to themselves again, such as a bool of 2, are invalid.
    if encode_scalar(scalar, "") != content:
        raise ValueError
    return scalar


_TIME = re.compile(
    r"(?:datetime|timedelta)64(?:\[(?:[1-9][0-9]{0,8})?(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?",
    re.ASCII,
)


def _time(dtype: np.dtype[Any], data: bytes) -> np.generic:
    scalar: np.generic = _only(np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype))
    return scalar


def _number(dtype: np.dtype[Any], data: bytes) -> np.generic:
    scalar: np.generic = _only(_swap(np.frombuffer(data, dtype)).view(dtype))
    return scalar


def _only(values: Sequence[Any] | np.ndarray[Any, Any]) -> Any:
    if len(values) != 1:
        raise ValueError
    return values[0]


def _swap(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same bytes in little-endian order.

    They are swapped as bytes, because ml_dtypes have no dtypes of another byte order.
    """
    if sys.byteorder == "little":
        return array
    part = array.dtype.itemsize // (2 if array.dtype.kind in "cW" else 1)
    return array.view(np.uint8).reshape(-1, part)[:, ::-1].copy()


_HEX = re.compile(r"(?:[0-9a-f]{2})*", re.ASCII)


def from_hex(content: object) -> bytes:
    """Decode lower-case hex without gaps; ValueError for anything else."""
    if not isinstance(content, str) or not _HEX.fullmatch(content):
        raise ValueError
    return bytes.fromhex(content)
