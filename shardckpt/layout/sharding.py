"""A mesh and a partition spec together: the sharding of a tensor.

A sharding determines, for a tensor of any shape, the box of every device and the OpSharding that
torch_xla and JAX would give to XLA. In the other direction, `infer` finds the spec with axis names
for an OpSharding.

The tile of a device along one tensor dimension is a number in mixed radix whose digits are the
device's coordinates on that dimension's axes, first axis most significant (GSPMD, section 3.1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from shardckpt.errors import FormatError, ShardingError
from shardckpt.layout.device_boxes import (
    DeviceBoxes,
    Tiling,
    checked_tensor_shape,
    tile_coords,
    tile_shape,
)
from shardckpt.layout.hlo_text import Kind
from shardckpt.layout.mesh import Mesh, checked_sizes, referred_mesh
from shardckpt.layout.op_sharding import OpSharding
from shardckpt.layout.partition_spec import PartitionSpec
from shardckpt.layout.tile_assignment import Iota, TileAssignment

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


@dataclass(frozen=True, slots=True)
class Sharding:
    """A mesh and a partition spec: the layout of a tensor of any shape.

    Each axis of the spec cuts a tensor dimension into as many parts as the axis has devices. Part
    lengths are rounded up, so the last parts may be shorter or empty.

    Raises:
        ShardingError: The spec names an axis that the mesh lacks, or one axis twice.

    Examples:
        >>> mesh = Mesh((4, 2), ("data", "model"))
        >>> Sharding(mesh, PartitionSpec("data")).tile((10, 7))
        (3, 7)
        >>> str(Sharding(mesh, PartitionSpec("data")).op_sharding(2))
        '{devices=[4,1,2]<=[8] last_tile_dim_replicate}'
    """

    mesh: Mesh
    """The mesh."""
    spec: PartitionSpec
    """The mesh axes that cut each dimension, by name."""

    def __post_init__(self) -> None:
        """Resolve the spec against the mesh."""
        mesh: object = self.mesh
        spec: object = self.spec
        if not isinstance(mesh, Mesh) or not isinstance(spec, PartitionSpec):
            types = f"{type(mesh).__name__} and {type(spec).__name__}"
            raise ShardingError(
                f"Sharding: expected a shardckpt Mesh and PartitionSpec, found {types}; write "
                "PartitionSpec(*entries)."
            )
        object.__setattr__(self, "spec", self.spec.named(self.mesh))

    @classmethod
    def from_partition_counts(
        cls, counts: Sequence[int | None] | None, num_devices: int
    ) -> Sharding:
        """A sharding from the number of parts along each dimension.

        The form is the same as in `PartitionSpec(4, 1)` of JAX's `sharded_jit`.

        Parts are assigned to devices 0, 1, 2, … in row-major order. If there are more devices than
        parts, each part is replicated on the same number of consecutive devices.

        Args:
            counts: Number of parts along each dimension, None for 1. None instead of a sequence:
                replicated.
            num_devices: Number of devices, a multiple of the number of parts.

        Raises:
            ShardingError: `num_devices` is no such multiple, or a count is not a positive integer.

        Examples:
            >>> Sharding.from_partition_counts((4, 1), 8)
            Sharding(mesh=Mesh((4, 2), ('dim0', 'replica')), spec=PartitionSpec('dim0', None))
        """
        parts = checked_sizes(
            [1 if count is None else count for count in (() if counts is None else counts)],
            "Partition counts",
            least=1,
        )
        (devices,) = checked_sizes([num_devices], "Number of devices", least=1)
        if devices % prod(parts):
            raise ShardingError(
                f"Partition counts {parts} make {prod(parts)} parts, which do not divide "
                f"{devices} devices evenly."
            )
        cut = {f"dim{d}": count for d, count in enumerate(parts) if count > 1}
        replicas = devices // prod(parts)
        axes = cut if replicas == 1 and cut else {**cut, "replica": replicas}
        return cls(
            Mesh(tuple(axes.values()), tuple(axes)),
            PartitionSpec(*(f"dim{d}" if f"dim{d}" in cut else None for d in range(len(parts)))),
        )

    @classmethod
    def infer(cls, mesh: Mesh, op_sharding: OpSharding, ndim: int) -> Sharding | None:
        """Find the partition spec over `mesh` that is equivalent to an OpSharding.

        Axes of size 1 never appear in the result.

        Args:
            mesh: A mesh of exactly the OpSharding's devices.
            op_sharding: The OpSharding of a tensor with `ndim` dimensions. Replicated without known
                devices means all devices of the mesh.
            ndim: Number of tensor dimensions.

        Returns:
            The sharding; None if no spec over this mesh is equivalent, as for manual and unknown
            OpShardings.
        """
        # A spec makes a device's tile the sum of its mesh coordinates times a stride per axis. So
        # the device one step along an axis gives that axis's stride; the strides show which axes
        # cut a dimension and in which order. The spec is then checked for every device.
        if op_sharding.kind is Kind.REPLICATED and op_sharding.tiles is None:
            return cls(mesh, PartitionSpec(*[None] * ndim))
        try:
            tiling = op_sharding.tiling(ndim)
        except ShardingError:
            return None
        order = np.argsort(mesh.device_ids)
        if not np.array_equal(mesh.device_ids[order], tiling.device_ids):
            return None
        tile_ids = np.empty_like(tiling.tile_ids)
        tile_ids[order] = tiling.tile_ids  # by position in the mesh
        cuts: list[list[tuple[int, str]]] = [[] for _ in range(ndim)]
        for axis, (name, size) in enumerate(mesh.axis_sizes.items()):
            at = prod(mesh.shape[axis + 1 :]) if size > 1 else 0
            step = tile_coords(tile_ids[at : at + 1], tiling.parts)[0]
            for d in np.flatnonzero(step).tolist():
                cuts[d].append((int(step[d]), name))
        try:
            spec = PartitionSpec(
                *(tuple(name for _, name in sorted(cut, reverse=True)) for cut in cuts)
            )
        except ShardingError:  # an axis cuts two dimensions at once
            return None
        sharding = cls(mesh, spec)
        same = sharding.parts(ndim) == tiling.parts and np.array_equal(
            sharding.tiling(ndim).tile_ids, tiling.tile_ids
        )
        return sharding if same else None

    @property
    def num_devices(self) -> int:
        """Number of devices of the mesh."""
        return self.mesh.size

    def parts(self, ndim: int) -> tuple[int, ...]:
        """Number of tiles along each dimension of a tensor with `ndim` dimensions.

        Raises:
            ShardingError: The spec has more entries than `ndim`.
        """
        if len(self.spec) > ndim:
            raise ShardingError(
                f"{self.spec!r} has {len(self.spec)} entries and the tensor {ndim} dimensions; "
                "give at most one per dimension."
            )
        sizes = self.mesh.axis_sizes
        cut = tuple(prod(sizes[str(axis)] for axis in axes) for axes in self.spec.axes)
        return cut + (1,) * (ndim - len(cut))

    def tile(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The padded shape of every shard of a tensor with this shape.

        Each dimension of it is ceil(dim / parts).
        """
        shape = checked_tensor_shape(shape)
        return tile_shape(shape, self.parts(len(shape)))

    def tiling(self, ndim: int) -> Tiling:
        """The tile of every device; cached.

        Raises:
            ShardingError: The spec has more entries than `ndim`.
        """
        return _tiling(self, ndim)

    def device_boxes(
        self, shape: Sequence[int], device_ids: ArrayLike | None = None
    ) -> DeviceBoxes:
        """The boxes of all devices, or of `device_ids`, in a tensor with this shape.

        Raises:
            ShardingError: The spec has more entries than the tensor has dimensions, or a device is
                not in the mesh.
        """
        shape = checked_tensor_shape(shape)
        return self.tiling(len(shape)).device_boxes(shape, device_ids)

    def op_sharding(self, ndim: int) -> OpSharding:
        """The OpSharding that torch_xla gives to XLA for a tensor with `ndim` dimensions.

        JAX gives the same one, with positions in the mesh in place of device ids.

        Raises:
            ShardingError: The spec has more entries than `ndim`.
        """
        parts = self.parts(ndim)
        if prod(parts) == 1:
            return OpSharding.replicated(self.mesh.device_ids)
        order = _axis_order(self)
        replicas = self.mesh.size // prod(parts)
        dims = parts if replicas == 1 else (*parts, replicas)
        devices: Iota | np.ndarray
        if self.mesh.is_arange:
            devices = Iota(self.mesh.shape, order)
        else:
            devices = np.sort(
                self.mesh.devices.transpose(order).reshape(-1, replicas), axis=1
            ).reshape(-1)
        return OpSharding(
            Kind.TILED, TileAssignment(dims, devices), (Kind.REPLICATED,) if replicas > 1 else ()
        )

    def to_json(self, mesh: int | None = None) -> dict[str, object]:
        """The JSON form: `{"mesh": {…}, "spec": […]}`.

        Args:
            mesh: Index of the mesh in a list of meshes; if given, the index is written in place of
                the mesh.
        """
        return {"mesh": self.mesh.to_json() if mesh is None else mesh, "spec": self.spec.to_json()}

    @classmethod
    def from_json(cls, doc: object, meshes: Sequence[Mesh] = ()) -> Sharding:
        """Parse the output of `to_json`.

        Args:
            doc: The document.
            meshes: The list of meshes that an index in the document refers to.

        Raises:
            FormatError: The document is invalid.
        """
        if not isinstance(doc, Mapping) or set(doc) != {"mesh", "spec"}:
            raise FormatError(
                f"sharding: expected an object with mesh and spec, found {type(doc).__name__}."
            )
        mesh = referred_mesh(doc["mesh"], meshes, "sharding")
        try:
            return cls(mesh, PartitionSpec.from_json(doc["spec"]))
        except ShardingError as error:
            raise FormatError(str(error)) from error


