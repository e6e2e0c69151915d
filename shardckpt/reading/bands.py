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
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shardckpt.reading.finder import Located
    from shardckpt.reading.wanted import Index

    Array = NDArray[np.generic]
    Place = tuple[Array, Index, int]
    """Where elements of a band go: the place of all of them, which elements of each chunk, and along which dimension chunks follow."""

__all__ = ["Band", "continues", "places_of"]


def continues(chunks: Located) -> NDArray[np.bool_]:
    """(n,) whether each chunk continues the band of the one before it; chunks are in order of their place."""
    wanted, targets = chunks.wanted, chunks.wanted.targets
    found = np.zeros(len(chunks), bool)
    found[1:] = (
        (chunks.file[1:] == chunks.file[:-1])
        & (wanted.part[1:] == wanted.part[:-1])
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

    def destination(self, places: Sequence[Place], nbytes: int) -> memoryview | None:
        """The place as bytes, if there is one only, of all elements, side by side and as they are.

        Args:
            places: of the band.
            nbytes: of a chunk.
        """
        if len(places) != 1 or self.chunks.wanted.part_of(self.begin).request.convert_from is not None:
            return None
        place, _, along = places[0]
        if place.nbytes != (self.end - self.begin) * nbytes or not place.flags.c_contiguous:
            return None
        if prod(place.shape[:along]) != 1:  # rows of one chunk lie between those of others
            return None
        return place.reshape(-1).view(np.uint8).data

    def scatter(self, raw: NDArray[np.uint8], places: Sequence[Place]) -> None:
        """Copy the elements to where they go.

        Args:
            raw: (chunks, bytes) of each chunk, side by side.
            places: of the band.
        """
        part = self.chunks.wanted.part_of(self.begin)
        request, shape, n = part.request, part.piece.chunks, len(raw)
        elements = raw.view(request.convert_from or request.dtype).reshape(n, *shape)
        # What is too large for another dtype becomes infinite there, and NaN as an integer anything: asked for, so no warning.
        with np.errstate(all="ignore") if request.convert_from is not None else nullcontext():
            for place, in_chunk, along in places:
                # Cut along the step, the place has the chunks as a dimension before that one.
                cut = place.reshape(*place.shape[:along], n, -1, *place.shape[along + 1 :]) if n > 1 else place[np.newaxis]
                axes = (*range(1, along + 1), 0, *range(along + 1, cut.ndim))
                np.copyto(cut, elements[:, *in_chunk].transpose(axes), casting="unsafe")


def places_of(bands: Sequence[Band]) -> list[list[Place]]:
    """Per band where its elements go, for every box that wants some of them.

    Args:
        bands: of the same chunks, one after another.
    """
    wanted, begin, end = bands[0].chunks.wanted, bands[0].begin, bands[-1].end
    targets = wanted.targets
    count = targets.count[begin:end].tolist()
    row = int(targets.first[begin])
    pairs = slice(row, row + sum(count))
    # As Python's numbers, all at once: taken from arrays one by one they cost more than all that is done with them.
    box, *sides = (
        column[pairs].tolist()
        for column in (targets.box, targets.in_box.start, targets.in_box.stop, targets.in_chunk.start, targets.in_chunk.stop)
    )
    found = []
    pair = 0
    for band in bands:
        chunks = wanted.part_of(band.begin).piece.chunks
        n, own = band.end - band.begin, slice(len(sides[0][pair]) - len(chunks), None) if sides[0] else slice(None)
        each = count[band.begin - begin]
        places: list[Place] = []
        for at in range(pair, pair + each):
            start, stop, first, last = (side[at][own] for side in sides)
            along = 0
            if n > 1:
                along = next(d for d, (here, there) in enumerate(zip(start, sides[0][at + each][own], strict=True)) if there > here)
                stop[along] = start[along] + n * chunks[along]
            places.append((targets.buffers[box[at]][(*map(slice, start, stop), ...)], (*map(slice, first, last), ...), along))
        found.append(places)
        pair += each * n
    return found
