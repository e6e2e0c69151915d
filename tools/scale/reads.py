"""How many requests does one host of a restore make?

Of some hosts, evenly spread, each with caches of its own:

1. The commit record, and the header of the table of all (`tables.py` has both tables and records of all hosts that saved).
2. What the product's own `TableBlocks` reads to find the host's chunks, a batch of tensors after the other as a restore has them: counted
   where it is read.
3. The data, per batch: runs of neighbours in data files, joined as the reader joins them (`io.runs`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from shardckpt.batches import batches
from shardckpt.io.finder import MOST_CHUNKS
from shardckpt.io.reader import OBJECT_GAP, OBJECT_RUN
from shardckpt.io.runs import RunLimits, count_runs
from shardckpt.io.stats import ReadStats
from shardckpt.io.table_blocks import TableBlocks
from shardckpt.planning.plan import overlaps
from shardckpt.restoring import LARGEST_BATCH
from tools.scale.host import DEVICES_PER_HOST, Job, held
from tools.scale.tables import Tables

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardckpt.io.store import Store
    from shardckpt.structure import TensorRecord

__all__ = ["MEASURED"]

HOSTS = 4
"""That are looked at, at most."""
LIMITS = RunLimits(OBJECT_RUN[0], OBJECT_GAP, MOST_CHUNKS)
COUNTED = ("table requests", "table bytes", "data requests", "data bytes")


def prepared(onto_devices: int | None = None, **job: Any) -> Callable[[], dict[str, float]]:
    """Make the tables of a save; what is measured is counting.

    Args:
        onto_devices: over how many the same kind of layout is restored; None: as many.
        job: that has saved.
    """
    asked = Job(**job)
    onto = Job(asked.tree, asked.kind, onto_devices or asked.devices, asked.tensors)
    tables = Tables(asked)

    def run() -> dict[str, float]:
        hosts = np.unique(np.linspace(0, onto.hosts - 1, HOSTS).astype(int)).tolist()
        found = [restored(tables, onto, host) for host in hosts]
        alone = [restored(tables, onto, host, ask=False) for host in hosts]
        counted: dict[str, float] = {
            "hosts": onto.hosts,
            "saved by": asked.hosts,
            "table of all": tables.reference.size,
            "header": tables.reference.header,
        }
        for key in COUNTED:
            counted[key] = sum(each[key] for each in found) / len(found)
            counted[f"most {key}"] = max(each[key] for each in found)
        for key in COUNTED[:2]:
            counted[f"{key} without hosts' tables"] = sum(each[key] for each in alone) / len(alone)
        return counted

    return run


def restored(tables: Tables, onto: Job, host: int, *, ask: bool = True) -> dict[str, int]:
    """What one host reads; `ask`: whether hosts' own tables may be among that."""
    stats, requests, nbytes = ReadStats(), 0, 0
    table = TableBlocks(cast("Store", tables), tables.reference, stats, None, tables.hosts if ask else ())
    devices = tuple(range(host * DEVICES_PER_HOST, min((host + 1) * DEVICES_PER_HOST, onto.devices)))
    boxes = {name: held(onto.layouts[name], tensor.shape, devices)[0] for name, tensor in tables.records.items()}

    def share(tensor: TensorRecord) -> tuple[int]:
        return (int(boxes[tensor.name].sizes().sum()) * tensor.dtype.storage.itemsize,)

    for batch in batches(tables.records.values(), share, (LARGEST_BATCH,)):
        table.prepare((piece, boxes[tensor.name]) for tensor in batch for piece in tensor.pieces)
        pieces = [(piece, boxes[tensor.name]) for tensor in batch for piece in tensor.pieces]
        chunks = [np.unique(overlaps(piece, wanted).chunk) for piece, wanted in pieces]
        array, every = np.repeat(np.arange(len(pieces)), list(map(len, chunks))), np.concatenate(chunks)
        for i in range(0, len(every), MOST_CHUNKS):
            _, rows = table.find([piece.path for piece, _ in pieces], array[i : i + MOST_CHUNKS], every[i : i + MOST_CHUNKS])
            runs, read = count_runs(*(column.astype(np.int64) for column in (rows.file, rows.offset, rows.length)), LIMITS)
            requests, nbytes = requests + runs, nbytes + read
    return dict(zip(COUNTED, (stats.index_reads, stats.index_bytes, requests, nbytes), strict=True))


MEASURED = {"requests": prepared}
