"""Cuts of a box at borders of chunks, so that each part can be read alone and no chunk is read twice. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.layout.box import Box

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardckpt.plan.pieces import Piece


def cut_at_chunks(box: Box, pieces: Sequence[Piece], is_small: Callable[[Box], bool]) -> Iterator[Box]:
    """Yield the parts of a box, in order: halves of halves, until each is small enough or is not divided by a border between chunks.

    Args:
        box: a part of a tensor, in the tensor's indices.
        pieces: the stored arrays of the tensor.
        is_small: whether a part needs no further cut.

    >>> from shardckpt.plan.pieces import Piece
    >>> rows = Piece("w", (0, 0), (10, 4), (2, 4))
    >>> [(part.start[0], part.stop[0]) for part in cut_at_chunks(Box((1, 0), (9, 4)), [rows], lambda part: part.size <= 12)]
    [(1, 4), (4, 6), (6, 9)]
    """
    if is_small(box):
        yield box
        return
    touched = [piece for piece in pieces if piece.box.overlap(box) is not None]
    for d in range(box.ndim):
        border = _middle_border(box, touched, d)
        if border is not None:
            yield from cut_at_chunks(Box(box.start, (*box.stop[:d], border, *box.stop[d + 1 :])), touched, is_small)
            yield from cut_at_chunks(Box((*box.start[:d], border, *box.start[d + 1 :]), box.stop), touched, is_small)
            return
    yield box


def _middle_border(box: Box, pieces: Sequence[Piece], d: int) -> int | None:
    """The index along dimension `d`, closest to the middle of the box, at which no chunk is divided; None if there is none."""
    middle = (box.start[d] + box.stop[d]) // 2
    near = set()
    for piece in pieces:
        start, side = piece.start[d], piece.chunks[d]
        below = start + (middle - start) // side * side
        near |= {start, start + piece.shape[d], below, below + side}

    def divides_none(border: int) -> bool:
        return all(
            border <= piece.start[d] or border >= piece.start[d] + piece.shape[d] or (border - piece.start[d]) % piece.chunks[d] == 0
            for piece in pieces
        )

    inside = [border for border in near if box.start[d] < border < box.stop[d] and divides_none(border)]
    return min(inside, key=lambda border: (abs(border - middle), border), default=None)
