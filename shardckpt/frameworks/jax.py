"""JAX: arrays of any sharding, saved and restored shard by shard, without compiling anything.

Saving
1. One of this process's shards per distinct box is copied to the host. All copies of a call are
   under way at once, as explicit transfers for `jax.transfer_guard`. On CPU the host array is the
   shard itself.
2. Accelerators copy to XLA's pinned host memory, and the host array is that memory (`private`). It
   is free for XLA's next user when the host array is gone. Where XLA refuses so much, small batches
   are copied on to ordinary memory, one after another.
3. Elsewhere JAX keeps the host copy of an array for as long as the array lives. So the copy is made
   of a new array over the same memory, which is freed as soon as it is stored: a numpy array where
   Python can access that memory itself, or else a JAX array, which takes thirty times as long to
   create.

Restoring
1. A new array is built directly from the buffers of the local devices' boxes, all of them in one
   call: the complete array is never on the host, and no program runs. Accelerators copy several
   arrays at a time, while the next chunks are read (`JaxTransfers`).
2. On CPU JAX uses an aligned buffer itself as the array's memory. So JAX gets memory to keep
   (`adopts`), which replicas share, and elements are read directly to their final place. JAX never
   writes to such memory: if the array is donated, JAX copies it.
3. An array that could be moved freely stays uncommitted: a restored array for an uncommitted leaf
   is uncommitted too, on that leaf's device. Otherwise it could not be an argument beside arrays of
   a larger mesh.

Restored arrays have a strong type, whatever the leaf's `weak_type`, and the default memory layout.
Keys (`jax.random.key`) are stored as their words, see `jax_keys`.

In a job of several JAX processes each process handles its own devices alone: no call here waits for
another process.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import prod
from threading import RLock
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import numpy as np

from shardckpt.errors import DtypeError, LeafError, ShardingError
from shardckpt.frameworks.base import Array, HostSource, PlainSink, Sink, Source, Target
from shardckpt.frameworks.jax_arrays import check_placeable, probe
from shardckpt.frameworks.jax_holders import holders_of, sharers_of
from shardckpt.frameworks.jax_keys import (
    check_named,
    is_keys,
    key_shape,
    keys_of,
    meaning,  # noqa: F401  (`frameworks.meaning` calls it)
    words_of,
)
from shardckpt.frameworks.jax_layout import JaxShards, layout_of, local_shards, to_jax, with_devices
from shardckpt.frameworks.jax_transfers import (
    ACCELERATORS,
    JaxTransfers,
    landed,
    on_host,
    separate,
    warm_pinned,
)
from shardckpt.layout.dtypes import DType, of_numpy
from shardckpt.layout.op_sharding import OpSharding
from shardckpt.layout.sharding import Layout, Sharding
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from shardckpt.layout.box import BoxArray
    from shardckpt.layout.world import World

_ON_HOST = ("pinned_host", "unpinned_host")
_LISTING = RLock()  # a signal handler may save amid a save
"""JAX lists an array's shards at the first use. Another thread that asks meanwhile gets a part of
the list, and JAX keeps that part."""


def matches(leaf: object) -> bool:
    """Whether the leaf is a JAX array, or a placeholder of one.

    `sources` and `target` refuse kinds that cannot be stored.
    """
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)


def accepts(leaf: Target) -> bool:
    """Whether the target has a JAX sharding or, if torch_xla is not imported, a shardckpt one."""
    portable = isinstance(leaf.sharding, Sharding | OpSharding) and "torch_xla" not in sys.modules
    return portable or isinstance(leaf.sharding, jax.sharding.Sharding)


def settle(leaves: Iterable[object]) -> None:  # noqa: ARG001 - the signature is `frameworks.settle`'s
    """Check that arrays can be made here; running computations are waited for by the copies.

    Raises:
        LeafError: a function is being traced, or JAX refuses transfers.
        BudgetError: the device is full.
    """
    probe(np.dtype(np.bool_), None, "JAX arrays")


def identity(leaf: Any) -> Hashable | None:
    """A key that is equal for the same array object.

    Arrays never change, so shared memory has no effect.
    """
    return ("jax", id(leaf)) if isinstance(leaf, jax.Array) else None


# --- Saving ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _JaxSource(HostSource):
    """An array to save."""

    name: str
    array: Any
    """The leaf, or the words of its keys."""
    dtype: DType
    layout: Layout | None
    """None for an uncommitted array, whose device is arbitrary."""
    shards: JaxShards
    holders: list[tuple[int, ...]] | None
    """None where each process has its own devices, and for an uncommitted array."""
    held: dict[int, Any]
    """The array of each of this process's devices, by the device's id."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    @property
    def boxes(self) -> BoxArray:
        return self.shards.boxes

    @property
    def packed(self) -> bool:
        """Whether several elements share a byte; they are unpacked to one byte each."""
        return bool(jax.dtypes.itemsize_bits(self.dtype.numpy) < 8 * self.dtype.itemsize)

    @property
    def private(self) -> bool:
        """True for copies in pinned memory; not for arrays that are on the host already."""
        return (
            self.shards.pinnable
            and not self.packed
            and self.array.sharding.memory_kind not in _ON_HOST
        )

    @property
    def staged_bytes(self) -> int:
        """0 on CPU, except for packed elements."""
        if not self.packed and all(on_host(device) for device in self.shards.devices):
            return 0
        return int(self.boxes.sizes().sum()) * self.dtype.itemsize

    @property
    def comparer(self) -> str | None:
        if (
            self.packed
            or self.dtype.numpy.kind == "c"
            or prod(self.shards.tile) * self.dtype.itemsize >= 1 << 31
        ):
            return None  # positions are 32-bit numbers
        return "jax"

    def on_device(self) -> Sequence[Any]:
        _check_alive(self.name, self.array)
        return [self.held[holder] for holder in self.shards.holders]

    @classmethod
    def fetch(
        cls, sources: Sequence[_JaxSource], positions: Sequence[Sequence[int]]
    ) -> list[list[Array]]:
        rows = [s.distinct(boxes) for s, boxes in zip(sources, positions, strict=True)]
        private = [source.private for source in sources]
        if any(private):
            rest = iter(
                landed(
                    [shard for row, own in zip(rows, private, strict=True) if own for shard in row]
                )
            )
            rows = [
                [next(rest) for _ in row] if own else row
                for row, own in zip(rows, private, strict=True)
            ]
        fetched: list[list[Array]] = jax.device_get(rows)  # begins all copies before it awaits one
        return fetched

    def distinct(self, positions: Sequence[int]) -> list[Any]:
        """For each requested box one local shard.

        Unless `private`, as a separate array over its memory.
        """
        _check_alive(self.name, self.array)
        arrays: list[Any] = []
        holders = self.shards.holders
        for k in positions:
            device = holders[k]
            data = self.held[device]
            if data.shape != self.shards.tile:  # JAX has no unevenly cut arrays
                raise ShardingError(
                    f"{shown(self.name)}: the shard on device {device} has shape {data.shape} and "
                    f"its sharding says {self.shards.tile}; save it with another sharding, after "
                    "jax.device_put(leaf, sharding)."
                )
            try:
                arrays.append(data if self.private else np.asarray(memoryview(data)))
            except BufferError:
                # Memory of another device than a CPU, a dtype that numpy itself lacks, or another
                # memory order.
                arrays.append(separate(data))
        return arrays


