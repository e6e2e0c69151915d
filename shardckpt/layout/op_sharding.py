"""XLA's OpSharding: the tiles of a tensor by device id, without axis names.

Every type of XLA is supported. `replicated`, `maximal` and `tiled`, the last with subgroups of
replicas or without ("partial" is tiled with one subgroup of replicas), determine where data is and
can be saved. `manual`, `unreduced` and `unknown`, and tiled with subgroups of the first two, do
not: asking them for boxes is an error with the reason.

Two shardings are equal when all their fields agree: type, tile dimensions, devices, subgroups;
listed and iota forms of the same devices are equal. They are `equivalent` when every device holds
the same part of every tensor. `canonical` is XLA's own normal form (`HloSharding::PartialTile` and
`::Subgroup`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt.errors import FormatError, ShardingError
from shardckpt.layout.device_boxes import (
    DeviceBoxes,
    Tiling,
    checked_tensor_shape,
    integer_ids,
    tile_shape,
)
from shardckpt.layout.hlo_text import Kind, parse_hlo
from shardckpt.layout.tile_assignment import Form, TileAssignment
from shardckpt.text import clip, shorten

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

_NO_BOXES = {
    Kind.MANUAL: (
        "manual: only the program inside the manual region knows what its devices hold; leave "
        "the region first"
    ),
    Kind.UNREDUCED: "unreduced: its devices hold partial sums; reduce it first",
    Kind.UNKNOWN: "unknown: the compiler has not decided yet; sync or compile first",
}

_SUBGROUP_ORDER = (Kind.MANUAL, Kind.UNREDUCED, Kind.REPLICATED)
"""XLA's order of subgroups, replicas last."""


