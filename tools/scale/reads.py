"""How many requests does one host of a restore make, onto the layout that was saved?

The layout is FSDP, where every chunk of the host is its own: where its data files have them follows from its plan.

1. The commit record, and the chunk table's header.
2. Of the table, per batch of tensors, the units with rows of its chunks; neighbours together.
3. Of the data files, per batch, runs of adjacent chunks, joined as the reader joins them (`io.runs`).
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.batches import batches
from shardckpt.io.codec import CHECKSUM_BYTES
from shardckpt.io.finder import MOST_CHUNKS
from shardckpt.io.packed import OBJECT_BYTES
from shardckpt.io.reader import OBJECT_GAP, OBJECT_RUN
from shardckpt.io.runs import RunLimits, count_runs
from shardckpt.io.table_blocks import LARGEST_REQUEST, LEAST_REQUEST
from shardckpt.io.table_header import ROW
from shardckpt.planning.plan import chunks_inside
from shardckpt.restoring import LARGEST_BATCH
from tools.scale.host import Job

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = ["MEASURED"]


def prepared(**job: int | str) -> Callable[[], dict[str, int]]:
    """Plan it; what is measured is counting."""
    asked = Job(**job)  # type: ignore[arg-type]
    plan = asked.planned()

    def run() -> dict[str, int]:
        limits = RunLimits(OBJECT_RUN[0], OBJECT_GAP, MOST_CHUNKS)
        table = data = written = row = 0
        first_row: dict[str, int] = {}
        for name, tensor in plan.tensors.items():
            first_row[name], row = row, row + tensor.num_chunks
        for names in batches(plan.blocks, lambda name: (sum(block.nbytes for block in plan.blocks[name]),), (LARGEST_BATCH,)):
            rows, lengths = [], []
            for name in names:
                for block in plan.blocks[name]:
                    chunks, _ = chunks_inside(block.piece, block.box)
                    rows.append(chunks + first_row[name])
                    lengths.append(np.full(len(chunks), prod(block.piece.chunks) * block.itemsize + CHECKSUM_BYTES))
            length = np.concatenate(lengths)
            at = written + np.cumsum(length) - length
            data += count_runs(at // OBJECT_BYTES, at % OBJECT_BYTES, length, limits)[0]
            written += int(length.sum())
            table += _units(np.concatenate(rows))
        return {"hosts": asked.hosts, "data files": -(-written // OBJECT_BYTES), "bytes": written, "table reads": table, "data reads": data}

    return run


def _units(rows: NDArray[np.int64]) -> int:
    """Requests for the units of a chunk table that have those rows."""
    units = np.unique(rows * ROW.itemsize // LEAST_REQUEST)
    stretches = np.split(units, np.flatnonzero(np.diff(units) > 1) + 1)
    return sum(-(-len(stretch) * LEAST_REQUEST // LARGEST_REQUEST) for stretch in stretches)


MEASURED = {"requests": prepared}
