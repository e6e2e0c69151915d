"""Which chunks are read together?

A read call costs microseconds on a local disk and a request of milliseconds on an object store, so chunks that lie
side by side in a data file are read as one *run*. Where a request is dear, small gaps between them are read along. Runs of one file
that a thread reads one after another are a *task*: what Python does for them is done for all of them at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, repeat
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.format.table import OWN_OBJECT
from shardckpt.reading.bands import Band, continues

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from shardckpt.reading.finder import Located

    Ints = NDArray[np.int64]

__all__ = ["Run", "RunLimits", "Task", "count_runs", "join", "tasks"]


@dataclass(frozen=True, slots=True)
class Run:
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
class Task:
    """Runs of one file that follow each other in it, and in the rows of their chunks."""

    chunks: Located
    """Among others; in order of their place."""
    runs: Sequence[Run]

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

    def alone(self) -> Iterator[Task]:
        """Each of its chunks as a task of its own."""
        for row in range(self.begin, self.end):
            run = Run(row, row + 1, int(self.chunks.offset[row]), self.chunks.stop(row), [Band(self.chunks, row, row + 1)])
            yield Task(self.chunks, [run])


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


def tasks(chunks: Located, limits: RunLimits, group: Ints | None = None) -> Iterator[Task]:
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
    task: list[Run] = []
    nbytes, before = 0, (0, OWN_OBJECT)
    for (first, after), (file, start, stop) in zip(pairwise(firsts), where, strict=True):
        nbytes += stop - start
        if task and (file != before or file[1] == OWN_OBJECT or nbytes > limits.nbytes or len(task) == limits.runs):
            yield Task(chunks, task)
            task, nbytes = [], stop - start
        before = file
        found = [Band(chunks, edges[i], edges[i + 1]) for i in range(first, after)]
        task.append(Run(edges[first], edges[after], start, stop, found))
    if task:
        yield Task(chunks, task)


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
