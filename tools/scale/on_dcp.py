"""Cost of plans by DCP's planner for the same job.

DCP has one process per device. Its save plans in three steps, of which this measures what its
planners compute, in one process:

1. `create_local_plan` of rank 0, with DTensors on the meta device over a fake process group of all
   ranks: as it is.
2. `create_global_plan` of the coordinator: deduplication, metadata, validation. It is given the
   plans of all ranks. Those are built of the same classes as step 1 builds them, from the boxes
   that our layouts give to each rank, and building them is not measured; nor is pickling them and
   sending them to the coordinator and back, which a real job does besides.
3. `finish_plan` on each rank, which does nothing.

A restore's plan is `create_local_plan` of rank 0's load planner, with the metadata of such a save,
onto half as many ranks; its global plan does nothing. The metadata is built as step 2 builds it,
without being measured.

Who takes longer than `limit` seconds is cut off, and what it took until then is told.
"""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import distributed
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tools.scale.host import Job
from tools.scale.layouts import DEVICES_PER_HOST

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardckpt.layout.sharding import Sharding

__all__ = ["MEASURED"]


class _CutOffError(Exception):
    """Time is up."""


def save(limit: float, **job: Any) -> Callable[[], dict[str, Any]]:
    """Rank 0's plan, and the coordinator's of all."""
    asked = Job(**job)
    state = _state(asked)
    everybody = [SavePlan(items, planner_data={}) for items in _items(asked)]

    def run() -> dict[str, Any]:
        planner = DefaultSavePlanner()
        planner.set_up_planner(state, is_coordinator=True)
        began = time.process_time()
        with _Limited(limit) as cut:
            mine = planner.create_local_plan()
            local = time.process_time() - began
            planner.create_global_plan([mine, *everybody[1:]])
            return {"items": sum(len(plan.items) for plan in everybody), "local": local}
        return {"items": sum(len(plan.items) for plan in everybody), "cut": cut.seconds}

    return run


def restore(limit: float, **job: Any) -> Callable[[], dict[str, Any]]:
    """Rank 0's plan."""
    asked = Job(**job)
    onto = Job(asked.tree, asked.kind, max(DEVICES_PER_HOST, asked.devices // 2), asked.tensors)
    tensors: dict[str, Any] = {}
    for name, properties, size, chunks in _shards(asked):
        each_once = {chunk.offsets: chunk for chunk in chunks}  # as after deduplication
        tensors[name] = TensorStorageMetadata(properties, size, list(each_once.values()))
    state = _state(onto)

    def run() -> dict[str, Any]:
        planner = DefaultLoadPlanner()
        planner.set_up_planner(state, Metadata(tensors), is_coordinator=True)
        with _Limited(limit) as cut:
            return {"items": len(planner.create_local_plan().items)}
        return {"cut": cut.seconds}

    return run


MEASURED = {"dcp save": save, "dcp restore": restore}


class _Limited:
    """Ends what is inside after so many seconds of processor time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __enter__(self) -> Self:
        def stop(_signal: int, _frame: object) -> None:
            raise _CutOffError

        signal.signal(signal.SIGPROF, stop)
        signal.setitimer(signal.ITIMER_PROF, self.seconds)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: object, _traceback: object
    ) -> bool:
        signal.setitimer(signal.ITIMER_PROF, 0)
        return kind is _CutOffError


def _state(job: Job) -> dict[str, DTensor]:
    """Rank 0's DTensors, without elements."""
    if distributed.is_initialized():
        distributed.destroy_process_group()
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=job.devices)
    mesh = next(iter(job.layouts.values())).mesh
    over = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.axis_names)
    state = {}
    for tensor in job.state:
        layout = job.layouts[tensor.name]
        local = torch.empty(
            layout.device_boxes(tensor.shape, [0]).boxes[0].shape,
            dtype=getattr(torch, tensor.dtype),
            device="meta",
        )
        whole = torch.empty(tensor.shape, device="meta")
        placed = _placements(layout)
        state[tensor.name] = DTensor.from_local(
            local, over, placed, run_check=False, shape=whole.shape, stride=whole.stride()
        )
    return state


def _placements(layout: Sharding) -> list[Any]:
    """Torch's words for it.

    Where several axes cut one dimension, the first of the mesh cuts first there as here.
    """
    cut = {axis: d for d, axes in enumerate(layout.spec.axes) for axis in axes}
    return [Shard(cut[name]) if name in cut else Replicate() for name in layout.mesh.axis_names]


def _items(job: Job) -> Iterator[list[WriteItem]]:
    """Per rank what its local plan consists of, one item per tensor, of an empty shard too."""
    rows: list[list[WriteItem]] = [[] for _ in range(job.devices)]
    for name, properties, size, chunks in _shards(job):
        for row, chunk in zip(rows, chunks, strict=True):
            index = MetadataIndex(name, chunk.offsets)
            row.append(
                WriteItem(
                    index, WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, size)
                )
            )
    yield from rows


def _shards(
    job: Job,
) -> Iterator[tuple[str, TensorProperties, torch.Size, list[ChunkStorageMetadata]]]:
    """Of each tensor what DCP says of it, and each rank's box."""
    known: dict[Any, list[ChunkStorageMetadata]] = {}
    for tensor in job.state:
        layout = job.layouts[tensor.name]
        key = (layout, tensor.shape)
        if key not in known:
            boxes = layout.device_boxes(tensor.shape).boxes
            pairs = zip(boxes.start.tolist(), (boxes.stop - boxes.start).tolist(), strict=True)
            known[key] = [
                ChunkStorageMetadata(torch.Size(start), torch.Size(size)) for start, size in pairs
            ]
        yield (
            tensor.name,
            TensorProperties(dtype=getattr(torch, tensor.dtype)),
            torch.Size(tensor.shape),
            known[key],
        )
