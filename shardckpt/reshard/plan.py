"""The plan of a reshard: tasks, memory and cost, from the source's record and options alone.

1. `targets`: how each tensor will be stored.
2. `plan.cells`: each tensor is cut into boxes that can be read and written independently.
3. All cells, in the order of the tensors, form one sequence. It is cut into *tasks* of equal
   length; a cell belongs to the task that contains its middle. A task is one host of the new
   attempt: it writes its own data and a record, and knows nothing of the other tasks. The cut
   depends on sizes alone, not on workers or memory, so a job that is restarted elsewhere finds the
   same tasks.
4. `streaming.memory`: what each worker may use. A task handles its cells in steps that fit
   (`ReshardPlan.steps`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt.format.zarr_arrays import CHECKSUM_BYTES, largest_chunk
from shardckpt.io.store import kind_of
from shardckpt.plan.cells import Cells, plan_cells, read_bytes
from shardckpt.plan.cut import Order, cut
from shardckpt.plan.views import View
from shardckpt.reshard.targets import Targets, targets
from shardckpt.streaming.batches import ChunkTarget, PlannedStep
from shardckpt.streaming.memory import Memory, Sizes, check_limit, share
from shardckpt.text import count, file_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from shardckpt.format.record import CheckpointRecord
    from shardckpt.format.structure import Structure, TensorRecord
    from shardckpt.io.url import Location
    from shardckpt.plan.cut import Step
    from shardckpt.reshard.options import ReshardOptions
    from shardckpt.streaming.source import OpenSource

MOST_TASKS = 4096
"""Approximate maximum number of tasks of a job."""
_ENOUGH_TASKS = 8
"""Desired minimum number of tasks: a smaller job gets shorter tasks, so that several workers have
work and progress is visible."""
_SHORTEST_TASK = 64 << 20
"""Minimum bytes of a task that is shortened for this reason: its start and end, without reads or
writes, take the time of about 10 MiB."""


@dataclass(frozen=True, slots=True)
class TaskShare:
    """Some cells of one tensor."""

    tensor: str
    """Name of the tensor in the target."""
    cells: range
    """Range of the tensor's cells, counted in row-major order."""
    nbytes: int
    """Bytes of the cells' elements in the target."""


@dataclass(frozen=True, slots=True)
class Task:
    """The unit of work of one worker: one host of the new attempt."""

    number: int
    """Number of the task and of its host, from 0."""
    shares: tuple[TaskShare, ...]
    """The cells that the task writes; empty if the task only copies a process's own values."""

    @property
    def nbytes(self) -> int:
        """Bytes of the elements that the task writes."""
        return sum(share.nbytes for share in self.shares)


