"""torch_xla SPMD: tensors sharded over devices, saved and restored shard by shard.

Nothing is compiled.

Saving
1. Pending results have no sharding yet: all pending leaves are computed in one program. No other
   tensor is computed, and no buffer is donated, so pending tensors of the training step stay valid.
2. The sharding is available only as OpSharding text, read for all leaves in one call. If the global
   mesh (`xs.set_global_mesh`) explains it, the layout has axis names; otherwise the OpSharding
   itself is the layout.
3. Replicated tensors are read from one device (`_xla_get_cpu_tensors`). All others are read in
   calls that return every local device's shard (`_get_local_shards`); one replica is kept and the
   others are freed at once. Version 2.9 can read a chosen shard only after compiling and running a
   program that every process of the job would have to run, which a save must not require. Calls are
   small, so that replicas take little memory at any moment. Two dtypes lose data: every float16 NaN
   becomes the same NaN, and complex128 is refused.

Restoring A tensor is built from one host buffer per distinct local box
(`_global_tensor_from_cpu_shards`): without a destination and without a program. 2.9 copies all
local devices' shards on the host before the call returns, so the buffers are free again. The result
is a plain tensor, as `mark_sharding` leaves a module's parameters; an XLAShardedTensor could not be
trained.

Shards are padded to the tile, ceil(dim / parts). XLAShardedTensor is a subclass of DTensor, but its
placements are not reliable, and this module does not use them.
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

from shardckpt.errors import DtypeError, LeafError, OptionError, ShardingError
from shardckpt.frameworks.base import Array, HostSource, PlainSink, Sink, Source, Target, whole
from shardckpt.frameworks.torch import array_of, dtype_of_tensor, tensor_of
from shardckpt.frameworks.xla_layout import (
    XlaShards,
    from_sharding_spec,
    holders_of,
    layouts_of,
    local_device_ids,
    local_shards,
    over_all_devices,
    replicated,
    to_xla,
)
from shardckpt.layout.op_sharding import OpSharding
from shardckpt.layout.sharding import Layout, Sharding
from shardckpt.plan.pieces import batches
from shardckpt.plan.writers import box_holders
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Sequence

    from shardckpt.layout.box import BoxArray
    from shardckpt.layout.dtypes import DType
    from shardckpt.layout.world import World

CALL_BYTES = 256 << 20
"""Most host bytes of one call that reads shards, replicas included; a larger tensor has a call of
its own."""

_UNSIGNED = ("uint16", "uint32", "uint64")
"""dtypes that are read, and built from shards, as signed integers with the same bits."""
_PLACEABLE = frozenset(
    (
        *(
            "bool",
            "int8",
            "int16",
            "int32",
            "int64",
            "uint8",
            *_UNSIGNED,
            "float16",
            "float32",
            "float64",
            "complex64",
            "complex128",
        ),
        *("bfloat16", "float8_e4m3fn", "float8_e5m2"),
    )
)
"""dtypes that tensors on devices can have."""

_KINDS = (torch.Tensor, torch.nn.Parameter)
"""Classes of tensors that are no more than their elements; another class may have another
meaning."""


def matches(leaf: object) -> bool:
    """Whether the leaf is on torch_xla's device: a plain tensor, Parameter or XLAShardedTensor."""
    return isinstance(leaf, torch.Tensor) and leaf.device.type == "xla"


def accepts(leaf: Target) -> bool:
    """Whether the target has a sharding that torch_xla can use, which requires SPMD."""
    spec = leaf.sharding
    pair = isinstance(spec, tuple) and len(spec) == 2 and isinstance(spec[0], xs.Mesh)
    return (pair or isinstance(spec, Sharding | OpSharding | xs.ShardingSpec)) and xr.is_spmd()


def settle(leaves: Iterable[Any]) -> None:
    """Compute the pending leaves whose sharding only their program determines, in one program.

    A marked pending leaf has its sharding already; without SPMD there is none. Kinds that cannot be
    stored are skipped.
    """
    tensors = (
        [tensor for tensor in map(_unwrap, leaves) if type(tensor) in _KINDS]
        if xr.is_spmd()
        else []
    )
    marked = _XLAC._get_xla_sharding_specs(tensors)
    _compute([tensor for tensor, spec in zip(tensors, marked, strict=True) if not spec])


