"""Counts of the stored bytes and the requests that a reshard reads.

A task reads its steps in batches that fill a buffer (`reshard.task`). Each step reads every source
chunk that it overlaps once, and adjacent chunks of a batch are read together. Of a job with very
many tasks, an evenly chosen sample is counted and extrapolated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardckpt.layout.box import BoxArray
from shardckpt.plan.pieces import overlaps, touched
from shardckpt.reshard.forecast.stored import count_requests
from shardckpt.streaming.batches import batches_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from shardckpt.reading.places import ChunkPlaces, Places
    from shardckpt.reading.runs import RunLimits
    from shardckpt.reshard.plan import ReshardPlan
    from shardckpt.streaming.batches import PlannedStep

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
    """Number of tasks that were counted; the same number of requests per byte is assumed for the
    others."""


def reshard_reads(plan: ReshardPlan, places: Places, limits: RunLimits) -> ReshardReads:
    """Count the stored bytes and requests that a reshard reads.

    Args:
        plan: plan of the reshard.
        places: places of the source's chunks.
        limits: the reader's limits for joining chunks.
    """
    chosen = sorted(
        {round(i) for i in np.linspace(0, len(plan.tasks) - 1, min(MOST_COUNTED, len(plan.tasks)))}
    )
    nbytes = requests = elements = 0
    for task in (plan.tasks[i] for i in chosen):
        of_arrays: dict[str, ChunkPlaces] = {}
        for batch in batches_of(plan.planned_steps(task), plan.memory.batch):
            chunks = [
                columns
                for planned in batch.steps
                for columns in _chunks_read(plan, planned, places, of_arrays)
            ]
            requests += count_requests(chunks, limits)
            nbytes += sum(int(length.sum()) for _, _, length in chunks)
        elements += task.nbytes
    if len(chosen) == len(plan.tasks) or not elements:
        return ReshardReads(nbytes, requests, len(chosen))
    return ReshardReads(
        round(nbytes * plan.nbytes / elements),
        round(requests * plan.nbytes / elements),
        len(chosen),
    )


def _chunks_read(
    plan: ReshardPlan, planned: PlannedStep, places: Places, of_arrays: dict[str, ChunkPlaces]
) -> Iterator[tuple[Ints, Ints, Ints]]:
    """For each array of the source, yield file, offset and length of the chunks that a step reads.

    `of_arrays` keeps places of arrays.
    """
    source, box = (
        plan.sources[planned.target.name],
        BoxArray.of([planned.step.box], planned.step.box.ndim),
    )
    for piece in touched(source.pieces, box):
        chunk = np.unique(overlaps(piece, box).chunk)
        at = of_arrays.get(piece.path) or of_arrays.setdefault(
            piece.path, places.of(source.name, [piece])
        )
        yield at.file[chunk], at.offset[chunk], at.length[chunk]