def warm(sources: Iterable[Source]) -> None:
    """Have XLA take the pinned memory of copies of these arrays.

    Sources of other adapters are left out.
    """
    shards = []
    for source in sources:
        if isinstance(source, _JaxSource):
            devices = {device.id: device for device in source.shards.devices}
            shards += [
                (devices[holder], source.shards.tile, source.dtype.numpy)
                for holder in source.shards.holders
            ]
    warm_pinned(shards)


def on_accelerator(state: object) -> bool:
    """Whether an array in JAX's containers is on accelerators.

    No device is asked for: that would take its memory. `jax.tree.leaves` would sort the keys of
    dicts, which may be of several types, and follow a cycle for ever.
    """
    seen: dict[int, object] = {}
    below = [state]
    while below:
        item = below.pop()
        if isinstance(item, jax.Array):
            if any(device.platform in ACCELERATORS for device in item.sharding.device_set):
                return True
        elif id(item) not in seen:
            seen[id(item)] = item  # kept, so that its id is not used again
            below += _children(item)
    return False


def _children(item: object) -> Iterable[Any]:
    """The items of one of JAX's containers; none of a leaf."""
    if isinstance(item, dict):
        return item.values()
    flat = jax.tree_util.default_registry.flatten_one_level(item)
    return () if flat is None else flat[0]


