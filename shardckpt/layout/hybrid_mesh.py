"""A mesh over several TPU slices.

Fast links (ICI) connect devices inside a slice, and the data-center network (DCN) connects the
slices.

Every axis has an inner size, within a slice, and an outer one, across slices; its size is their
product.

1. Devices are grouped into slices, in order of their slice index. There must be prod(dcn_shape)
   slices of prod(ici_shape) devices each.
2. Inside a slice, `ici_shape` is laid over the physical torus that the devices' coordinates
   describe (`torus_mesh`); devices without coordinates are placed in order of their ids.
3. The slice at DCN position (s0, s1, …) fills the block that begins at (s0·ici0, s1·ici1, …): along
   every axis the devices of one slice are contiguous.

Order and rules are those of torch_xla's `HybridMesh` and JAX's `create_hybrid_device_mesh`, so that
a mesh built here, away from any accelerator, has the ids of one built on it. JAX reorders some
small single hosts (rings on v5e and v5p 2x2x2) where torch_xla does not; here, as in torch_xla,
they are not reordered.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, product
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.errors import ShardingError
from shardckpt.layout.mesh import MAX_DEVICES, Ids, Mesh, checked_sizes

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Device:
    """The properties of one device that determine its place in a mesh.

    The device's runtime reports them.
    """

    id: int
    """The global device id."""
    slice_index: int = 0
    """Index of the device's slice."""
    coords: tuple[int, ...] | None = None
    """Coordinates of its chip in the slice's torus, x first; None off TPU."""
    core_on_chip: int = 0
    """Number of the core on the chip; 0 where a chip is one device (v4 and later)."""
    process_index: int = 0
    """Index of the device's process."""

    def __post_init__(self) -> None:
        """Refuse negative or non-integer numbers.

        Convert coordinates, which runtimes give as lists.
        """
        checked_sizes(
            (self.id, self.slice_index, self.core_on_chip, self.process_index), "Device", least=0
        )
        if self.coords is not None:
            object.__setattr__(
                self,
                "coords",
                checked_sizes(self.coords, f"Coordinates of device {self.id}", least=0),
            )


@dataclass(frozen=True, slots=True, init=False, eq=False, repr=False)
class HybridMesh(Mesh):
    """A mesh over several TPU slices.

    Fast links (ICI) connect devices inside a slice, and the data-center network (DCN) connects the
    slices.

    The size of each axis is its number of devices within a slice times its number of slices. The
    devices of one slice are contiguous along every axis. The order of devices is the order of
    torch_xla's `HybridMesh` and JAX's `create_hybrid_device_mesh`.

    Args:
        ici_shape: Number of devices along each axis within a slice.
        dcn_shape: Number of slices along each axis.
        axis_names: One name per axis. None: the names are "0", "1", …
        devices: All devices, in any order. None: ids from 0, slice after slice.
        process_is_granule: Treat the devices of one process as a slice, on platforms without
            slices.

    Raises:
        ShardingError: The shapes differ in rank, the devices do not form as many slices of equal
            size, or the coordinates in a slice have gaps.

    Examples:
        >>> mesh = HybridMesh((1, 4), (2, 1), ("data", "fsdp"))
        >>> mesh.devices.tolist()
        [[0, 1, 2, 3], [4, 5, 6, 7]]
    """

    ici_shape: tuple[int, ...]
    """Number of devices along each axis within a slice."""
    dcn_shape: tuple[int, ...]
    """Number of slices along each axis."""

    def __init__(
        self,
        ici_shape: Sequence[int],
        dcn_shape: Sequence[int],
        axis_names: Sequence[str] | None,
        devices: Sequence[Device] | None = None,
        *,
        process_is_granule: bool = False,
    ) -> None:
        ici = checked_sizes(ici_shape, "HybridMesh ici_shape", least=1)
        dcn = checked_sizes(dcn_shape, "HybridMesh dcn_shape", least=1)
        if len(ici) != len(dcn):
            raise ShardingError(
                f"HybridMesh: ici_shape {ici} and dcn_shape {dcn} must have one size each for "
                "every axis."
            )
        if prod(ici) * prod(dcn) > MAX_DEVICES:
            raise ShardingError(
                f"HybridMesh: {ici} × {dcn} is {prod(ici) * prod(dcn)} devices; at most "
                f"{MAX_DEVICES} can be."
            )
        if devices is None:
            blocks = np.arange(prod(dcn) * prod(ici), dtype=np.int64).reshape(*dcn, *ici)
        else:
            slices = _slices(
                devices, prod(ici), prod(dcn), "process" if process_is_granule else "slice"
            )
            blocks = np.stack([_slice_mesh(members, ici) for members in slices]).reshape(*dcn, *ici)
        # (dcn0, dcn1, …, ici0, ici1, …) to (dcn0, ici0, dcn1, ici1, …): the slice is the major part
        # of every axis.
        interleaved = blocks.transpose(
            [place for axis in range(len(ici)) for place in (axis, len(ici) + axis)]
        )
        shape = tuple(i * d for i, d in zip(ici, dcn, strict=True))
        Mesh.__init__(self, shape, axis_names, interleaved.reshape(-1))
        object.__setattr__(self, "ici_shape", ici)
        object.__setattr__(self, "dcn_shape", dcn)


