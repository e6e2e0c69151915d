"""Chunks stored as differences from the same chunk of an earlier version of the tensor.

Their `compression` is "difference".

A stored chunk, before its checksum, is one of these:

```
nothing        the chunk of the earlier version
0, elements    the elements, as in a chunk without compression
1, u32 crc32c of the elements, u32 n, u32 m, zstd frame of:
    n bytes        gaps: unchanged elements before each changed one; 255: more, see the next of `m`
    m x u32        the rest of each gap of 255 and more
    n x itemsize   growth of each changed element, byte plane by byte plane
```

All numbers are little-endian. The elements are in the form of a chunk without compression, padding
included. Elements are compared as bits: -0.0 and 0.0 differ, and a NaN equals itself.

*Growth*: elements are taken as unsigned numbers, those of more than 8 bytes as several of 8. The
new number minus the old one, modulo the power of two, is a signed number d. It is stored as 2d, or
as -2d - 1 if it is negative.

Gaps and planes of changed elements compress well: of bfloat16 weights, a step of training changes
few elements, most of them by one or two units in the last place.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import crc32c
import numpy as np

from shardckpt.errors import CorruptionError
from shardckpt.format.stored_chunks import compress, decompress

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import ArrayLike, NDArray

    Bytes = NDArray[np.uint8]
    Growth = NDArray[np.unsignedinteger[Any]]

WHOLE, DIFFERENCE = 0, 1
"""First byte of a stored chunk."""
_HEAD = struct.Struct("<BIII")
_LONG = 255
"""A gap of at least so many elements takes more than its byte."""
_WORD = 8
"""Bytes that are compared at a time."""
_PORTION = 1 << 14
"""Changed words whose elements are encoded at a time, as these take up to 36 times their bytes."""


def whole(elements: Bytes) -> bytes:
    """A stored chunk that has all of its elements, without the checksum."""
    return bytes([WHOLE]) + elements.tobytes()


def difference(old: Bytes, new: Bytes, itemsize: int) -> tuple[bytes, int]:
    """A chunk stored as its difference from an earlier one or as a whole, without the checksum.

    The chunk is stored as a whole if the whole is at most twice as large as the difference.

    Args:
        old: (bytes,) elements of the earlier chunk. They become those of the new one.
        new: (bytes,) elements of the chunk.
        itemsize: bytes of an element.

    Returns:
        The stored chunk, and the number of changed elements.
    """
    changes = _EncodedChanges()
    for position, growth in _apply(old, new, itemsize):
        changes.add(position, growth)
    if not changes.count:
        return b"", 0
    stored = changes.packed(len(new), crc32c.crc32c(new.data))
    return whole(new) if stored is None else stored, changes.count


def encode_changes(
    position: NDArray[np.int64], growth: Growth, nbytes: int, crc: int
) -> bytes | None:
    """A chunk of `nbytes` bytes of elements stored as these changes, the result of `changes`.

    None if that has more than half its bytes.
    """
    changes = _EncodedChanges()
    changes.add(position, growth)
    return changes.packed(nbytes, crc)


class _EncodedChanges:
    """The changes of a chunk, as they are stored but not compressed yet."""

    def __init__(self) -> None:
        """No change yet."""
        self.count = 0
        self._last = -1
        """Position of the last one."""
        self._parts: list[tuple[Bytes, NDArray[np.uint32], Bytes]] = []
        """Gaps, rests of long gaps, and (n, itemsize) bytes of the growth."""

    def add(self, position: NDArray[np.int64], growth: Growth) -> None:
        """Add changes after those that are here."""
        if not len(position):
            return
        gaps = np.diff(position, prepend=self._last) - 1
        rest = (gaps[gaps >= _LONG] - _LONG).astype("<u4")
        # The sign becomes the lowest bit.
        folded = (growth << 1) ^ -(growth >> (8 * growth.itemsize - 1))
        rows = np.ascontiguousarray(folded).view(np.uint8).reshape(len(position), -1)
        self._parts.append((np.minimum(gaps, _LONG).astype(np.uint8), rest, rows))
        self.count += len(position)
        self._last = int(position[-1])

    def packed(self, nbytes: int, crc: int) -> bytes | None:
        """The result of `encode_changes`; nothing is here any more."""
        long_gaps = sum(len(rest) for _, rest, _ in self._parts)
        body = self._body()
        self._parts.clear()  # the compression takes as much memory
        return pack_changes(body, self.count, long_gaps, nbytes, crc)

    def _body(self) -> Bytes:
        gaps = [gap for gap, _, _ in self._parts]
        rests = [rest.view(np.uint8) for _, rest, _ in self._parts]
        planes = [rows.T for _, _, rows in self._parts]
        head = np.concatenate([*gaps, *rests])
        body = np.empty(len(head) + sum(plane.size for plane in planes), np.uint8)
        body[: len(head)] = head
        np.concatenate(planes, axis=1, out=body[len(head) :].reshape(-1, self.count))
        return body


def pack_changes(body: Bytes, changed: int, long_gaps: int, nbytes: int, crc: int) -> bytes | None:
    """Like `encode_changes`, for changes that are encoded but not compressed yet.

    The parts of `body` are gaps, rests of long gaps, and planes.
    """
    frame = compress(body)
    return (
        _HEAD.pack(DIFFERENCE, crc, changed, long_gaps) + frame
        if 2 * (_HEAD.size + len(frame)) <= nbytes
        else None
    )


class Joined:
    """The difference of a chunk over several versions, from those from one version to the next."""

    def __init__(self, nbytes: int, itemsize: int) -> None:
        """No difference yet, of a chunk with so many bytes of elements."""
        self._nbytes = nbytes
        self._itemsize = itemsize
        self._elements: Bytes | None = None
        """All elements, if a version has stored them."""
        self._position = np.empty(0, np.int64)
        self._growth = np.empty((0, itemsize), np.uint8).view(_number(itemsize))
        self._crc: int | None = None
        """Of the elements of the last version that changed any."""

    def add(self, stored: Bytes, where: str) -> None:
        """Add the next version's chunk, without its checksum.

        Args:
            stored: (bytes,) the stored chunk.
            where: chunk and file, for messages.

        Raises:
            CorruptionError: not such a chunk, or one made from other elements.
        """
        if not needs_older(stored) and self._elements is None:
            self._elements = np.empty(self._nbytes, np.uint8)
        if self._elements is not None:
            apply(stored, self._elements, self._itemsize, where)
        elif len(stored):
            position, growth, self._crc = changes(
                stored, self._nbytes // self._itemsize, self._itemsize, where
            )
            every = np.concatenate([self._position, position])
            order = np.argsort(every, kind="stable")
            every, joined = every[order], np.concatenate([self._growth, growth])[order]
            again = np.flatnonzero(every[1:] == every[:-1])  # each position is there at most twice
            joined[again] += joined[again + 1]
            joined[again + 1] = 0
            keep = np.flatnonzero(joined.any(axis=1))
            self._position, self._growth = every[keep], joined[keep]

    def stored(self) -> bytes | None:
        """The stored chunk, without its checksum.

        None if it needs all elements, and these are not known.
        """
        if self._elements is not None:
            return whole(self._elements)
        if not len(self._position):
            return b""
        assert self._crc is not None
        return encode_changes(self._position, self._growth, self._nbytes, self._crc)


def _number(itemsize: int) -> np.dtype[np.unsignedinteger[Any]]:
    """The numbers that an element is taken as: of its bytes, or of fewer that divide it."""
    return np.dtype(f"<u{min(_WORD, itemsize & -itemsize)}")


def _apply(old: Bytes, new: Bytes, itemsize: int) -> Iterator[tuple[NDArray[np.int64], Growth]]:
    """The positions of the elements that differ, ascending, and how they grow, as `changes`.

    They come portion after portion. `old` becomes `new`.
    """
    number = _number(itemsize)
    if itemsize != number.itemsize:
        rows = (new.view(number) - old.view(number)).reshape(-1, itemsize // number.itemsize)
        old[:] = new
        for position in _portions(rows.any(axis=1)):
            yield position, rows[position]
        return
    each = _WORD // itemsize
    words = len(new) // _WORD
    # Words of several elements are compared first: most are equal.
    for first, part, size in (
        (0, slice(words * _WORD), _WORD),
        (words * each, slice(words * _WORD, None), itemsize),
    ):
        before, after = old[part].view(f"u{size}"), new[part].view(f"u{size}")
        for differ in _portions(before != after):
            values = after[differ]
            rises = values.view(number) - before[differ].view(number)
            before[differ] = values
            inside = np.flatnonzero(rises)
            word, at = np.divmod(inside, size // itemsize)
            position = first + differ[word] * (size // itemsize) + at
            yield position, rises[inside][:, np.newaxis]


def _portions(mask: ArrayLike) -> Iterator[NDArray[np.int64]]:
    """The positions at which a mask is set, so many at a time."""
    positions = np.flatnonzero(mask)
    for first in range(0, len(positions), _PORTION):
        yield positions[first : first + _PORTION]


def needs_older(stored: Bytes) -> bool:
    """Whether the elements of a stored chunk follow from those of the earlier version only.

    `stored` is without the checksum.
    """
    return not len(stored) or stored[0] != WHOLE


def apply(stored: Bytes, elements: Bytes, itemsize: int, where: str) -> None:
    """Turn the elements of the earlier chunk into those of a stored one.

    Args:
        stored: (bytes,) the stored chunk without its checksum.
        elements: (bytes,) changed in place; of any values if the chunk does not need the earlier
            one.
        itemsize: bytes of an element.
        where: chunk and file, for messages.

    Raises:
        CorruptionError: not such a chunk, or one made from other elements.
    """
    if not len(stored):
        return
    if stored[0] == WHOLE:
        if len(stored) != 1 + len(elements):
            raise CorruptionError(
                f"{where}: a whole chunk of {len(stored) - 1} bytes, where {len(elements)} are "
                "expected."
            )
        elements[:] = stored[1:]
        return
    position, growth, crc = changes(stored, len(elements) // itemsize, itemsize, where)
    numbers = elements.view(growth.dtype)
    if growth.shape[1] == 1:
        numbers[position] += growth[:, 0]
    else:
        numbers.reshape(-1, growth.shape[1])[position] += growth
    if crc32c.crc32c(elements.data) != crc:
        raise CorruptionError(
            f"{where}: the chunk does not have its checksum after the difference is applied: its "
            "base is another one."
        )


def changes(
    stored: Bytes, elements: int, itemsize: int, where: str
) -> tuple[NDArray[np.int64], Growth, int]:
    """The changed elements of a chunk that is stored as a difference.

    Args:
        stored: (bytes,) the stored chunk without its checksum, a difference.
        elements: number of elements of the chunk.
        itemsize: bytes of an element.
        where: chunk and file, for messages.

    Returns:
        (n,) their positions in the chunk, ascending; (n, k) the new numbers minus the old ones, k
        for an element (one, or several of 8 bytes), modulo the power of two; and the crc32c of all
        elements of the chunk.

    Raises:
        CorruptionError: not such a chunk.
    """
    if len(stored) < _HEAD.size or stored[0] != DIFFERENCE:
        raise CorruptionError(f"{where}: neither a whole chunk nor a difference.")
    _, crc, n, m = _HEAD.unpack(stored[: _HEAD.size].tobytes())
    if not m <= n <= elements:
        raise CorruptionError(
            f"{where}: a difference of {n} elements, {m} of them far apart, in a chunk of "
            f"{elements}."
        )
    data = decompress(stored[_HEAD.size :], n * (1 + itemsize) + 4 * m, where)
    gaps = data[:n].astype(np.int64)
    long = gaps == _LONG
    if int(long.sum()) != m:
        raise CorruptionError(
            f"{where}: a difference with {int(long.sum())} long gaps, where {m} are expected."
        )
    gaps[long] += data[n : n + 4 * m].view("<u4") if m else 0
    position = np.cumsum(gaps + 1) - 1
    if n and position[-1] >= elements:
        raise CorruptionError(
            f"{where}: a difference at element {position[-1]} of a chunk of {elements}."
        )
    folded = np.ascontiguousarray(data[n + 4 * m :].reshape(itemsize, n).T).view(_number(itemsize))
    return position, ((folded >> 1) ^ -(folded & 1)).view(folded.dtype), crc
