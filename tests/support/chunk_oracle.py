"""The chunks of a piece that lie in a box, found in another way than by `overlaps`."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.plan.pieces import chunk_boxes, coordinates, whole_chunks

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardckpt.layout.box import Box, BoxArray
    from shardckpt.plan.pieces import Piece


def chunks_inside(
    piece: Piece, box: Box, which: range | None = None
) -> tuple[NDArray[np.int64], BoxArray]:
    """The chunks of `piece` that lie in `box`; the part of the box that lies in the piece must be a
    union of them.

    Args:
        piece: an array.
        box: in the tensor's indices.
        which: a run of the `count_chunks(piece, box)` chunks, counted in grid order; the other
            chunks cost nothing. None: all.

    Returns:
        (n,) their positions in the piece's grid, ascending, and the elements of each (in the
        tensor's indices, cut off at the piece's edge).

    Raises:
        FormatError: a chunk crosses the border of the box, so it would have two writers.
    """
    spans = whole_chunks(piece, box)
    within = np.arange(
        *(0, prod(map(len, spans))) if which is None else (which.start, which.stop), dtype=np.int64
    )
    coords = coordinates(within, tuple(map(len, spans))) + np.array(
        [span.start for span in spans], np.int64
    )
    chunk = np.zeros(len(coords), np.int64)
    for d, n in enumerate(piece.grid):
        chunk = chunk * n + coords[:, d]
    return chunk, chunk_boxes(piece, chunk)