def torus_mesh(physical: Ids, shape: Sequence[int]) -> Ids:
    """Lay a logical mesh over a slice's torus, later (more talkative) axes first.

    A logical axis gets complete physical axes if some subset has exactly its size, more axes rather
    than fewer: rings in several directions at once. If that fails for any axis, all are placed
    again by splitting physical axes, by torch_xla's and JAX's preferences: complete axes before
    parts, and parts of axes that are already in use before unused ones.

    Args:
        physical: Device ids in the shape of the torus.
        shape: The logical mesh, with as many devices; axes in order of increasing traffic.

    Returns:
        The ids in `shape`.

    Examples:
        >>> torus_mesh(np.arange(16).reshape(4, 2, 2), (4, 4))[0].tolist()
        [0, 1, 2, 3]
    """
    whole = _whole_axes(physical.shape, tuple(shape))
    if whole is not None:
        given = [axis for axes in whole for axis in axes]
        return physical.transpose(
            given + [axis for axis in range(physical.ndim) if axis not in given]
        ).reshape(shape)
    factors = _split_axes(physical.shape, tuple(shape))  # (logical, physical)
    # Within a physical axis the later logical axes are innermost, where neighbours are one hop
    # apart.
    split = physical.reshape(factors.T.reshape(-1))
    logical, ndim = factors.shape
    by_logical = [axis * logical + place for place in range(logical) for axis in range(ndim)]
    return split.transpose(by_logical).reshape(shape)


def _slices(
    devices: Sequence[Device], slice_size: int, num_slices: int, granule: str
) -> list[list[Device]]:
    """The devices of every slice, by slice index."""
    slices: dict[int, list[Device]] = {}
    for device in devices:
        slices.setdefault(
            device.process_index if granule == "process" else device.slice_index, []
        ).append(device)
    if len(slices) != num_slices:
        plural = "processes" if granule == "process" else "slices"
        raise ShardingError(
            f"HybridMesh: dcn_shape asks for {num_slices} {plural}, but the devices are in "
            f"{len(slices)}: {sorted(slices)[:16]}; give a dcn_shape whose product is "
            f"{len(slices)}."
        )
    for index, members in slices.items():
        if len(members) != slice_size:
            raise ShardingError(
                f"HybridMesh: ici_shape asks for {slice_size} devices per {granule}, but "
                f"{granule} {index} has {len(members)}; every {granule} needs the same number."
            )
    return [slices[index] for index in sorted(slices)]


def _slice_mesh(members: list[Device], shape: tuple[int, ...]) -> Ids:
    """The ids of one slice in `shape`."""
    located = [device.coords for device in members if device.coords is not None]
    if not located:
        return np.array(sorted(device.id for device in members), np.int64).reshape(shape)
    if len({len(coords) for coords in located}) > 1 or len(located) < len(members):
        raise ShardingError(
            f"HybridMesh: slice {members[0].slice_index} has devices without coordinates, or with "
            "fewer coordinates than others."
        )
    places = np.array(
        [(*coords, device.core_on_chip) for coords, device in zip(located, members, strict=True)],
        np.int64,
    )
    places -= places.min(axis=0)
    extents = (places.max(axis=0) + 1).tolist()
    cores = extents.pop()
    # A chip with two cores (v2, v3) lies in a plane, and the cores are the third dimension of the
    # torus.
    used = [
        *(axis for axis in range(len(extents)) if cores == 1 or extents[axis] > 1 or axis < 2),
        *([len(extents)] if cores > 1 else []),
    ]
    torus = [(*extents, cores)[axis] for axis in used]
    if prod(torus) != len(members) or len(np.unique(places, axis=0)) != len(members):
        raise ShardingError(
            f"HybridMesh: the coordinates of slice {members[0].slice_index} span "
            f"{'×'.join(map(str, torus))} places for {len(members)} devices; they must fill a "
            "cuboid, one device at each place."
        )
    physical = np.empty(torus, np.int64)
    physical[tuple(places[:, used].T)] = [device.id for device in members]
    return torus_mesh(physical, shape)


def _whole_axes(torus: tuple[int, ...], shape: tuple[int, ...]) -> list[tuple[int, ...]] | None:
    """The physical axes of every logical axis, or None if an axis would have to be split."""
    free = set(range(len(torus)))
    given: list[tuple[int, ...]] = [()] * len(shape)
    for place in reversed(range(len(shape))):
        candidates = (
            axes for count in range(len(torus), 0, -1) for axes in combinations(sorted(free), count)
        )
        axes = next(
            (axes for axes in candidates if prod(torus[axis] for axis in axes) == shape[place]),
            None,
        )
        if axes is None and shape[place] > 1:
            return None
        given[place] = axes or ()
        free -= set(given[place])
    return given


def _split_axes(torus: tuple[int, ...], shape: tuple[int, ...]) -> Ids:
    """(logical, physical) factors: row i multiplies to shape[i], column j to torus[j]."""
    factors = np.ones((len(shape), len(torus)), np.int64)
    for place in reversed(range(len(shape))):
        in_use = factors.prod(axis=0)
        options = (_divisors(size // int(used)) for size, used in zip(torus, in_use, strict=True))
        fitting = [option for option in product(*options) if prod(option) == shape[place]]
        if not fitting:
            raise ShardingError(
                f"HybridMesh: axes {shape} cannot be laid over a torus of "
                f"{'×'.join(map(str, torus))}; choose other sizes."
            )
        factors[place] = max(fitting, key=lambda option: _preference(option, torus, in_use))
    return factors


def _preference(
    option: tuple[int, ...], torus: tuple[int, ...], in_use: Ids
) -> tuple[int, int, int, tuple[int, ...]]:
    """Sort key of an option; a greater key is better.

    It has the devices on complete axes, the number of complete axes, the devices on axes in use,
    and last the earlier axes.
    """
    whole = [size for size, extent in zip(option, torus, strict=True) if size == extent]
    shared = [size for size, used in zip(option, in_use.tolist(), strict=True) if used > 1]
    return prod(whole), sum(size > 1 for size in whole), prod(shared), option


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
