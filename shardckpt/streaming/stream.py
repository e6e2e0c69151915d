"""Reading the sources of outputs, block by block, within a memory limit.

1. The limit is divided: memory for reading (`streaming.memory`), for the writer's buffers, and for
   two buffers of equal size, the *room*: one is filled while blocks of the other are written.
2. The writer chooses the blocks of each output: the chunks of one array, or of several.
3. Each output is cut into steps of complete blocks, so that each stored chunk is read once if the
   room suffices (`plan.cells`). A writer can request blocks in row-major order; stored chunks may
   then be read more often.
4. A second thread reads steps while the writer processes earlier ones (`assemble`).

The outputs, their blocks and the room determine the order of the blocks, so a writer that is
started again can skip the first ones (`Stream.read`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt.errors import BudgetError
from shardckpt.format.zarr_arrays import largest_chunk
from shardckpt.io.buffers import round_up
from shardckpt.io.cores import cores
from shardckpt.io.store import kind_of
from shardckpt.layout.box import Box
from shardckpt.plan.cells import plan_cells
from shardckpt.plan.cut import Order, Step, cut
from shardckpt.plan.grids import cut_into_grids
from shardckpt.plan.pieces import Piece
from shardckpt.reading.naming.outputs import OutputTensor, source_tensors
from shardckpt.state.names import shown
from shardckpt.streaming.assemble import assemble_chunks
from shardckpt.streaming.batches import BatchMemory, ChunkTarget, PlannedStep
from shardckpt.streaming.memory import PARTS, Sizes, readers
from shardckpt.text import Message, file_size, mebibytes_above, named_size

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from numpy.typing import NDArray

    from shardckpt.reading.checkpoint import Checkpoint

Blocks = Callable[[OutputTensor, Sequence[Piece], int], Sequence[Piece]]
"""Chooses the blocks of an output, as the chunks of arrays that together are the output (see
`plan.grids`). Arguments: the output, which has elements; the arrays from which it is made, in the
output's indices; the most bytes of a block."""
_BATCH = 16 << 20
"""Bytes of one read batch from a local disk, if work can be cut that small: each batch is planned
and passed between threads, which costs more than smaller batches would gain from caches."""
_OBJECT_BATCH = 32 << 20
"""Bytes of one read batch from an object store, which consists of several requests."""


@dataclass(frozen=True, slots=True, eq=False)
class OutputBlock:
    """A complete block of an output; its memory is valid until the next blocks are requested."""

    output: OutputTensor
    box: Box
    elements: NDArray[Any]
    """Elements of the box's shape, in row-major order, of the dtype's storage type."""


