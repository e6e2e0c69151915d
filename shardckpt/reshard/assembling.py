"""Reading tensors of a checkpoint into the chunks of what is made of them, while what was read before is written.

1. Work comes in steps (`cells`): a box of one target, which holds whole chunks of it, but for those that later steps finish.
2. Small steps are taken together, into *batches* that a processor's cache holds, and reading some batches is planned together, by the
   caller's thread. A second thread reads them, one after another: source chunks go, or are scattered, straight to where they lie in the
   chunks of the target, converted on the way where dtypes differ. A target may be made of parts of several tensors, transposed
   (`plan.views`); a source chunk that several parts of a batch need is read once.
3. Meanwhile the chunks of the batch before are the caller's. Some batches are read ahead, so that neither waits for the other.
"""

from __future__ import annotations

from collections import defaultdict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt.layout.box import BoxArray
from shardckpt.reading.locate import Request
from shardckpt.reshard.batches import Batch, BatchMemory, BatchPlace, ChunkTarget, Filled, PlannedStep, batches_of, batches_together

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from shardckpt.format.structure import TensorRecord
    from shardckpt.plan.overlaps import Overlaps
    from shardckpt.plan.pieces import Piece
    from shardckpt.plan.views import View
    from shardckpt.reshard.source import OpenSource

    Bytes = NDArray[np.uint8]

_AHEAD = 3
"""Batches in memory: the caller has one, one is being read, and one waits for either."""
_NOTHING: Bytes = np.empty(0, np.uint8)


def assembled(source: OpenSource, steps: Iterable[PlannedStep], at_once: int, memory: BatchMemory) -> Generator[Batch]:
    """Read everything; a batch of whole chunks at a time, which is good until the next is asked for.

    Whoever does not take all of it closes the iterator, which waits for what is being read.

    Args:
        source: what is read.
        steps: what to read; those of one target follow each other.
        at_once: bytes to which small steps are joined. One that is larger takes what it takes, in each of the two halves of the
            memory, which else has twice `PARTS` times as much.
        memory: kept by the caller.

    Raises:
        CorruptionError, ReplacedError, StorageError: the source could not be read.
    """
    reading, coming = _Reading(source), deque[tuple[BatchPlace, Future[Batch]]]()

    def until_free(place: BatchPlace) -> Iterator[Batch]:
        """Batches that are read, until none has anything of a place, and there may be one more."""
        while len(coming) == _AHEAD or any(place.meets(other) for other, _ in coming):
            yield coming[0][1].result()
            coming.popleft()

    with ThreadPoolExecutor(1, "shardckpt-ahead") as ahead, source.reading():
        try:
            for batches in batches_together(batches_of(steps, at_once), at_once):
                places = [memory.next(batch.nbytes, at_once) for batch in batches]
                if batches[0].nbytes > at_once:  # for which this memory may be replaced
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


class _Wanted:
    """Boxes of one tensor, and where their elements go."""

    def __init__(self) -> None:
        self.boxes: list[BoxArray] = []
        self.buffers: list[NDArray[Any]] = []

    def request(self, tensor: TensorRecord, *, converts: bool) -> Request:
        wanted = BoxArray(np.concatenate([b.start for b in self.boxes]), np.concatenate([b.stop for b in self.boxes]))
        meaning = tensor.dtype.numpy if converts else None
        return Request(tensor.name, tensor.dtype.storage, tensor.pieces, wanted, self.buffers, convert_from=meaning)


class _Reading:
    """Reads batch after batch; for one thread at a time."""

    def __init__(self, source: OpenSource) -> None:
        self._source = source
        self._open: dict[tuple[str, int], tuple[Batch, Bytes]] = {}
        """Chunks, by array and position, that the last step has begun and not finished; and in which batch."""

    def plan(self, batches: Sequence[Batch]) -> Sequence[Callable[[], None]]:
        """For each batch a call that reads it; nothing is written to its memory before."""
        return self._source.reader.reads([self._requests(batch) for batch in batches])

    def read(self, batch: Batch, read: Callable[[], None]) -> Batch:
        """Read a batch."""
        for raw, first in batch.first:
            raw[:] = first
        read()
        return batch

    def _requests(self, batch: Batch) -> list[Request]:
        wanted: defaultdict[tuple[str, bool], _Wanted] = defaultdict(_Wanted)
        tensors = {tensor.name: tensor for planned in batch.steps for tensor, _ in planned.target.sources}
        for planned in batch.steps:
            if planned.target.is_one_chunk:
                _plan_one(planned.target, batch, wanted)
            else:
                self._plan(planned, batch, wanted)
        return [some.request(tensors[name], converts=converts) for (name, converts), some in wanted.items()]

    def _plan(self, planned: PlannedStep, batch: Batch, wanted: defaultdict[tuple[str, bool], _Wanted]) -> None:
        """What a step reads: of each chunk that it reaches into, the part that lies in it, to where that is in the chunk."""
        begun, self._open = self._open, {}
        for piece, pairs, boxes in planned.pairs:
            parts = BoxArray(boxes.start + pairs.in_chunk.start, boxes.start + pairs.in_chunk.stop)
            raws = self._room(planned, piece, pairs, boxes, begun, batch)
            for tensor, view in planned.target.sources:
                self._aim(planned.target, tensor, view, piece, boxes, parts, raws, wanted)

    def _room(
        self,
        planned: PlannedStep,
        piece: Piece,
        pairs: Overlaps,
        boxes: BoxArray,
        begun: dict[tuple[str, int], tuple[Batch, Bytes]],
        batch: Batch,
    ) -> list[Bytes]:
        """Memory of each chunk that a step reaches into, with what earlier steps have read of it."""
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
        wanted: defaultdict[tuple[str, bool], _Wanted],
    ) -> None:
        """Say what of one source goes into the chunks of an array."""
        inside = view.inside
        first, last = np.maximum(parts.start, inside.start), np.minimum(parts.stop, inside.stop)
        which = np.flatnonzero((first < last).all(axis=1))
        if not len(which):
            return
        into = wanted[tensor.name, target.dtype != tensor.dtype]
        into.boxes.append(view.back(BoxArray(first[which], last[which])))
        low, high = (first[which] - boxes.start[which]).tolist(), (last[which] - boxes.start[which]).tolist()
        shapes = (boxes.stop - boxes.start)[which].tolist()
        for i, start, stop, shape in zip(which.tolist(), low, high, shapes, strict=True):
            index: Any = (*map(slice, start, stop), ...)
            into.buffers.append(view.part(target.elements(raws[i], piece, shape, tensor)[index]))


def _plan_one(target: ChunkTarget, batch: Batch, wanted: defaultdict[tuple[str, bool], _Wanted]) -> None:
    """As `_Reading._plan`, of a target that is one chunk."""
    (piece,) = target.pieces
    raw = batch.take(target.nbytes(piece, piece.shape))
    if target.as_stored and piece.shape != piece.chunks:
        batch.first.append((raw, 0))
    batch.whole.append(Filled(target, piece, 0, piece.start, piece.shape, raw))
    for tensor, view in target.sources:
        into = wanted[tensor.name, target.dtype != tensor.dtype]
        into.boxes.append(BoxArray.of([view.box], view.box.ndim))
        index: Any = (*view.inside.slices, ...)
        into.buffers.append(view.part(target.elements(raw, piece, piece.shape, tensor)[index]))
