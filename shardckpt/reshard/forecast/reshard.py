"""Counts of the stored bytes and the requests that a reshard reads.

A task reads its steps in batches that fill a buffer (`reshard.task`). Each step reads every source chunk that it overlaps once, and
adjacent chunks of a batch are read together. Of a job with very many tasks, an evenly chosen sample is counted and extrapolated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardckpt.format.zarr_arrays import room_for
from shardckpt.io.buffers import round_up
from shardckpt.layout.box import BoxArray
from shardckpt.plan.overlaps import overlaps, touched
from shardckpt.plan.pieces import batches, count_chunks
from shardckpt.reading.locate import MOST_CHUNKS
from shardckpt.reading.runs import count_runs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from shardckpt.reading.places import Places
    from shardckpt.reading.runs import RunLimits
    from shardckpt.reshard.plan import ReshardPlan, Task

    Ints = NDArray[np.int64]

MOST_COUNTED = 16
"""Maximum number of counted tasks; each takes a few milliseconds."""


class ReshardReads(NamedTuple):
    """Reads of the complete job."""

    nbytes: int
    """Stored bytes of chunks."""
    requests: int
    """Read calls on a local disk, requests to an object store."""
    counted: int
    """Number of tasks that were counted; the same number of requests per byte is assumed for the others."""


def reshard_reads(plan: ReshardPlan, places: Places, limits: RunLimits) -> ReshardReads:
    """Count the stored bytes and requests that a reshard reads.

    Args:
        plan: plan of the reshard.
        places: places of the source's chunks.
        limits: the reader's limits for joining chunks.
    """
    chosen = sorted({round(i) for i in np.linspace(0, len(plan.tasks) - 1, min(MOST_COUNTED, len(plan.tasks)))})
    nbytes = requests = elements = 0
    for task in (plan.tasks[i] for i in chosen):
        for batch in batches(_steps(plan, task, places), lambda step: (step[0],), (plan.memory.batch,)):
            file, offset, length = (np.concatenate(column) for column in zip(*(step[1] for step in batch), strict=True))
            for i in range(0, len(file), MOST_CHUNKS):
                some = slice(i, i + MOST_CHUNKS)
                requests += count_runs(file[some], offset[some], length[some], limits)[0]
            nbytes += int(length.sum())
        elements += task.nbytes
    if len(chosen) == len(plan.tasks) or not elements:
        return ReshardReads(nbytes, requests, len(chosen))
    return ReshardReads(round(nbytes * plan.nbytes / elements), round(requests * plan.nbytes / elements), len(chosen))


def _steps(plan: ReshardPlan, task: Task, places: Places) -> Iterator[tuple[int, tuple[Ints, Ints, Ints]]]:
    """Yield per step its bytes of a buffer, and the chunks that it reads: file, offset and length."""
    for share in task.shares:
        target, source = plan.target.tensors[share.tensor], plan.sources[share.tensor]
        itemsize = target.dtype.itemsize
        found = {piece.path: places.of(source.name, [piece]) for piece in source.pieces}
        for step in plan.steps(share):
            box = BoxArray.of([step.box], step.box.ndim)
            held = sum(count_chunks(p, step.box) * round_up(room_for(p.chunks, itemsize)) for p in touched(target.pieces, box))
            read = [(found[p.path], np.unique(overlaps(p, box).chunk)) for p in touched(source.pieces, box)]
            columns = [(at.file[chunk], at.offset[chunk], at.length[chunk]) for at, chunk in read]
            file, offset, length = (np.concatenate(column) for column in zip(*columns, strict=True))
            yield held, (file, offset, length)
