"""CRCs of 32 bits as polynomials over GF(2), with which sums of parts are joined.

A CRC is a remainder of polynomials. So the CRC of two adjacent parts is the CRC of the first, times
x to the power of the number of bits of the second, plus the CRC of the second: no byte is read
again. (zlib's `crc32_combine`, which Python does not offer.) Bits are reversed: bit 31 is x^0.
"""

from __future__ import annotations

from functools import lru_cache

_ALL = 0xFFFFFFFF
ONE = 1 << 31
"""x^0."""
CRC32C = 0x82F63B78
"""The polynomial of CRC-32C. RFC 3720, appendix B.4."""


@lru_cache(maxsize=1024)
def shift(nbytes: int, polynomial: int) -> int:
    """X to the power of the number of bits in `nbytes` bytes, modulo a polynomial."""
    power, square = ONE, ONE >> 8
    while nbytes:
        if nbytes & 1:
            power = product(power, square, polynomial)
        square = product(square, square, polynomial)
        nbytes >>= 1
    return power


def product(one: int, other: int, polynomial: int) -> int:
    """The product of two polynomials, modulo a third one."""
    result = 0
    while one:
        if one & ONE:
            result ^= other
        one = one << 1 & _ALL
        other = other >> 1 ^ (polynomial if other & 1 else 0)
    return result


def joined(crc: int, nbytes: int, following: int, polynomial: int) -> int:
    """The CRC of two adjacent parts, from that of each; `nbytes` are those of the second."""
    return product(crc, shift(nbytes, polynomial), polynomial) ^ following
