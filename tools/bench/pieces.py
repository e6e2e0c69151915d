"""Arrays, cut and joined to pieces that are moved at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from numpy.typing import NDArray

    Bytes: TypeAlias = NDArray[np.uint8]
    Piece: TypeAlias = list[Bytes]
    """Parts of arrays, one after another."""

__all__ = ["pieces_of"]

MOST_PARTS = 1024
"""Of a piece: the kernel takes no more in one call (IOV_MAX)."""


def pieces_of(arrays: Iterable[Bytes], nbytes: int) -> list[Piece]:
    """All bytes of arrays in order, in pieces of `nbytes` each.

    The last piece and pieces of very many parts may have fewer bytes.
    """
    pieces: list[Piece] = [[]]
    room = nbytes
    for array in arrays:
        begin = 0
        while begin < array.nbytes:
            if not room or len(pieces[-1]) == MOST_PARTS:
                pieces.append([])
                room = nbytes
            part = array[begin : begin + room]
            pieces[-1].append(part)
            begin += part.nbytes
            room -= part.nbytes
    return pieces
