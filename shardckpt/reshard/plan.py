"""The plan of a reshard: its tasks, memory and cost, from the source's record and the options alone.

1. `targets`: how each tensor will be stored.
2. `cells`: each tensor is cut into boxes that can be read and written by themselves.
3. All cells, in the order of the tensors, make one tape. It is cut into *tasks* of equal length, one cell wherever its
   middle lies. A task is one host of the new attempt: it writes data of its own and a record, and knows nothing of the
   others. How the tape is cut depends on sizes alone, not on workers or memory, so a job that is started again elsewhere
   finds the same tasks.
4. `memory`: what each worker may use. A task's cells are done in steps that fit (`ReshardPlan.steps`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.format.zarr_arrays import CHECKSUM_BYTES, largest_chunk
from shardckpt.reshard.cells import Cells, cut, read_bytes, steps
from shardckpt.reshard.memory import Memory, Sizes, check_limit, share
from shardckpt.reshard.targets import targets

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardckpt.format.record import CheckpointRecord
    from shardckpt.format.structure import Structure, TensorRecord
    from shardckpt.io.url import Location
    from shardckpt.reshard.cells import Step
    from shardckpt.reshard.dtype_rules import ConvertedSubtree
    from shardckpt.reshard.options import ReshardOptions
    from shardckpt.reshard.rules import Decision
    from shardckpt.reshard.source import OpenSource

__all__ = ["ReshardPlan", "Task", "TaskShare", "plan_reshard"]

MOST_TASKS = 4096
"""About how many tasks a job has at most."""
_ENOUGH_TASKS = 8
"""A job that would have fewer tasks has shorter ones: there is something to do for several workers, and progress is seen."""
_SHORTEST_TASK = 64 << 20
"""Bytes below which a task is not made shorter for that: what begins and ends it (nothing is read or written meanwhile) takes the
time of some 10 MiB."""


@dataclass(frozen=True, slots=True)
class TaskShare:
    """Some cells of one tensor."""

    tensor: str
    """Its name in the target."""
    cells: range
    """Which of its cells, counted in row-major order."""
    nbytes: int
    """Of their elements in the target."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is done by one worker at a time: one host of the new attempt."""

    number: int
    """From 0; the host's number."""
    shares: tuple[TaskShare, ...]
    """What it writes; none where it only carries over what a process owned by itself."""

    @property
    def nbytes(self) -> int:
        """Of the elements that it writes."""
        return sum(share.nbytes for share in self.shares)


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """What a reshard does."""

    source: CheckpointRecord
    """Of the checkpoint that is read."""
    target: Structure
    """Of the new one."""
    sources: Mapping[str, TensorRecord]
    """By name in the target, the tensor of the source that it is made of."""
    decisions: Mapping[str, Decision]
    """By name in the target, how a tensor is laid out, and why."""
    values: frozenset[str]
    """Names of the places where every process that saved had a value of its own."""
    layout: str
    """Of the target: "packed" or "zarr"."""
    compression: str | None
    """Of the target."""
    tasks: tuple[Task, ...]
    memory: Memory
    """What each worker may use."""
    conversions: tuple[ConvertedSubtree, ...] = ()
    """How many tensors `dtype` converts and leaves, by subtree."""
    _cells: Mapping[str, Cells] = field(default_factory=dict, repr=False, compare=False)

    @property
    def unchanged(self) -> bool:
        """Whether every chunk of the target is one of the source, byte for byte, and there are no others."""
        return (
            (self.layout, self.compression) == (self.source.layout, self.source.compression)
            and self.target.tree == self.source.structure.tree
            and not self.source.structure.bases
            and all(t.dtype == self.sources[n].dtype and t.pieces == self.sources[n].pieces for n, t in self.target.tensors.items())
        )

    @property
    def nbytes(self) -> int:
        """Of all elements in the target."""
        return sum(task.nbytes for task in self.tasks)

    @property
    def source_bytes(self) -> int:
        """Stored bytes of the tensors that are read, uncompressed: of each chunk once."""
        return sum(p.num_chunks * (prod(p.chunks) * t.dtype.itemsize + CHECKSUM_BYTES) for t in self.sources.values() for p in t.pieces)

    @property
    def read_bytes(self) -> int:
        """Stored bytes that all tasks read, uncompressed."""
        return sum(self.task_read_bytes(task) for task in self.tasks)

    @property
    def written_bytes(self) -> int:
        """Stored bytes of the target, uncompressed, with what fills up chunks at edges."""
        return sum(
            p.num_chunks * (prod(p.chunks) * t.dtype.itemsize + CHECKSUM_BYTES) for t in self.target.tensors.values() for p in t.pieces
        )

    @property
    def amplification(self) -> float:
        """Stored bytes that are read, per stored byte of the tensors."""
        return self.read_bytes / max(1, self.source_bytes)

    def steps(self, share: TaskShare) -> Iterator[Step]:
        """What is read at once of a share, one after another."""
        target, source = self.target.tensors[share.tensor], self.sources[share.tensor]
        itemsize, room = target.dtype.itemsize, self.memory.room
        for box in self._cells[share.tensor].boxes(share.cells, self.memory.batch // itemsize):
            yield from steps(box, target.pieces, source.pieces, itemsize, room)

    def task_read_bytes(self, task: Task) -> int:
        """Stored bytes that a task reads, uncompressed; each time that it reads them."""
        return sum(self._share_read_bytes(share) for share in task.shares)

    def _share_read_bytes(self, share: TaskShare) -> int:
        target, source, cells = self.target.tensors[share.tensor], self.sources[share.tensor], self._cells[share.tensor]
        # Between cells nothing of the source is cut that the task has both sides of, but of a large one every step counts.
        if 2 * cells.largest() * target.dtype.itemsize <= self.memory.room:
            boxes = cells.boxes(share.cells, prod(target.shape))
        else:
            boxes = (step.box for step in self.steps(share))
        return sum(read_bytes(box, source.pieces, source.dtype.itemsize, CHECKSUM_BYTES) for box in boxes)


def plan_reshard(source: OpenSource, options: ReshardOptions, destination: Location | None = None) -> ReshardPlan:
    """Plan a reshard; nothing is read but the source's record, which is read already.

    Args:
        source: the checkpoint to read.
        options: what to make of it.
        destination: where to, which decides what writing takes; None: a local disk.

    Raises:
        OptionError, ShardingError, NamesMismatchError, DtypeMismatchError, LeafError: what is asked for cannot be made of it.
        BudgetError: the memory limit does not suffice; names it, and what would.
    """
    record = source.record
    ours = bool(record.hosts)  # what no host of a save has written is cut as somebody else cut it
    layout = options.layout or record.layout
    keep_chunks = ours and layout == record.layout
    made = targets(record.structure, options, str(source.location), files=layout == "zarr", keep_chunks=keep_chunks)
    compression = record.compression if options.compression is None else None if options.compression == "none" else options.compression
    sizes = Sizes(
        source_chunk=largest_chunk(made.sources.values()),
        target_chunk=largest_chunk(made.structure.tensors.values()),
        source_local=source.location.local is not None,
        target_local=destination is None or destination.local is not None,
        # How others decode, and from what, is not known, and not yet of bases either.
        source_compressed=record.compression is not None or bool(record.structure.bases) or not ours,
        target_compressed=compression is not None,
    )
    # Before cells are cut: there are as many as a file claims to have elements for.
    check_limit(options.budget, options.workers or 1, sizes, str(source.location))
    least = record.processes if made.values else 1
    length = _task_length(made.structure, options.task_length)
    cells = {
        name: cut(tensor.pieces, made.sources[name].pieces, made.sources[name].dtype.itemsize, length // 4)
        for name, tensor in made.structure.tensors.items()
        if tensor.nbytes
    }
    tasks = _tasks(cells, made.structure, length, least)
    return ReshardPlan(
        source=record,
        target=made.structure,
        sources=made.sources,
        decisions=made.decisions,
        values=made.values,
        layout=layout,
        compression=compression,
        tasks=tasks,
        memory=share(options.budget, options.workers, len(tasks), length, sizes, str(source.location)),
        conversions=made.conversions,
        _cells=cells,
    )


def _task_length(structure: Structure, most: int) -> int:
    """Bytes that a task writes: at most `most`, unless there were too many of them; less where there are few."""
    total = sum(t.nbytes for t in structure.tensors.values())
    return max(min(most, max(_SHORTEST_TASK, -(-total // _ENOUGH_TASKS))), -(-total // MOST_TASKS))


def _tasks(cells: Mapping[str, Cells], structure: Structure, length: int, least: int) -> tuple[Task, ...]:
    """Cut the tape of all cells into parts of that many bytes; at least so many tasks, the last of them empty if they must be."""
    if not cells:
        return tuple(Task(number, ()) for number in range(least))
    names, grids = list(cells), list(cells.values())
    sizes = np.concatenate([grid.sizes() * structure.tensors[name].dtype.itemsize for name, grid in cells.items()])
    counts = np.array([grid.count for grid in grids])
    tensor, begins = np.repeat(np.arange(len(grids)), counts), np.cumsum(counts) - counts
    which = (np.cumsum(sizes) - sizes // 2) // length
    first = np.flatnonzero(np.diff(tensor, prepend=-1) | np.diff(which, prepend=-1))
    found: dict[int, list[TaskShare]] = {}
    of, nbytes = tensor[first], np.add.reduceat(sizes, first)
    runs = (first - begins[of], np.append(first[1:], len(sizes)) - begins[of])
    for task, k, a, b, n in zip(which[first].tolist(), of.tolist(), *(run.tolist() for run in runs), nbytes.tolist(), strict=True):
        found.setdefault(task, []).append(TaskShare(names[k], range(a, b), n))
    shares = [*found.values(), *([[]] * (least - len(found)))]
    return tuple(Task(number, tuple(some)) for number, some in enumerate(shares))
