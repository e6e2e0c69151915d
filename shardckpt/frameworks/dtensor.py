"""PyTorch's DTensor: each process saves and restores its own rank's data without a collective.

The boxes of a rank follow from mesh and placements (`shardckpt.layout.placements`), if the local
tensor agrees with them. Its shape is checked, and a difference is an error. (The shape does not
always show one difference: for a `_StridedShard` of a length that its parts do not divide, torch's
own `distribute_tensor` and `full_tensor` make other shards than FSDP2 does. This module uses
FSDP2's meaning.)

Saving
1. If the boxes are the boxes of a `Sharding`, the layout is that `Sharding`, so that other
   frameworks understand it, too; otherwise it is the `Placements` themselves.
2. A rank is a process, so the holders of a box follow from the mesh. A rank outside the mesh holds
   nothing.
3. FSDP2 places parameters that tensor parallelism leaves alone (norms) on each rank's own slice of
   the mesh, so that every slice has the complete tensor: it is one tensor, replicated along the
   other dimensions of the larger mesh (`widest_meshes`). As with `Replicate`, the slices must have
   equal data; `writing.replicas` compares them.
4. Boxes are views of the local tensor on the CPU, and copies on any other device; CUDA tensors are
   copied by `cuda`.

Restoring fills the local tensor in place, on any device. A meta tensor gets a new local tensor, on
the mesh's device.

Partial sums have no meaning alone. They are refused, or reduced beforehand (`reduce_partial`): the
only function here that communicates with other ranks.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from shardckpt.errors import DtypeError, LeafError, ShardingError
from shardckpt.frameworks.base import Array, HostSource, InPlace, Sink, Source, Target
from shardckpt.frameworks.dtensor_layout import (
    from_device_mesh,
    from_placements,
    over,
    widest_meshes,
)
from shardckpt.frameworks.torch import (
    TensorSink,
    copied_source,
    device_type,
    dtype_of_tensor,
    host_array,
    is_host_memory,
    sink_of,
    torch_dtype,
)
from shardckpt.frameworks.torch_devices import device_memory
from shardckpt.frameworks.torch_kinds import check_fillable, check_kind
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from shardckpt.layout.box import Box, BoxArray
    from shardckpt.layout.dtypes import DType
    from shardckpt.layout.placements import Placements
    from shardckpt.layout.sharding import Sharding
    from shardckpt.layout.world import World

CLASSES = frozenset((DTensor,))
"""Classes for which `owns` decides."""


def owns(leaf: Any) -> bool:
    """Whether an instance of `CLASSES` is a leaf of this adapter, in programs without torch_xla."""
    return type(leaf._local_tensor) is torch.Tensor and "torch_xla" not in sys.modules


def matches(leaf: object) -> bool:
    """Whether the leaf is a DTensor whose local tensor has no own shards (`dcp_protocol`)."""
    return isinstance(leaf, DTensor) and not hasattr(leaf._local_tensor, "__create_chunk_list__")


def accepts(leaf: Target) -> bool:
    """Whether the target is a pair of a DeviceMesh and placements."""
    return (
        isinstance(leaf.sharding, tuple)
        and len(leaf.sharding) == 2
        and isinstance(leaf.sharding[0], DeviceMesh)
    )


def identity(leaf: Any) -> Hashable | None:
    """A key that is equal for DTensors over the same local memory in the same form.

    So detached aliases of one parameter have the same key.

    It uses the memory's owner, not its address: a rank with an empty shard must find the same
    tensors tied as other ranks do. In a buffer of several tensors all empty shards may look alike,
    so there each DTensor is itself only: one in memory that is larger than the complete tensor, and
    a view of memory without bytes. (FSDP2's memory is never empty, nor larger than the tensor.)
    """
    local = leaf._local_tensor
    if (
        type(local) not in (torch.Tensor, torch.nn.Parameter)
        or local.is_meta
        or local.layout is not torch.strided
        or leaf.numel() == 0
    ):
        return None
    memory = local.untyped_storage()
    if local.numel() == 0 and (
        memory.nbytes() > leaf.nbytes or (memory.nbytes() == 0 and local._is_view())
    ):
        return ("dtensor", id(leaf))
    seen = (
        tuple(local.shape),
        local.stride(),
        local.storage_offset(),
        local.dtype,
        local.is_conj(),
        local.is_neg(),
    )
    return (
        "dtensor",
        memory._cdata,
        *seen,
        tuple(leaf.shape),
        leaf.device_mesh,
        tuple(map(str, leaf.placements)),
    )


# --- Layouts --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Held:
    """The data that this rank holds of all tensors with one shape and layout."""

    layout: Sharding | Placements
    boxes: BoxArray
    places: BoxArray
    """The place of each box in the local tensor."""
    local_shape: tuple[int, ...] | None
    """None for a rank outside the mesh."""
    holders: list[tuple[int, ...]]


@lru_cache(maxsize=4096)
def _held_boxes(placements: Placements, shape: tuple[int, ...], rank: int) -> _Held:
    boxes = placements.rank_boxes(shape, rank)
    return _Held(
        placements.as_sharding(shape) or placements,
        boxes,
        placements.local_boxes(shape, rank),
        placements.local_shape(shape, rank),
        [placements.holders(rank)] * len(boxes),
    )


def _held_of(
    name: str, mesh: DeviceMesh, placements: Sequence[Any], shape: tuple[int, ...]
) -> _Held:
    coordinate = mesh.get_coordinate()
    try:
        rank = -1 if coordinate is None else int(from_device_mesh(mesh).devices[tuple(coordinate)])
        return _held_boxes(from_placements(mesh, placements, len(shape)), shape, rank)
    except ShardingError as e:
        raise ShardingError(f"{shown(name)}: {e}") from e


def local_shape(
    name: str, mesh: DeviceMesh, placements: Sequence[Any], shape: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Shape of this rank's part of a tensor; None for a rank outside the mesh."""
    return _held_of(name, mesh, placements, shape).local_shape


def describe_shards(
    name: str, mesh: DeviceMesh, placements: Sequence[Any], shape: tuple[int, ...]
) -> str:
    """Text that is equal for equal shards of a tensor in equal order, on any mesh."""
    _held_of(name, mesh, placements, shape)  # refuses by name
    return _shards_text(from_placements(mesh, placements, len(shape)), shape)


@lru_cache(maxsize=4096)
def _shards_text(layout: Placements, shape: tuple[int, ...]) -> str:
    one_copy = tuple(0 if p.dim is None else slice(None) for p in layout.placements)
    held = [layout.rank_boxes(shape, r) for r in layout.mesh.devices[one_copy].ravel().tolist()]
    texts = [[str(boxes[i]) for i in range(len(boxes))] for boxes in held]
    digest = sha256(json.dumps(texts).encode()).hexdigest()
    return f"{len(held)} shards from {' and '.join(texts[0][:2])} on ({digest[:16]})"


def _local(name: str, leaf: Any, wide: DeviceMesh | None = None) -> tuple[Any, _Held]:
    """A leaf's local tensor, ready for reading, and the boxes of it.

    Args:
        name: for messages.
        leaf: a DTensor.
        wide: the mesh to describe the boxes on, if it is not the leaf's own.

    Raises:
        LeafError: a kind of tensor that cannot be stored.
        ShardingError: it does not determine which data this rank holds.
    """
    if type(leaf) is not DTensor:
        raise LeafError(
            f"{shown(name)}: the DTensor subclass "
            f"{type(leaf).__module__}.{type(leaf).__qualname__} is not supported; pass a DTensor."
        )
    local = leaf._local_tensor
    local = local.wait() if isinstance(local, AsyncCollectiveTensor) else local
    check_kind(name, local)
    mesh, placements = leaf.device_mesh, leaf.placements
    if wide is not None and wide is not mesh:
        mesh, placements = wide, over(wide, mesh, placements)
    held = _held_of(name, mesh, placements, tuple(leaf.shape))
    if (
        held.local_shape is not None
        and tuple(local.shape) != held.local_shape
        and (local.numel() or len(held.boxes))
    ):
        raise ShardingError(
            f"{shown(name)}: {leaf.placements} of shape {tuple(leaf.shape)} give this rank a "
            f"local tensor of shape {held.local_shape}, and it has one of {tuple(local.shape)}; "
            "make the DTensor with distribute_tensor, or from_local with its shape and stride."
        )
    return local, held


def _inside(box: Box) -> tuple[Any, ...]:
    return (*box.slices, ...)


# --- Saving ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _DTensorSource(HostSource):
    """A DTensor to save."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    local: Any
    held: _Held

    @property
    def layout(self) -> Sharding | Placements:
        return self.held.layout

    @property
    def boxes(self) -> BoxArray:
        return self.held.boxes

    @property
    def holders(self) -> list[tuple[int, ...]]:
        return self.held.holders

    @property
    def staged_bytes(self) -> int:
        """Bytes of a copy; 0 for a tensor on the host without pending conjugation or negation."""
        return (
            0 if is_host_memory(self.local) else int(self.boxes.sizes().sum()) * self.dtype.itemsize
        )

    @property
    def comparer(self) -> str | None:
        return None if self.dtype.numpy.kind == "c" else "torch"

    def on_device(self) -> Sequence[Any]:
        return [
            self.local.detach()[_inside(place)]
            for place in map(self.held.places.__getitem__, range(len(self.boxes)))
        ]

    @classmethod
    def fetch(
        cls, sources: Sequence[_DTensorSource], positions: Sequence[Sequence[int]]
    ) -> list[list[Array]]:
        return [
            [host_array(s.local.detach()[_inside(s.held.places[k])], s.dtype) for k in boxes]
            for s, boxes in zip(sources, positions, strict=True)
        ]


def sources(leaves: dict[str, Any], world: World) -> dict[str, Source]:
    """Sources of DTensors, by name.

    Raises:
        LeafError: a kind of tensor that cannot be stored, by name.
        DtypeError: elements that cannot be stored, by name.
        ShardingError: placements do not determine where data is, or ranks differ from this job's
            process numbers, by name.
    """
    by_name: dict[str, Source] = {}
    wide = widest_meshes(leaf.device_mesh for leaf in leaves.values())
    if leaves:
        _check_world(next(iter(leaves)), world)
    for name, leaf in leaves.items():
        local, held = _local(name, leaf, wide[leaf.device_mesh])
        source = _DTensorSource(name, tuple(leaf.shape), dtype_of_tensor(name, local), local, held)
        by_name[name] = (
            source
            if device_type(local) == "cpu"
            else copied_source(source, _views(local, held), (leaf, local))
        )
    return by_name


def _check_world(name: str, world: World) -> None:
    if not distributed.is_initialized():
        raise ShardingError(
            f"{shown(name)}: the process group of this DTensor is gone; save before "
            "destroy_process_group()."
        )
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    if (rank, ranks) != (world.process, world.processes):
        raise ShardingError(
            f"{shown(name)}: torch.distributed says that this is rank {rank} of {ranks}, but the "
            f"coordinator says process {world.process} of {world.processes}; give a coordinator "
            "that numbers the processes as torch.distributed does."
        )


def reduce_partial(leaves: dict[str, Any]) -> dict[str, Any]:
    """The leaves, with partial values reduced and replicated where they were partial.

    Other leaves are unchanged.

    It runs one collective per partial leaf, in the order of their names.
    """
    whole = dict(leaves)
    with torch.no_grad():
        for name in sorted(leaves):
            leaf = leaves[name]
            if any(isinstance(placement, Partial) for placement in leaf.placements):
                whole[name] = leaf.redistribute(
                    placements=[
                        Replicate() if isinstance(p, Partial) else p for p in leaf.placements
                    ]
                )
    return whole


# --- Restoring ------------------------------------------------------------------------------------


def target(name: str, leaf: Any, shape: tuple[int, ...], dtype: DType) -> Sink:
    """A sink that fills the local tensor in place, or the local tensor of a new DTensor.

    The DTensor is new for a meta tensor or a `Target`.

    Raises:
        LeafError: a kind of tensor that cannot be restored into, or whose elements share memory.
        DtypeError: torch has no such dtype.
        ShardingError: placements do not determine where data is.
    """
    tie_key: Hashable = InPlace(id(leaf))
    if isinstance(leaf, Target):
        leaf = _meta(name, leaf, shape, dtype)
    local, held = _local(name, leaf)
    if local.is_meta:
        leaf = _materialize(name, leaf)
        local = leaf._local_tensor
        tie_key = (
            "dtensor",
            leaf.device_mesh,
            tuple(map(str, leaf.placements)),
            tuple(leaf.shape),
            str(leaf.dtype),
            leaf.requires_grad,
        )
    check_fillable(name, local)
    ranks, dtype = held.holders[0] if held.holders else None, dtype_of_tensor(name, local)
    return sink_of(
        TensorSink(
            leaf,
            tuple(leaf.shape),
            dtype,
            held.boxes,
            _views(local, held),
            tie_key,
            (leaf, local),
            ranks,
        )
    )


def _views(local: Any, held: _Held) -> tuple[Any, ...]:
    """For each box its elements in the local tensor."""
    return tuple(local.detach()[_inside(held.places[k])] for k in range(len(held.boxes)))


def _meta(name: str, leaf: Target, shape: tuple[int, ...], dtype: DType) -> Any:
    """A meta DTensor that matches a target."""
    shape, dtype = leaf.resolve(shape, dtype)
    kind = torch_dtype(dtype)
    if kind is None:
        raise DtypeError(
            f"{shown(name)}: torch has no dtype {dtype}; restore it as another dtype, or as a "
            "numpy array."
        )
    pair: Any = leaf.sharding
    mesh, placements = pair
    held = _held_of(name, mesh, placements, shape)
    whole = torch.empty(shape, dtype=kind, device="meta")
    # Outside of the mesh from_local empties the local tensor; it uses the shape of a scalar on
    # every rank.
    local = torch.empty(
        shape if held.local_shape is None else held.local_shape, dtype=kind, device="meta"
    )
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.size(), stride=whole.stride()
    )


def _materialize(name: str, leaf: Any) -> Any:
    """A new DTensor like a meta one, with memory on the device of its mesh."""
    device = leaf.device_mesh.device_type
    with torch.no_grad(), device_memory(name, device):
        like = leaf._local_tensor if leaf.dim() else leaf._local_tensor.new_empty(())  # see _meta
        local = torch.empty_like(like, device=device, requires_grad=False)
        new = DTensor.from_local(
            local,
            leaf.device_mesh,
            leaf.placements,
            run_check=False,
            shape=leaf.size(),
            stride=leaf.stride(),
        )
    return new.requires_grad_(leaf.requires_grad)
