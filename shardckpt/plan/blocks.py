"""Blocks: the boxes of chunks that a process copies and writes at a time. Pure.

A process writes a run of a shard's chunks. The chunks that are copied at once should form a box:
then one copy is enough, and if the box is complete rows of the shard, the copy is contiguous in
memory. So a run is cut into boxes (`cut_run`), its *blocks*. Blocks can be cut further when they
are written (`parts_of`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, TypeAlias

from shardckpt.layout.box import Box
from shardckpt.plan.cut import cut_run
from shardckpt.plan.pieces import count_chunks, padded_size

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import EllipsisType

    from shardckpt.plan.pieces import Piece

Index: TypeAlias = "tuple[slice | EllipsisType, ...]"


@dataclass(frozen=True, slots=True)
class Block:
    """Chunks of one piece that form a box inside one box held by this process."""

    held: int
    """Index of the held box among the source's boxes."""
    corner: tuple[int, ...]
    """First index of the held box, in the tensor's indices."""
    piece: Piece
    box: Box
    """The chunks' box, in the tensor's indices."""
    itemsize: int
    """Stored bytes of an element."""
    nbytes: int = field(init=False, compare=False)
    """Bytes of its elements."""

    padded_bytes: int = field(init=False, compare=False)
    """Stored bytes of its chunks, including the padding at the piece's edges."""

    def __post_init__(self) -> None:
        """Count its bytes once: a plan is used for many saves."""
        object.__setattr__(self, "nbytes", self.box.size * self.itemsize)
        object.__setattr__(
            self, "padded_bytes", padded_size(self.box.shape, self.piece.chunks) * self.itemsize
        )

    @property
    def chunk_bytes(self) -> int:
        """Bytes of its largest chunk."""
        return min(self.nbytes, prod(self.piece.chunks) * self.itemsize)

    @property
    def inside(self) -> Index:
        """Index of the block in the array of the held box."""
        return index_within(self.box.start, self.box.stop, self.corner)


def blocks_of(
    held: int,
    corner: tuple[int, ...],
    piece: Piece,
    part: Box,
    run: range,
    itemsize: int,
    most: int | None = None,
) -> Iterator[Block]:
    """Yield the blocks of a run of chunks, in order.

    Args:
        held: as in `Block`.
        corner: as in `Block`.
        piece: as in `Block`.
        part: a part of the tensor, a box of complete chunks.
        run: range of the chunks in it, counted in grid order.
        itemsize: as in `Block`.
        most: maximum bytes of a block, unless a single chunk is larger.
    """
    first = [
        (a - start) // side * side + start
        for a, start, side in zip(part.start, piece.start, piece.chunks, strict=True)
    ]
    borders = [
        range(a, b + side, side) for a, b, side in zip(first, part.stop, piece.chunks, strict=True)
    ]
    for box in cut_run(
        borders, run, len(run) * prod(piece.chunks) if most is None else most // itemsize
    ):
        # The last chunk of a dimension may extend beyond the piece.
        yield Block(
            held, corner, piece, Box(box.start, tuple(map(min, box.stop, part.stop))), itemsize
        )


def smaller(block: Block, most: int) -> Iterator[Block]:
    """Yield the block, cut into blocks of at most `most` bytes."""
    if block.nbytes <= most:
        yield block
    else:
        yield from _cut(block, most)


def _cut(block: Block, most: int) -> Iterator[Block]:
    run = range(count_chunks(block.piece, block.box))
    return blocks_of(block.held, block.corner, block.piece, block.box, run, block.itemsize, most)


def parts_of(block: Block, most: int) -> Iterator[tuple[Box, Index]]:
    """Yield parts of a block whose chunks, with padding at edges, have at most `most` bytes.

    Each item is a box in the tensor's indices and its index in the block's array.
    """
    if block.padded_bytes <= most:
        yield block.box, (...,)
        return
    for part in _cut(block, most):
        yield part.box, index_within(part.box.start, part.box.stop, block.box.start)


def index_within(
    start: list[int] | tuple[int, ...], stop: list[int] | tuple[int, ...], corner: tuple[int, ...]
) -> Index:
    """The index of a box in an array that begins at `corner`.

    The ellipsis keeps a 0-d array an array.
    """
    return (*(slice(a - o, b - o) for a, b, o in zip(start, stop, corner, strict=True)), ...)
