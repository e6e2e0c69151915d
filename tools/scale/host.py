"""Plans of one host of a very large job, and the metadata that it writes and reads.

The host is the first one, which holds a part of every tensor whatever the layout; it has eight
devices.

1. `plan_save`: the boxes of its devices and who else holds them, as the frameworks' adapters ask
   for them, and then `save_plan.plan_save`. Nothing is remembered from before: it is the first
   save's plan.
2. `plan_restore`: the boxes of the layout that it restores onto (the same kind, over half as many
   devices), and which chunks they overlap, where in each and where to.
3. `metadata`: the documents of such a checkpoint, as bytes: what a host says of it, its record, the
   commit record, the header of the chunk table. The commit record is read back, too, as every
   restoring host does.

Counted beside the time: boxes, planned rows, objects, bytes. They are what a test can hold on to.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt import SaveOptions
from shardckpt.format.documents import FileReference, TableReference, seal
from shardckpt.format.record import (
    CheckpointRecord,
    Contents,
    HostFiles,
    HostRecord,
    parse_checkpoint,
)
from shardckpt.format.structure import Structure, TensorRecord
from shardckpt.format.table import BLOCK_ROWS, ROW, TableHeader
from shardckpt.frameworks.base import HostSource
from shardckpt.layout.box import BoxArray, distinct_boxes
from shardckpt.layout.dtypes import DType, by_name
from shardckpt.layout.world import DeviceOwners, World
from shardckpt.plan.pieces import count_chunks, overlaps, touched
from shardckpt.plan.writers import box_holders
from shardckpt.state import flatten
from shardckpt.writing.save_plan import SavePlan, plan_save
from shardckpt.writing.tensor_storage import tensor_records
from tools.scale.layouts import DEVICES_PER_HOST, laid_out
from tools.scale.trees import TREES

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardckpt.layout.sharding import Sharding
    from tools.scale.trees import Tensor

__all__ = ["MEASURED", "Job", "commit_record", "held"]

ATTEMPT = "20300101T000000-00000000-1"
DIGEST = "0" * 64
DATA_FILE = 64 << 20
"""Bytes of a data file on an object store, see docs/storage.md."""


@dataclass(frozen=True, slots=True)
class _Source(HostSource):
    """The host's part of one tensor: a `frameworks.base.Source` of which nothing is fetched."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    layout: Sharding
    boxes: BoxArray
    holders: list[tuple[int, ...]]
    own_pieces: bool = False
    staged_bytes: int = 0
    private: bool = False


