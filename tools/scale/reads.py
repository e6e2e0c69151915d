"""Requests that one host of a restore makes.

They are counted for some hosts, evenly spread, each with caches of its own:

1. The commit record, and the header of the table of all (`tables.py` has both tables and records of
   all hosts that saved).
2. What the product's own `TableBlocks` reads to find the host's chunks, a batch of tensors after
   the other as a restore has them: counted where it is read.
3. The data, per batch: runs of neighbours in data files, joined as the reader joins them
   (`reading.runs`).

*Together*: with `restore(cooperative=True)`, where several hosts need the same. That is cut into
rounds and dealt out by the product's own rule (`planning.shares`); counted is the part of each
round that the host reads itself. What hosts send to each other is not a request.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from shardckpt.layout.box import BoxArray
from shardckpt.options import DEFAULT_MEMORY_LIMIT
from shardckpt.plan.pieces import batches, overlaps, touched
from shardckpt.plan.shares import SharedBoxes, peers_sharing_reads, rounds
from shardckpt.plan.writers import box_holders
from shardckpt.reading.cooperative import exchange_bytes
from shardckpt.reading.locate import MOST_CHUNKS
from shardckpt.reading.reader import OBJECT_GAP, OBJECT_RUN, ReadStats
from shardckpt.reading.restore import LARGEST_BATCH
from shardckpt.reading.runs import RunLimits, count_runs
from shardckpt.reading.table_blocks import TableBlocks
from tools.scale.host import Job, held
from tools.scale.layouts import DEVICES_PER_HOST
from tools.scale.tables import Tables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardckpt.format.structure import TensorRecord
    from shardckpt.io.store import Store
    from shardckpt.plan.pieces import Piece

__all__ = ["MEASURED", "TOGETHER", "WITHOUT"]

HOSTS = 6
"""That are looked at, at most: each in the middle of a part of the job, so that their average is
about everybody's."""
LIMITS = RunLimits(OBJECT_RUN[0], OBJECT_GAP, MOST_CHUNKS)
WITHOUT, TOGETHER = " without hosts' tables", " together"
"""Behind the name of what is counted, where the restore is not as by default."""
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
        hosts = sorted({(2 * i + 1) * onto.hosts // (2 * HOSTS) for i in range(HOSTS)})
        reads = {"": [restored(tables, onto, host) for host in hosts]}
        reads[WITHOUT] = [restored(tables, onto, host, ask=False) for host in hosts]
        if any(len(members) > 1 for members, _ in _groups(tables.records, onto, 0)):
            reads[TOGETHER] = [restored(tables, onto, host, together=True) for host in hosts]
        counted: dict[str, float] = {"hosts": onto.hosts, "saved by": asked.hosts}
        counted |= {"table of all": tables.reference.size, "header": tables.reference.header}
        for how, each in reads.items():
            for key in COUNTED:
                counted[f"{key}{how}"] = sum(one[key] for one in each) / len(each)
                counted[f"most {key}{how}"] = max(one[key] for one in each)
        return counted

    return run


def restored(
    tables: Tables, onto: Job, host: int, *, together: bool = False, ask: bool = True
) -> dict[str, int]:
    """Requests and bytes of one host's reads.

    `ask`: whether hosts' own tables may be among them.
    """
    stats, requests, nbytes = ReadStats(), 0, 0
    table = TableBlocks(
        cast("Store", tables),
        tables.reference,
        stats.count_index,
        None,
        tables.hosts if ask else (),
    )
    for pieces in _reads(tables.records, onto, host, together=together):
        table.prepare(pieces)
        chunks = [np.unique(overlaps(piece, boxes).chunk) for piece, boxes in pieces]
        array, every = (
            np.repeat(np.arange(len(pieces)), list(map(len, chunks))),
            np.concatenate(chunks),
        )
        for i in range(0, len(every), MOST_CHUNKS):
            _, rows = table.find(
                [piece.path for piece, _ in pieces],
                array[i : i + MOST_CHUNKS],
                every[i : i + MOST_CHUNKS],
            )
            runs, read = count_runs(
                *(column.astype(np.int64) for column in (rows.file, rows.offset, rows.length)),
                LIMITS,
            )
            requests, nbytes = requests + runs, nbytes + read
    return dict(zip(COUNTED, (stats.index_reads, stats.index_bytes, requests, nbytes), strict=True))


def _reads(
    records: dict[str, TensorRecord], onto: Job, host: int, *, together: bool
) -> Iterator[list[tuple[Piece, BoxArray]]]:
    """Reads of one host, in batches: pieces, and the boxes of each that are wanted."""
    boxes = {
        name: held(onto.layouts[name], tensor.shape, _devices(onto, host))[0]
        for name, tensor in records.items()
    }

    def share(tensor: TensorRecord) -> tuple[int]:
        return (int(boxes[tensor.name].sizes().sum()) * tensor.dtype.storage.itemsize,)

    for members, tensors in (
        _groups(records, onto, host) if together else [((host,), list(records.values()))]
    ):
        for batch in batches(tensors, share, (LARGEST_BATCH,)):
            if len(members) == 1:
                yield [(piece, boxes[tensor.name]) for tensor in batch for piece in tensor.pieces]
                continue
            shared = [
                SharedBoxes(tensor.pieces, boxes[tensor.name], tensor.dtype.storage.itemsize)
                for tensor in batch
            ]
            for shares in rounds(shared, len(members), exchange_bytes(DEFAULT_MEMORY_LIMIT)):
                share_of_host = shares[members.index(host)]
                if not share_of_host:
                    continue  # fewer chunks than hosts
                mine = groupby(share_of_host, lambda region: region.tensor)
                parts = [
                    (
                        batch[i],
                        BoxArray.of([region.part for region in regions], len(batch[i].shape)),
                    )
                    for i, regions in mine
                ]
                yield [
                    (piece, part)
                    for tensor, part in parts
                    for piece in touched(tensor.pieces, part)
                ]


def _groups(
    records: dict[str, TensorRecord], onto: Job, host: int
) -> list[tuple[tuple[int, ...], list[TensorRecord]]]:
    """Tensors by the hosts that read them together, as `cooperative` has them.

    Tensors that are read with other hosts come first, in order of names.
    """
    world, groups = onto.world(host), dict[tuple[int, ...], list["TensorRecord"]]()
    for name in sorted(records):
        layout, shape = onto.layouts[name], records[name].shape
        _, holding = held(layout, shape, _devices(onto, host))
        sharers = set(box_holders(layout, len(shape), holding, world.devices["simulated"]))
        # Where different hosts share a host's boxes, the frameworks' adapters have it read them by
        # itself.
        members = peers_sharing_reads(sharers.pop(), host) if len(sharers) == 1 else (host,)
        groups.setdefault(members, []).append(records[name])
    alone = {tensor.name for tensor in groups.pop((host,), [])}
    return [
        *sorted(groups.items()),
        ((host,), [tensor for name, tensor in records.items() if name in alone]),
    ]


def _devices(job: Job, host: int) -> tuple[int, ...]:
    return tuple(range(host * DEVICES_PER_HOST, min((host + 1) * DEVICES_PER_HOST, job.devices)))


MEASURED = {"requests": prepared}
