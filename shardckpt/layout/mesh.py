"""A mesh: devices in an n-dimensional arrangement whose axes have names.

A mesh maps coordinates on its axes to devices. Device ids are written
in row-major order of the mesh, as torch_xla and JAX do. They are the runtime's own ids: possibly a
permutation, or numbers that start at 2048. Nothing here assumes 0…N-1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TypeAlias
from zlib import crc32

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardckpt.errors import FormatError, ShardingError
from shardckpt.text import shorten

Ids: TypeAlias = NDArray[np.int64]

MAX_DEVICES = 1 << 20
"""Maximum devices in a mesh or tile assignment: ten times the largest systems known, and 8 MiB of
device ids.

A foreign checkpoint may claim any number; the limit bounds the time and memory spent on it.
"""

MAX_AXES = 32
"""Maximum axes of a mesh and dimensions of a tensor: TensorStore's and numpy's own limit."""


_LARGEST = (1 << 62) - 1
"""Maximum dimension: a longer one could overflow int64 when the end of a padded tile is
computed."""
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True, init=False, eq=False, repr=False)
class Mesh:
    """Devices in an n-dimensional arrangement whose axes have names.

    Args:
        shape: Number of devices along each axis, at least 1.
        axis_names: One name per axis. None: the names are "0", "1", …
        device_ids: The runtime's own device ids, in row-major order: a flat list, or an array in
            `shape`. They need not count from 0. None: 0, 1, 2, …

    Raises:
        ShardingError: A name or an id repeats, an id is negative or not an integer, or the number
            of names or ids does not fit `shape`.

    Examples:
        >>> mesh = Mesh((2, 4), ("data", "model"), [7, 6, 5, 4, 3, 2, 1, 0])
        >>> mesh.size, mesh.axis_sizes
        (8, {'data': 2, 'model': 4})
        >>> mesh.devices[1].tolist()
        [3, 2, 1, 0]
    """

    shape: tuple[int, ...]
    """Number of devices along each axis."""
    axis_names: tuple[str, ...]
    """Name of each axis."""
    device_ids: Ids
    """Device ids in row-major order: (size,) int64, read-only."""
    _hash: int = field(init=False)

    def __init__(
        self,
        shape: Sequence[int],
        axis_names: Sequence[str] | None,
        device_ids: ArrayLike | None = None,
    ) -> None:
        checked_shape = _checked_shape(shape)
        names = _checked_names(axis_names, checked_shape)
        ids = (
            np.arange(prod(checked_shape), dtype=np.int64)
            if device_ids is None
            else checked_ids(device_ids, checked_shape)
        )
        ids.setflags(write=False)
        object.__setattr__(self, "shape", checked_shape)
        object.__setattr__(self, "axis_names", names)
        object.__setattr__(self, "device_ids", ids)
        # Pickles carry the hash, and each process hashes text and bytes differently.
        sums = crc32("\0".join(names).encode()), crc32(ids.tobytes())
        object.__setattr__(self, "_hash", hash((checked_shape, sums)))

    @property
    def size(self) -> int:
        """Number of devices."""
        return len(self.device_ids)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Axis name → number of devices along the axis, in axis order."""
        return dict(zip(self.axis_names, self.shape, strict=True))

    @property
    def devices(self) -> Ids:
        """Device ids as an int64 array in the mesh's shape."""
        return self.device_ids.reshape(self.shape)

    @property
    def is_arange(self) -> bool:
        """Whether the devices are 0, 1, 2, … in row-major order."""
        return bool(np.array_equal(self.device_ids, np.arange(self.size)))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Mesh):
            return NotImplemented
        # The hash is computed once; it distinguishes nearly all unequal pairs without comparing
        # ids.
        return (
            self._hash == other._hash
            and self.shape == other.shape
            and self.axis_names == other.axis_names
            and bool(np.array_equal(self.device_ids, other.device_ids))
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        ids = (
            ""
            if self.is_arange
            else f", {np.array2string(self.device_ids, separator=', ', threshold=16)}"
        )
        return f"Mesh({self.shape}, {self.axis_names}{ids})"

    def to_json(self) -> dict[str, object]:
        """The JSON form: `{"shape": …, "axes": …, "devices": null | […]}`.

        Null stands for ids from 0 in order.
        """
        return {
            "shape": list(self.shape),
            "axes": list(self.axis_names),
            "devices": None if self.is_arange else self.device_ids.tolist(),
        }

    @classmethod
    def from_json(cls, doc: object) -> Mesh:
        """Parse the output of `to_json`.

        Raises:
            FormatError: The document is invalid.
        """
        if not isinstance(doc, Mapping) or set(doc) != {"shape", "axes", "devices"}:
            raise FormatError(
                f"mesh: expected an object with shape, axes and devices, found {shorten(doc)}."
            )
        shape, axes, devices = doc["shape"], doc["axes"], doc["devices"]
        if not _is_list_of(shape, int) or not _is_list_of(axes, str):
            raise FormatError(
                "mesh: shape must be a list of integers and axes a list of names, found "
                f"{shorten(shape)} and {shorten(axes)}."
            )
        if devices is not None and not _is_list_of(devices, int):
            raise FormatError(
                f"mesh: devices must be null or a list of integers, found {shorten(devices)}."
            )
        try:
            return Mesh(shape, axes, devices)
        except ShardingError as error:
            raise FormatError(str(error)) from error


def referred_mesh(doc: object, meshes: Sequence[Mesh], what: str) -> Mesh:
    """The mesh of a document: either in full, or its index in a list that is stored once.

    Args:
        doc: the output of `Mesh.to_json`, or a number.
        meshes: the list.
        what: name of the referring object, for messages.

    Raises:
        FormatError: the document is neither.
    """
    if type(doc) is not int:
        return Mesh.from_json(doc)
    if not 0 <= doc < len(meshes):
        raise FormatError(
            f"{what}: it refers to mesh {shorten(doc)}, but there are {len(meshes)} meshes, "
            "counted from 0."
        )
    return meshes[doc]


def _is_list_of(value: object, kind: type) -> bool:
    # type(), not isinstance, because True is an int in Python.
    return isinstance(value, list) and all(type(item) is kind for item in value)


def _checked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    checked = checked_sizes(shape, "Mesh shape", least=1)
    if len(checked) > MAX_AXES:
        raise ShardingError(f"Mesh: {len(checked)} axes; at most {MAX_AXES} can be.")
    if prod(checked) > MAX_DEVICES:
        raise ShardingError(
            f"Mesh: shape {checked} has {prod(checked)} devices; at most {MAX_DEVICES} can be."
        )
    return checked


def checked_sizes(sizes: Sequence[int], what: str, *, least: int) -> tuple[int, ...]:
    """Sizes as a tuple of Python ints, each at least `least`.

    Raises:
        ShardingError: A size is invalid; the message has `what`, the position and the value.
    """
    try:
        checked = tuple(sizes)
    except TypeError:
        raise ShardingError(
            f"{what}: expected a sequence of integers, found {shorten(sizes)}."
        ) from None
    for i, size in enumerate(checked):
        if isinstance(size, bool | np.bool_) or not isinstance(size, int | np.integer):
            raise ShardingError(
                f"{what}: expected integers, found {shorten(size)} at position {i} of "
                f"{shorten(checked)}."
            )
        if not least <= size <= _LARGEST:
            raise ShardingError(
                f"{what}: every size must be at least {least} and below 2**62, found "
                f"{shorten(size)} at position {i} of {shorten(checked)}."
            )
    return tuple(int(size) for size in checked)


def _checked_names(axis_names: Sequence[str] | None, shape: tuple[int, ...]) -> tuple[str, ...]:
    if axis_names is None:
        return tuple(str(i) for i in range(len(shape)))
    if isinstance(axis_names, str):
        raise ShardingError(
            f"Mesh: axis_names is the single string {axis_names!r}; give a tuple with one name "
            "per axis."
        )
    try:
        names = tuple(axis_names)
    except TypeError:
        raise ShardingError(
            f"Mesh: axis_names is {shorten(axis_names)}; give a tuple with one name per axis."
        ) from None
    if not all(isinstance(name, str) and name for name in names):
        raise ShardingError(
            f"Mesh: axis names must be strings that are not empty, found {shorten(names)}."
        )
    surrogate = next((name for name in names if _SURROGATE.search(name)), None)
    if surrogate is not None:
        raise ShardingError(
            f"Mesh: the axis name {shorten(surrogate)} is not Unicode text, which has no lone "
            "surrogates; give another name."
        )
    if len(names) != len(shape):
        raise ShardingError(
            f"Mesh: {len(names)} axis names {shorten(names)} for the {len(shape)} axes of shape "
            f"{shape}; give one per axis."
        )
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ShardingError(
            f"Mesh: axis name {twice!r} is used more than once in {shorten(names)}; give every "
            "axis its own."
        )
    return names


def checked_ids(device_ids: ArrayLike, shape: tuple[int, ...], what: str = "Mesh") -> Ids:
    """Device ids as a new flat int64 array, one for each position of `shape`.

    Raises:
        ShardingError: The ids are not integers, are negative or repeated, or their number is not
            prod(shape).
    """
    try:
        given = np.asarray(device_ids)
    except (ValueError, OverflowError) as error:
        raise ShardingError(
            f"{what}: device ids must be integers, one per device: {error}."
        ) from error
    if given.size and not np.issubdtype(given.dtype, np.integer):
        raise ShardingError(
            f"{what}: device ids must be integers below 2**63, found an array of {given.dtype}."
        )
    if given.ndim != 1 and given.shape != shape:
        raise ShardingError(
            f"{what}: device ids have shape {given.shape}; give a flat list or the shape {shape}."
        )
    if given.size != prod(shape):
        raise ShardingError(
            f"{what}: {given.size} device ids for shape {shape}, which has {prod(shape)} devices; "
            "give one id per device."
        )
    if given.dtype == np.uint64 and given.max() > np.iinfo(np.int64).max:
        raise ShardingError(f"{what}: device id {given.max()} is not below 2**63.")
    ids: Ids = given.reshape(-1).astype(np.int64)  # a copy that the caller owns
    if ids.min() < 0:
        raise ShardingError(f"{what}: device id {ids.min()} is negative; ids count from 0.")
    ordered = np.sort(ids)
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(repeated):
        raise ShardingError(
            f"{what}: device id {repeated[0]} stands at more than one position; every device has "
            "one position."
        )
    return ids
