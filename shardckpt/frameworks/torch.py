"""Plain torch tensors: one box each, without a copy on the CPU.

All access uses numpy views of a tensor's memory. For dtypes that numpy lacks, such as bfloat16,
torch views the memory as integers of the same width, and ml_dtypes gives them their dtype. Tensors
on CUDA devices are copied by `cuda`. Tensors on other devices are copied to the host when they are
fetched, and filled from the host when they are restored.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, fields
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch

from shardckpt.errors import DtypeError, LeafError
from shardckpt.frameworks.base import (
    Array,
    HostSource,
    InPlace,
    PlainSink,
    Sink,
    Source,
    Target,
    whole,
)
from shardckpt.frameworks.numpy import dtype_names
from shardckpt.frameworks.torch_devices import device_memory, has_streams
from shardckpt.frameworks.torch_kinds import (
    CLASSES,
    check_fillable,
    check_kind,
    elements_of,
    is_elements,
    memory_key,
)
from shardckpt.layout.dtypes import DType, by_name
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from shardckpt.layout.box import BoxArray
    from shardckpt.layout.world import World

_SAME_IN_NUMPY = frozenset(
    (
        *(
            torch.bool,
            torch.uint8,
            torch.uint16,
            torch.uint32,
            torch.uint64,
            torch.int8,
            torch.int16,
            torch.int32,
            torch.int64,
        ),
        *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    )
)
_AS_BITS = {torch.bfloat16: torch.int16} | {
    getattr(torch, name): torch.uint8
    for name in (
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    )
    if hasattr(torch, name)
}
"""dtypes that numpy has only through ml_dtypes, and the integers of their width."""


@dataclass(slots=True, eq=False)
class TensorSource(HostSource):
    """A tensor to save. It is not frozen, because that triples the time to make one."""

    name: str
    tensor: Any
    dtype: DType
    shape: tuple[int, ...]
    on_host: bool
    """Whether the elements are the tensor's own memory, on the host, and need no copy."""
    contiguous: bool = False
    """Whether that memory is known to be contiguous."""
    holders: list[tuple[int, ...]] | None = None
    # Asked for each tensor of a state: without a call.
    layout: ClassVar[None] = None
    own_pieces: ClassVar[bool] = False
    private: ClassVar[bool] = False

    @property
    def boxes(self) -> BoxArray:
        """The box of the complete tensor."""
        return whole(self.shape)

    @property
    def staged_bytes(self) -> int:
        """Bytes of a copy; 0 for a tensor on the host without pending conjugation or negation."""
        return 0 if self.on_host else prod(self.shape) * self.dtype.itemsize

    @property
    def address(self) -> int:
        """The tensor's address now: its memory may be replaced before it is copied."""
        return self.tensor.data_ptr() if self.contiguous else 0

    @property
    def comparer(self) -> str | None:
        """None for complex numbers."""
        return None if self.dtype.numpy.kind == "c" else "torch"

    def on_device(self) -> Sequence[Any]:
        """The tensor."""
        return [self.tensor] * len(self.boxes)

    @classmethod
    def fetch(
        cls, sources: Sequence[TensorSource], positions: Sequence[Sequence[int]]
    ) -> list[list[Array]]:
        """Views of tensors on the CPU, copies of all others."""
        pairs = zip(sources, positions, strict=True)
        return [
            [(array_of if s.on_host else host_array)(s.tensor, s.dtype)] if boxes else []
            for s, boxes in pairs
        ]


