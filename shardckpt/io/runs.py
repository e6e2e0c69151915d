"""Which chunks are read together?

A read call costs microseconds on a local disk and a request of milliseconds on an object store, so chunks that lie
side by side in a data file are read as one *run*. Where a request is dear, small gaps between them are read along.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from shardckpt.io.wanted import Chunk

    Ints = NDArray[np.int64]

__all__ = ["Run", "RunLimits", "count_runs", "runs"]


@dataclass(frozen=True, slots=True)
class Run:
    """Chunks of one file, in order of their place, none beginning before the one before has ended."""

    chunks: Sequence[Chunk]

    @property
    def file(self) -> str:
        """The file that they lie in."""
        return self.chunks[0].file

    @property
    def start(self) -> int:
        """Its first byte."""
        return self.chunks[0].offset

    @property
    def stop(self) -> int:
        """One past its last byte."""
        return self.chunks[-1].stop

    @property
    def nbytes(self) -> int:
        """Bytes that are read, gaps among them."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class RunLimits:
    """How far chunks are joined."""

    nbytes: int
    """Bytes of a run, unless a single chunk is larger."""
    gap: int
    """Bytes between two chunks that are read although nobody wants them."""
    chunks: int
    """Chunks of a run."""


def runs(chunks: Iterable[Chunk], limits: RunLimits) -> Iterator[Run]:
    """All chunks in order of their place, neighbours together."""
    run: list[Chunk] = []
    for chunk in sorted(chunks, key=lambda c: (c.file, c.offset)):
        if run:
            near = chunk.file == run[0].file and 0 <= chunk.offset - run[-1].stop <= limits.gap
            if not (near and chunk.stop - run[0].offset <= limits.nbytes and len(run) < limits.chunks):
                yield Run(run)
                run = []
        run.append(chunk)
    if run:
        yield Run(run)


def count_runs(file: Ints, offset: Ints, length: Ints, limits: RunLimits) -> tuple[int, int]:
    """How many runs `runs` would make of some chunks, and the bytes of all of them, gaps included.

    Args:
        file: (n,) number of each chunk's file.
        offset: (n,) first byte.
        length: (n,) bytes.
        limits: how far chunks are joined.
    """
    if not len(file):
        return 0, 0
    order = np.lexsort((offset, file))
    file, offset, stop = file[order], offset[order], (offset + length)[order]
    gap = offset[1:] - stop[:-1]
    apart = np.flatnonzero((file[1:] != file[:-1]) | (gap < 0) | (gap > limits.gap)) + 1
    count = nbytes = 0
    for first, last in zip([0, *apart.tolist()], [*apart.tolist(), len(file)], strict=True):
        at = first
        while at < last:
            # Within such a stretch chunks follow each other, so where a run ends is a matter of its own length.
            end = int(np.searchsorted(stop[at:last], offset[at] + limits.nbytes, side="right")) + at
            end = min(max(end, at + 1), at + limits.chunks)
            count += 1
            nbytes += int(stop[end - 1] - offset[at])
            at = end
    return count, nbytes
