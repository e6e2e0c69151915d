"""Several processes need the same boxes: which of them reads what, so that every chunk is read once?

The same question as for writing (`planning.writers`), and the same answer, which every process works out by itself:

1. All chunks that the boxes touch make one tape, in order of tensor, piece and place.
2. The tape is cut into rounds of so many bytes: what is under way between processes at once.
3. Of each round every process reads one part, a run of chunks, dealt as they are dealt for writing (`deal`).
4. A run of chunks of one box is cut into few boxes (`run_boxes`), each cut off at the box's own border.

So every element of every box is read by exactly one process, and every chunk once; only a chunk that several boxes
touch may be read by several processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.box import Box
from shardckpt.planning.grid_runs import run_boxes
from shardckpt.planning.plan import Piece, chunk_spans, touched
from shardckpt.planning.writers import Part, deal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardckpt.box import BoxArray

__all__ = ["MOST_READERS", "Region", "Wanted", "fellows", "rounds"]

MOST_READERS = 64
"""Processes that share the reading; more of them make several such groups, each of which reads everything once."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What of one tensor is needed."""

    pieces: Sequence[Piece]
    boxes: BoxArray
    """In the tensor's indices, without common elements."""
    itemsize: int
    """Bytes of an element, as it is stored or as it is sent, whichever is more."""


@dataclass(frozen=True, slots=True)
class Region:
    """Elements that one process reads and sends at once."""

    tensor: int
    """Which of the tensors."""
    box: int
    """Which of its boxes."""
    part: Box
    """The part of that box, in the tensor's indices."""


def fellows(sharers: tuple[int, ...], process: int) -> tuple[int, ...]:
    """Those of the processes that need the same with which one of them shares the reading: as evenly as it goes.

    >>> len(fellows(tuple(range(130)), 129))
    43
    """
    at, groups = sharers.index(process), -(-len(sharers) // MOST_READERS)
    return next(tuple(group.tolist()) for group in np.array_split(np.array(sharers), groups) if sharers[at] in group)


def rounds(wanted: Sequence[Wanted], readers: int, limit: int) -> Iterator[list[list[Region]]]:
    """Per round, and per reader, what that one reads.

    Args:
        wanted: the tensors, the same and in the same order on all readers.
        readers: how many.
        limit: bytes of a round; a larger chunk makes a round of its own.
    """
    for stretches in _cut(list(_parts(wanted)), limit):
        dealt = [Part(f"{i:08}", "", (), tuple(range(readers)), len(which), part.chunk_bytes) for i, (part, which) in enumerate(stretches)]
        shares = [deal(dealt, reader) for reader in range(readers)]
        yield [
            [
                region
                for (part, which), mine in zip(stretches, share, strict=True)
                for region in part.regions(range(which.start + mine.start, which.start + mine.stop))
            ]
            for share in shares
        ]


@dataclass(frozen=True, slots=True)
class _TapePart:
    """The chunks of one piece that one box touches."""

    tensor: int
    box_number: int
    piece: Piece
    box: Box
    """The elements of the box that the piece holds."""
    spans: tuple[range, ...]
    """Of chunks, per dimension."""
    chunk_bytes: int

    @property
    def chunks(self) -> int:
        return prod(map(len, self.spans))

    def regions(self, which: range) -> Iterator[Region]:
        """Elements of a run of the chunks."""
        first = [span.start for span in self.spans]
        for cells in run_boxes(tuple(map(len, self.spans)), which, max(len(which), 1)):
            start = [a + (f + c) * n for a, f, c, n in zip(self.piece.start, first, cells.start, self.piece.chunks, strict=True)]
            stop = [a + (f + c) * n for a, f, c, n in zip(self.piece.start, first, cells.stop, self.piece.chunks, strict=True)]
            inside = Box(tuple(start), tuple(stop)).overlap(self.box)
            assert inside is not None
            yield Region(self.tensor, self.box_number, inside)


def _parts(wanted: Sequence[Wanted]) -> Iterator[_TapePart]:
    """The tape."""
    for i, one in enumerate(wanted):
        for piece in touched(one.pieces, one.boxes):
            chunk_bytes = prod(piece.chunks) * one.itemsize
            for b in range(len(one.boxes)):
                inside = one.boxes[b].overlap(piece.box)
                if inside is not None:
                    yield _TapePart(i, b, piece, inside, tuple(chunk_spans(piece, inside)), chunk_bytes)


def _cut(parts: Sequence[_TapePart], limit: int) -> Iterator[list[tuple[_TapePart, range]]]:
    """The tape in rounds: parts, and which of their chunks."""
    some: list[tuple[_TapePart, range]] = []
    room = limit
    for part in parts:
        at = 0
        while at < part.chunks:
            fitting = min(max(room, 0) // part.chunk_bytes, part.chunks - at)
            if not fitting and some:
                yield some
                some, room = [], limit
                continue
            taken = range(at, at + max(fitting, 1))
            some.append((part, taken))
            room -= len(taken) * part.chunk_bytes
            at = taken.stop
    if some:
        yield some