@dataclass(slots=True)
class TensorSink(PlainSink):
    """Torch memory that is filled for a leaf, box by box."""

    leaf: Any
    """The leaf that `place` returns."""
    shape: tuple[int, ...]
    dtype: DType
    boxes: BoxArray
    views: tuple[Any, ...]
    """For each box, the memory to fill, without gradient."""
    tie_key: Hashable
    written: tuple[Any, ...]
    """The tensors that autograd must see as written."""
    ranks: tuple[int, ...] | Literal["all"] | None = None
    """The processes that need the same boxes; None: not known."""
    placing_bytes: ClassVar[int] = 0
    on_host: bool = field(init=False)
    """Whether all of the memory is on the host."""
    destinations: list[Array] | None = field(init=False)
    """The memory itself; None if it is not on the host."""

    def __post_init__(self) -> None:
        """Ask once where the memory is."""
        self.on_host = all([device_type(view) == "cpu" for view in self.views])  # noqa: C419  (faster than a generator)
        self.destinations = [array_of(v, self.dtype) for v in self.views] if self.on_host else None

    @classmethod
    def of_complete(cls, name: str, leaf: Any) -> TensorSink:
        """The sink of a plain tensor that `_is_complete`."""
        made: TensorSink = object.__new__(cls)  # in half the time of __init__
        shape, dtype = made.shape, made.dtype = tuple(leaf.shape), dtype_of_tensor(name, leaf)
        boxes = made.boxes = whole(shape)
        plain = leaf.detach() if leaf.requires_grad else leaf
        made.leaf, made.written, made.tie_key = leaf, (leaf,), InPlace(id(leaf))
        made.ranks, made.on_host = "all", True
        made.views = (plain,) * len(boxes)
        made.destinations = [array_of(plain, dtype)] if made.views else []
        return made

    @property
    def buffer_shapes(self) -> list[tuple[int, ...]]:
        """The boxes' own shapes."""
        return [tuple(view.shape) for view in self.views]

    @property
    def address(self) -> int:
        """As in `Sink`; torch tells it in a tenth of the time that numpy takes."""
        return self.views[0].data_ptr() if self.on_host and len(self.views) == 1 else 0

    def sharers(self, world: World) -> tuple[int, ...] | None:
        """The processes that the layout gives."""
        return tuple(range(world.processes)) if self.ranks == "all" else self.ranks

    def place(self, buffers: Sequence[Array]) -> object:
        """Copy the buffers that are not the memory itself into it, and record the write.

        The write is recorded as autograd does under no_grad.
        """
        if self.destinations is None:
            for view, buffer in zip(self.views, buffers, strict=True):
                view.copy_(tensor_of(buffer, self.dtype))
        elif buffers is not self.destinations:
            for memory, buffer in zip(self.destinations, buffers, strict=True):
                if memory is not buffer:
                    memory[...] = buffer
        self.mark_written()
        return self.leaf

    def mark_written(self) -> None:
        """Record the write as autograd does under no_grad."""
        for tensor in self.written:
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)


def owns(leaf: object) -> bool:
    """Whether an instance of `CLASSES` is a leaf of this adapter.

    Otherwise the instance may describe itself as a shard, or be on torch_xla's device.
    """
    return not hasattr(leaf, "global_offsets") and "torch_xla" not in sys.modules


def matches(leaf: object) -> bool:
    """Whether the leaf is a tensor of any kind.

    `sources` and `target` refuse kinds that cannot be stored.
    """
    return isinstance(leaf, torch.Tensor)


def accepts(leaf: Target) -> bool:
    """Whether the target is a torch device, for a new tensor on it."""
    return isinstance(leaf.sharding, torch.device)


def identity(leaf: Any) -> Hashable | None:
    """A key that is equal for tensors over the same memory in the same form.

    So detached and `.data` aliases of one parameter have the same key.

    On the host it is the key of a numpy array over that memory.

    None for tensors without memory: without elements, meta tensors, freed storages, and kinds that
    cannot be stored.
    """
    if type(leaf) not in CLASSES:
        if not is_elements(leaf):
            return None
        leaf = elements_of(leaf)
    dtype = _stored_dtype(leaf.dtype)
    if dtype is None or not is_host_memory(leaf):
        memory = memory_key(leaf)
        return None if memory is None else ("torch", *memory)
    itemsize = leaf.itemsize
    try:
        address, shape, strides = (
            leaf.data_ptr(),
            tuple(leaf.shape),
            tuple([itemsize * n for n in leaf.stride()]),
        )
    except RuntimeError:  # a sparse or nested tensor, or one inside a transform of torch.func
        return None
    return ("numpy", address, shape, strides, *dtype_names(dtype.numpy)) if address else None


def address(leaf: Any) -> int:
    """The address in the `identity` of an instance of `CLASSES`.

    0: only `identity` itself can say.
    """
    try:
        return leaf.data_ptr() if owns(leaf) else 0
    except RuntimeError:  # as in `identity`
        return 0