Layout: TypeAlias = Sharding | OpSharding
"""A layout that has `num_devices`, `parts`, `tile`, `tiling` and `device_boxes`."""


@lru_cache(maxsize=64)
def _tiling(sharding: Sharding, ndim: int) -> Tiling:
    parts = sharding.parts(ndim)
    mesh = sharding.mesh
    order = _axis_order(sharding)
    strides = np.zeros(mesh.ndim, np.int64)
    step = 1
    for axis in reversed(order[: sum(map(len, sharding.spec.axes))]):
        strides[axis] = (
            step  # of the row-major tile number: the axes that cut, in order, are its digits
        )
        step *= mesh.shape[axis]
    tile_ids = np.zeros(mesh.shape, np.int64)
    for axis, (size, stride) in enumerate(zip(mesh.shape, strides.tolist(), strict=True)):
        if stride:
            tile_ids += (np.arange(size, dtype=np.int64) * stride).reshape(
                -1, *[1] * (mesh.ndim - axis - 1)
            )
    return Tiling.of(mesh.device_ids, tile_ids.reshape(-1), parts)


def _axis_order(sharding: Sharding) -> tuple[int, ...]:
    """Mesh axes: those that cut, in the spec's order, then the others in the mesh's order."""
    place = {name: i for i, name in enumerate(sharding.mesh.axis_names)}
    cut = [place[str(axis)] for axes in sharding.spec.axes for axis in axes]
    return (*cut, *(i for i in range(sharding.mesh.ndim) if i not in cut))
