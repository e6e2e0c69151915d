"""Which chunks can be moved by one copy?

Chunks of one array that lie one after another in a file, and go one after another to the same boxes, are a *band*: in the file
their elements are an array [chunks, *chunk shape], and in memory they are a box that is as many times as long in one dimension.
One copy moves all of them, with no Python for each.

A chunk continues a band if it is the next in the grid, of as many bytes, and for each box the same part of it goes on in the box:
nowhere back, as it would where a row of the grid ends. Then it lies beside the one before it along the grid's last dimension
with more than one chunk. A box that reaches into both, and wants the same of both, wants all of either along that dimension.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardckpt.io.finder import Located
    from shardckpt.io.wanted import Index

    Array = NDArray[np.generic]

__all__ = ["Band", "continues"]


def continues(chunks: Located) -> NDArray[np.bool_]:
    """(n,) whether each chunk continues the band of the one before it; chunks are in order of their place."""
    wanted, targets = chunks.wanted, chunks.wanted.targets
    found = np.zeros(len(chunks), bool)
    found[1:] = (
        (wanted.part[1:] == wanted.part[:-1])
        & (wanted.position[1:] == wanted.position[:-1] + 1)
        & (chunks.offset[1:] == chunks.offset[:-1] + chunks.length[:-1])
        & (chunks.length[1:] == chunks.length[:-1])
        & (targets.count[1:] == targets.count[:-1])
    )
    # Pairs lie in the order of their chunks, so the same of the chunk before is as many back as a chunk has.
    of = np.repeat(np.arange(len(chunks)), targets.count)
    pair = np.flatnonzero(found[of])
    before = pair - targets.count[of[pair]]
    goes_on = (
        (targets.box[pair] == targets.box[before])
        & (targets.in_chunk.start[pair] == targets.in_chunk.start[before]).all(axis=1)
        & (targets.in_chunk.stop[pair] == targets.in_chunk.stop[before]).all(axis=1)
        & (targets.in_box.start[pair] >= targets.in_box.start[before]).all(axis=1)
    )
    found[of[pair[~goes_on]]] = False
    return found


@dataclass(frozen=True, slots=True)
class Band:
    """A band of chunks: the rows from `begin` to before `end`."""

    chunks: Located
    """In order of their place."""
    begin: int
    end: int

    def destination(self) -> memoryview | None:
        """Where the elements go, as bytes, if they go to one place only, all of them, side by side and as they are."""
        targets = self.chunks.wanted.targets
        part = self.chunks.wanted.part_of(self.begin)
        if part.request.convert_from is not None or targets.count[self.begin] != 1:
            return None
        place, _, along = self._place(int(targets.first[self.begin]), part.piece.chunks)
        if not place.flags.c_contiguous or place.nbytes != (self.end - self.begin) * part.chunk_bytes:
            return None
        if prod(place.shape[:along]) != 1:  # rows of one chunk lie between those of others
            return None
        return place.reshape(-1).view(np.uint8).data

    def scatter(self, raw: NDArray[np.uint8]) -> None:
        """Copy the elements to every box that wants some of them.

        Args:
            raw: (chunks, bytes) of each chunk, side by side.
        """
        targets, part = self.chunks.wanted.targets, self.chunks.wanted.part_of(self.begin)
        request, shape = part.request, part.piece.chunks
        elements = raw.view(request.convert_from or request.dtype).reshape(len(raw), *shape)
        # What is too large for another dtype becomes infinite there, and NaN as an integer anything: asked for, so no warning.
        with np.errstate(all="ignore") if request.convert_from is not None else nullcontext():
            first = int(targets.first[self.begin])
            for pair in range(first, first + int(targets.count[self.begin])):
                place, in_chunk, along = self._place(pair, shape)
                # Cut along the step, the place has the chunks as a dimension before that one.
                cut = place.reshape(*place.shape[:along], len(raw), -1, *place.shape[along + 1 :]) if len(raw) > 1 else place[np.newaxis]
                np.copyto(cut, np.moveaxis(elements[:, *in_chunk], 0, along), casting="unsafe")

    def _place(self, pair: int, shape: tuple[int, ...]) -> tuple[Array, Index, int]:
        """Where the elements go of one of the first chunk's pairs, and those that go on from there with the other chunks.

        Returns:
            The place of all, which elements of each chunk, and the dimension along which chunks follow each other.
        """
        targets = self.chunks.wanted.targets
        buffer, in_box, in_chunk = targets.target(pair, len(shape))
        if self.end - self.begin == 1:
            return buffer[in_box], in_chunk, 0
        start = targets.in_box.start
        forward = start[pair + targets.count[self.begin]] - start[pair]
        along = int(np.argmax(forward)) - (len(forward) - len(shape))
        begin = int(start[pair, len(forward) - len(shape) + along])
        in_box = (*in_box[:along], slice(begin, begin + (self.end - self.begin) * shape[along]), *in_box[along + 1 :])
        return buffer[in_box], in_chunk, along
