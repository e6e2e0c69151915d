"""Conversion of JAX's shardings, and this process's shards of an array.

1. A `NamedSharding` becomes a `Sharding`: its mesh's ids, its axes' names, its spec.
2. The sharding of an array on one device becomes `{maximal device=…}`.
3. Any other sharding is converted through the HLO text that JAX itself gives to XLA. That text
   numbers the positions in the sharding's device list; `relabel` replaces them with the ids.

Device ids are JAX's own, and need not be 0…N-1: on CPU the ids of a second process begin at 2048.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from math import isqrt
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from shardckpt.errors import ShardingError
from shardckpt.frameworks.jax_transfers import pinned
from shardckpt.layout.box import BoxArray, distinct_boxes
from shardckpt.layout.hlo_text import Kind
from shardckpt.layout.mesh import Mesh
from shardckpt.layout.op_sharding import OpSharding
from shardckpt.layout.partition_spec import PartitionSpec
from shardckpt.layout.sharding import Layout, Sharding

if TYPE_CHECKING:
    from numpy.typing import NDArray


@lru_cache(maxsize=1024)
def layout_of(sharding: Any, ndim: int) -> Layout:
    """The layout of arrays of rank `ndim` with a JAX sharding.

    Raises:
        ShardingError: it does not determine where data is (unconstrained, unreduced, manual, or
            over an abstract mesh), or it is of a kind that XLA does not know, such as `pmap`'s
            former ones.
    """
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        (device,) = sharding.device_set
        return OpSharding.maximal(device.id)
    if isinstance(sharding, jax.sharding.NamedSharding):
        _check_decided(sharding)
        names = sharding.mesh.axis_names
        if all(isinstance(name, str) and name for name in names):
            mesh = Mesh(sharding.mesh.devices.shape, names, _ids(sharding.mesh.devices.flat))
            return Sharding(mesh, PartitionSpec(*_parts(sharding.spec)))
    try:
        text = str(sharding._to_xla_hlo_sharding(ndim))
    except NotImplementedError:
        raise ShardingError(
            f"a {type(sharding).__qualname__} has no XLA form, so it cannot be stored; "
            f"put the array into a NamedSharding first, with jax.device_put(leaf, sharding)."
        ) from None
    return OpSharding.parse(text).relabel(_ids(sharding._device_assignment))


def _parts(spec: Any) -> tuple[Any, ...]:
    """The entries of a spec.

    Newer JAX refuses to iterate over a spec with `reduced` axes, which mean replicas of the data.
    """
    return tuple(getattr(spec, "partitions", spec))


def _check_decided(sharding: Any) -> None:
    text = f"{sharding.spec} over {sharding.mesh}"
    if isinstance(sharding.mesh, jax.sharding.AbstractMesh):
        raise ShardingError(
            f"{text:.300} names no devices; restore within `with jax.set_mesh(mesh)`, or give a "
            "NamedSharding over a jax.sharding.Mesh."
        )
    if jax.sharding.PartitionSpec.UNCONSTRAINED in _parts(sharding.spec):
        raise ShardingError(
            f"{text:.300} leaves a dimension to the compiler; give an axis, or None, for every one."
        )
    if sharding.spec.unreduced:
        raise ShardingError(
            f"{text:.300}: its devices hold partial sums; reduce it first, with jax.reshard for "
            "example."
        )
    if getattr(sharding.mesh, "manual_axes", ()):
        raise ShardingError(
            f"{text:.300}: only the program inside a shard_map knows what its devices hold; use "
            "the array outside of it."
        )


def with_devices(sharding: Any) -> Any:
    """The sharding, with the mesh of `jax.set_mesh` in the place of an abstract mesh.

    Without an abstract mesh, or without a mesh that is set, the result is the same sharding.

    `jax.eval_shape` and `nnx.as_abstract` give abstract meshes to their results.

    Raises:
        ShardingError: the mesh that is set has other axes.
    """
    if not isinstance(sharding, jax.sharding.NamedSharding) or not isinstance(
        sharding.mesh, jax.sharding.AbstractMesh
    ):
        return sharding
    # JAX 0.6 has none.
    mesh = jax.sharding.get_mesh() if hasattr(jax.sharding, "get_mesh") else None
    if mesh is None or mesh.empty:
        return sharding
    axes, abstract = dict(mesh.shape), dict(sharding.mesh.shape)
    if list(axes.items()) != list(abstract.items()):
        raise ShardingError(
            f"{sharding.spec} is over an abstract mesh of {abstract}, and the mesh of jax.set_mesh "
            f"has {axes}; make the abstract state under the mesh that it is restored to."
        )
    return jax.sharding.NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def to_jax(layout: Layout, ndim: int) -> Any:
    """The equivalent JAX sharding of arrays of rank `ndim`, over this job's devices.

    An OpSharding becomes a NamedSharding as well: JAX's programs accept no other kind over several
    devices.

    Raises:
        ShardingError: it does not determine where data is, is for another rank, or has devices that
            the job lacks.
    """
    return _to_jax(layout, ndim, jax.devices()[0].client)


@lru_cache(maxsize=256)
def _to_jax(layout: Layout, ndim: int, client: Any) -> Any:
    """The cached part of `to_jax`.

    The client is a key, because devices belong to their client, which may be replaced.
    """
    devices = {device.id: device for device in client.devices()}
    if isinstance(layout, OpSharding) and layout.kind is Kind.MAXIMAL:
        (device,) = _devices_of(layout.replication_groups, devices)
        return jax.sharding.SingleDeviceSharding(device)
    if isinstance(layout, OpSharding):
        layout = _with_names(layout, ndim, list(devices))
    layout.parts(ndim)  # checks the rank
    mesh = jax.sharding.Mesh(
        _devices_of(layout.mesh.device_ids, devices).reshape(layout.mesh.shape),
        layout.mesh.axis_names,
    )
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*layout.spec))


def _with_names(layout: OpSharding, ndim: int, all_ids: list[int]) -> Sharding:
    """The equivalent sharding over a mesh with generated names.

    JAX's programs accept several arrays only if all of them have their devices in one order. So the
    mesh has its devices in ascending order wherever a spec over such a mesh is equivalent, and
    otherwise in the order of the tiles.
    """
    if layout.kind is Kind.REPLICATED and layout.tiles is None:
        layout = OpSharding.replicated(all_ids)
    parts, groups = layout.parts(ndim), layout.replication_groups
    ids, factors = np.sort(groups.reshape(-1)), _prime_factors(groups.size)
    for shape in (factors, factors[::-1]):
        sharding = Sharding.infer(
            Mesh(shape, [f"axis{i}" for i in range(len(shape))], ids), layout, ndim
        )
        if sharding is not None:
            return sharding
    cut = {f"dim{d}": count for d, count in enumerate(parts) if count > 1}
    axes = {**cut, "replica": groups.shape[1]}
    spec = PartitionSpec(*(f"dim{d}" if count > 1 else None for d, count in enumerate(parts)))
    return Sharding(Mesh(tuple(axes.values()), tuple(axes), groups.reshape(-1)), spec)


def _prime_factors(n: int) -> tuple[int, ...]:
    """The prime factors, ascending; axes of any other mesh of n devices are products of them.

    >>> _prime_factors(12)
    (2, 2, 3)
    """
    factor = next((d for d in range(2, isqrt(n) + 1) if n % d == 0), n)
    return () if n == 1 else (factor, *_prime_factors(n // factor))


def _devices_of(ids: NDArray[np.int64], devices: dict[int, Any]) -> NDArray[np.object_]:
    numbers = ids.reshape(-1).tolist()
    strangers = [i for i in numbers if i not in devices]
    if strangers:
        raise ShardingError(
            f"the target has device {strangers[0]} and this JAX job has {len(devices)} devices, "
            f"{min(devices)}…{max(devices)}; give a mesh of ids from jax.devices()."
        )
    objects = np.empty(len(numbers), object)
    objects[:] = [devices[i] for i in numbers]
    return objects


def _ids(devices: Any) -> NDArray[np.int64]:
    return np.array([device.id for device in devices], np.int64)


# --- Shards of this process -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JaxShards:
    """This process's shards for one shape and sharding."""

    boxes: BoxArray
    """The distinct, non-empty boxes."""
    devices: tuple[Any, ...]
    """This process's devices in the sharding, by ascending id."""
    box_of: NDArray[np.int64]
    """(devices,) the box of each device; -1 where the array has no elements."""
    tile: tuple[int, ...]
    """The shape of every shard."""
    holders: list[int] = field(init=False)
    """For each box, the id of the first device that holds it."""
    pinnable: bool = field(init=False)
    """Whether all of the devices are accelerators with pinned host memory."""

    def __post_init__(self) -> None:
        """Compute once what each save needs for each array."""
        boxes, first = np.unique(self.box_of, return_index=True)
        object.__setattr__(
            self, "holders", [self.devices[i].id for i in first[boxes >= 0].tolist()]
        )
        object.__setattr__(
            self, "pinnable", all(pinned(device) is not None for device in self.devices)
        )

    def extended(self, shape: tuple[int, ...]) -> JaxShards:
        """The shards of an array with these additional last dimensions, which are not cut."""
        start = np.hstack([self.boxes.start, np.zeros((len(self.boxes), len(shape)), np.int64)])
        stop = np.hstack(
            [self.boxes.stop, np.tile(np.array(shape, np.int64), (len(self.boxes), 1))]
        )
        return JaxShards(BoxArray(start, stop), self.devices, self.box_of, (*self.tile, *shape))


@lru_cache(maxsize=1024)
def local_shards(sharding: Any, shape: tuple[int, ...]) -> JaxShards:
    """The shards of this process's devices.

    Raises:
        ShardingError: the sharding does not determine where data is, is for another rank, or cuts
            unevenly.
    """
    layout = layout_of(sharding, len(shape))
    tile, parts = layout.tile(shape), layout.parts(len(shape))
    uneven = [d for d, n in enumerate(shape) if n % parts[d]]
    if uneven:
        raise ShardingError(
            f"{layout} cuts dimension {uneven[0]} of shape {shape} into {parts[uneven[0]]} parts, "
            "and JAX has no arrays cut unevenly; cut another dimension, or none."
        )
    devices = tuple(sorted(sharding.addressable_devices, key=lambda device: device.id))
    ids = _ids(devices)
    if not devices:
        return JaxShards(BoxArray.of([], len(shape)), devices, ids, tile)
    boxes, where = distinct_boxes(layout.device_boxes(shape, ids).boxes)
    return JaxShards(boxes, devices, where, tile)
