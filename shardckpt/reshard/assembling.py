"""Reading source tensors into target chunks, while the chunks read before are written.

1. The work comes in steps (`cells`). A step is a box of one target. It holds complete chunks, except chunks that a later step finishes.
2. Small steps are joined into *batches* that fit a processor cache. The caller's thread plans the reads of several batches at a time.
   A second thread reads the batches one after another. It reads or scatters source chunks directly to their position in the target
   chunks, and converts them where dtypes differ. A target may consist of parts of several tensors, transposed (`plan.views`). A source
   chunk that several parts of a batch need is read once.
3. Meanwhile the caller handles the chunks of the previous batch. A few batches are read ahead, so that neither thread waits.
"""

from __future__ import annotations

from collections import defaultdict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt.layout.box import BoxArray
from shardckpt.reading.locate import TensorBoxes
from shardckpt.reshard.batches import Batch, BatchMemory, BatchPlace, ChunkTarget, Filled, PlannedStep, batches_of, batches_together

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from shardckpt.format.structure import TensorRecord
    from shardckpt.plan.pieces import Overlaps, Piece
    from shardckpt.plan.views import View
    from shardckpt.reading.locate import Request
    from shardckpt.reshard.source import OpenSource

    Bytes = NDArray[np.uint8]

_AHEAD = 3
"""Batches in memory: one with the caller, one being read, one waiting."""
_NOTHING: Bytes = np.empty(0, np.uint8)


def assembled(source: OpenSource, steps: Iterable[PlannedStep], at_once: int, memory: BatchMemory) -> Generator[Batch]:
    """Read all steps and yield batches of complete chunks; a batch is valid until the next one is requested.

    A caller that stops early closes the iterator, which waits for reads in progress.

    Args:
        source: the checkpoint to read.
        steps: what to read; all steps of one target are consecutive.
        at_once: bytes up to which small steps are joined. Each of the two halves of the memory has `PARTS` times as much, or as much as
            one larger step needs.
        memory: the batch memory; the caller keeps it.

    Raises:
        CorruptionError, ReplacedError, StorageError: the source could not be read.
    """
    reading, coming = _Reading(source), deque[tuple[BatchPlace, Future[Batch]]]()

    def until_free(place: BatchPlace) -> Iterator[Batch]:
        """Yield batches until no batch in memory overlaps a place and there is room for one more."""
        while len(coming) == _AHEAD or any(place.meets(other) for other, _ in coming):
            yield coming[0][1].result()
            coming.popleft()

    with ThreadPoolExecutor(1, "shardckpt-ahead") as ahead, source.reading():
        try:
            for batches in batches_together(batches_of(steps, at_once), at_once):
                places = [memory.next(batch.nbytes, at_once) for batch in batches]
                if batches[0].nbytes > at_once:  # the memory may be replaced for it
                    yield from until_free(places[0])
                for batch, place in zip(batches, places, strict=True):
                    batch.begin(memory.at(place, batch.nbytes, at_once))
                for batch, place, read in zip(batches, places, reading.plan(batches), strict=True):
                    yield from until_free(place)
                    coming.append((place, ahead.submit(reading.read, batch, read)))
            while coming:
                yield coming[0][1].result()
                coming.popleft()
        finally:
            ahead.shutdown(cancel_futures=True)


class _Reading:
    """Reader of batches, one after another; for one thread at a time."""

    def __init__(self, source: OpenSource) -> None:
        self._source = source
        self._open: dict[tuple[str, int], tuple[Batch, Bytes]] = {}
        """Chunks that the last step began and did not finish, with their batch; keyed by array and position."""

    def plan(self, batches: Sequence[Batch]) -> Sequence[Callable[[], None]]:
        """One call per batch that reads it; no call writes to the batch's memory before it runs."""
        return self._source.reader.reads([self._requests(batch) for batch in batches])

    def read(self, batch: Batch, read: Callable[[], None]) -> Batch:
        """Read a batch."""
        for raw, first in batch.first:
            raw[:] = first
        read()
        return batch

    def _requests(self, batch: Batch) -> list[Request]:
        requested: defaultdict[tuple[str, bool], TensorBoxes] = defaultdict(TensorBoxes)
        tensors = {tensor.name: tensor for planned in batch.steps for tensor, _ in planned.target.sources}
        for planned in batch.steps:
            if planned.target.is_one_chunk:
                _plan_one(planned.target, batch, requested)
            else:
                self._plan(planned, batch, requested)
        return [some.request(tensors[name], converts=converts) for (name, converts), some in requested.items()]

    def _plan(self, planned: PlannedStep, batch: Batch, requested: defaultdict[tuple[str, bool], TensorBoxes]) -> None:
        """Add the reads of a step: for each target chunk that it overlaps, the overlap and its position in the chunk."""
        begun, self._open = self._open, {}
        for piece, pairs, boxes in planned.pairs:
            parts = BoxArray(boxes.start + pairs.in_chunk.start, boxes.start + pairs.in_chunk.stop)
            raws = self._room(planned, piece, pairs, boxes, begun, batch)
            for tensor, view in planned.target.sources:
                self._aim(planned.target, tensor, view, piece, boxes, parts, raws, requested)

    def _room(
        self,
        planned: PlannedStep,
        piece: Piece,
        pairs: Overlaps,
        boxes: BoxArray,
        begun: dict[tuple[str, int], tuple[Batch, Bytes]],
        batch: Batch,
    ) -> list[Bytes]:
        """Memory of each chunk that a step overlaps, including the elements that earlier steps read into it."""
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

    def _aim(
        self,
        target: ChunkTarget,
        tensor: TensorRecord,
        view: View,
        piece: Piece,
        boxes: BoxArray,
        parts: BoxArray,
        raws: list[Bytes],
        requested: defaultdict[tuple[str, bool], TensorBoxes],
    ) -> None:
        """Add the reads from one source into the chunks of an array."""
        inside = view.inside
        first, last = np.maximum(parts.start, inside.start), np.minimum(parts.stop, inside.stop)
        which = np.flatnonzero((first < last).all(axis=1))
        if not len(which):
            return
        into = requested[tensor.name, target.dtype != tensor.dtype]
        into.boxes.append(view.back(BoxArray(first[which], last[which])))
        low, high = (first[which] - boxes.start[which]).tolist(), (last[which] - boxes.start[which]).tolist()
        shapes = (boxes.stop - boxes.start)[which].tolist()
        for i, start, stop, shape in zip(which.tolist(), low, high, shapes, strict=True):
            index: Any = (*map(slice, start, stop), ...)
            into.buffers.append(view.part(target.elements(raws[i], piece, shape, tensor)[index]))


def _plan_one(target: ChunkTarget, batch: Batch, requested: defaultdict[tuple[str, bool], TensorBoxes]) -> None:
    """Do the work of `_Reading._plan` for a target that is one chunk."""
    (piece,) = target.pieces
    raw = batch.take(target.nbytes(piece, piece.shape))
    if target.as_stored and piece.shape != piece.chunks:
        batch.first.append((raw, 0))
    batch.whole.append(Filled(target, piece, 0, piece.start, piece.shape, raw))
    for tensor, view in target.sources:
        into = requested[tensor.name, target.dtype != tensor.dtype]
        into.boxes.append(BoxArray.of([view.box], view.box.ndim))
        index: Any = (*view.inside.slices, ...)
        into.buffers.append(view.part(target.elements(raw, piece, piece.shape, tensor)[index]))
