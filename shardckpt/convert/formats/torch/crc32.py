"""The CRC-32 of bytes that were written in parts, in any order.

A CRC is a remainder of polynomials over GF(2). So the CRC of two adjacent parts is the CRC of the
first, times x to the power of the number of bits of the second, plus the CRC of the second: no byte
is read again. (zlib's `crc32_combine`, which Python does not offer.)
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_POLYNOMIAL = 0xEDB88320
"""Polynomial of CRC-32, as in zip files and zlib: bit-reversed, so the highest bit is the
coefficient of 1."""
_ONE = 1 << 31


def combine(parts: Iterable[tuple[int, int]]) -> int:
    """The CRC-32 of adjacent parts.

    Args:
        parts: in order, the CRC-32 of each part and its length in bytes.

    >>> import zlib
    >>> combine([(zlib.crc32(b"check"), 5), (zlib.crc32(b"point"), 5)]) == zlib.crc32(b"checkpoint")
    True
    """
    crc = 0
    for part, length in parts:
        crc = _times(_shift(length), crc) ^ part
    return crc


@lru_cache(maxsize=64)
def _shift(nbytes: int) -> int:
    """The polynomial x to the power of the number of bits in `nbytes` bytes, mod `_POLYNOMIAL`."""
    result, power = _ONE, _ONE >> 8  # x^0, x^8
    while nbytes:
        if nbytes & 1:
            result = _times(power, result)
        power = _times(power, power)
        nbytes >>= 1
    return result


def _times(a: int, b: int) -> int:
    """The product of two polynomials, modulo the polynomial."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product
