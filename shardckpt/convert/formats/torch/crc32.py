"""The CRC-32 of bytes that were written in parts, in any order.

A CRC is a remainder of polynomials over GF(2). So the CRC of two adjacent parts is the CRC of the
first, times x to the power of the number of bits of the second, plus the CRC of the second: no byte
is read again. (zlib's `crc32_combine`, which Python does not offer.)
"""

from __future__ import annotations

from functools import lru_cache

_POLYNOMIAL = 0xEDB88320
"""Polynomial of CRC-32, as in zip files and zlib: bit-reversed, so the highest bit is the
coefficient of 1."""
_ONE = 1 << 31


class PartsCrc:
    """The CRC-32 of bytes that arrive in parts; a part is joined to the one before it.

    >>> import zlib
    >>> crc = PartsCrc()
    >>> crc.add(5, 5, zlib.crc32(b"point"))
    >>> crc.add(0, 5, zlib.crc32(b"check"))
    >>> crc.nbytes, crc.value == zlib.crc32(b"checkpoint")
    (10, True)
    """

    __slots__ = ("_ends", "nbytes", "parts", "value")

    def __init__(self) -> None:
        self.nbytes = 0
        """Bytes from the beginning without a gap."""
        self.value = 0
        """The CRC-32 of these bytes."""
        self.parts: dict[int, tuple[int, int]] = {}
        """Parts after a gap: offset → length and CRC-32."""
        self._ends: dict[int, int] = {}
        """End of each of these parts → its offset."""

    def add(self, offset: int, nbytes: int, crc: int) -> None:
        """Add a part that is not empty, by its CRC-32."""
        start = self._ends.pop(offset, offset)
        before, known = self.parts.pop(start, (0, 0))
        self.parts[start] = before + nbytes, _append(known, nbytes, crc)
        self._ends[offset + nbytes] = start
        while self.nbytes in self.parts:
            length, following = self.parts.pop(self.nbytes)
            self.value = _append(self.value, length, following)
            self.nbytes += length
            del self._ends[self.nbytes]


def _append(crc: int, nbytes: int, following: int) -> int:
    """The CRC-32 of two adjacent parts; `nbytes` are those of the second."""
    return (_times(_shift(nbytes), crc) if crc else 0) ^ following


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
