"""A tile assignment: the device of every tile, in XLA's two notations.

Listed, `[4,2]0,1,2,3,4,5,6,7`: the tiles' dimensions, then the device of every tile in row-major
order. Iota, `[4,2]<=[2,4]T(1,0)`: `arange(8).reshape(2, 4).transpose(1, 0).reshape(4, 2)`, which
stays short however many devices there are, and is expanded only when a caller needs the devices.

Every iota is stored in the form that XLA prints: without sizes of 1, and with adjacent dimensions
merged where possible. A list is converted to its iota form on request, if it has one: split off
arithmetic progressions from the innermost dimension, and check whether the resulting strides are
those of a row-major array.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Literal, TypeAlias
from zlib import crc32

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardckpt.errors import ShardingError
from shardckpt.layout.device_boxes import integer_ids
from shardckpt.layout.mesh import MAX_DEVICES, checked_ids, checked_sizes
from shardckpt.text import clip

if TYPE_CHECKING:
    from collections.abc import Sequence

Ids = NDArray[np.int64]

Form: TypeAlias = Literal["auto", "listed", "iota"]
"""Notation of devices: "auto" is iota if the devices have an iota form, else listed."""

MAX_DIMS = 64
"""Maximum dimensions of an assignment: a tensor's 32 and as many subgroups."""


@dataclass(frozen=True, slots=True)
class Iota:
    """`arange(prod(dims)).reshape(dims).transpose(perm)`, row-major."""

    dims: tuple[int, ...]
    """Sizes before the transposition; `(1,)` for one device."""
    perm: tuple[int, ...]
    """Order of the dimensions after the transposition."""

    def expand(self) -> Ids:
        """The device ids: (prod(dims),) int64."""
        return (
            np.arange(prod(self.dims), dtype=np.int64)
            .reshape(self.dims)
            .transpose(self.perm)
            .reshape(-1)
        )

    def __str__(self) -> str:
        order = "" if len(self.dims) == 1 else f"T({_csv(self.perm)})"
        return f"<=[{_csv(self.dims)}]{order}"

    @classmethod
    def canonical(cls, dims: tuple[int, ...], perm: tuple[int, ...]) -> Iota:
        """The same devices without sizes of 1, and with dimensions merged that stay adjacent.

        >>> str(Iota.canonical((1, 2, 2, 2), (3, 0, 1, 2)))
        '<=[4,2]T(1,0)'
        """
        runs: list[list[int]] = []
        kept = [d for d in range(len(dims)) if dims[d] > 1]
        follows = dict(pairwise(kept))
        for d in (d for d in perm if dims[d] > 1):
            if runs and follows.get(runs[-1][-1]) == d:
                runs[-1].append(d)
            else:
                runs.append([d])
        if not runs:
            return cls((1,), (0,))
        order = sorted(range(len(runs)), key=lambda i: runs[i][0])
        place = {i: position for position, i in enumerate(order)}
        return cls(
            tuple(prod(dims[d] for d in runs[i]) for i in order),
            tuple(place[i] for i in range(len(runs))),
        )

    @classmethod
    def find(cls, devices: Ids) -> Iota | None:
        """The iota that expands to these devices; None if there is none.

        >>> str(Iota.find(np.array([0, 4, 1, 5, 2, 6, 3, 7])))
        '<=[2,4]T(1,0)'
        """
        if devices[0] != 0:
            return None
        sizes: list[int] = []  # innermost first
        strides: list[int] = []
        rest = devices
        while len(rest) > 1:
            stride = int(rest[1] - rest[0])
            breaks = np.flatnonzero(np.diff(rest) != stride)
            size = int(breaks[0]) + 1 if len(breaks) else len(rest)
            if stride <= 0 or len(rest) % size:
                return None
            blocks = rest.reshape(-1, size)
            if (blocks != blocks[:, :1] + stride * np.arange(size)).any():
                return None
            sizes.append(size)
            strides.append(stride)
            rest = blocks[:, 0]
        if not sizes:
            return cls((1,), (0,))
        major_first = sorted(range(len(sizes)), key=lambda i: -strides[i])
        dims = tuple(sizes[i] for i in major_first)
        if any(strides[i] != prod(dims[position + 1 :]) for position, i in enumerate(major_first)):
            return None
        return cls(dims, tuple(major_first.index(i) for i in reversed(range(len(sizes)))))


