"""torch_xla SPMD: tensors sharded over devices, in and out shard by shard, without compiling anything.

Saving
1. Pending results have no sharding yet: all pending leaves are computed in one program. Nothing else is, and no
   buffer is donated, so what the training step still has pending stays valid.
2. A sharding is known as OpSharding text only, read for all leaves in one call. Where the global mesh
   (`xs.set_global_mesh`) explains it, axis names come back; otherwise the OpSharding itself is the layout.
3. Replicated tensors are read from one device (`_xla_get_cpu_tensors`). All others are read in calls that return
   every local device's shard (`_get_local_shards`); of replicas, one is kept and the rest is freed at once. 2.9 can
   read a chosen shard only after compiling and running a program that every process of the job would have to run,
   which a save must not ask for. Calls are small, so that what replicas cost at any moment is small.

Restoring
A tensor is built from one host buffer per distinct local box (`_global_tensor_from_cpu_shards`): no destination, no
program. 2.9 copies all local devices' shards on the host before the call returns, so the buffers are free again.
The result is a plain tensor, as `mark_sharding` leaves a module's parameters; as an XLAShardedTensor it could not be
trained.

Shards are padded to the tile, ceil(dim / parts). XLAShardedTensor subclasses DTensor, and what it says there about
placements is not to be relied on; nothing here asks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch_xla import _XLAC

from shardckpt.box import BoxArray, distinct_boxes
from shardckpt.errors import DtypeError, LeafError, ShardingError
from shardckpt.frameworks.base import Array, Sink, Source, Target, whole
from shardckpt.frameworks.torch import array_of, dtype_of_tensor, tensor_of
from shardckpt.mesh import Mesh
from shardckpt.names import shown
from shardckpt.op_sharding import Kind, OpSharding
from shardckpt.partition_spec import PartitionSpec
from shardckpt.sharding import Layout, Sharding

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from shardckpt.dtypes import DType

__all__ = ["accepts", "from_sharding_spec", "from_xla_mesh", "identity", "matches", "settle", "sources", "target"]

CALL_BYTES = 256 << 20
"""Host bytes that one call which reads shards may take, replicas included; a larger tensor has a call of its own."""

_UNSIGNED = ("uint16", "uint32", "uint64")
"""Read, and built from shards, as signed integers of the same bits."""
_PLACEABLE = frozenset(
    (
        *("bool", "int8", "int16", "int32", "int64", "uint8", *_UNSIGNED, "float16", "float32", "float64", "complex64", "complex128"),
        *("bfloat16", "float8_e4m3fn", "float8_e5m2"),
    )
)
_MOST_DIMS = 5
"""Dimensions of a tile assignment that 2.9 reads from Python; of longer ones it logs an error and makes up devices."""


def matches(leaf: object) -> bool:
    """Whether the leaf is on torch_xla's device, as a plain tensor, a Parameter or an XLAShardedTensor."""
    return isinstance(leaf, torch.Tensor) and leaf.device.type == "xla"


def accepts(wanted: Target) -> bool:
    """Whether the target says a sharding that means something here: SPMD is on."""
    spec = wanted.sharding
    pair = isinstance(spec, tuple) and len(spec) == 2 and isinstance(spec[0], xs.Mesh)
    return (pair or isinstance(spec, Sharding | OpSharding | xs.ShardingSpec)) and xr.is_spmd()


def from_xla_mesh(mesh: Any) -> Mesh:
    """A torch_xla `Mesh` or `HybridMesh` as a shardckpt `Mesh`; axes without names are numbered, "0" first."""
    return Mesh(tuple(int(n) for n in mesh.mesh_shape), mesh.axis_names, np.asarray(mesh.device_ids))


