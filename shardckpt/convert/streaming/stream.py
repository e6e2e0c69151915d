"""Reading what outputs are made of, block by block, within a memory limit.

1. The limit is shared out: what is being read (`reshard.memory`), what the writer keeps beside it, and two buffers of the same size,
   the *room*: what is read next is filled while other blocks are written.
2. The writer says in which blocks it wants each output: the chunks of one array, or of several.
3. Each output is cut into steps of whole blocks, so that each stored chunk is read once where the room is enough (`reshard.cells`).
   A writer that wants blocks in row-major order has them so, and stored chunks may then be read more often.
4. Steps are read in a second thread while the writer has what was read before (`reshard.assembling`).

The order of the blocks follows from the outputs, their blocks and the room, so a writer that is started again can leave out the first
ones (`Stream.read`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt.convert.streaming.outputs import OutputTensor, check
from shardckpt.errors import BudgetError
from shardckpt.excerpt import file_size, mebibytes_above
from shardckpt.format.zarr_arrays import largest_chunk
from shardckpt.io.buffers import round_up
from shardckpt.io.threads import cores
from shardckpt.layout.box import Box
from shardckpt.plan.pieces import Piece
from shardckpt.reshard.assembling import assembled
from shardckpt.reshard.batches import BatchMemory, ChunkTarget, PlannedStep
from shardckpt.reshard.cells import Step, cut, steps, steps_in_order
from shardckpt.reshard.memory import PARTS, Sizes, readers
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from numpy.typing import NDArray

    from shardckpt.reading.checkpoint import Checkpoint

__all__ = ["Blocks", "OutputBlock", "Put", "Stream", "stream"]

Blocks = Callable[[OutputTensor, Sequence[Piece], int], Sequence[Piece]]
"""Says in which blocks an output is wanted, as the chunks of arrays that together are the output (`chunking.grid` where that is one):
given the output, which has elements, the arrays that it is made of, as they lie in it, and the bytes that a block may have."""
Put = Callable[[OutputTensor, Box, "NDArray[Any]"], object]
"""Is given a block: its output, its box in it, and its elements, in row-major order, as the dtype's storage type."""
_BATCH = 16 << 20
"""Bytes that are read at once from a local disk, where work can be cut that small: each batch is planned, and handed from thread to
thread, which costs more than caches do for smaller ones."""
_OBJECT_BATCH = 32 << 20
"""The same from an object store, of which several requests are made."""


@dataclass(frozen=True, slots=True, eq=False)
class OutputBlock:
    """A part of an output, whole; its memory is good until the next blocks are asked for."""

    output: OutputTensor
    box: Box
    elements: NDArray[Any]
    """Of the box's shape, in row-major order, of the dtype's storage type."""


