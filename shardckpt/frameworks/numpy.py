"""numpy arrays: one box, no copy.

An array is fetched without a copy, whatever its strides, and restored in place. Only arrays in the
other byte order are copied, in both directions: all other code uses the machine's own order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

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
from shardckpt.layout.dtypes import DType, of_numpy
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from shardckpt.layout.box import BoxArray
    from shardckpt.layout.world import World

CLASSES = frozenset((np.ndarray,))
"""Classes for which `owns` decides."""


@dataclass(frozen=True, slots=True)
class ArraySource(HostSource):
    """An array to save."""

    name: str
    array: Array
    dtype: DType
    layout: None = None
    holders: None = None
    # Asked for each tensor of a state: without a call.
    own_pieces: ClassVar[bool] = False
    private: ClassVar[bool] = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.array.shape

    @property
    def boxes(self) -> BoxArray:
        """The box of the complete array."""
        return whole(self.shape)

    @property
    def staged_bytes(self) -> int:
        """Bytes of a copy for arrays in the other byte order; else 0."""
        return 0 if self.array.dtype.isnative else self.array.nbytes

    @property
    def address(self) -> int:
        """The array's own address."""
        array = self.array
        is_contiguous = array.size and array.flags.c_contiguous and array.dtype.isnative
        return address_of(array) if is_contiguous else 0

    @classmethod
    def fetch(
        cls, sources: Sequence[ArraySource], positions: Sequence[Sequence[int]]
    ) -> list[list[Array]]:
        """The arrays themselves."""
        return [
            [s.array.astype(s.dtype.numpy, copy=False)][: len(boxes)]
            for s, boxes in zip(sources, positions, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class ArraySink(PlainSink):
    """An array that is filled in place for a leaf."""

    leaf: object
    """The leaf that `place` returns."""
    array: Array
    """The leaf's memory, writable."""
    dtype: DType
    tie_key: Hashable
    address: ClassVar[int] = 0
    placing_bytes: ClassVar[int] = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.array.shape

    @property
    def boxes(self) -> BoxArray:
        """The box of the complete array."""
        return whole(self.shape)

    @property
    def buffer_shapes(self) -> list[tuple[int, ...]]:
        """The array's own shape."""
        return [self.shape] * len(self.boxes)

    @property
    def destinations(self) -> list[Array] | None:
        """The array itself.

        If it is in the other byte order, elements are converted when they are written to it.
        """
        return [self.array][: len(self.boxes)]

    def sharers(self, world: World) -> tuple[int, ...] | None:
        """All processes, because each of them has the complete array."""
        return tuple(range(world.processes))

    def place(self, buffers: Sequence[Array]) -> object:
        """Copy the buffers that are not the array's own memory into it."""
        for buffer in buffers:
            if address_of(buffer) != address_of(self.array):
                self.array[...] = buffer
        return self.leaf


def owns(_leaf: object) -> bool:
    """True: every instance of `CLASSES` is a leaf of this adapter."""
    return True


def matches(leaf: object) -> bool:
    """Whether the leaf is an array. numpy scalars are small leaves instead."""
    return isinstance(leaf, np.ndarray)


def accepts(leaf: Target) -> bool:
    """Whether the target is a numpy array, because it names no sharding."""
    return leaf.sharding is None


def identity(leaf: Array) -> Hashable | None:
    """A key that is equal for arrays over the same bytes in the same form.

    None for arrays without elements.
    """
    if leaf.size == 0:
        return None
    return "numpy", address_of(leaf), leaf.shape, leaf.strides, *dtype_names(leaf.dtype)


@lru_cache(maxsize=256)
def dtype_names(dtype: np.dtype[Any]) -> tuple[str, str]:
    """A dtype as a part of identities."""
    return dtype.str, dtype.name


def sources(leaves: dict[str, Any], world: World) -> dict[str, Source]:  # noqa: ARG001 - every adapter has the same signatures
    """Sources of arrays, by name.

    Raises:
        LeafError: a subclass has more than its elements, by name.
        DtypeError: elements cannot be stored, by name.
    """
    return {
        name: ArraySource(name, _plain(name, leaf), _dtype(name, leaf))
        for name, leaf in leaves.items()
    }


def target(name: str, leaf: object, shape: tuple[int, ...], dtype: DType) -> Sink:
    """A sink that fills an array in place, or a new array for a `Target`.

    Raises:
        LeafError: the array cannot be written, or overlaps itself; or none can be so large.
    """
    if isinstance(leaf, Target):
        shape, dtype = leaf.resolve(shape, dtype)
        try:
            array = np.empty(shape, dtype.numpy)
        except ValueError as e:
            raise LeafError(
                f"{shown(name)}: no array of the shape {shape} can be made ({e}); give the Target "
                "the stored shape, or none."
            ) from e
        return ArraySink(array, array, dtype, ("numpy", shape, dtype.name))
    assert isinstance(leaf, np.ndarray)
    array = _plain(name, leaf)
    if not array.flags.writeable:
        raise LeafError(
            f"{shown(name)}: this numpy array is read-only, so it cannot be restored into; give a "
            "writable copy of it."
        )
    if overlaps_itself(array):
        raise LeafError(
            f"{shown(name)}: elements of this numpy array share memory, so it cannot be restored "
            "into; give a copy of it."
        )
    return ArraySink(leaf, array, _dtype(name, array), InPlace(id(leaf)))


def overlaps_itself(array: Array) -> bool:
    """Whether two elements may share memory; never false if they do.

    In the order of strides, every dimension must step over the span of all smaller ones. Other
    memory layouts could still be without overlap, but no program makes such views.
    """
    if array.size == 0:
        return False
    reach = array.itemsize
    for stride, size in sorted(
        (abs(stride), size)
        for stride, size in zip(array.strides, array.shape, strict=True)
        if size > 1
    ):
        if stride < reach:
            return True
        reach = stride * (size - 1) + reach
    return False


def address_of(array: Array) -> int:
    """The address of an array's first element."""
    address: int = array.__array_interface__["data"][0]
    return address


def _plain(name: str, leaf: Array) -> Array:
    # The mask of a masked array would be lost; a matrix would come back as an array.
    if type(leaf) not in (np.ndarray, np.memmap):
        raise LeafError(
            f"{shown(name)}: only the elements of a {type(leaf).__qualname__} would be stored; "
            "pass plain arrays (of a masked array: data and mask), or call "
            "shardckpt.register_leaf for its class."
        )
    return leaf.view(np.ndarray)


def _dtype(name: str, leaf: Array) -> DType:
    try:
        return of_numpy(leaf.dtype)
    except DtypeError as e:
        raise DtypeError(f"{shown(name)}: {e}") from e