def from_sharding_spec(spec: Any) -> Sharding:
    """A torch_xla `ShardingSpec`, or a pair of its `Mesh` and a partition spec, as a shardckpt `Sharding`.

    Raises:
        ShardingError: the partition spec names an axis that the mesh has not.
    """
    mesh, parts = spec if isinstance(spec, tuple) else (spec.mesh, spec.partition_spec)
    return Sharding(from_xla_mesh(mesh), PartitionSpec(*parts))


def settle(leaves: Iterable[Any]) -> None:
    """Compute those leaves that are pending, in one program."""
    tensors = [_unwrapped(leaf) for leaf in leaves]
    pending = [t for t, needed in zip(tensors, _XLAC._check_tensor_need_materialization(tensors), strict=True) if needed]
    if pending:
        # No devices: the default one. Wait, and (False) touch no other live tensor, nor donate any buffer.
        _XLAC._xla_sync_multi(pending, [], True, False)


def identity(leaf: Any) -> Hashable | None:
    """Equal for a parameter and its detached aliases, as in `state_dict()`; other views are tensors of their own."""
    return "torch_xla", _XLAC._xla_get_tensor_id(_unwrapped(leaf))


# --- Shards of this process ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Shards:
    """What this process's devices hold of one shape in one layout."""

    boxes: BoxArray
    """The distinct boxes, none of them empty."""
    box_of: NDArray[np.int64]
    """(local devices,) the box of each device, in the runtime's order; -1 where it holds padding only."""
    tile: tuple[int, ...]
    """The padded shape of every shard."""

    @classmethod
    def of(cls, layout: Layout, shape: tuple[int, ...]) -> _Shards:
        local = _local_devices()
        held = layout.device_boxes(shape, local)
        boxes, where = distinct_boxes(held.boxes)
        return cls(boxes, where[np.searchsorted(held.device_ids, local)], held.tile)

    @property
    def first_holders(self) -> list[int]:
        """Per box, the first local device that holds it."""
        boxes, first = np.unique(self.box_of, return_index=True)
        holders: list[int] = first[boxes >= 0].tolist()
        return holders

    @property
    def elements(self) -> int:
        """Of all local shards, padding and replicas included."""
        return len(self.box_of) * prod(self.tile)


def _local_devices() -> NDArray[np.int64]:
    """Global ids of this process's devices, in the order in which torch_xla takes and returns shards."""
    return np.array([int(device.rpartition(":")[2]) for device in _XLAC._xla_get_runtime_devices()], np.int64)


def _layouts(tensors: dict[str, Any]) -> dict[str, Layout]:
    """The layout of each tensor, none of which may be pending."""
    _XLAC._get_xla_sharding_specs(list(tensors.values()))
    # Asked once, 2.9 can answer with what a tensor was before its last program; it then corrects itself.
    texts = _XLAC._get_xla_sharding_specs(list(tensors.values()))
    count, global_mesh = xr.global_runtime_device_count(), xs.get_global_mesh()
    mesh = None if global_mesh is None else from_xla_mesh(global_mesh)
    known: dict[tuple[str, int], Layout] = {}
    found: dict[str, Layout] = {}
    for (name, tensor), text in zip(tensors.items(), texts, strict=True):
        key = (text, tensor.dim())
        if key not in known:
            # A tensor that nobody marked is on every device.
            op_sharding = OpSharding.parse(text, count) if text else OpSharding.replicated(count)
            named = None if mesh is None else Sharding.infer(mesh, op_sharding, tensor.dim())
            known[key] = op_sharding if named is None else named
        found[name] = known[key]
    return found


def _shards(name: str, layout: Layout, shape: tuple[int, ...]) -> _Shards:
    try:
        return _Shards.of(layout, shape)
    except ShardingError as e:
        raise ShardingError(f"{shown(name)}: {e}") from e