def _compute(tensors: Sequence[Any]) -> None:
    """Compute the pending tensors, in one program."""
    pending = [
        t
        for t, needed in zip(
            tensors, _XLAC._check_tensor_need_materialization(tensors), strict=True
        )
        if needed
    ]
    if pending:
        # An empty device list: the default device. True: wait. False: compute no other live tensor,
        # and donate no buffer.
        _XLAC._xla_sync_multi(pending, [], True, False)


def identity(leaf: Any) -> Hashable | None:
    """A key that is equal for a parameter and its detached aliases, as in `state_dict()`.

    Other views are separate tensors.
    """
    tensor = _unwrap(leaf)
    return ("torch_xla", _XLAC._xla_get_tensor_id(tensor)) if type(tensor) in _KINDS else None


# --- Saving ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _XlaSource(HostSource):
    """A device tensor to save."""

    name: str
    tensor: Any
    dtype: DType
    layout: Layout | None
    shards: XlaShards | None
    """None for a tensor that every device holds completely, and without SPMD."""
    holders: list[tuple[int, ...]] | None
    """None where each process has its own devices."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def boxes(self) -> BoxArray:
        return whole(self.shape) if self.shards is None else self.shards.boxes

    @property
    def staged_bytes(self) -> int:
        """Twice the bytes that are read.

        torch_xla 2.9 reads all tensors of a call into literals, and then copies them into tensors.
        """
        elements = prod(self.shape) if self.shards is None else self.shards.elements
        return 2 * elements * self.dtype.itemsize

    @property
    def private(self) -> bool:
        """False for results of `_xla_get_cpu_tensors`, and for padded shards.

        A result of `_xla_get_cpu_tensors` may be the host tensor that a leaf was made from.
        """
        return self.shards is not None and bool(
            (self.boxes.sizes() == prod(self.shards.tile)).all()
        )

    @property
    def comparer(self) -> str | None:
        raise OptionError(
            f"{shown(self.name)}: torch_xla runs no program on one shard of a tensor, so nothing "
            "is compared there; publish with "
            f'snapshot="host".'
        )

    @classmethod
    def fetch(
        cls, sources: Sequence[_XlaSource], positions: Sequence[Sequence[int]]
    ) -> list[list[Array]]:
        fetched: list[list[Array]] = [[] for _ in sources]
        needed = [(i, s) for i, s in enumerate(sources) if positions[i]]
        for batch in _calls([(i, s) for i, s in needed if s.shards is None]):
            tensors = _XLAC._xla_get_cpu_tensors([s.tensor for _, s in batch])
            for (i, s), tensor in zip(batch, tensors, strict=True):
                fetched[i] = [array_of(tensor.detach(), s.dtype)]
        for batch in _calls([(i, s) for i, s in needed if s.shards is not None]):
            rows = _XLAC._get_local_shards([s.tensor for _, s in batch])
            for i, s in reversed(batch):
                # Replicas are freed before the next call.
                fetched[i] = s.distinct(rows.pop(), positions[i])
        return fetched

    def distinct(self, shards: Sequence[tuple[Any, str]], positions: Sequence[int]) -> list[Array]:
        """One array per requested box, without padding, from the shards of all local devices.

        The shards come with their devices' names.
        """
        assert self.shards is not None
        row = [tensor for tensor, _ in shards]
        holders = self.shards.first_holders
        extents = (self.shards.boxes.stop - self.shards.boxes.start).tolist()
        arrays = []
        for k in positions:
            device = holders[k]
            if tuple(row[device].shape) != self.shards.tile:
                raise ShardingError(
                    f"{shown(self.name)}: the layout {self.layout} has shards of shape "
                    f"{self.shards.tile} and device {device} holds one of "
                    f"{tuple(row[device].shape)}; call torch_xla.sync() before saving."
                )
            arrays.append(array_of(row[device], self.dtype)[tuple(map(slice, extents[k]))])
        return arrays


def _calls(sources: list[tuple[int, _XlaSource]]) -> Iterator[list[tuple[int, _XlaSource]]]:
    """Batches of sources that are read in one call."""
    return batches(sources, lambda numbered: (numbered[1].staged_bytes,), (CALL_BYTES,))


def sources(leaves: dict[str, Any], world: World) -> dict[str, Source]:
    """Sources of device tensors, by name; pending ones are computed together.

    Raises:
        LeafError: a kind of tensor that cannot be stored, by name.
        DtypeError: elements cannot be stored, by name.
        ShardingError: a sharding does not determine where data is, or the owners of its devices are
            unknown, by name.
    """
    tensors = {name: _check(name, leaf) for name, leaf in leaves.items()}
    dtypes = {name: dtype_of_tensor(name, tensor) for name, tensor in tensors.items()}
    for name, dtype in dtypes.items():
        if dtype.name == "complex128":
            raise DtypeError(
                f"{shown(name)}: torch_xla 2.9 reads complex128 from a device without its "
                "imaginary parts; save torch.view_as_real(leaf), or complex64."
            )
    _compute([*tensors.values()])
    if not xr.is_spmd():
        return {
            name: _XlaSource(name, tensor, dtypes[name], None, None, None)
            for name, tensor in tensors.items()
        }
    by_name: dict[str, Source] = {}
    for (name, tensor), layout in zip(
        tensors.items(), layouts_of(list(tensors.values())), strict=True
    ):
        shards = (
            None if replicated(layout, tensor.dim()) else _shards(name, layout, tuple(tensor.shape))
        )
        by_name[name] = _XlaSource(
            name,
            tensor,
            dtypes[name],
            layout,
            shards,
            holders_of(name, layout, tensor.dim(), shards, world),
        )
    return by_name


def _shards(name: str, layout: Layout, shape: tuple[int, ...]) -> XlaShards:
    try:
        return local_shards(layout, shape)
    except ShardingError as e:
        raise ShardingError(f"{shown(name)}: {e}") from e


# --- Restoring ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ShardedSink(PlainSink):
    """A new tensor, in the layout of a leaf or of a `Target`."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    layout: Layout
    op_sharding: Any
    """torch_xla's object of the layout."""
    shards: XlaShards
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
        """2.9 copies the shard of each local device on the host, replicas too.

        Unsigned integers need a template in addition.
        """
        template = prod(self.shape) if self.dtype.name in _UNSIGNED else 0
        return (self.shards.elements + template) * self.dtype.itemsize

    def sharers(self, world: World) -> tuple[int, ...] | None:
        owners = world.devices.get("torch_xla")
        if owners is None or not len(self.boxes):
            return None
        try:
            sharers = set(
                box_holders(
                    self.layout,
                    len(self.shape),
                    local_device_ids()[self.shards.first_holders],
                    owners,
                )
            )
        except ShardingError:
            return None
        return sharers.pop() if len(sharers) == 1 else None

    def place(self, buffers: Sequence[Array]) -> object:
        tiles = [
            tensor_of(_padded_with_zeros(b, self.boxes[i].shape), self.dtype)
            for i, b in enumerate(buffers)
        ]
        kind = getattr(torch, self.dtype.name)
        if (self.shards.box_of < 0).any():
            # For devices with padding only, whose box is -1.
            tiles.append(torch.zeros(self.shards.tile, dtype=kind))
        shards = [tiles[box] for box in self.shards.box_of.tolist()]
        if self.dtype.name in _UNSIGNED:
            return self._place_unsigned(shards)
        tensor = _XLAC._global_tensor_from_cpu_shards(shards, self.op_sharding, list(self.shape))
        if tensor.dtype != kind:
            raise DtypeError(
                f"{shown(self.name)}: torch_xla made a tensor of {tensor.dtype} from shards of "
                f"{kind}; restore another dtype."
            )
        return tensor

    def _place_unsigned(self, shards: list[Any]) -> object:
        """Load into a tensor whose dtype is set.

        A tensor built from shards alone would be int16, int32 or int64.
        """
        whole_everywhere = replicated(self.layout, len(self.shape))
        template = (
            shards[0].clone()
            if whole_everywhere
            else torch.zeros((), dtype=shards[0].dtype).expand(self.shape)
        )
        tensor = template.to("xla")
        _XLAC._xla_mark_sharding(tensor, self.op_sharding)
        if not whole_everywhere:
            _XLAC._load_local_shards(tensor, shards, _XLAC._xla_get_runtime_devices())
        return tensor