class Stream:
    """Some outputs of a checkpoint, and the plan for reading them."""

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
        """Plan the reads; nothing is read yet.

        Args:
            checkpoint: the source; nothing of it has been read yet.
            outputs: the outputs to make.
            blocks: chooses the blocks of each output.
            limit: bytes of all buffers.
            beside: bytes of these that the writer keeps.
            in_order: whether the blocks of an output must come in row-major order, even if chunks
                are then read more than once.

        Raises:
            NamesMismatchError: a source tensor of an output does not exist.
            ShapeMismatchError, DtypeMismatchError: an output cannot be made of its tensors.
            BudgetError: the limit is too low; the message names it, and a limit that suffices.
        """
        self.outputs = outputs
        self._checkpoint = checkpoint
        self._in_order = in_order
        self._tensors = source_tensors(outputs, checkpoint.tensor)
        largest = largest_chunk(self._tensors.values())
        sizes = Sizes(
            source_chunk=largest,
            target_chunk=0,
            source_local=kind_of(checkpoint.location).near,
            target_local=True,
            source_compressed=checkpoint.record.compression is not None
            or bool(checkpoint.record.structure.bases),
            target_compressed=False,
        )
        too_little = f"{checkpoint.location}: ", named_size("memory_limit", limit)
        spare = limit - sizes.reading - beside
        if spare < 2 * largest:
            advice = (
                f"{file_size(largest)}; raise it to "
                f"{mebibytes_above(sizes.reading + beside + 2 * largest)}."
            )
            raise BudgetError(Message(*too_little, f" is too little to read chunks of {advice}"))
        reading = sizes.reading + (0 if sizes.source_local else spare // 4)
        self.room = (limit - reading - beside) // 2
        """Bytes of each half of the memory that is read into."""
        self._at_once = min(self.room // PARTS, _BATCH if sizes.source_local else _OBJECT_BATCH)
        self._reading = reading
        self._targets = [self._target(output, blocks) for output in outputs if prod(output.shape)]
        for _, target, _ in self._targets:
            least = max(prod(piece.chunks) for piece in target.pieces) * target.dtype.itemsize
            if least > self.room:
                advice = (
                    f"{file_size(least)}; raise it to "
                    f"{mebibytes_above(reading + beside + 2 * round_up(least))}."
                )
                raise BudgetError(
                    Message(
                        *too_little,
                        f" is too little to make {shown(target.name)} in blocks of {advice}",
                    )
                )

    @property
    def grids(self) -> list[tuple[OutputTensor, Sequence[Piece]]]:
        """The outputs that have elements, and the arrays whose chunks are the blocks of each."""
        return [(output, target.pieces) for output, target, _ in self._targets]

    @property
    def read_bytes(self) -> int:
        """Stored bytes read so far."""
        return self._checkpoint.stats.bytes_read

    def read(self, skip: int = 0) -> Generator[list[OutputBlock]]:
        """Iterate over all blocks, some at a time; close the iterator unless it is exhausted.

        Args:
            skip: number of blocks to skip, the first in the order of the blocks. Data that only
                these need is not read.

        Raises:
            CorruptionError, ReplacedError, StorageError: the checkpoint could not be read.
        """
        threads = readers(self._checkpoint.location, cores() - 1)  # one core is the writer's
        self._checkpoint.limit_reading(threads=threads, memory=self._reading)
        outputs = {id(target): output for output, target, _ in self._targets}
        planned, left_out = _after(self._steps(), skip)
        with closing(
            assemble_chunks(self._checkpoint, planned, self._at_once, BatchMemory())
        ) as batches:
            for batch in batches:
                blocks = []
                for chunk in batch.whole:
                    box = Box(
                        chunk.start,
                        tuple(a + n for a, n in zip(chunk.start, chunk.shape, strict=True)),
                    )
                    elements = chunk.raw.view(chunk.target.dtype.storage).reshape(chunk.shape)
                    blocks.append(OutputBlock(outputs[id(chunk.target)], box, elements))
                dropped = min(left_out, len(blocks))
                left_out -= dropped
                yield blocks[dropped:]

    def order(self) -> Iterator[tuple[OutputTensor, Box]]:
        """Every block, in the order of `read`; nothing is read."""
        outputs = {id(target): output for output, target, _ in self._targets}
        for planned in self._steps():
            if planned.target.is_one_chunk:
                yield outputs[id(planned.target)], planned.step.box
                continue
            for _, _, boxes in planned.pairs:
                for i in np.flatnonzero(~planned.unfinished(boxes)).tolist():
                    yield outputs[id(planned.target)], boxes[i]

    def _target(
        self, output: OutputTensor, blocks: Blocks
    ) -> tuple[OutputTensor, ChunkTarget, list[Piece]]:
        sources = [
            (self._tensors[view.tensor], view) for view in output.sources if prod(view.shape)
        ]
        stored = [piece for tensor, view in sources for piece in view.pieces(tensor.pieces)]
        return (
            output,
            ChunkTarget(
                output.name,
                output.dtype,
                blocks(output, stored, self.room),
                sources,
                as_stored=False,
            ),
            stored,
        )

    def _steps(self) -> Iterator[PlannedStep]:
        for _, target, stored in self._targets:
            if target.is_one_chunk:
                yield PlannedStep(target, Step(target.pieces[0].box))
                continue
            for step in self._steps_of(target, stored):
                yield PlannedStep(target, step)

    def _steps_of(self, target: ChunkTarget, stored: Sequence[Piece]) -> Iterator[Step]:
        joined, room = self._at_once // target.dtype.itemsize, self.room // target.dtype.itemsize
        if self._in_order:
            for piece in target.pieces:
                yield from cut(piece.box, [piece], room, Order.ROWS, sources=stored, joined=joined)
            return
        cells = plan_cells(target.pieces, stored, target.dtype.itemsize)
        for box in cells.boxes(range(cells.count), joined):
            yield from cut(box, target.pieces, room, Order.OPEN, sources=stored)


def row_blocks(output: OutputTensor, stored: Sequence[Piece], room: int) -> list[Piece]:
    """Blocks of complete rows, in row-major order; arguments as in `Blocks`."""
    return cut_into_grids(
        output.name, output.shape, stored, output.dtype.itemsize, room, Order.ROWS
    )


def read_once_blocks(output: OutputTensor, stored: Sequence[Piece], room: int) -> list[Piece]:
    """Blocks of complete rows, or of parts of rows where only these read each stored byte once.

    Arguments as in `Blocks`.
    """
    return cut_into_grids(
        output.name, output.shape, stored, output.dtype.itemsize, room, Order.OPEN
    )


def _after(planned: Iterator[PlannedStep], skip: int) -> tuple[Iterator[PlannedStep], int]:
    """The steps needed after skipping `skip` blocks, and the number of blocks to drop.

    These blocks are dropped from the results of the steps.
    """
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
    return _chain(held, planned), skip


def _chain(first: list[PlannedStep], then: Iterator[PlannedStep]) -> Iterator[PlannedStep]:
    while first:
        yield first.pop(0)  # frees the plan of each step
    yield from then