# --- Saving -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _XlaSource:
    """A device tensor to be saved."""

    name: str
    tensor: Any
    dtype: DType
    layout: Layout | None
    shards: _Shards | None
    """None for a tensor that every device holds whole, and without SPMD."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def boxes(self) -> BoxArray:
        return whole(self.shape) if self.shards is None else self.shards.boxes

    @property
    def identity(self) -> Hashable | None:
        return identity(self.tensor)

    @property
    def staged_bytes(self) -> int:
        """Twice what is read: 2.9 reads all of a call into literals, and then copies them into tensors."""
        elements = prod(self.shape) if self.shards is None else self.shards.elements
        return 2 * elements * self.dtype.itemsize

    @classmethod
    def fetch(cls, sources: Sequence[_XlaSource]) -> list[list[Array]]:
        fetched: list[list[Array]] = [[] for _ in sources]
        for batch in _calls([(i, s) for i, s in enumerate(sources) if s.shards is None]):
            tensors = _XLAC._xla_get_cpu_tensors([s.tensor for _, s in batch])
            for (i, s), tensor in zip(batch, tensors, strict=True):
                fetched[i] = [array_of(tensor.detach(), s.dtype)][: len(s.boxes)]
        for batch in _calls([(i, s) for i, s in enumerate(sources) if s.shards is not None]):
            rows = _XLAC._get_local_shards([s.tensor for _, s in batch])
            for (i, s), row in zip(batch, rows, strict=True):
                fetched[i] = s.distinct([tensor for tensor, _ in row])
        return fetched

    def distinct(self, row: Sequence[Any]) -> list[Array]:
        """Of the shards of all local devices, one per distinct box and without padding."""
        assert self.shards is not None
        arrays = []
        for k, device in enumerate(self.shards.first_holders):
            if tuple(row[device].shape) != self.shards.tile:
                raise ShardingError(
                    f"{shown(self.name)}: the layout {self.layout} has shards of shape {self.shards.tile} and device {device} holds "
                    f"one of {tuple(row[device].shape)}; call torch_xla.sync() before saving."
                )
            inside = tuple(slice(n) for n in self.shards.boxes[k].shape)
            arrays.append(array_of(row[device], self.dtype)[inside])
        return arrays


def _calls(sources: list[tuple[int, _XlaSource]]) -> Iterator[list[tuple[int, _XlaSource]]]:
    """Sources that are read in one call."""
    batch: list[tuple[int, _XlaSource]] = []
    size = 0
    for i, source in sources:
        if batch and size + source.staged_bytes > CALL_BYTES:
            yield batch
            batch, size = [], 0
        batch.append((i, source))
        size += source.staged_bytes
    if batch:
        yield batch


def sources(leaves: dict[str, Any]) -> dict[str, Source]:
    """Sources of device tensors, by name; pending ones are computed together.

    Raises:
        LeafError: a kind of tensor that cannot be stored, by name.
        DtypeError: elements that cannot be stored, by name.
        ShardingError: a sharding that does not say where data is, by name.
    """
    tensors = {name: _checked(name, leaf) for name, leaf in leaves.items()}
    dtypes = {name: dtype_of_tensor(name, tensor) for name, tensor in tensors.items()}
    for name, dtype in dtypes.items():
        if dtype.name == "complex128":
            raise DtypeError(
                f"{shown(name)}: torch_xla 2.9 reads complex128 from a device without its imaginary parts; "
                f"save torch.view_as_real(leaf), or complex64."
            )
    settle(tensors.values())
    layouts = _layouts(tensors) if xr.is_spmd() else {}
    held: dict[tuple[Layout, tuple[int, ...]], _Shards] = {}
    found: dict[str, Source] = {}
    for name, tensor in tensors.items():
        layout, shape = layouts.get(name), tuple(tensor.shape)
        shards = None
        if layout is not None and not _replicated(layout, len(shape)):
            shards = held.get((layout, shape)) or _shards(name, layout, shape)
            held[layout, shape] = shards
        found[name] = _XlaSource(name, tensor, dtypes[name], layout, shards)
    return found


def _replicated(layout: Layout, ndim: int) -> bool:
    """Whether XLA knows the tensor as replicated."""
    return layout.kind is Kind.REPLICATED if isinstance(layout, OpSharding) else prod(layout.parts(ndim)) == 1


# --- Restoring ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ShardedSink:
    """A new tensor, in the layout of a leaf or of a `Target`."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    layout: Layout
    op_sharding: Any
    """The same for torch_xla."""
    shards: _Shards
    destinations: None = None

    @property
    def boxes(self) -> BoxArray:
        return self.shards.boxes

    @property
    def buffer_shapes(self) -> list[tuple[int, ...]]:
        return [self.shards.tile] * len(self.boxes)

    @property
    def tie_key(self) -> Hashable:
        return "torch_xla", self.layout, self.shape, self.dtype.name

    @property
    def placing_bytes(self) -> int:
        """2.9 copies the shard of each local device on the host, replicas too; unsigned integers need a template."""
        template = prod(self.shape) if self.dtype.name in _UNSIGNED else 0
        return (self.shards.elements + template) * self.dtype.itemsize

    def place(self, buffers: Sequence[Array]) -> object:
        tiles = [tensor_of(_padded_with_zeros(b, self.boxes[i].shape), self.dtype) for i, b in enumerate(buffers)]
        kind = getattr(torch, self.dtype.name)
        tiles.append(torch.zeros(self.shards.tile, dtype=kind))  # for devices with padding only: box -1
        shards = [tiles[box] for box in self.shards.box_of.tolist()]
        if self.dtype.name in _UNSIGNED:
            return self._place_unsigned(shards)
        tensor = _XLAC._global_tensor_from_cpu_shards(shards, self.op_sharding, list(self.shape))
        if tensor.dtype != kind:
            raise DtypeError(f"{shown(self.name)}: torch_xla made a tensor of {tensor.dtype} from shards of {kind}; restore another dtype.")
        return tensor

    def _place_unsigned(self, shards: list[Any]) -> object:
        """Load into a tensor that knows its dtype: built from shards alone it would say int16, int32 or int64."""
        replicated = _replicated(self.layout, len(self.shape))
        template = shards[0].clone() if replicated else torch.zeros((), dtype=shards[0].dtype).expand(self.shape)
        tensor = template.to("xla")
        _XLAC._xla_mark_sharding(tensor, self.op_sharding)
        if not replicated:
            _XLAC._load_local_shards(tensor, shards, _XLAC._xla_get_runtime_devices())
        return tensor


