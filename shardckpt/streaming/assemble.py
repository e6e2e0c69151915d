"""Reading source tensors into target chunks, while the chunks read before are written.

1. The work comes in steps (`plan.cells`). A step is a box of one target. Its chunks are complete,
   or a later step finishes them.
2. Small steps are joined into *batches* that fit a processor cache. The caller's thread plans the
   reads of several batches at a time. A second thread reads the batches one after another. It reads
   or scatters source chunks directly to their position in the target chunks, and converts them
   where dtypes differ. A target may consist of parts of several tensors, transposed (`plan.views`).
   A source chunk that several parts of a batch need is read once.
3. Meanwhile the caller handles the chunks of the previous batch. A few batches are read ahead, so
   that neither thread waits.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt.io.threads import read_ahead
from shardckpt.layout.box import BoxArray
from shardckpt.plan.views import overlapping_views
from shardckpt.reading.read_list import ReadList
from shardckpt.streaming.batches import (
    Batch,
    BatchMemory,
    BatchPlace,
    ChunkTarget,
    Filled,
    PlannedStep,
    batches_of,
    batches_together,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

    from numpy.typing import NDArray

    from shardckpt.plan.pieces import Overlaps, Piece
    from shardckpt.reading.locate import Request
    from shardckpt.streaming.source import OpenSource

    Bytes = NDArray[np.uint8]

_AHEAD = 2
"""Batches in memory besides the one with the caller: one being read, one waiting."""
_NOTHING: Bytes = np.empty(0, np.uint8)


def assemble_chunks(
    source: OpenSource, steps: Iterable[PlannedStep], at_once: int, memory: BatchMemory
) -> Generator[Batch]:
    """Read all steps and yield batches of complete chunks.

    A batch is valid until the next one is requested.

    A caller that stops early closes the iterator, which waits for reads in progress.

    Args:
        source: the checkpoint to read.
        steps: what to read; all steps of one target are consecutive.
        at_once: bytes up to which small steps are joined. Each of the two halves of the memory has
            `PARTS` times as much, or as much as one larger step needs.
        memory: the batch memory; the caller keeps it.

    Raises:
        CorruptionError, ReplacedError, StorageError: the source could not be read.
    """
    reading = _Reading(source, at_once, memory)
    coming = read_ahead(
        reading.draw(steps), reading.lend, reading.read, ahead=_AHEAD, threads=1, copies=False
    )
    with source.reading(), closing(coming):
        for planned, place in coming:
            yield planned.batch
            reading.give_back(place)


@dataclass(slots=True, eq=False)
class _PlannedBatch:
    """A batch, its place in the memory, and the call that reads it."""

    batch: Batch
    place: BatchPlace
    group: list[_PlannedBatch]
    """The batches that are planned together with it; empty when they are."""
    read: Callable[[], None] | None = None
    """None: the reads are not planned yet."""


class _Reading:
    """Reader of batches, one after another."""

    def __init__(self, source: OpenSource, at_once: int, memory: BatchMemory) -> None:
        self._source = source
        self._at_once = at_once
        self._memory = memory
        self._lent: list[BatchPlace] = []
        self._open: dict[tuple[str, int], tuple[Batch, Bytes]] = {}
        """Chunks that the last step began and did not finish, with their batch; keyed by array and
        position."""

    def draw(self, steps: Iterable[PlannedStep]) -> Iterator[_PlannedBatch]:
        """Yield the batches of steps, in order."""
        for batches in batches_together(batches_of(steps, self._at_once), self._at_once):
            group: list[_PlannedBatch] = []
            group += [
                _PlannedBatch(batch, self._memory.next(batch.nbytes, self._at_once), group)
                for batch in batches
            ]
            yield from tuple(group)

    def lend(self, planned: _PlannedBatch, _alone: bool) -> BatchPlace | None:
        """Give a batch its place in the memory; None: another batch is there.

        The reads of its group are planned now, if they are not.
        """
        if any(planned.place.meets(other) for other in self._lent):
            return None
        if planned.read is None:
            # The memory of a batch that stands alone may be replaced by a larger one: nothing is
            # there any more.
            for one in planned.group:
                one.batch.begin(self._memory.at(one.place, one.batch.nbytes, self._at_once))
            reads = self._source.reader.reads([self._requests(one.batch) for one in planned.group])
            for one, read in zip(planned.group, reads, strict=True):
                one.read = read
            planned.group.clear()
        self._lent.append(planned.place)
        return planned.place

    def give_back(self, place: BatchPlace) -> None:
        """Take back the place of a batch that the caller has handled."""
        self._lent.remove(place)

    def read(self, planned: _PlannedBatch) -> None:
        """Read a batch, on the reading thread. Until then, nothing was written to its memory."""
        for raw, first in planned.batch.first:
            raw[:] = first
        assert planned.read is not None
        planned.read()

    def _requests(self, batch: Batch) -> list[Request]:
        reads = ReadList()
        for planned in batch.steps:
            if planned.target.is_one_chunk:
                _plan_one(planned.target, batch, reads)
            else:
                self._plan(planned, batch, reads)
        return reads.requests()

    def _plan(self, planned: PlannedStep, batch: Batch, reads: ReadList) -> None:
        """Add the reads of a step: its overlap with each target chunk, and the position there."""
        begun, self._open = self._open, {}
        for piece, pairs, boxes in planned.pairs:
            parts = BoxArray(boxes.start + pairs.in_chunk.start, boxes.start + pairs.in_chunk.stop)
            raws, shapes = (
                self._room(planned, piece, pairs, boxes, begun, batch),
                (boxes.stop - boxes.start).tolist(),
            )
            for i in overlapping_views(planned.target.insides, parts):
                tensor, view = planned.target.sources[i]
                chunks = [
                    planned.target.elements(raw, piece, shape, tensor)
                    for raw, shape in zip(raws, shapes, strict=True)
                ]
                reads.of(tensor, converts=planned.target.dtype != tensor.dtype).add(
                    view, parts, chunks, boxes.start
                )

    def _room(
        self,
        planned: PlannedStep,
        piece: Piece,
        pairs: Overlaps,
        boxes: BoxArray,
        begun: dict[tuple[str, int], tuple[Batch, Bytes]],
        batch: Batch,
    ) -> list[Bytes]:
        """Memory of each chunk that a step overlaps, with what earlier steps read into it."""
        target, raws = planned.target, []
        shapes = (boxes.stop - boxes.start).tolist()
        later = planned.unfinished(boxes).tolist()
        rows = zip(pairs.chunk.tolist(), boxes.start.tolist(), shapes, later, strict=True)
        for position, start, shape, unfinished in rows:
            key = piece.path, position
            before, raw = begun.get(key, (None, _NOTHING))
            if before is not batch:
                former, raw = raw, batch.take(target.nbytes(piece, shape))
                if before is not None:
                    batch.first.append((raw, former))
                elif target.as_stored and tuple(shape) != piece.chunks:
                    batch.first.append((raw, 0))
            if unfinished:
                self._open[key] = batch, raw
            else:
                batch.whole.append(Filled(target, piece, position, tuple(start), tuple(shape), raw))
            raws.append(raw)
        return raws


def _plan_one(target: ChunkTarget, batch: Batch, reads: ReadList) -> None:
    """Do the work of `_Reading._plan` for a target that is one chunk."""
    (piece,) = target.pieces
    raw = batch.take(target.nbytes(piece, piece.shape))
    if target.as_stored and piece.shape != piece.chunks:
        batch.first.append((raw, 0))
    batch.whole.append(Filled(target, piece, 0, piece.start, piece.shape, raw))
    for tensor, view in target.sources:
        into = reads.of(tensor, converts=target.dtype != tensor.dtype)
        into.boxes.append(BoxArray.of([view.box], view.box.ndim))
        index: Any = (*view.inside.slices, ...)
        into.buffers.append(view.part(target.elements(raw, piece, piece.shape, tensor)[index]))