def sources(leaves: dict[str, Any], world: World) -> dict[str, Source]:
    """Sources of arrays, by name.

    Raises:
        LeafError: a leaf has no elements to store (deleted, traced, a ShapeDtypeStruct), or keys of
            an unnamed generator; by name.
        DtypeError: elements cannot be stored, by name.
        ShardingError: a sharding does not determine where data is, or the world and JAX disagree
            about devices, by name.
    """
    by_name: dict[str, Source] = {}
    for name, leaf in leaves.items():
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise LeafError(
                f"{shown(name)}: a ShapeDtypeStruct has no data to save; leave it out of the state."
            )
        dtype = _dtype(name, leaf)
        _check_alive(name, leaf)
        array = words_of(leaf) if is_keys(leaf) else leaf
        shards = _shards(name, array.sharding, tuple(array.shape))
        layout = layout_of(array.sharding, array.ndim) if array.committed else None
        with _LISTING:
            held = {shard.device.id: shard.data for shard in array.addressable_shards}
        by_name[name] = _JaxSource(
            name, array, dtype, layout, shards, holders_of(name, array, layout, shards, world), held
        )
    return by_name


def _check_alive(name: str, leaf: Any) -> None:
    if leaf.is_deleted():
        raise LeafError(
            f"{shown(name)}: this array was deleted or donated to a jitted function and has no "
            "data left; save what that function returned."
        )


# --- Restoring ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _JaxSink(PlainSink):
    """A new array, in the sharding of a leaf or of a `Target`."""

    name: str
    shape: tuple[int, ...]
    """Shape of the stored array: for an array of keys it includes the dimensions of the words."""
    dtype: DType
    sharding: Any
    """Sharding of the array."""
    shards: JaxShards
    committed: bool
    keys: Any
    """The array's dtype if it has keys; else None."""
    tie_key: Hashable
    destinations: None = None
    adopts: ClassVar[bool] = True
    """`device_put` uses an aligned buffer itself as the memory of an array on CPU, whatever
    `may_alias` says."""

    @property
    def boxes(self) -> BoxArray:
        return self.shards.boxes

    @property
    def buffer_shapes(self) -> list[tuple[int, ...]]:
        return [self.shards.tile] * len(self.boxes)

    @property
    def word_dims(self) -> int:
        """Number of the last dimensions that are not the array's own, but of its keys' words."""
        return 0 if self.keys is None else len(key_shape(self.keys))

    def sharers(self, world: World) -> tuple[int, ...] | None:
        ndim = len(self.shape) - self.word_dims
        return sharers_of(
            layout_of(self.sharding, ndim) if self.committed else None, ndim, self.shards, world
        )

    def place(self, buffers: Sequence[Array]) -> object:
        return self.array(buffers)

    def array(self, buffers: Sequence[Array]) -> Any:
        """The new array, to which an accelerator may still be copying from the buffers."""
        return self._of_keys(buffers) if self.keys is not None else self._of_numbers(buffers)

    def _of_numbers(self, buffers: Sequence[Array]) -> Any:
        if not self.committed:
            (array,) = self._on_devices(buffers)
        else:
            at = dict(zip(map(tuple, self.boxes.start.tolist()), buffers, strict=True))
            # An explicit transfer, as any `device_put`.
            with jax.transfer_guard_host_to_device("allow"):
                array = jax.make_array_from_callback(
                    self.shape,
                    self.sharding,
                    lambda index: (
                        at[tuple(side.start or 0 for side in index)] if at else self._no_elements
                    ),
                    dtype=self.dtype.numpy,
                )
        if array.dtype != self.dtype.numpy:
            raise DtypeError(
                f"{shown(self.name)}: JAX made {array.dtype} of {self.dtype}; restore it as "
                "another dtype, or as a numpy array."
            )
        return array

    def _of_keys(self, buffers: Sequence[Array]) -> Any:
        words = self._on_devices(buffers)
        if not self.committed:
            return keys_of(words[0], self.keys)
        shape = self.shape[: len(self.shape) - len(key_shape(self.keys))]
        on_device = dict(zip(self.shards.devices, words, strict=True))
        # Unlike arrays of numbers, arrays of keys must be assembled in the order of the sharding's
        # devices.
        keys = [
            keys_of(on_device[device], self.keys)
            for device in self.sharding.addressable_devices_indices_map(shape)
        ]
        return jax.make_array_from_single_device_arrays(shape, self.sharding, keys, dtype=self.keys)

    def _on_devices(self, buffers: Sequence[Array]) -> list[Any]:
        """For each device, an array of its data; for an uncommitted array, one on its device."""
        shards = [
            buffers[box] if box >= 0 else self._no_elements for box in self.shards.box_of.tolist()
        ]
        if not self.committed:
            with jax.default_device(self.shards.devices[0]):
                return [jax.device_put(shard) for shard in shards]
        kind = self.sharding.memory_kind
        arrays: list[Any] = jax.device_put(
            shards,
            [
                jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
                for device in self.shards.devices
            ],
        )
        return arrays

    @property
    def _no_elements(self) -> Array:
        return np.empty(self.shards.tile, self.dtype.numpy)