@dataclass(frozen=True, slots=True)
class _DeviceSink:
    """A new tensor on one device: SPMD is off."""

    shape: tuple[int, ...]
    dtype: DType
    device: Any
    destinations: None = None

    @property
    def boxes(self) -> BoxArray:
        return whole(self.shape)

    @property
    def buffer_shapes(self) -> list[tuple[int, ...]]:
        return [self.shape] * len(self.boxes)

    @property
    def tie_key(self) -> Hashable:
        return "torch_xla", str(self.device), self.shape, self.dtype.name

    @property
    def placing_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def place(self, buffers: Sequence[Array]) -> object:
        empty = np.empty(self.shape, self.dtype.numpy)
        # torch_xla may keep the host tensor until the device needs it.
        return tensor_of(next(iter(buffers), empty), self.dtype).clone().to(self.device)


def target(name: str, leaf: Any, shape: tuple[int, ...], dtype: DType) -> Sink:
    """A sink that makes a new tensor in the leaf's sharding, or in the one that a `Target` says.

    Raises:
        LeafError: a kind of tensor that cannot be restored into.
        DtypeError: torch_xla has no such dtype.
        ShardingError: the sharding does not fit the tensor, or this job's devices.
    """
    if isinstance(leaf, Target):
        shape, dtype = leaf.resolve(shape, dtype)
        if dtype.name not in _PLACEABLE:
            raise DtypeError(f"{shown(name)}: torch_xla has no tensors of {dtype}; restore it as another dtype, or as a numpy array.")
        try:
            layout = leaf.sharding if isinstance(leaf.sharding, Sharding | OpSharding) else from_sharding_spec(leaf.sharding)
            layout = _over_all_devices(layout)
            return _ShardedSink(name, shape, dtype, layout, _xla_op_sharding(layout, len(shape)), _Shards.of(layout, shape))
        except ShardingError as e:
            raise ShardingError(f"{shown(name)}: {e}") from e
    tensor = _checked(name, leaf)
    shape, dtype = tuple(tensor.shape), dtype_of_tensor(name, tensor)
    if not xr.is_spmd():
        return _DeviceSink(shape, dtype, tensor.device)
    settle([tensor])
    layout = _layouts({name: tensor})[name]
    shards = _shards(name, layout, shape)
    op_sharding = _XLAC._get_xla_op_sharding(tensor)
    return _ShardedSink(name, shape, dtype, layout, op_sharding or _xla_op_sharding(layout, len(shape)), shards)