class Stream:
    """Some outputs of a checkpoint, and how they are read."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        outputs: Sequence[OutputTensor],
        blocks: Blocks,
        *,
        limit: int,
        beside: int = 0,
        in_order: bool = False,
    ) -> None:
        """Plan; nothing is read.

        Args:
            checkpoint: where from; nothing of it has been read yet.
            outputs: what to make.
            blocks: in which blocks.
            limit: bytes of buffers in all.
            beside: bytes of them that the writer keeps.
            in_order: whether the blocks of an output have to come in row-major order, rather than be read once.

        Raises:
            NamesMismatchError: an output is made of a tensor that is not there.
            ShapeMismatchError, DtypeMismatchError: an output cannot be made of its tensors.
            BudgetError: the limit is too low; names it, and what would do.
        """
        self.outputs = outputs
        self._checkpoint = checkpoint
        self._in_order = in_order
        self._tensors = {view.tensor: checkpoint.tensor(view.tensor) for output in outputs for view in output.sources}
        for output in outputs:
            check(output, self._tensors)
        largest = largest_chunk(self._tensors.values())
        sizes = Sizes(
            source_chunk=largest,
            target_chunk=0,
            source_local=checkpoint.location.local is not None,
            target_local=True,
            source_compressed=checkpoint.record.compression is not None or bool(checkpoint.record.structure.bases),
            target_compressed=False,
        )
        spare = limit - sizes.reading - beside
        if spare < 2 * largest:
            raise BudgetError(
                f"{checkpoint.location}: memory_limit={file_size(limit)} is too little to read chunks of {file_size(largest)}; "
                f"raise it to {mebibytes_above(sizes.reading + beside + 2 * largest)}."
            )
        reading = sizes.reading + (0 if sizes.source_local else spare // 4)
        self.room = (limit - reading - beside) // 2
        """Bytes of each half of the memory that is read into."""
        self._at_once = min(self.room // PARTS, _BATCH if sizes.source_local else _OBJECT_BATCH)
        self._reading = reading
        self._targets = [self._target(output, blocks) for output in outputs if prod(output.shape)]
        for _, target, _ in self._targets:
            least = max(prod(piece.chunks) for piece in target.pieces) * target.dtype.itemsize
            if least > self.room:
                raise BudgetError(
                    f"{checkpoint.location}: memory_limit={file_size(limit)} is too little to make {shown(target.name)} in blocks "
                    f"of {file_size(least)}; raise it to {mebibytes_above(reading + beside + 2 * round_up(least))}."
                )

    @property
    def grids(self) -> list[tuple[OutputTensor, Sequence[Piece]]]:
        """The outputs that have elements, and the arrays of whose chunks each is made."""
        return [(output, target.pieces) for output, target, _ in self._targets]

    @cached_property
    def num_blocks(self) -> int:
        """Of all outputs."""
        return sum(piece.num_chunks for _, pieces in self.grids for piece in pieces)

    @property
    def read_bytes(self) -> int:
        """Stored bytes that have been read so far."""
        return self._checkpoint.stats.bytes_read

    def read(self, skip: int = 0) -> Generator[list[OutputBlock]]:
        """All blocks, some at a time; whoever does not take all of them closes the iterator.

        Args:
            skip: how many blocks are not wanted: the first in the order in which they come. What is not needed for others is not read.

        Raises:
            CorruptionError, ReplacedError, StorageError: the checkpoint could not be read.
        """
        threads = readers(self._checkpoint.location, cores() - 1)  # one core is the writer's
        self._checkpoint.limit_reading(threads=threads, memory=self._reading)
        outputs = {id(target): output for output, target, _ in self._targets}
        planned, left_out = _after(self._steps(), skip)
        with closing(assembled(self._checkpoint, planned, self._at_once, BatchMemory())) as batches:
            for batch in batches:
                found = []
                for chunk in batch.whole:
                    box = Box(chunk.start, tuple(a + n for a, n in zip(chunk.start, chunk.shape, strict=True)))
                    elements = chunk.raw.view(chunk.target.dtype.storage).reshape(chunk.shape)
                    found.append(OutputBlock(outputs[id(chunk.target)], box, elements))
                dropped = min(left_out, len(found))
                left_out -= dropped
                yield found[dropped:]

    def order(self) -> Iterator[tuple[OutputTensor, Box]]:
        """Every block, in the order in which `read` has them; nothing is read."""
        outputs = {id(target): output for output, target, _ in self._targets}
        for planned in self._steps():
            if planned.target.is_one_chunk:
                yield outputs[id(planned.target)], planned.step.box
                continue
            for _, _, boxes in planned.pairs:
                for i in np.flatnonzero(~planned.unfinished(boxes)).tolist():
                    yield outputs[id(planned.target)], boxes[i]

    def _target(self, output: OutputTensor, blocks: Blocks) -> tuple[OutputTensor, ChunkTarget, list[Piece]]:
        sources = [(self._tensors[view.tensor], view) for view in output.sources if prod(view.shape)]
        stored = [piece for tensor, view in sources for piece in view.pieces(tensor.pieces)]
        return output, ChunkTarget(output.name, output.dtype, blocks(output, stored, self.room), sources, as_stored=False), stored

    def _steps(self) -> Iterator[PlannedStep]:
        for _, target, stored in self._targets:
            if target.is_one_chunk:
                yield PlannedStep(target, Step(target.pieces[0].box, 0))
                continue
            for step in self._steps_of(target, stored):
                yield PlannedStep(target, step)

    def _steps_of(self, target: ChunkTarget, stored: Sequence[Piece]) -> Iterator[Step]:
        itemsize, most = target.dtype.itemsize, self._at_once
        if self._in_order:
            for piece in target.pieces:
                yield from steps_in_order(piece.box, piece, stored, itemsize, most, self.room)
            return
        cells = cut(target.pieces, stored, itemsize)
        for box in cells.boxes(range(prod(cells.grid)), most // itemsize):
            yield from steps(box, target.pieces, stored, itemsize, self.room)


def stream(
    checkpoint: Checkpoint,
    outputs: Sequence[OutputTensor],
    blocks: Blocks,
    limit: int,
    put: Put,
    *,
    beside: int = 0,
    in_order: bool = False,
) -> None:
    """Make outputs of a checkpoint, and hand out each block once; see `Stream` for arguments and errors.

    `put` is called in one thread, while what follows is read in others; what it is given is good during the call only.
    """
    with closing(Stream(checkpoint, outputs, blocks, limit=limit, beside=beside, in_order=in_order).read()) as batches:
        for batch in batches:
            for block in batch:
                put(block.output, block.box, block.elements)


def _after(planned: Iterator[PlannedStep], skip: int) -> tuple[Iterator[PlannedStep], int]:
    """The steps that are needed when so many blocks are not; and how many of the blocks that those make are not, either."""
    held: list[PlannedStep] = []
    while skip:
        step = next(planned, None)
        if step is None:
            break
        held.append(step)
        if step.leaves_open:
            continue
        finished = sum(step.finished for step in held)
        if finished > skip:
            break
        skip -= finished
        held.clear()
    return _chained(held, planned), skip


def _chained(first: list[PlannedStep], then: Iterator[PlannedStep]) -> Iterator[PlannedStep]:
    while first:
        yield first.pop(0)  # which frees what each has planned
    yield from then
