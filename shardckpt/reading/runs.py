"""Runs of adjacent chunks read with one request, and bands of chunks moved with one copy.

A read call costs microseconds on a local disk, and a request milliseconds on an object store. So
chunks that are adjacent in a data file are read as one *run*. If requests are expensive, small gaps
between chunks are read along. Consecutive runs of one file that one thread reads are a *task*; the
Python code runs once for all of them.

Chunks of one array that are adjacent in a file, and go one after another to the same boxes, are a
*band*. In the file their elements are an array [chunks, *chunk shape]. In memory they are a box
that is as many times longer in one dimension. One copy moves all of them, without Python code for
each.

A chunk continues a band if it is the next one in the grid, has as many bytes, and for each box the
same part of it continues in the box. That part must not step back, as it does at the end of a row
of the grid. Then it lies beside the chunk before it along the last grid dimension with more than
one chunk. A box that overlaps both chunks in the same part covers all of both along that dimension.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise, repeat
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt.format.table import OWN_OBJECT
from shardckpt.layout.dtypes import with_plain_bools
from shardckpt.layout.records import record

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from shardckpt.reading.locate import Index, Located
    from shardckpt.reading.lookup import ChunkSource

    Array = NDArray[np.generic]
    Ints = NDArray[np.int64]
    Place = tuple[Array, Index, int]
    """Destination of elements of a band: memory for all of them, their index in each chunk, and the
    dimension along which chunks follow."""


EVERYTHING: Index = (...,)
"""The index of all elements of a chunk."""


def continues(chunks: Located) -> NDArray[np.bool_]:
    """(n,) whether each chunk continues the band of the chunk before it.

    Chunks are in order of their place.
    """
    requested, targets = chunks.requested, chunks.requested.targets
    follows = np.zeros(len(chunks), bool)
    follows[1:] = (
        (chunks.file[1:] == chunks.file[:-1])
        & (requested.part[1:] == requested.part[:-1])
        & (requested.position[1:] == requested.position[:-1] + 1)
        & (chunks.offset[1:] == chunks.offset[:-1] + chunks.length[:-1])
        & (chunks.length[1:] == chunks.length[:-1])
        & (targets.count[1:] == targets.count[:-1])
    )
    # Pairs are in the order of their chunks, so the matching pair of the chunk before is `count`
    # rows back.
    of = np.repeat(np.arange(len(chunks)), targets.count)
    pair = np.flatnonzero(follows[of])
    before = pair - targets.count[of[pair]]
    goes_on = (
        (targets.box[pair] == targets.box[before])
        & (targets.in_chunk.start[pair] == targets.in_chunk.start[before]).all(axis=1)
        & (targets.in_chunk.stop[pair] == targets.in_chunk.stop[before]).all(axis=1)
        & (targets.in_box.start[pair] >= targets.in_box.start[before]).all(axis=1)
    )
    follows[of[pair[~goes_on]]] = False
    return follows


@record
class Band:
    """A band of chunks: rows `begin` to `end` (exclusive)."""

    chunks: Located
    """Chunks in order of their place."""
    begin: int
    end: int

    def destination(self, places: Sequence[Place], nbytes: int) -> memoryview | None:
        """The only destination as bytes, if elements can be read straight into it; else None.

        There must be no other destination, and this one must take all elements contiguously and
        unconverted.

        Args:
            places: destinations of the band.
            nbytes: bytes of a chunk's elements.
        """
        if (
            len(places) != 1
            or self.chunks.requested.part_of(self.begin).request.convert_from is not None
        ):
            return None
        place, _, along = places[0]
        if place.nbytes != (self.end - self.begin) * nbytes or not place.flags.c_contiguous:
            return None
        if prod(place.shape[:along]) != 1:  # rows of one chunk lie between those of others
            return None
        return place.reshape(-1).view(np.uint8).data

    def scatter(self, raw: NDArray[np.uint8], places: Sequence[Place]) -> None:
        """Copy the elements to their destinations.

        Args:
            raw: (chunks, bytes) elements of each chunk.
            places: destinations of the band.
        """
        request = self.chunks.requested.part_of(self.begin).request
        # An overflow becomes infinite, and NaN any integer: the user asked for the conversion, so
        # there is no warning.
        with np.errstate(all="ignore") if request.convert_from is not None else nullcontext():
            for place, elements in self.copies(raw, places):
                np.copyto(place, elements, casting="unsafe")

    def copies(
        self, raw: NDArray[np.uint8], places: Sequence[Place]
    ) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """For each destination its memory and the elements to copy there, in one shape.

        `scatter` describes the arguments.
        """
        part = self.chunks.requested.part_of(self.begin)
        request, shape, n = part.request, part.piece.chunks, len(raw)
        if raw.shape[1] < part.chunk_bytes:  # foreign chunks at an edge are not padded
            shape = self.chunks.requested.box(self.begin).shape
        elements = raw.view(request.convert_from or request.dtype).reshape(n, *shape)
        if request.convert_from == np.bool_:
            elements = with_plain_bools(elements)
        for place, in_chunk, along in places:
            # Split the dimension along which chunks follow into chunks and elements.
            cut = (
                place.reshape(*place.shape[:along], n, -1, *place.shape[along + 1 :])
                if n > 1
                else place[np.newaxis]
            )
            axes = (*range(1, along + 1), 0, *range(along + 1, cut.ndim))
            yield cut, elements[:, *in_chunk].transpose(axes)


def places_of(bands: Sequence[Band]) -> list[list[Place]]:
    """For each band the destinations of its elements, one for every box that needs some of them.

    Args:
        bands: consecutive bands of the same chunks.
    """
    requested, begin, end = bands[0].chunks.requested, bands[0].begin, bands[-1].end
    targets = requested.targets
    count = targets.count[begin:end].tolist()
    row = int(targets.first[begin])
    pairs = slice(row, row + sum(count))
    box = targets.box[pairs].tolist()
    elements = (targets.in_box.stop[pairs] - targets.in_box.start[pairs]).prod(axis=1).tolist()
    sides: list[Any] = []
    by_band: list[list[Place]] = []
    pair = 0
    for band in bands:
        chunks = requested.part_of(band.begin).piece.chunks
        n, each = band.end - band.begin, count[band.begin - begin]
        if each == n == 1 and (buffer := targets.buffers[box[pair]]).size == elements[pair] == prod(
            chunks
        ):
            # A small tensor is one chunk, and nearly always read as a whole.
            by_band.append([(buffer, EVERYTHING, 0)])
            pair += 1
            continue
        if not sides:
            # Convert all columns to Python numbers at once; single array accesses would cost more
            # than the rest of the function.
            sides = [
                column[pairs].tolist()
                for column in (
                    targets.in_box.start,
                    targets.in_box.stop,
                    targets.in_chunk.start,
                    targets.in_chunk.stop,
                )
            ]
        own = slice(len(sides[0][pair]) - len(chunks), None) if sides[0] else slice(None)
        places: list[Place] = []
        for at in range(pair, pair + each):
            start, stop, first, last = (side[at][own] for side in sides)
            along = 0
            if n > 1:
                along = next(
                    d
                    for d, (here, there) in enumerate(
                        zip(start, sides[0][at + each][own], strict=True)
                    )
                    if there > here
                )
                stop[along] = start[along] + n * chunks[along]
            places.append(
                (
                    targets.buffers[box[at]][(*map(slice, start, stop), ...)],
                    (*map(slice, first, last), ...),
                    along,
                )
            )
        by_band.append(places)
        pair += each * n
    return by_band


@dataclass(frozen=True, slots=True)
class ChunkRun:
    """Non-overlapping chunks in order of their place: rows `begin` to `end` (exclusive)."""

    begin: int
    end: int
    start: int
    """Offset of the first byte in the file."""
    stop: int
    """One past the last byte."""
    bands: Sequence[Band]
    """All of its chunks, grouped into bands."""

    @property
    def nbytes(self) -> int:
        """Bytes that are read, including gaps."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class ReadTask:
    """Consecutive runs of one file, which are also consecutive in the rows of their chunks."""

    chunks: Located
    """Chunks of this task and of others, in order of their place."""
    runs: Sequence[ChunkRun]

    @property
    def file(self) -> str:
        """The file of the runs, relative to `source`."""
        return self.chunks.file_of(self.begin)

    @property
    def source(self) -> ChunkSource:
        """The attempt that has the file."""
        return self.chunks.source_of(self.begin)

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
        """Yield each of its chunks as a task of its own."""
        for row in range(self.begin, self.end):
            run = ChunkRun(
                row,
                row + 1,
                int(self.chunks.offset[row]),
                self.chunks.stop(row),
                [Band(self.chunks, row, row + 1)],
            )
            yield ReadTask(self.chunks, [run])