@dataclass(frozen=True, slots=True, repr=False)
class ReshardPlan(Targets):
    """The complete plan of a reshard."""

    source: CheckpointRecord
    """Record of the checkpoint to read."""
    layout: str
    """Storage layout of the target: "packed" or "zarr"."""
    compression: str | None
    """Compression of the target; None: uncompressed."""
    tasks: tuple[Task, ...]
    memory: Memory
    """Memory of each worker."""
    _cells: Mapping[str, Cells] = field(default_factory=dict, repr=False, compare=False)

    def __repr__(self) -> str:
        """Tensors, bytes and tasks in short."""
        work = (
            f"{count(len(self.tasks), 'task')}, {file_size(self.read_bytes)} read, "
            f"{file_size(self.written_bytes)} written"
        )
        return (
            f"<ReshardPlan of {count(len(self.target.tensors), 'tensor')}, "
            f"{file_size(self.nbytes)}: {work}>"
        )

    @property
    def unchanged(self) -> bool:
        """Whether the target has exactly the source's chunks, byte for byte."""
        return (
            (self.layout, self.compression) == (self.source.layout, self.source.compression)
            and self.target.tree == self.source.structure.tree
            and not self.source.structure.bases
            and all(
                t.dtype == self.sources[n].dtype and t.pieces == self.sources[n].pieces
                for n, t in self.target.tensors.items()
            )
        )

    @property
    def notices(self) -> list[dict[str, Any]]:
        """The distinct notices about layouts, each with its tensor count and first tensor."""
        counts: Counter[str] = Counter()
        first: dict[str, str] = {}
        for name, decision in self.decisions.items():
            for notice in decision.notices:
                counts[notice] += 1
                first.setdefault(notice, name)
        return [
            {"notice": notice, "tensors": n, "first": first[notice]}
            for notice, n in counts.most_common()
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements in the target."""
        return sum(task.nbytes for task in self.tasks)

    @property
    def source_bytes(self) -> int:
        """Stored bytes of the source tensors, uncompressed; each chunk counts once."""
        return _stored_bytes(self.sources.values())

    @property
    def read_bytes(self) -> int:
        """Stored bytes that all tasks read, uncompressed."""
        return sum(self.task_read_bytes(task) for task in self.tasks)

    @property
    def written_bytes(self) -> int:
        """Stored bytes of the target, uncompressed, including the padding of chunks at edges."""
        return _stored_bytes(self.target.tensors.values())

    @property
    def amplification(self) -> float:
        """Stored bytes read per stored byte of the source tensors."""
        return self.read_bytes / max(1, self.source_bytes)

    def steps(self, share: TaskShare) -> Iterator[Step]:
        """Yield the steps of a share in order."""
        target, source = self.target.tensors[share.tensor], self.sources[share.tensor]
        itemsize, room = target.dtype.itemsize, self.memory.room
        for box in self._cells[share.tensor].boxes(share.cells, self.memory.batch // itemsize):
            yield from cut(box, target.pieces, room // itemsize, Order.OPEN, sources=source.pieces)

    def planned_steps(self, task: Task) -> Iterator[PlannedStep]:
        """Yield the steps of a task in order, with the target of each."""
        for cells in task.shares:
            tensor, source = self.target.tensors[cells.tensor], self.sources[cells.tensor]
            view = View.whole(source.name, source.shape)
            target = ChunkTarget(
                tensor.name, tensor.dtype, tensor.pieces, [(source, view)], as_stored=True
            )
            for step in self.steps(cells):
                yield PlannedStep(target, step)

    def task_read_bytes(self, task: Task) -> int:
        """Stored bytes that a task reads, uncompressed; repeated reads count each time."""
        return sum(self._share_read_bytes(share) for share in task.shares)

    def _share_read_bytes(self, share: TaskShare) -> int:
        target, source, cells = (
            self.target.tensors[share.tensor],
            self.sources[share.tensor],
            self._cells[share.tensor],
        )
        # No source chunk is read twice between cells of one task, but each step of a large cell
        # counts by itself.
        if 2 * cells.largest() * target.dtype.itemsize <= self.memory.room:
            boxes = cells.boxes(share.cells, prod(target.shape))
        else:
            boxes = (step.box for step in self.steps(share))
        return sum(
            read_bytes(box, source.pieces, source.dtype.itemsize, CHECKSUM_BYTES) for box in boxes
        )


def plan_reshard(
    source: OpenSource, options: ReshardOptions, destination: Location | None = None
) -> ReshardPlan:
    """Plan a reshard from the source's record, which is already in memory; nothing is read.

    Args:
        source: the checkpoint to read.
        options: the requested result.
        destination: place of the new checkpoint, which determines the memory for writing; None: a
            local disk.

    Raises:
        OptionError, ShardingError, NamesMismatchError, DtypeMismatchError, LeafError: the request
        does not fit the source.
        BudgetError: the memory limit is too small; names it, and a sufficient one.
    """
    record, native = source.record, source.native
    layout = options.layout or record.layout
    keep_chunks = native and layout == record.layout
    made = targets(
        record.structure,
        options,
        str(source.location),
        files=layout == "zarr",
        keep_chunks=keep_chunks,
    )
    compression = {None: record.compression, "none": None}.get(
        options.compression, options.compression
    )
    if compression == "difference":  # the new checkpoint has all elements
        compression = None
    sizes = Sizes(
        source_chunk=largest_chunk(made.sources.values()),
        target_chunk=largest_chunk(made.target.tensors.values()),
        source_local=kind_of(source.location).near,
        target_local=destination is None or kind_of(destination).near,
        # The decoding of foreign formats is unknown; bases are not known yet either.
        source_compressed=record.compression is not None
        or bool(record.structure.bases)
        or not native,
        target_compressed=compression is not None,
    )
    # Check before cells are cut: their number grows with the number of elements that a file claims
    # to have.
    check_limit(options.budget, options.workers or 1, sizes, str(source.location))
    least = record.processes if made.values else 1
    length = _task_length(made.target, options.task_length)
    cells = {
        name: plan_cells(
            tensor.pieces, made.sources[name].pieces, made.sources[name].dtype.itemsize, length // 4
        )
        for name, tensor in made.target.tensors.items()
        if tensor.nbytes
    }
    tasks = _tasks(cells, made.target, length, least)
    return ReshardPlan(
        made.target,
        made.sources,
        made.decisions,
        made.values,
        made.conversions,
        source=record,
        layout=layout,
        compression=compression,
        tasks=tasks,
        memory=share(
            options.budget, options.workers, len(tasks), length, sizes, str(source.location)
        ),
        _cells=cells,
    )


def _stored_bytes(tensors: Iterable[TensorRecord]) -> int:
    """Bytes of all chunks of some tensors, uncompressed, with their checksums."""
    return sum(
        p.num_chunks * (prod(p.chunks) * t.dtype.itemsize + CHECKSUM_BYTES)
        for t in tensors
        for p in t.pieces
    )


def _task_length(structure: Structure, most: int) -> int:
    """Bytes that a task writes: at most `most`, unless that makes too many tasks.

    Less if there are few tasks.
    """
    total = sum(t.nbytes for t in structure.tensors.values())
    return max(min(most, max(_SHORTEST_TASK, -(-total // _ENOUGH_TASKS))), -(-total // MOST_TASKS))


def _tasks(
    cells: Mapping[str, Cells], structure: Structure, length: int, least: int
) -> tuple[Task, ...]:
    """Cut the sequence of all cells into tasks of `length` bytes.

    At least `least` tasks, the last of them empty if necessary.
    """
    if not cells:
        return tuple(Task(number, ()) for number in range(least))
    names, grids = list(cells), list(cells.values())
    sizes = np.concatenate(
        [grid.sizes() * structure.tensors[name].dtype.itemsize for name, grid in cells.items()]
    )
    counts = np.array([grid.count for grid in grids])
    tensor, begins = np.repeat(np.arange(len(grids)), counts), np.cumsum(counts) - counts
    which = (np.cumsum(sizes) - sizes // 2) // length
    first = np.flatnonzero(np.diff(tensor, prepend=-1) | np.diff(which, prepend=-1))
    by_task: dict[int, list[TaskShare]] = {}
    of, nbytes = tensor[first], np.add.reduceat(sizes, first)
    runs = (first - begins[of], np.append(first[1:], len(sizes)) - begins[of])
    for task, k, a, b, n in zip(
        which[first].tolist(),
        of.tolist(),
        *(run.tolist() for run in runs),
        nbytes.tolist(),
        strict=True,
    ):
        by_task.setdefault(task, []).append(TaskShare(names[k], range(a, b), n))
    shares = [*by_task.values(), *([[]] * (least - len(by_task)))]
    return tuple(Task(number, tuple(of_task)) for number, of_task in enumerate(shares))
