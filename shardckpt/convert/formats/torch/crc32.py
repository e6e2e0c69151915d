"""The CRC-32 of bytes that were written in parts, in any order.

A CRC is a remainder of polynomials over GF(2), so that of two parts side by side is that of the first, times x to the number of bits
of the second, plus that of the second: no byte is read again. (zlib's `crc32_combine`, which Python does not offer.)
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["combine"]

_POLYNOMIAL = 0xEDB88320
"""Of CRC-32, as zip files and zlib have it: bit-reversed, so the highest bit is the coefficient of 1."""
_ONE = 1 << 31


def combine(parts: Iterable[tuple[int, int]]) -> int:
    """The CRC-32 of parts side by side.

    Args:
        parts: in order, the CRC-32 of each and its length in bytes.

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
    """The power of x to so many bits, modulo the polynomial."""
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