def _over_all_devices(layout: Layout) -> Layout:
    """The layout, if it is over all devices of the job, as torch_xla wants it."""
    count = xr.global_runtime_device_count()
    if isinstance(layout, OpSharding) and layout.kind is Kind.REPLICATED and layout.tiles is None:
        return OpSharding.replicated(count)
    if layout.num_devices != count:
        raise ShardingError(
            f"the target is sharded over {layout.num_devices} devices and this torch_xla job has {count}; give a mesh of all {count}."
        )
    ids = np.sort(layout.mesh.device_ids if isinstance(layout, Sharding) else layout.replication_groups.reshape(-1))
    if not np.array_equal(ids, np.arange(count)):
        raise ShardingError(
            f"the target's devices are {ids[0]}…{ids[-1]} and those of this torch_xla job 0…{count - 1}; give a mesh of the job's own."
        )
    return layout


def _xla_op_sharding(layout: Layout, ndim: int) -> Any:
    """torch_xla's OpSharding of ours."""
    same = (layout.op_sharding(ndim) if isinstance(layout, Sharding) else layout).canonical()
    parts = same.parts(ndim)
    kinds = xs.ShardingType
    if prod(parts) == 1:
        return _XLAC.OpSharding([], [], [], int(kinds.REPLICATED))
    if ndim > _MOST_DIMS:
        raise ShardingError(f"torch_xla 2.9 takes shardings of at most {_MOST_DIMS} dimensions and the tensor has {ndim}; reshape it.")
    groups = same.replication_groups
    if groups.shape[1] == 1:
        return _XLAC.OpSharding(groups.reshape(parts).tolist(), [], [], int(kinds.TILED))
    return _XLAC.OpSharding([], np.arange(len(groups)).reshape(parts).tolist(), groups.tolist(), int(kinds.PARTIAL))


def _padded_with_zeros(buffer: Array, inside: tuple[int, ...]) -> Array:
    """The buffer, zeros beyond its box: lent memory holds anything, and not-a-numbers would reach reductions."""
    for d, n in enumerate(inside):
        if n < buffer.shape[d]:
            buffer[(slice(None),) * d + (slice(n, None),)] = 0
    return buffer


# --- Leaves -------------------------------------------------------------------------------------------------------


def _unwrapped(leaf: Any) -> Any:
    return leaf.global_tensor if isinstance(leaf, xs.XLAShardedTensor) else leaf


def _checked(name: str, leaf: Any) -> Any:
    """The plain tensor of a leaf.

    Raises:
        LeafError: it is another kind of tensor.
    """
    tensor = _unwrapped(leaf)
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        raise LeafError(
            f"{shown(name)}: a {type(leaf).__qualname__} of layout {leaf.layout} on {leaf.device} is not supported; "
            f"pass the plain tensors it is made of."
        )
    return tensor
