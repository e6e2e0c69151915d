"""The CRC-32 of bytes that were written in parts, in any order; see `format.crc_algebra`."""

from __future__ import annotations

from shardckpt.format.crc_algebra import joined

_POLYNOMIAL = 0xEDB88320
"""Polynomial of CRC-32, as in zip files and zlib: bit-reversed, so the highest bit is the
coefficient of 1."""


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
        self.parts[start] = before + nbytes, joined(known, nbytes, crc, _POLYNOMIAL)
        self._ends[offset + nbytes] = start
        while self.nbytes in self.parts:
            length, following = self.parts.pop(self.nbytes)
            self.value = joined(self.value, length, following, _POLYNOMIAL)
            self.nbytes += length
            del self._ends[self.nbytes]