def sources(leaves: dict[str, Any], world: World) -> dict[str, Source]:  # noqa: ARG001 - every adapter has the same signatures
    """Sources of tensors, by name.

    Raises:
        LeafError: a kind of tensor that cannot be stored, by name.
        DtypeError: elements that cannot be stored, by name.
    """
    of_leaves: dict[str, Source] = {}
    for name, leaf in leaves.items():
        # Nearly all of a state of many small tensors.
        if type(leaf) in CLASSES and device_type(leaf) == "cpu" and _is_complete(leaf):
            of_leaves[name] = TensorSource(
                name, leaf, dtype_of_tensor(name, leaf), tuple(leaf.shape), True, contiguous=True
            )
            continue
        check_kind(name, leaf)
        plain = elements_of(leaf)
        source = TensorSource(
            name, plain, dtype_of_tensor(name, plain), tuple(plain.shape), is_host_memory(plain)
        )
        of_leaves[name] = (
            source
            if device_type(plain) == "cpu"
            else copied_source(source, (plain.detach(),) * len(source.boxes), (leaf,))
        )
    return of_leaves


def target(name: str, leaf: Any, shape: tuple[int, ...], dtype: DType) -> Sink:
    """A sink that fills a tensor in place, or a new tensor.

    For a meta tensor the new tensor is on the CPU, and for a `Target` it is on the device of the
    `Target`.

    Raises:
        LeafError: a kind of tensor that cannot be restored into, or whose elements share memory; or
            there is no such device.
        DtypeError: torch has no such dtype.
        BudgetError: the device has no memory for a new tensor.
    """
    # Nearly all of a state of many small tensors.
    if type(leaf) in CLASSES and device_type(leaf) == "cpu" and _is_complete(leaf):
        return TensorSink.of_complete(name, leaf)
    tie_key: Hashable = InPlace(id(leaf))
    device: Any = None
    if isinstance(leaf, Target):
        shape, dtype = leaf.resolve(shape, dtype)
        kind, device = torch_dtype(dtype), leaf.sharding
        if device.type == "meta":
            raise LeafError(
                f"{shown(name)}: a tensor on the device meta has no memory to restore to; give a "
                "Target with another device."
            )
        if kind is None:
            raise DtypeError(
                f"{shown(name)}: torch has no dtype {dtype.name}; restore it as another dtype, or "
                "as a numpy array."
            )
    else:
        check_kind(name, leaf)
        kind, dtype, shape = leaf.dtype, dtype_of_tensor(name, leaf), tuple(leaf.shape)
        if leaf.is_meta:
            device = "cpu"
    if device is not None:
        with device_memory(name, device):
            new = torch.empty(shape, dtype=kind, device=device)
        tie_key = "torch", type(leaf), shape, dtype.name, str(device)
        leaf = (
            new
            if isinstance(leaf, Target) or type(leaf) in CLASSES
            else new.as_subclass(type(leaf))
        )
    check_fillable(name, leaf)
    boxes, elements = whole(shape), elements_of(leaf)
    views = (elements.detach() if elements.requires_grad else elements,) * len(boxes)
    return sink_of(TensorSink(leaf, shape, dtype, boxes, views, tie_key, (leaf,), "all"))


def device_type(tensor: Any) -> str:
    """The kind of device that holds a tensor, such as "cuda"."""
    # The first answer comes ten times as fast.
    kind: str = "cpu" if tensor.is_cpu else tensor.device.type
    return kind


def copied_source(source: Source, views: tuple[Any, ...], watched: tuple[Any, ...]) -> Source:
    """A source for elements that may be on a device with streams: the given one if they are not.

    Args:
        source: the tensor's source.
        views: for each box, its elements.
        watched: the tensors whose version counters show a change of the elements.
    """
    if not views or not has_streams(device_type(views[0])):
        return source
    from shardckpt.frameworks.cuda import CudaSource

    return CudaSource(source, views, watched)


def sink_of(sink: TensorSink) -> Sink:
    """The sink itself, or one that fills the memory of a device in parts."""
    if sink.on_host or not has_streams(device_type(sink.views[0])):
        return sink
    from shardckpt.frameworks.cuda_fills import CudaSink

    return CudaSink(**{one.name: getattr(sink, one.name) for one in fields(sink) if one.init})