@dataclass(frozen=True)
class Job:
    """One job."""

    tree: str
    kind: str
    """Of layout."""
    devices: int
    tensors: int = 1000

    @property
    def hosts(self) -> int:
        """Number of processes."""
        return -(-self.devices // DEVICES_PER_HOST)

    @cached_property
    def state(self) -> list[Tensor]:
        """Tensors that it saves."""
        return TREES[self.tree].tensors(self.tensors, experts=self.kind == "EP")

    @cached_property
    def layouts(self) -> dict[str, Sharding]:
        """Of each tensor, as leaves bring them along."""
        return laid_out(self.kind, self.state, self.devices)

    def world(self, process: int = 0) -> World:
        """As a host sees it."""
        ids = np.arange(self.devices)
        return World(process, self.hosts, {"simulated": DeviceOwners(ids, ids // DEVICES_PER_HOST)})

    def sources(self, world: World) -> dict[str, Any]:
        """That host's."""
        owners = world.devices["simulated"]
        own = owners.device_ids[owners.processes == world.process]
        sources = {}
        for tensor, layout in zip(self.state, self.layouts.values(), strict=True):
            boxes, holding = held(layout, tensor.shape, tuple(own.tolist()))
            holders = box_holders(layout, len(tensor.shape), holding, owners)
            sources[tensor.name] = _Source(
                tensor.name, tensor.shape, by_name(tensor.dtype), layout, boxes, holders
            )
        return sources

    def planned(self, process: int = 0) -> SavePlan:
        """A host's share of a save."""
        world = self.world(process)
        return plan_save(self.sources(world), SaveOptions(), world)

    def records(self) -> dict[str, TensorRecord]:
        """Name → record of the tensor, with its pieces and chunks."""
        world = self.world()
        return tensor_records(self.sources(world), SaveOptions(), world)


@lru_cache(maxsize=1024)
def held(
    layout: Sharding, shape: tuple[int, ...], devices: tuple[int, ...]
) -> tuple[BoxArray, list[int]]:
    """The distinct boxes that some devices hold, and one of the devices for each box.

    They are found once per shape, as in `frameworks.jax_layout`.
    """
    held = layout.device_boxes(shape, devices)
    boxes, where = distinct_boxes(held.boxes)
    distinct, first = np.unique(where, return_index=True)
    return boxes, held.device_ids[first[distinct >= 0]].tolist()


def save(job: Job) -> Callable[[], dict[str, int]]:
    """The first save's plan."""
    state, _ = job.state, job.layouts

    def run() -> dict[str, int]:
        plan = job.planned()
        blocks = plan.blocks.values()
        return {
            "tensors": len(state),
            "boxes": sum(len({(block.held, block.piece.path) for block in of}) for of in blocks),
            "blocks": sum(map(len, blocks)),
            "chunks": sum(count_chunks(block.piece, block.box) for of in blocks for block in of),
            "bytes": plan.nbytes,
        }

    return run


def restore(job: Job) -> Callable[[], dict[str, int]]:
    """The plan of a restore onto half as many devices."""
    records = job.records()
    onto = Job(job.tree, job.kind, max(DEVICES_PER_HOST, job.devices // 2), job.tensors)
    layouts = onto.layouts

    def run() -> dict[str, int]:
        boxes = rows = 0
        for name, tensor in records.items():
            needed, _ = held(layouts[name], tensor.shape, tuple(range(DEVICES_PER_HOST)))
            boxes += len(needed)
            rows += sum(
                len(overlaps(piece, needed).chunk) for piece in touched(tensor.pieces, needed)
            )
        return {"tensors": len(records), "boxes": boxes, "rows": rows}

    return run


def metadata(job: Job) -> Callable[[], dict[str, int | float]]:
    """Write the documents of such a checkpoint, and read its commit record."""
    tensors = job.records()
    total = sum(tensor.nbytes for tensor in tensors.values())
    tree = flatten(dict.fromkeys(tensors, 0), lambda leaf: leaf == 0).tree

    def run() -> dict[str, int | float]:
        structure = Structure(tree, tensors)
        described, contents = Contents(structure, {}, {}).seal()
        counts = {
            piece.path: piece.num_chunks for tensor in tensors.values() for piece in tensor.pieces
        }
        chunks = sum(counts.values())
        host = _host_record(job, described)
        record = seal(commit_record(structure, job.hosts).to_json())
        began = time.process_time()
        parse_checkpoint(record, "checkpoint.json")
        parsed = time.process_time() - began
        each = max(1, -(-total // job.hosts // DATA_FILE))
        files = [f"hosts/{h:05d}/0/d/{i:05d}" for h in range(job.hosts) for i in range(each)]
        rows = bytes(BLOCK_ROWS * ROW.itemsize)  # of every block the digest takes the same
        header = len(TableHeader.encode(files, counts, rows)) + 16 * (-(-chunks // BLOCK_ROWS) - 1)
        return {
            "contents bytes": len(contents),
            "host record bytes": len(host),
            "commit record bytes": len(record),
            "bytes per host": (len(record) - len(seal(commit_record(structure, 0).to_json())))
            / job.hosts,
            "table header bytes": header,
            "chunks": chunks,
            "seconds to read the commit record": parsed,
        }

    return run


def _host_record(job: Job, contents: FileReference) -> bytes:
    table = TableReference("hosts/00000/table", 1 << 20, 1 << 10, DIGEST)
    files = HostFiles(table, ("hosts/00000/0/",), contents, None)
    return seal(
        HostRecord(ATTEMPT, 0, job.hosts, None, "packed", None, files, 1 << 20, 1 << 40).to_json()
    )


def commit_record(structure: Structure, hosts: int) -> CheckpointRecord:
    """The `checkpoint.json` of a save by so many hosts.

    Digests and sizes of its files are made up.
    """
    tensors = structure.tensors.values()
    total, chunks = (
        sum(tensor.nbytes for tensor in tensors),
        sum(tensor.num_chunks for tensor in tensors),
    )
    return CheckpointRecord(
        attempt=ATTEMPT,
        created="2030-01-01T00:00:00+00:00",
        writer="tools.scale",
        layout="packed",
        compression=None,
        hosts=tuple(FileReference(f"records/{i:05d}.json", 1000, DIGEST) for i in range(hosts)),
        structure=structure,
        totals={
            "tensors": len(tensors),
            "bytes": total,
            "stored_bytes": total + 4 * chunks,
            "chunks": chunks,
        },
        table=TableReference("table", 1 << 30, 1 << 20, DIGEST),
    )


MEASURED = {
    "save": lambda **job: save(Job(**job)),
    "restore": lambda **job: restore(Job(**job)),
    "metadata": lambda **job: metadata(Job(**job)),
}
"""By name: prepares what is measured, and returns it."""