@dataclass(frozen=True, slots=True)
class _DeviceSink(PlainSink):
    """A new tensor on one device, without SPMD."""

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

    def sharers(self, world: World) -> tuple[int, ...] | None:  # noqa: ARG002 - without SPMD nobody says what the others want
        return None

    def place(self, buffers: Sequence[Array]) -> object:
        empty = np.empty(self.shape, self.dtype.numpy)
        # torch_xla may keep the host tensor until the device needs it.
        return tensor_of(next(iter(buffers), empty), self.dtype).clone().to(self.device)


def target(name: str, leaf: Any, shape: tuple[int, ...], dtype: DType) -> Sink:
    """A sink that makes a new tensor in the leaf's sharding, or in the sharding of a `Target`.

    Raises:
        LeafError: a kind of tensor that cannot be restored into.
        DtypeError: torch_xla has no such dtype.
        ShardingError: the sharding does not fit the tensor, or this job's devices.
    """
    if isinstance(leaf, Target):
        shape, dtype = leaf.resolve(shape, dtype)
        if dtype.name not in _PLACEABLE:
            raise DtypeError(
                f"{shown(name)}: torch_xla has no tensors of {dtype}; restore it as another "
                "dtype, or as a numpy array."
            )
        try:
            layout = (
                leaf.sharding
                if isinstance(leaf.sharding, Sharding | OpSharding)
                else from_sharding_spec(leaf.sharding)
            )
            layout = over_all_devices(layout)
            return _ShardedSink(
                name, shape, dtype, layout, to_xla(layout, len(shape)), local_shards(layout, shape)
            )
        except ShardingError as e:
            raise ShardingError(f"{shown(name)}: {e}") from e
    tensor = _check(name, leaf)
    shape, dtype = tuple(tensor.shape), dtype_of_tensor(name, tensor)
    if not xr.is_spmd():
        return _DeviceSink(shape, dtype, tensor.device)
    settle([tensor])
    (layout,) = layouts_of([tensor])
    shards = _shards(name, layout, shape)
    op_sharding = _XLAC._get_xla_op_sharding(tensor)
    return _ShardedSink(
        name,
        shape,
        dtype,
        layout,
        to_xla(layout, len(shape)) if op_sharding is None else op_sharding,
        shards,
    )


def _padded_with_zeros(buffer: Array, inside: tuple[int, ...]) -> Array:
    """The buffer with zeros outside its box.

    Lent memory has arbitrary contents, and NaNs in the padding would reach reductions.
    """
    for d, n in enumerate(inside):
        if n < buffer.shape[d]:
            buffer[(slice(None),) * d + (slice(n, None),)] = 0
    return buffer


# --- Leaves ---------------------------------------------------------------------------------------


def _unwrap(leaf: Any) -> Any:
    return leaf.global_tensor if isinstance(leaf, xs.XLAShardedTensor) else leaf


def _check(name: str, leaf: Any) -> Any:
    """The plain tensor of a leaf.

    Raises:
        LeafError: the leaf is another kind of tensor.
    """
    tensor = _unwrap(leaf)
    if type(tensor) not in _KINDS or tensor.layout is not torch.strided:
        raise LeafError(
            f"{shown(name)}: a {type(leaf).__qualname__} of layout {leaf.layout} on {leaf.device} "
            "is not supported; pass the plain tensors it is made of."
        )
    return tensor
