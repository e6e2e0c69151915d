"""Which chunks can be moved by one copy?

Chunks of one array that lie one after another in a file, and go one after another to the same boxes, are a *band*: in the file
their elements are an array [chunks, *chunk shape] whose first stride is a chunk's stored bytes, and so they are in memory, whose
first stride is a step from one chunk to the next. One copy moves all of them, with no Python for each.

A chunk continues a band if it is the next in the grid, of as many bytes, and for each box the same part of it goes on in the box:
nowhere back, as it would where a row of the grid ends. Then the step is a side of a chunk along the grid's last dimension with
more than one chunk, and the same from each to the next.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import as_strided

from shardckpt.io.codec import CHECKSUM_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardckpt.io.finder import Located

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

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return (self.end - self.begin) * int(self.chunks.length[self.begin])

    def destination(self) -> list[NDArray[np.uint8]] | None:
        """Per chunk the bytes where its elements go, if they go to one place only, all of them, side by side and as they are."""
        targets = self.chunks.wanted.targets
        part = self.chunks.wanted.part_of(self.begin)
        if part.request.convert_from is not None or targets.count[self.begin] != 1:
            return None
        places, _ = self._pair(int(targets.first[self.begin]))
        shape = part.piece.chunks
        if places.shape[1:] != shape or not places[0].flags.c_contiguous or part.chunk_bytes + CHECKSUM_BYTES != self._stored:
            return None
        return list(places.reshape(len(places), -1).view(np.uint8))

    def scatter(self, data: NDArray[np.uint8], at: int) -> None:
        """Copy the elements to every box that wants some of them.

        Args:
            data: bytes that hold the chunks' elements.
            at: where the first chunk's begin.
        """
        wanted = self.chunks.wanted
        request, shape = wanted.part_of(self.begin).request, wanted.part_of(self.begin).piece.chunks
        dtype = request.convert_from or request.dtype
        strides = [self._stored, *np.cumprod([dtype.itemsize, *shape[:0:-1]])[::-1].tolist()] if shape else [self._stored]
        elements: Array = np.ndarray((self.end - self.begin, *shape), dtype, data, at, strides)
        # What is too large for another dtype becomes infinite there, and NaN as an integer anything: asked for, so no warning.
        with np.errstate(all="ignore") if request.convert_from is not None else nullcontext():
            first = int(wanted.targets.first[self.begin])
            for pair in range(first, first + int(wanted.targets.count[self.begin])):
                places, in_chunk = self._pair(pair)
                np.copyto(places, elements[:, *in_chunk], casting="unsafe")

    @property
    def _stored(self) -> int:
        """Bytes of each chunk in the file."""
        return int(self.chunks.length[self.begin])

    def _pair(self, pair: int) -> tuple[Array, tuple[slice, ...]]:
        """Where the elements of one of the first chunk's pairs go, and those of the other chunks: an array by chunk. And of each which."""
        targets = self.chunks.wanted.targets
        ndim = len(self.chunks.wanted.part_of(self.begin).piece.shape)
        buffer, in_box, in_chunk = targets.target(pair, ndim)
        place = buffer[in_box]
        if self.end - self.begin == 1:
            return place[np.newaxis], in_chunk
        start = targets.in_box.start
        forward = start[pair + int(targets.count[self.begin])] - start[pair]
        step = sum(n * stride for n, stride in zip(forward[len(forward) - ndim :].tolist(), buffer.strides, strict=True))
        return as_strided(place, (self.end - self.begin, *place.shape), (step, *place.strides)), in_chunk