@dataclass(frozen=True, slots=True)
class OpSharding:
    """XLA's OpSharding: the tile of a tensor that each device holds, without axis names.

    Make one with `parse`, `replicated`, `maximal` or `tiled`. Tensors with a replicated, maximal or
    tiled sharding can be saved. XLA's other types (manual, unreduced, unknown) can be parsed, but
    they do not determine which box each device holds: methods that need boxes raise an error. The
    same holds for a tiled sharding with a manual or unreduced subgroup.

    `==` compares type, tile dimensions, devices and subgroups; `equivalent` compares which device
    holds which part.

    Raises:
        ShardingError: The fields contradict each other.

    Examples:
        >>> sharding = OpSharding.parse("{devices=[4,1,2]<=[8] last_tile_dim_replicate}")
        >>> sharding.device_boxes((10, 7)).replica_id.tolist()
        [0, 1, 0, 1, 0, 1, 0, 1]
    """

    kind: Kind
    """Type of the sharding."""
    tiles: TileAssignment | None = None
    """The devices. Tiled: an array with the tensor's dimensions, then one dimension per subgroup.
    Maximal: one device. Replicated: all devices, or None, because XLA's text does not name them."""
    subgroups: tuple[Kind, ...] = ()
    """Type of each subgroup, in the order of the last dimensions of `tiles`: replicated, manual or
    unreduced."""

    def __post_init__(self) -> None:
        """Refuse fields that contradict each other."""
        object.__setattr__(self, "kind", _kind(self.kind))
        object.__setattr__(self, "subgroups", tuple(map(_kind, self.subgroups)))
        dims = None if self.tiles is None else self.tiles.dims
        if self.kind is Kind.TILED and dims is None:
            raise ShardingError("OpSharding: tiled needs a tile assignment.")
        if self.kind is Kind.MAXIMAL and dims != (1,):
            raise ShardingError("OpSharding: maximal needs exactly one device.")
        if self.kind is Kind.REPLICATED and self.tiles is not None:
            if self.tiles.dims != (self.tiles.num_devices,):
                raise ShardingError("OpSharding: replicated takes a flat list of devices.")
            # A set of devices: only the order could differ, and it means nothing.
            object.__setattr__(self, "tiles", self.tiles.sorted())
        if self.kind in _NO_BOXES and dims is not None:
            raise ShardingError(f"OpSharding: {self.kind} has no devices.")
        if self.subgroups and self.kind is not Kind.TILED:
            raise ShardingError(f"OpSharding: {self.kind} has no subgroups.")
        if len(self.subgroups) > len(dims or ()):
            raise ShardingError(
                f"OpSharding: {len(self.subgroups)} subgroups for the {len(dims or ())} "
                "dimensions of its tiles."
            )
        if unfit := [kind for kind in self.subgroups if kind not in _SUBGROUP_ORDER]:
            raise ShardingError(
                f"OpSharding: a subgroup cannot be {unfit[0]}; it is replicated, manual or "
                "unreduced."
            )

    # Construction

    @classmethod
    def replicated(cls, devices: int | ArrayLike | None = None) -> OpSharding:
        """The complete tensor on each device.

        Args:
            devices: Number of devices with ids from 0, or their ids; None: not known.
        """
        if devices is None:
            return cls(Kind.REPLICATED)
        if isinstance(devices, int):
            return cls(Kind.REPLICATED, TileAssignment((devices,)))
        ids = integer_ids(devices)
        if ids.ndim == 0:
            return cls(Kind.REPLICATED, TileAssignment((ids.item(),)))
        return cls(Kind.REPLICATED, TileAssignment((ids.size,), ids.reshape(-1)))

    @classmethod
    def maximal(cls, device: int) -> OpSharding:
        """The complete tensor on one device, given by its id."""
        return cls(Kind.MAXIMAL, TileAssignment((1,), [device]))

    @classmethod
    def tiled(
        cls,
        dims: Sequence[int],
        devices: ArrayLike | None = None,
        *,
        subgroups: Sequence[Kind] = (),
    ) -> OpSharding:
        """One tile of the tensor per device, or per group of replicas.

        Args:
            dims: Number of tiles along each tensor dimension, then the size of each subgroup.
            devices: Device ids in row-major order of `dims`; None: 0, 1, 2, …
            subgroups: Type of each subgroup; `(Kind.REPLICATED,)` is XLA's
                `last_tile_dim_replicate`.
        """
        return cls(Kind.TILED, TileAssignment(dims, devices), tuple(subgroups))

    @classmethod
    def parse(cls, text: str, num_devices: int | None = None) -> OpSharding:
        """Parse XLA's text, with listed devices or in iota form.

        Args:
            text: A text such as `{devices=[4,2]<=[2,4]T(1,0)}`.
            num_devices: Number of devices, with ids from 0. `{replicated}` needs it, because its
                text has no number. For a tiled text, it is compared with the text's number.

        Raises:
            ShardingError: The text is not a sharding, is a tuple of shardings, or has a different
                number of devices.
        """
        kind, tiles, subgroups = parse_hlo(text)
        if kind is Kind.REPLICATED and num_devices is not None:
            return cls.replicated(num_devices)
        if (
            kind is Kind.TILED
            and num_devices is not None
            and tiles is not None
            and tiles.num_devices != num_devices
        ):
            raise ShardingError(
                f"OpSharding: the text has {tiles.num_devices} devices, but "
                f"num_devices={num_devices}: {clip(text)}"
            )
        return cls(kind, tiles, subgroups)

    def relabel(self, device_ids: ArrayLike) -> OpSharding:
        """Replace each device i by `device_ids[i]`.

        JAX's HLO shardings contain positions in a device list instead of ids. `{replicated}` gets
        all ids of the list.

        Args:
            device_ids: The device list.

        Raises:
            ShardingError: This sharding names a position beyond the end of the list.
        """
        ids = integer_ids(device_ids).reshape(-1)
        if self.kind is Kind.REPLICATED and self.tiles is None:
            return OpSharding.replicated(ids)
        if self.tiles is None:
            return self
        positions = self.tiles.devices
        if positions.max() >= len(ids):
            raise ShardingError(
                f"OpSharding: it names device {positions.max()}, and the device list has "
                f"{len(ids)}."
            )
        if self.kind is Kind.REPLICATED:
            return OpSharding.replicated(ids[positions])
        return OpSharding(
            self.kind, TileAssignment(self.tiles.dims, ids[positions]), self.subgroups
        )

    # Properties

    @property
    def num_devices(self) -> int:
        """Number of devices that hold a part of the tensor.

        Raises:
            ShardingError: The number is not known: the type is manual, unreduced or unknown, or
                replicated without devices.
        """
        if self.tiles is None:
            raise _no_devices(self)
        return self.tiles.num_devices

    @property
    def data_dims(self) -> tuple[int, ...]:
        """Number of tiles along each tensor dimension, for a tiled sharding."""
        assert self.tiles is not None
        return self.tiles.dims[: len(self.tiles.dims) - len(self.subgroups)]

    @property
    def replication_groups(self) -> NDArray[np.int64]:
        """Device ids as an array (tiles, replicas): row i has the devices of tile i, ascending.

        Raises:
            ShardingError: As for `device_boxes`.
        """
        same = self._saveable()
        assert same.tiles is not None
        if same.kind is not Kind.TILED:
            return same.tiles.devices.reshape(1, -1)
        return same.tiles.devices.reshape(prod(same.data_dims), -1)

    def parts(self, ndim: int) -> tuple[int, ...]:
        """Number of tiles along each dimension of a tensor with `ndim` dimensions.

        Raises:
            ShardingError: The sharding is for tensors of another rank, or its type does not
                determine boxes.
        """
        if self.kind in {Kind.REPLICATED, Kind.MAXIMAL}:
            return (1,) * ndim
        self._saveable()
        if len(self.data_dims) != ndim:
            raise ShardingError(
                f"OpSharding {clip(self.to_hlo())} cuts tensors of {len(self.data_dims)} "
                f"dimensions and this one has {ndim}; use the sharding of the tensor itself."
            )
        return self.data_dims

    def tile(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The padded shape of every shard of a tensor with this shape."""
        shape = checked_tensor_shape(shape)
        return tile_shape(shape, self.parts(len(shape)))

    def tiling(self, ndim: int) -> Tiling:
        """The tile of every device; cached.

        Raises:
            ShardingError: As for `device_boxes`.
        """
        return _tiling(self, ndim)

    def device_boxes(
        self, shape: Sequence[int], device_ids: ArrayLike | None = None
    ) -> DeviceBoxes:
        """The boxes of all devices, or of `device_ids`, in a tensor with this shape.

        Raises:
            ShardingError: The sharding is for tensors of another rank, its type does not determine
                boxes, or its devices are not known.
        """
        shape = checked_tensor_shape(shape)
        return self.tiling(len(shape)).device_boxes(shape, device_ids)

    # Equality

    def canonical(self) -> OpSharding:
        """XLA's normal form (`HloSharding::PartialTile` and `::Subgroup`).

        Subgroups of the same type are merged and put in a fixed order; subgroups of size 1 are
        removed; replicas are sorted by id. A tiled sharding that cuts nothing becomes replicated,
        manual or unreduced.
        """
        if self.kind is not Kind.TILED or not self.subgroups:
            return self
        assert self.tiles is not None
        data, sizes = self.data_dims, self.tiles.dims[len(self.data_dims) :]
        kept = [
            (kind, g)
            for kind in _SUBGROUP_ORDER
            for g, other in enumerate(self.subgroups)
            if other is kind and sizes[g] > 1
        ]
        kinds = tuple(kind for kind in _SUBGROUP_ORDER if any(kind is other for other, _ in kept))
        if prod(data) == 1 and len(set(self.subgroups)) == 1:
            kind = self.subgroups[0]
            return (
                OpSharding.replicated(self.tiles.devices)
                if kind is Kind.REPLICATED
                else OpSharding(kind)
            )
        merged = (*data, *(prod(sizes[g] for other, g in kept if other is kind) for kind in kinds))
        order = [g for _, g in kept]
        devices = self.tiles.devices
        if order != sorted(order):
            in_place = sorted(order)
            cube = devices.reshape(prod(data), *(sizes[g] for g in in_place))
            devices = cube.transpose(0, *(1 + in_place.index(g) for g in order)).reshape(-1)
        if kinds and kinds[-1] is Kind.REPLICATED:
            groups = devices.reshape(-1, merged[-1])
            if (groups[:, 1:] < groups[:, :-1]).any():
                devices = np.sort(groups, axis=1).reshape(-1)
        tiles = (
            self.tiles.reshape(merged)
            if devices is self.tiles.devices
            else TileAssignment(merged, devices)
        )
        return OpSharding(Kind.TILED, tiles, kinds)

    def equivalent(self, other: OpSharding) -> bool:
        """Whether each device holds the same part of any tensor under both shardings.

        `{replicated}` without known devices is equivalent to every replicated sharding.
        """
        a, b = self.canonical(), other.canonical()
        if _is_whole(a) and _is_whole(b):
            if a.tiles is None or b.tiles is None:
                return a.kind is b.kind
            return np.array_equal(np.sort(a.tiles.devices), np.sort(b.tiles.devices))
        return a == b

    # Text and JSON

    def to_hlo(self, form: Form = "auto") -> str:
        """Format the sharding as XLA's text.

        Args:
            form: "iota", "listed", or "auto": iota if possible, else listed.

        Raises:
            ShardingError: `form="iota"`, but the devices have no iota form.

        Examples:
            >>> OpSharding.tiled((4, 2), [0, 4, 1, 5, 2, 6, 3, 7]).to_hlo()
            '{devices=[4,2]<=[2,4]T(1,0)}'
        """
        if self.kind is Kind.MAXIMAL:
            assert self.tiles is not None
            return f"{{maximal device={self.tiles.devices[0]}}}"
        if self.kind is not Kind.TILED:
            return f"{{{self.kind}}}"
        assert self.tiles is not None
        subgroups = ""
        if self.subgroups:
            replicate = self.subgroups == (Kind.REPLICATED,)
            subgroups = (
                " last_tile_dim_replicate"
                if replicate
                else f" last_tile_dims={{{', '.join(self.subgroups)}}}"
            )
        return f"{{devices={self.tiles.to_hlo(form)}{subgroups}}}"

    def to_json(self) -> dict[str, object]:
        """The JSON form: `{"hlo": text}`.

        A replicated sharding also has `"devices": null | number | [ids]`.
        """
        doc: dict[str, object] = {"hlo": self.to_hlo()}
        if self.kind is Kind.REPLICATED:
            ids = None if self.tiles is None else self.tiles.devices
            doc["devices"] = (
                None if ids is None else len(ids) if ids[-1] == len(ids) - 1 else ids.tolist()
            )
        return doc

    @classmethod
    def from_json(cls, doc: object) -> OpSharding:
        """Parse the output of `to_json`.

        Raises:
            FormatError: The document is invalid.
        """
        if not isinstance(doc, Mapping) or not isinstance(doc.get("hlo"), str):
            raise FormatError(
                f"OpSharding: expected an object with the text in hlo, found {type(doc).__name__}."
            )
        devices = doc.get("devices")
        whole = devices is None or type(devices) is int
        if not whole and not (
            isinstance(devices, list) and all(type(item) is int for item in devices)
        ):
            raise FormatError(
                "OpSharding: devices must be null, a number or a list of integers, found "
                f"{type(devices).__name__}."
            )
        try:
            sharding = cls.parse(doc["hlo"])
            expected = {"hlo", "devices"} if sharding.kind is Kind.REPLICATED else {"hlo"}
            if set(doc) != expected:
                raise FormatError(
                    f"OpSharding: {sharding.kind} is stored with {sorted(expected)}, found "
                    f"{sorted(map(str, doc))[:8]}."
                )
            return cls.replicated(devices) if sharding.kind is Kind.REPLICATED else sharding
        except ShardingError as error:
            raise FormatError(str(error)) from error

    def __str__(self) -> str:
        return self.to_hlo()

    def _saveable(self) -> OpSharding:
        """The canonical form, checked to have devices and boxes."""
        same = self.canonical()
        if same.tiles is None:
            raise _no_devices(same)
        for kind in same.subgroups:
            if kind is not Kind.REPLICATED:
                raise ShardingError(
                    f"OpSharding {clip(self.to_hlo())} has no boxes. A subgroup is "
                    f"{_NO_BOXES[kind]}."
                )
        return same


def _kind(given: Any) -> Kind:
    """The kind, given as such or in words."""
    try:
        return Kind(given)
    except ValueError:
        kinds = ", ".join(Kind)
        raise ShardingError(
            f"OpSharding: {shorten(given)} is not a kind of sharding; the kinds are {kinds}."
        ) from None


@lru_cache(maxsize=64)
def _tiling(sharding: OpSharding, ndim: int) -> Tiling:
    groups = sharding.replication_groups
    parts = sharding.parts(ndim)
    tile_ids = np.repeat(np.arange(len(groups), dtype=np.int64), groups.shape[1])
    return Tiling.of(groups.reshape(-1), tile_ids, parts)


def _is_whole(canonical: OpSharding) -> bool:
    """Whether every device of a canonical sharding holds the complete tensor."""
    if canonical.kind is Kind.TILED:
        return not canonical.subgroups and prod(canonical.data_dims) == 1
    return canonical.kind in {Kind.REPLICATED, Kind.MAXIMAL}


def _no_devices(sharding: OpSharding) -> ShardingError:
    if sharding.kind is Kind.REPLICATED:
        return ShardingError(
            "OpSharding {replicated} does not say on how many devices; read it with parse(text, "
            "num_devices=…)."
        )
    return ShardingError(
        f"OpSharding {clip(sharding.to_hlo())} has no boxes. It is {_NO_BOXES[sharding.kind]}."
    )