@dataclass(frozen=True, slots=True, init=False, eq=False, repr=False)
class TileAssignment:
    """The device of every tile.

    Args:
        dims: Tiles per dimension, all at least 1.
        devices: (prod(dims),) device ids in row-major order of the tiles, an `Iota` that has as
            many, or None for 0, 1, 2, …

    Raises:
        ShardingError: The counts do not agree, ids repeat or are negative, or there are more than
            `MAX_DEVICES`.
    """

    dims: tuple[int, ...]
    """Tiles per dimension."""
    _iota: Iota | None = field(init=False)
    _devices: Ids | None = field(init=False)
    _hash: int | None = field(init=False)

    def __init__(self, dims: Sequence[int], devices: ArrayLike | Iota | None = None) -> None:
        checked = checked_sizes(dims, "Tile assignment", least=1)
        if len(checked) > MAX_DIMS:
            raise ShardingError(
                f"Tile assignment: {len(checked)} dimensions; at most {MAX_DIMS} can be."
            )
        if prod(checked) > MAX_DEVICES:
            raise ShardingError(
                f"Tile assignment: {prod(checked)} devices; at most {MAX_DEVICES} can be."
            )
        iota = (
            Iota((prod(checked),), (0,))
            if devices is None
            else devices
            if isinstance(devices, Iota)
            else None
        )
        if iota is not None:
            iota = _checked_iota(iota, checked)
        object.__setattr__(self, "dims", checked)
        object.__setattr__(self, "_iota", iota)
        object.__setattr__(
            self, "_devices", None if iota is not None else _id_array(devices, checked)
        )
        object.__setattr__(self, "_hash", None)

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return prod(self.dims)

    @property
    def devices(self) -> Ids:
        """(num_devices,) int64, row-major, read-only."""
        if self._devices is None:
            assert self._iota is not None
            devices = self._iota.expand()
            devices.setflags(write=False)
            object.__setattr__(self, "_devices", devices)
            return devices
        return self._devices

    def iota(self) -> Iota | None:
        """The iota form; None if there is none."""
        return self._iota if self._iota is not None else Iota.find(self.devices)

    def reshape(self, dims: Sequence[int]) -> TileAssignment:
        """The same devices with other dimensions."""
        return TileAssignment(dims, self._iota if self._iota is not None else self.devices)

    def sorted(self) -> TileAssignment:
        """The same devices in ascending order."""
        ids = self.devices
        return self if (ids[1:] > ids[:-1]).all() else TileAssignment(self.dims, np.sort(ids))

    def to_hlo(self, form: Form) -> str:
        """XLA's text, such as `[4,2]<=[2,4]T(1,0)`.

        Raises:
            ShardingError: `form="iota"` and the devices have no iota form.
        """
        iota = None if form == "listed" else self.iota()
        if iota is None and form == "iota":
            raise ShardingError(
                'OpSharding: these devices have no iota form; write them with form="listed" or '
                '"auto".'
            )
        return f"[{_csv(self.dims)}]{iota if iota is not None else _csv(self.devices.tolist())}"

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, TileAssignment):
            return NotImplemented
        if self.dims != other.dims:
            return False
        same_iota = self._iota is not None and self._iota == other._iota
        return same_iota or bool(np.array_equal(self.devices, other.devices))

    def __hash__(self) -> int:
        if self._hash is None:
            # Pickles carry the hash, and each process hashes bytes differently.
            object.__setattr__(self, "_hash", hash((self.dims, crc32(self.devices.tobytes()))))
        assert self._hash is not None
        return self._hash

    def __repr__(self) -> str:
        return f"TileAssignment({clip(self.to_hlo('auto'), 200)})"


def _checked_iota(iota: Iota, dims: tuple[int, ...]) -> Iota:
    sizes = checked_sizes(iota.dims, "Iota", least=1)
    if len(sizes) > MAX_DIMS:
        raise ShardingError(f"Iota: {len(sizes)} dimensions; at most {MAX_DIMS} can be.")
    if prod(sizes) != prod(dims):
        raise ShardingError(
            f"Tile assignment: {prod(dims)} tiles and an iota of {prod(sizes)} devices; give one "
            "device per tile."
        )
    if len(iota.perm) > MAX_DIMS or sorted(iota.perm) != list(range(len(sizes))):
        raise ShardingError(
            f"Iota: T({_csv(iota.perm)}) is not a permutation of the {len(sizes)} dimensions "
            f"[{_csv(sizes)}]."
        )
    return Iota.canonical(sizes, tuple(iota.perm))


def _id_array(devices: object, dims: tuple[int, ...]) -> Ids:
    ids = checked_ids(integer_ids(devices).reshape(-1), (prod(dims),), what="Tile assignment")
    ids.setflags(write=False)
    return ids


def _csv(values: Sequence[int]) -> str:
    return ",".join(map(str, values))
