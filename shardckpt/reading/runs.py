"""Runs of adjacent chunks that are read with one request, and bands of them that are moved with one copy.

A read call costs microseconds on a local disk and a request of milliseconds on an object store, so chunks that lie
side by side in a data file are read as one *run*. Where a request is dear, small gaps between them are read along. Runs of one file
that a thread reads one after another are a *task*: what Python does for them is done for all of them at once.

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
from itertools import pairwise, repeat
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.format.table import OWN_OBJECT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from shardckpt.reading.locate import Index, Located

    Array = NDArray[np.generic]
    Ints = NDArray[np.int64]
    Place = tuple[Array, Index, int]
    """Where elements of a band go: the place of all of them, which elements of each chunk, and along which dimension chunks follow."""


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


@dataclass(frozen=True, slots=True)
class ChunkRun:
    """Chunks in order of their place, none beginning before the one before has ended: rows `begin` to before `end`."""

    begin: int
    end: int
    start: int
    """First byte, in the file."""
    stop: int
    """One past the last byte."""
    bands: Sequence[Band]
    """All of its chunks, by what one copy moves."""

    @property
    def nbytes(self) -> int:
        """Bytes that are read, gaps among them."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class ReadTask:
    """Runs of one file that follow each other in it, and in the rows of their chunks."""

    chunks: Located
    """Among others; in order of their place."""
    runs: Sequence[ChunkRun]

    @property
    def file(self) -> str:
        """The file that they lie in."""
        return self.chunks.file_of(self.begin)

    @property
    def begin(self) -> int:
        """The first chunk's row."""
        return self.runs[0].begin

    @property
    def end(self) -> int:
        """One past the last chunk's row."""
        return self.runs[-1].end

    @property
    def nbytes(self) -> int:
        """Bytes that are read."""
        return sum(run.nbytes for run in self.runs)

    def alone(self) -> Iterator[ReadTask]:
        """Each of its chunks as a task of its own."""
        for row in range(self.begin, self.end):
            run = ChunkRun(row, row + 1, int(self.chunks.offset[row]), self.chunks.stop(row), [Band(self.chunks, row, row + 1)])
            yield ReadTask(self.chunks, [run])


@dataclass(frozen=True, slots=True)
class RunLimits:
    """How far chunks are joined."""

    nbytes: int
    """Bytes of a run, unless a single chunk is larger."""
    gap: int
    """Bytes between two chunks that are read although nobody wants them."""
    chunks: int
    """Chunks of a run."""
    runs: int = 1
    """Runs of a task, which together have no more bytes than one may."""


def tasks(chunks: Located, limits: RunLimits, group: Ints | None = None) -> Iterator[ReadTask]:
    """All chunks in order of their place, neighbours together; if they are in groups, one group after the other, each by itself.

    Args:
        chunks: in any order.
        limits: how far they are joined.
        group: (n,) number of the group that each belongs to.
    """
    order, begins = join(chunks.file, chunks.offset, chunks.length, limits, group)
    if (order[1:] < order[:-1]).any():
        chunks = chunks.take(order)
    starts = ~continues(chunks)
    starts[begins] = True
    bands = np.flatnonzero(starts)
    edges = [*bands.tolist(), len(chunks)]
    firsts = [*np.searchsorted(bands, begins).tolist(), len(bands)]
    last = np.append(begins[1:], len(chunks))[: len(begins)] - 1
    groups = repeat(0) if group is None else group[order][begins].tolist()
    files = zip(groups, chunks.file[begins].tolist(), strict=False)
    where = zip(files, chunks.offset[begins].tolist(), (chunks.offset + chunks.length)[last].tolist(), strict=True)
    task: list[ChunkRun] = []
    nbytes, before = 0, (0, OWN_OBJECT)
    for (first, after), (file, start, stop) in zip(pairwise(firsts), where, strict=True):
        nbytes += stop - start
        if task and (file != before or file[1] == OWN_OBJECT or nbytes > limits.nbytes or len(task) == limits.runs):
            yield ReadTask(chunks, task)
            task, nbytes = [], stop - start
        before = file
        found = [Band(chunks, edges[i], edges[i + 1]) for i in range(first, after)]
        task.append(ChunkRun(edges[first], edges[after], start, stop, found))
    if task:
        yield ReadTask(chunks, task)


def join(file: Ints, offset: Ints, length: Ints, limits: RunLimits, group: Ints | None = None) -> tuple[Ints, Ints]:
    """Join chunks to runs.

    Args:
        file: (n,) number of each chunk's file; `OWN_OBJECT` is another one for each.
        offset: (n,) first byte.
        length: (n,) bytes.
        limits: how far chunks are joined.
        group: (n,) number of the group that each belongs to; only those of one are joined, and the first group's come first.

    Returns:
        (n,) the chunks in order of group and place, and (runs,) where in that order each run begins.
    """
    order = np.lexsort((offset, file) if group is None else (offset, file, group))
    file, offset, stop = file[order], offset[order], (offset + length)[order]
    gap = offset[1:] - stop[:-1]
    apart = (file[1:] != file[:-1]) | (file[1:] == OWN_OBJECT) | (gap < 0) | (gap > limits.gap)
    if group is not None:
        apart |= np.diff(group[order]) > 0
    first = np.flatnonzero(np.append(np.ones(min(1, len(file)), bool), apart))
    last = np.append(first[1:], len(file))[: len(first)]
    long = (stop[last - 1] - offset[first] > limits.nbytes) | (last - first > limits.chunks)
    begins = first.tolist()
    for begin, after in zip(first[long].tolist(), last[long].tolist(), strict=True):
        at = begin
        while True:
            # Within such a stretch chunks follow each other, so where a run ends is a matter of its own length.
            end = int(np.searchsorted(stop[at:after], offset[at] + limits.nbytes, side="right")) + at
            at = min(max(end, at + 1), at + limits.chunks)
            if at == after:
                break
            begins.append(at)
    return order, np.sort(np.array(begins, np.int64))


def count_runs(file: Ints, offset: Ints, length: Ints, limits: RunLimits) -> tuple[int, int]:
    """How many runs `join` makes of some chunks, and the bytes of all of them, gaps included; arguments as there."""
    order, begins = join(file, offset, length, limits)
    if not len(begins):
        return 0, 0
    ends = np.append(begins[1:], len(file))
    return len(begins), int(((offset + length)[order][ends - 1] - offset[order][begins]).sum())
