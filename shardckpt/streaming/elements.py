"""The bytes of outputs, read on demand.

An output is a run of bytes, row by row. It is cut into blocks of complete rows, as tall as stored
chunks (`cut`), so that a sequential read needs most chunks once. Blocks that a read covers
completely are read straight into the caller's memory, all with one call of the checkpoint's reader.
Of another block, the first read of a small part reads only the rows that it needs. The next read of
the same block puts it into a cache, because others are likely to follow. A read that continues
where the last one ended puts it there at once, with blocks that follow.

Every stored chunk is verified before any of its bytes is returned.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from math import prod
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from shardckpt.layout.box import Box, BoxArray
from shardckpt.plan.cut import Order, cut
from shardckpt.plan.views import overlapping_views
from shardckpt.reading.naming.outputs import source_tensors
from shardckpt.reading.read_list import ReadList

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardckpt.plan.views import View
    from shardckpt.reading.checkpoint import Checkpoint
    from shardckpt.reading.locate import Request
    from shardckpt.reading.naming.outputs import OutputTensor

    Bytes = NDArray[np.uint8]

T = TypeVar("T")
Key = tuple[int, int]
"""Index of an output, and number of a block in it."""
CACHE_BYTES = 128 << 20
"""Bytes of blocks that are kept; the last one is kept even if it is larger."""
_SMALL = 64
"""A part is small if the block has at least so many times its bytes."""
AHEAD_BYTES = 16 << 20
"""Most bytes that are read ahead of a sequential reader."""
_SMALL_BLOCK = 1 << 20
"""Bytes up to which smaller chunks are joined to a block: each block is planned by itself."""
LARGEST_BLOCK = 64 << 20
"""Most bytes of a block, unless a row has more. Of a larger slab, chunks are read for several
blocks."""


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The blocks of an output."""

    edges: list[int]
    """First byte of each block, and the bytes of the output."""
    boxes: BoxArray


class _Recent(OrderedDict[Key, T]):
    """Values for the blocks used last, up to a limit of the bytes that they stand for."""

    def __init__(self, nbytes: Callable[[T], int], most: int, least: int = 0) -> None:
        super().__init__()
        self._nbytes, self._most, self._least = nbytes, most, least
        self._total = 0

    def add(self, new: Mapping[Key, T]) -> None:
        """Add blocks, and remove those that are too many."""
        for key, value in new.items():
            self.remove(key)
            self[key] = value
            self._total += self._nbytes(value)
        while self._total > self._most and len(self) > self._least:
            self.remove(next(iter(self)))

    def remove(self, key: Key) -> bool:
        """Remove a block; return whether it was there."""
        if key not in self:
            return False
        self._total -= self._nbytes(self.pop(key))
        return True