@dataclass(frozen=True, slots=True)
class RunLimits:
    """Limits for joining chunks into runs, and runs into tasks."""

    nbytes: int
    """Most bytes of a run, unless a single chunk is larger."""
    gap: int
    """Most unneeded bytes between two chunks that are read along."""
    chunks: int
    """Most chunks of a run."""
    runs: int = 1
    """Most runs of a task."""
    task: int = 0
    """Most bytes of the runs of a task; less than `nbytes`: that many."""


def tasks(chunks: Located, limits: RunLimits, group: Ints | None = None) -> Iterator[ReadTask]:
    """Make tasks of all chunks in order of their place, with neighbours joined.

    Groups come one after the other and are not mixed.

    Args:
        chunks: in any order.
        limits: limits for joining.
        group: (n,) number of each chunk's group.
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
    where = zip(
        files,
        chunks.offset[begins].tolist(),
        (chunks.offset + chunks.length)[last].tolist(),
        strict=True,
    )
    task: list[ChunkRun] = []
    nbytes, before = 0, (0, OWN_OBJECT)
    for (first, after), (file, start, stop) in zip(pairwise(firsts), where, strict=True):
        nbytes += stop - start
        if task and (
            file != before
            or file[1] == OWN_OBJECT
            or nbytes > max(limits.nbytes, limits.task)
            or len(task) == limits.runs
        ):
            yield ReadTask(chunks, task)
            task, nbytes = [], stop - start
        before = file
        bands_of_run = [Band(chunks, edges[i], edges[i + 1]) for i in range(first, after)]
        task.append(ChunkRun(edges[first], edges[after], start, stop, bands_of_run))
    if task:
        yield ReadTask(chunks, task)


def join(
    file: Ints, offset: Ints, length: Ints, limits: RunLimits, group: Ints | None = None
) -> tuple[Ints, Ints]:
    """Join chunks into runs.

    Args:
        file: (n,) number of each chunk's file; each `OWN_OBJECT` is a file of its own.
        offset: (n,) first byte.
        length: (n,) bytes.
        limits: limits for joining.
        group: (n,) number of each chunk's group; only chunks of one group are joined, and lower
            groups come first.

    Returns:
        (n,) the chunks in order of group and place, and (runs,) the position in that order at which
        each run begins.
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
            # Chunks of such a stretch are adjacent, so the end of a run depends only on its own
            # length.
            end = (
                int(np.searchsorted(stop[at:after], offset[at] + limits.nbytes, side="right")) + at
            )
            at = min(max(end, at + 1), at + limits.chunks)
            if at == after:
                break
            begins.append(at)
    return order, np.sort(np.array(begins, np.int64))


def count_runs(file: Ints, offset: Ints, length: Ints, limits: RunLimits) -> tuple[int, int]:
    """The number of runs that `join` makes, and the bytes of all of them, including gaps.

    `join` describes the arguments.
    """
    order, begins = join(file, offset, length, limits)
    if not len(begins):
        return 0, 0
    ends = np.append(begins[1:], len(file))
    return len(begins), int(((offset + length)[order][ends - 1] - offset[order][begins]).sum())