@dataclass(frozen=True, slots=True)
class _AcceleratorSink(_JaxSink):
    """A new array on accelerators, which copy from buffers."""

    adopts: ClassVar[bool] = False
    placer: ClassVar[type[JaxTransfers] | None] = JaxTransfers

    def place(self, buffers: Sequence[Array]) -> object:
        return jax.block_until_ready(self.array(buffers))  # the buffers are free only after that


def target(name: str, leaf: Any, shape: tuple[int, ...], dtype: DType) -> Sink:
    """A sink that makes a new array in the leaf's sharding, or in the sharding of a `Target`.

    A ShapeDtypeStruct without sharding gives an uncommitted array on the default device, as
    `jnp.asarray` does: in a job of several processes, each process gets a complete array of its
    own.

    Raises:
        LeafError: a kind of leaf that cannot be restored into.
        DtypeError: JAX has no such dtype, or would silently replace it with a smaller one.
        ShardingError: the sharding does not fit the tensor, or this job's devices.
    """
    committed, same, keys = True, None, None
    if isinstance(leaf, Target):
        shape, dtype = leaf.resolve(shape, dtype)
        sharding = leaf.sharding
        if isinstance(sharding, Sharding | OpSharding):
            try:
                sharding = to_jax(sharding, len(shape))
            except ShardingError as e:
                raise ShardingError(f"{shown(name)}: {e}") from e
    else:
        shape, dtype, sharding = tuple(leaf.shape), _dtype(name, leaf), leaf.sharding
        keys = leaf.dtype if is_keys(leaf) else None
        if isinstance(leaf, jax.Array):
            committed = leaf.committed
            same = id(leaf)  # two arrays in `like` stay two: one buffer cannot be donated twice
        elif sharding is None:
            sharding, committed = probe(np.dtype(np.bool_), None, "JAX arrays").sharding, False
    try:
        sharding = with_devices(sharding)
    except ShardingError as e:
        raise ShardingError(f"{shown(name)}: {e}") from e
    shards = _shards(name, sharding, shape)
    if keys is not None:
        shape, shards = (*shape, *key_shape(keys)), shards.extended(key_shape(keys))
    check_placeable(name, dtype, shards)
    tie_key = ("jax", sharding, committed, shape, keys or dtype.name, same)
    kind = (
        _AcceleratorSink
        if all(device.platform in ACCELERATORS for device in shards.devices)
        else _JaxSink
    )
    return kind(name, shape, dtype, sharding, shards, committed, keys, tie_key)


# --- Leaves ---------------------------------------------------------------------------------------


def _shards(name: str, sharding: Any, shape: tuple[int, ...]) -> JaxShards:
    try:
        return local_shards(sharding, shape)
    except ShardingError as e:
        raise ShardingError(f"{shown(name)}: {e}") from e


def _dtype(name: str, leaf: Any) -> DType:
    """The stored dtype of a leaf that has elements.

    Raises:
        LeafError: it is being traced, or has keys of an unnamed generator.
        DtypeError: elements cannot be stored.
    """
    if isinstance(leaf, jax.core.Tracer):
        raise LeafError(
            f"{shown(name)}: this array is being traced and has no elements yet; call shardckpt "
            "outside of jit, grad and vmap."
        )
    if is_keys(leaf):
        check_named(name, leaf)
        return of_numpy(np.dtype(np.uint32))
    try:
        return of_numpy(leaf.dtype)
    except (DtypeError, TypeError) as e:
        raise DtypeError(f"{shown(name)}: {e}") from e