class OutputReader:
    """Reads bytes of outputs. Safe to use from several threads."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        outputs: Sequence[OutputTensor],
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        """Read outputs of a checkpoint; nothing is read yet.

        Args:
            checkpoint: the source.
            outputs: the outputs, in the order of their bytes.
            cache_bytes: most bytes of blocks that are kept.

        Raises:
            NamesMismatchError, ShapeMismatchError, DtypeMismatchError: an output cannot be made of
                the checkpoint's tensors.
        """
        self._checkpoint = checkpoint
        self._outputs = outputs
        self._tensors = source_tensors(outputs, checkpoint.tensor)
        self._most = cache_bytes
        self._blocks: dict[int, _Blocks] = {}
        self._insides: dict[int, BoxArray] = {}
        """The boxes that the views of an output fill, of outputs with several."""
        self._cache: _Recent[Bytes] = _Recent(len, cache_bytes, least=1)
        self._touched: _Recent[int] = _Recent(int, cache_bytes // 2)
        """Bytes of the blocks of which parts were read lately; a block is kept when it is read
        again."""
        self._expected: tuple[int, int] | None = 0, 0
        """Output and byte at which a sequential reader continues."""
        self._lock = Lock()

    def read_into(self, ranges: Sequence[tuple[int, int, memoryview]]) -> None:
        """Fill memory with bytes of outputs.

        Args:
            ranges: consecutive ranges of bytes, at most one of each output: index of the output,
                first byte, and memory for the range.

        Raises:
            CorruptionError, MissingDataError, ReplacedError: stored bytes are damaged or gone.
            StorageError: they cannot be read.
        """
        direct, parts = self._split(ranges)
        blocks, new = self._take_kept(ranges, parts)
        rows: list[tuple[tuple[int, Box, NDArray[Any]], int, memoryview]] = []
        for key, begin, part in parts:
            if key not in blocks and key not in new:
                box, skipped = self._rows(key, begin, len(part))
                rows.append((box, skipped, part))
        boxes = [*self._whole([*direct, *new.items()]), *(box for box, *_ in rows)]
        if boxes:
            self.read_boxes(boxes)
        for (_, _, memory), skipped, part in rows:
            part[:] = memory.reshape(-1).view(np.uint8)[skipped : skipped + len(part)].data
        for key, begin, part in parts:
            kept = blocks[key] if key in blocks else new.get(key)
            if kept is not None:
                part[:] = kept[begin : begin + len(part)].data
        with self._lock:
            self._cache.add(new)

    def _split(
        self, ranges: Sequence[tuple[int, int, memoryview]]
    ) -> tuple[list[tuple[Key, Bytes]], list[tuple[Key, int, memoryview]]]:
        """Split ranges into complete blocks that are not kept, and parts of blocks.

        Each complete block comes with memory for it.
        """
        direct: list[tuple[Key, Bytes]] = []
        parts: list[tuple[Key, int, memoryview]] = []
        for number, begin, into in ranges:
            edges, end = self._blocks_of(number).edges, begin + len(into)
            block, at = bisect_right(edges, begin) - 1, begin
            while at < end:
                stop = min(edges[block + 1], end)
                part = into[at - begin : stop - begin]
                if (at, stop) == (edges[block], edges[block + 1]) and (
                    number,
                    block,
                ) not in self._cache:
                    direct.append(((number, block), np.frombuffer(part, np.uint8)))
                else:
                    parts.append(((number, block), at - edges[block], part))
                at, block = stop, block + 1
        return direct, parts

    def _take_kept(
        self,
        ranges: Sequence[tuple[int, int, memoryview]],
        parts: Sequence[tuple[Key, int, memoryview]],
    ) -> tuple[dict[Key, Bytes], dict[Key, Bytes]]:
        """The cached blocks that parts are taken from, and memory for those that must be read.

        The memory is also for blocks to read ahead.
        """
        with self._lock:
            blocks = {key: self._cache[key] for key, *_ in parts if key in self._cache}
            for key in blocks:
                self._cache.move_to_end(key)
            continues = ranges[0][:2] == self._expected
            number, begin, into = ranges[-1]
            self._expected = number, begin + len(into)
            if len(into) + begin == self._outputs[number].nbytes:
                self._expected = next(
                    (
                        (n, 0)
                        for n in range(number + 1, len(self._outputs))
                        if self._outputs[n].nbytes
                    ),
                    None,
                )
            missing = [key for key in dict.fromkeys(key for key, *_ in parts) if key not in blocks]
            if missing and not continues:
                small = {key for key, _, part in parts if len(part) * _SMALL <= self._nbytes(key)}
                missing = [key for key in missing if key not in small or self._touched.remove(key)]
                others = small - blocks.keys() - set(missing)
                self._touched.add({key: self._nbytes(key) for key in others})
        if missing and continues:
            missing += self._following(missing[-1])
        return blocks, {key: np.empty(self._nbytes(key), np.uint8) for key in missing}

    def _rows(self, key: Key, begin: int, nbytes: int) -> tuple[tuple[int, Box, NDArray[Any]], int]:
        """The rows of a block with some of its bytes, with memory, as `read_boxes` wants them.

        The second value is the number of bytes in these rows before the wanted ones.
        """
        number, block = key
        box = self._blocks_of(number).boxes[block]
        start, stop, before = list(box.start), list(box.stop), 0
        along = next((d for d, side in enumerate(box.shape) if side > 1), None)
        if along is not None:
            row = self._nbytes(key) // box.shape[along]
            first, last = begin // row, -(-(begin + nbytes) // row)
            start[along], stop[along], before = (
                start[along] + first,
                start[along] + last,
                first * row,
            )
        part = Box(tuple(start), tuple(stop))
        return (
            number,
            part,
            np.empty(part.shape, self._outputs[number].dtype.numpy),
        ), begin - before

    def _following(self, key: Key) -> Iterator[Key]:
        """The blocks after a block, up to one that is kept."""
        nbytes, (number, block) = 0, key
        while True:
            block += 1
            while block + 1 >= len(self._blocks_of(number).edges):
                number, block = number + 1, 0
                if number == len(self._outputs):
                    return
            nbytes += self._nbytes((number, block))
            if nbytes > min(AHEAD_BYTES, self._most // 2) or (number, block) in self._cache:
                return
            yield number, block

    def drop_blocks(self) -> None:
        """Keep no blocks but those that are read from now on."""
        with self._lock:
            for key in [*self._cache]:
                self._cache.remove(key)

    def _nbytes(self, key: Key) -> int:
        number, block = key
        edges = self._blocks_of(number).edges
        return edges[block + 1] - edges[block]

    def _blocks_of(self, number: int) -> _Blocks:
        blocks = self._blocks.get(number)
        if blocks is None:
            blocks = self._blocks[number] = self._cut(self._outputs[number])
        return blocks

    def _cut(self, output: OutputTensor) -> _Blocks:
        if not output.nbytes:
            return _Blocks([0], BoxArray.of([], len(output.shape)))
        stored = [
            piece
            for view in output.sources
            if prod(view.shape)
            for piece in view.pieces(self._tensors[view.tensor].pieces)
        ]
        room = max(1, LARGEST_BLOCK // output.dtype.itemsize)
        # Views of single rows end inside of a chunk; a block has the bytes of a chunk at least.
        joined = max(
            _SMALL_BLOCK // output.dtype.itemsize,
            *(
                prod(piece.chunks)
                for view in output.sources
                for piece in self._tensors[view.tensor].pieces
            ),
        )
        steps = cut(
            Box.full(output.shape), (), room, Order.ROWS, sources=stored, joined=min(room, joined)
        )
        parts = [step.box for step in steps]
        boxes = BoxArray.of(parts, len(output.shape))
        strides = np.array(
            [prod(output.shape[d + 1 :]) * output.dtype.itemsize for d in range(len(output.shape))],
            np.int64,
        )
        return _Blocks([*(boxes.start @ strides).tolist(), output.nbytes], boxes)

    def edges(self, number: int) -> list[int]:
        """First byte of each block of an output, and the number of the output's bytes.

        Bytes between two of these numbers are read straight into the caller's memory.
        """
        return self._blocks_of(number).edges

    def read_boxes(self, boxes: Sequence[tuple[int, Box, NDArray[Any]]]) -> None:
        """Read boxes of outputs into memory, all with one call; nothing goes through the cache.

        Args:
            boxes: index of the output, a box of it, and an array of the box's shape and the
                output's dtype.

        Raises:
            CorruptionError, MissingDataError, ReplacedError, StorageError: as in `read_into`.
        """
        if requests := self.requests(boxes):
            with self._checkpoint.reading():
                self._checkpoint.reader.read(requests)

    def requests(self, boxes: Iterable[tuple[int, Box, NDArray[Any]]]) -> list[Request]:
        """The requests of `read_boxes`."""
        reads = ReadList()
        for number, box, elements in boxes:
            output, boxes_of_output = self._outputs[number], BoxArray.of([box], box.ndim)
            for view in self._views(number, boxes_of_output):
                tensor = self._tensors[view.tensor]
                reads.of(tensor, converts=output.dtype != tensor.dtype).add(
                    view, boxes_of_output, [elements]
                )
        return reads.requests()

    def _views(self, number: int, boxes: BoxArray) -> Sequence[View]:
        """The views of an output that may have elements of some boxes."""
        views = self._outputs[number].sources
        if len(views) <= 1:
            return views
        if number not in self._insides:
            self._insides[number] = BoxArray.of(
                [view.inside for view in views], len(views[0].start)
            )
        return [views[i] for i in overlapping_views(self._insides[number], boxes)]

    def _whole(
        self, blocks: Iterable[tuple[Key, Bytes]]
    ) -> Iterator[tuple[int, Box, NDArray[Any]]]:
        """Blocks and memory for them, as `read_boxes` wants them."""
        for (number, block), memory in blocks:
            box = self._blocks_of(number).boxes[block]
            yield number, box, memory.view(self._outputs[number].dtype.numpy).reshape(box.shape)
