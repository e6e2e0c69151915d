"""Dealing out the reads of boxes that several processes need, so that every chunk is read once.

The same question as for writing (`plan.writers`), and the same answer, which every process works out by itself:

1. All chunks that the boxes touch make one tape, in order of tensor, piece and place. Boxes of a tensor that fill at least
   half of what spans them, as those of one process's devices do, count as one there: they may share chunks.
2. The tape is cut into rounds of so many bytes: what is under way between processes at once.
3. Of each round every process reads one part, a run of chunks, dealt as they are dealt for writing (`deal`).
4. A run of chunks is cut into few boxes (`run_boxes`), and these are cut off at the borders of the boxes that are needed.

So every element of every box is read by exactly one process, and every chunk once; only boxes that lie far apart, with others'
between them, may have a chunk at their border read for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.layout.box import Box
from shardckpt.plan.overlaps import touched
from shardckpt.plan.pieces import Piece, chunk_spans, run_boxes
from shardckpt.plan.writers import Part, deal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardckpt.layout.box import BoxArray


MOST_READERS = 64
"""Processes that share the reading; more of them make several such groups, each of which reads everything once."""


@dataclass(frozen=True, slots=True)
class SharedBoxes:
    """A tensor of which several processes need the same boxes."""

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


def peers_sharing_reads(sharers: tuple[int, ...], process: int) -> tuple[int, ...]:
    """Peers that split the reads with `process`, itself among them; of all that need the same, in groups as even as can be.

    >>> len(peers_sharing_reads(tuple(range(130)), 129))
    43
    """
    at, groups = sharers.index(process), -(-len(sharers) // MOST_READERS)
    return next(tuple(group.tolist()) for group in np.array_split(np.array(sharers), groups) if sharers[at] in group)


def rounds(wanted: Sequence[SharedBoxes], readers: int, limit: int) -> Iterator[list[list[Region]]]:
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
    """The chunks of one piece that some boxes touch."""

    tensor: int
    piece: Piece
    boxes: Sequence[tuple[int, Box]]
    """Numbered as the tensor's."""
    spans: tuple[range, ...]
    """Places of its chunks in the grid, per dimension."""
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
            held = Box(tuple(start), tuple(stop)).overlap(self.piece.box)
            assert held is not None
            for number, box in self.boxes:
                if (inside := held.overlap(box)) is not None:
                    yield Region(self.tensor, number, inside)


def _parts(wanted: Sequence[SharedBoxes]) -> Iterator[_TapePart]:
    """The tape."""
    for i, one in enumerate(wanted):
        for piece in touched(one.pieces, one.boxes):
            for span, boxes in _together(one.boxes):
                spans = tuple(chunk_spans(piece, span))
                if all(spans):
                    yield _TapePart(i, piece, boxes, spans, prod(piece.chunks) * one.itemsize)


def _together(boxes: BoxArray) -> list[tuple[Box, list[tuple[int, Box]]]]:
    """Boxes that count as one, numbered, with what spans them."""
    numbered = [(b, boxes[b]) for b in range(len(boxes))]
    span = Box(tuple(boxes.start.min(axis=0).tolist()), tuple(boxes.stop.max(axis=0).tolist()))
    return [(span, numbered)] if 2 * int(boxes.sizes().sum()) >= span.size else [(box, [(b, box)]) for b, box in numbered]


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
