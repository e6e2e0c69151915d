"""Division of the reads of boxes that several processes need, so that every chunk is read once.

The method is the same as for writing (`plan.writers`), and every process computes the same result:

1. All chunks that the boxes overlap form one sequence (the *tape*), ordered by tensor, piece and
   position. If the boxes of a tensor fill at least half of their bounding box, as the boxes of one
   process's devices do, they count as one box: they may share chunks.
2. The sequence is cut into rounds of a fixed number of bytes: the data in flight between processes
   at once.
3. In each round every process reads one part, a run of chunks, assigned as for writing (`deal`).
4. A run of chunks is cut into few boxes (`cut_run`), and these are clipped to the needed boxes.

So exactly one process reads each element of each box, and each chunk is read once. The exception:
if boxes lie far apart, with other processes' boxes between them, a chunk at their border may be
read once for each box.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.layout.box import Box
from shardckpt.plan.cut import cut_run
from shardckpt.plan.pieces import Piece, chunk_spans, touched
from shardckpt.plan.writers import Part, deal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardckpt.layout.box import BoxArray


MOST_READERS = 64
"""Maximum number of processes that share the reads; more processes form several such groups, each
of which reads everything once."""


@dataclass(frozen=True, slots=True)
class SharedBoxes:
    """The boxes of one tensor that several processes need."""

    pieces: Sequence[Piece]
    boxes: BoxArray
    """The boxes, in the tensor's indices, without common elements."""
    itemsize: int
    """Bytes of an element, stored or sent, whichever is more."""


@dataclass(frozen=True, slots=True)
class Region:
    """Elements that one process reads and sends in one go."""

    tensor: int
    """Index of the tensor."""
    box: int
    """Index of the tensor's box."""
    part: Box
    """The part of the box, in the tensor's indices."""


def peers_sharing_reads(sharers: tuple[int, ...], process: int) -> tuple[int, ...]:
    """Peers that split the reads with `process`, including itself.

    All sharers form groups of nearly equal size.

    >>> len(peers_sharing_reads(tuple(range(130)), 129))
    43
    """
    at, groups = sharers.index(process), -(-len(sharers) // MOST_READERS)
    return next(
        tuple(group.tolist())
        for group in np.array_split(np.array(sharers), groups)
        if sharers[at] in group
    )


def rounds(
    tensors: Sequence[SharedBoxes], readers: int, limit: int
) -> Iterator[list[list[Region]]]:
    """Yield the rounds; each has, per reader, the regions to read.

    Args:
        tensors: the tensors, the same and in the same order on all readers.
        readers: number of readers.
        limit: maximum bytes of a round; a larger chunk makes a separate round.
    """
    for stretches in _cut(list(_parts(tensors)), limit):
        dealt = [
            Part(f"{i:08}", "", (), tuple(range(readers)), len(which), part.chunk_bytes)
            for i, (part, which) in enumerate(stretches)
        ]
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
    """The chunks of one piece that some boxes overlap."""

    tensor: int
    piece: Piece
    boxes: Sequence[tuple[int, Box]]
    """The boxes, with their numbers in the tensor."""
    spans: tuple[range, ...]
    """Grid positions of the chunks, per dimension."""
    chunk_bytes: int

    @property
    def chunks(self) -> int:
        return prod(map(len, self.spans))

    def regions(self, which: range) -> Iterator[Region]:
        """Yield the regions of a run of the chunks."""
        axes = zip(self.piece.start, self.spans, self.piece.chunks, strict=True)
        borders = [
            range(start + span.start * n, start + span.stop * n + 1, n) for start, span, n in axes
        ]
        for cells in cut_run(borders, which, len(which) * prod(self.piece.chunks)):
            held = cells.overlap(self.piece.box)
            assert held is not None
            for number, box in self.boxes:
                if (inside := held.overlap(box)) is not None:
                    yield Region(self.tensor, number, inside)


def _parts(tensors: Sequence[SharedBoxes]) -> Iterator[_TapePart]:
    """Yield the parts of the sequence of all chunks."""
    for i, one in enumerate(tensors):
        for piece in touched(one.pieces, one.boxes):
            for span, boxes in _together(one.boxes):
                spans = tuple(chunk_spans(piece, span))
                if all(spans):
                    yield _TapePart(i, piece, boxes, spans, prod(piece.chunks) * one.itemsize)


def _together(boxes: BoxArray) -> list[tuple[Box, list[tuple[int, Box]]]]:
    """Bounding boxes, each with the numbered boxes that count as one."""
    numbered = [(b, boxes[b]) for b in range(len(boxes))]
    span = Box(tuple(boxes.start.min(axis=0).tolist()), tuple(boxes.stop.max(axis=0).tolist()))
    return (
        [(span, numbered)]
        if 2 * int(boxes.sizes().sum()) >= span.size
        else [(box, [(b, box)]) for b, box in numbered]
    )


def _cut(parts: Sequence[_TapePart], limit: int) -> Iterator[list[tuple[_TapePart, range]]]:
    """Yield the rounds of the sequence: parts with ranges of their chunks."""
    stretches: list[tuple[_TapePart, range]] = []
    room = limit
    for part in parts:
        at = 0
        while at < part.chunks:
            fitting = min(max(room, 0) // part.chunk_bytes, part.chunks - at)
            if not fitting and stretches:
                yield stretches
                stretches, room = [], limit
                continue
            chunks_of_part = range(at, at + max(fitting, 1))
            stretches.append((part, chunks_of_part))
            room -= len(chunks_of_part) * part.chunk_bytes
            at = chunks_of_part.stop
    if stretches:
        yield stretches