def dtype_of_tensor(name: str, tensor: Any) -> DType:
    """The dtype of a tensor's elements.

    Raises:
        DtypeError: it cannot be stored; names the leaf.
    """
    dtype = _stored_dtype(tensor.dtype)
    if dtype is None:
        raise DtypeError(
            f"{shown(name)}: {tensor.dtype} cannot be stored; convert the tensor to a dtype that "
            "numpy or ml_dtypes has."
        )
    return dtype


@cache
def _stored_dtype(kind: Any) -> DType | None:
    """The dtype that elements of a torch dtype are stored as; None if they cannot be stored."""
    return (
        by_name(str(kind).removeprefix("torch."))
        if kind in _SAME_IN_NUMPY or kind in _AS_BITS
        else None
    )


def torch_dtype(dtype: DType) -> Any:
    """The torch dtype; None if torch has none."""
    kind = getattr(torch, dtype.name, None)
    return kind if kind in _SAME_IN_NUMPY or kind in _AS_BITS else None


def is_host_memory(tensor: Any) -> bool:
    """Whether `host_array` returns the tensor's own memory."""
    return device_type(tensor) == "cpu" and not tensor.is_conj() and not tensor.is_neg()


def host_array(tensor: Any, dtype: DType) -> Array:
    """A tensor's elements: its own memory if this holds the values, else a copy."""
    return array_of(
        tensor if is_host_memory(tensor) else tensor.detach().cpu().resolve_conj().resolve_neg(),
        dtype,
    )


def array_of(tensor: Any, dtype: DType) -> Array:
    """A CPU tensor's memory as a numpy array, without a copy.

    Args:
        tensor: without conjugation or negation. Its dtype may also be another of the same width.
        dtype: the dtype of its bits.
    """
    kind = dtype.numpy
    plain = kind.isbuiltin == 1 and kind.itemsize == tensor.itemsize
    array = np.asarray(memory := _Memory(tensor, kind.str if plain else None))
    del memory.__array_interface__  # in a state of 10,000 tensors these dicts take 6 MB
    return array if plain else array.view(kind)


def addresses(tensor: Any) -> Array:
    """A tensor's memory on any device as an array, only to compare addresses."""
    return np.asarray(_Memory(tensor))


class _Memory:
    """A CPU tensor's memory in numpy's array interface.

    `Tensor.numpy` would permanently mark the storage as not resizable.
    """

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: Any, typestr: str | None = None) -> None:
        self._tensor = tensor  # keeps the storage as long as numpy has arrays over it
        itemsize = tensor.itemsize
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "strides": None
            if tensor.is_contiguous()
            else tuple([itemsize * stride for stride in tensor.stride()]),
            "typestr": typestr or f"|V{itemsize}",
            "data": (tensor.data_ptr(), False),
        }


def tensor_of(array: Array, dtype: DType) -> Any:
    """A numpy array's memory as a CPU tensor, without a copy; the inverse of `array_of`.

    Raises:
        DtypeError: torch has no such dtype.
    """
    kind = torch_dtype(dtype)
    if kind is None:
        raise DtypeError(
            f"torch has no dtype {dtype.name}, so no tensor of it can be made; restore it as a "
            "numpy array."
        )
    if kind in _AS_BITS:
        return torch.from_numpy(array.view(np.dtype(f"int{8 * dtype.itemsize}"))).view(kind)
    return torch.from_numpy(array)


def _is_complete(leaf: Any) -> bool:
    """Whether a plain tensor on the CPU is known to have its elements in memory, contiguous.

    If it is not known, `check_kind` looks closer.
    """
    if leaf.is_nested or leaf.layout is not torch.strided or leaf.is_conj() or leaf.is_neg():
        return False
    if leaf._is_zerotensor() or torch._is_functional_tensor(leaf):
        return False
    if not leaf.is_contiguous() or leaf.is_quantized:
        return False
    try:
        held: int = leaf.untyped_storage().nbytes()
    except NotImplementedError:  # inside a transform of torch.func: `check_kind` says so
        return False
    needed: int = (leaf.storage_offset() + leaf.numel()) * leaf.itemsize
    return held >= needed
