"""numpy arrays: one box, no copy.

An array is fetched without a copy, whatever its strides, and restored in place. Only arrays in the
other byte order are copied, in both directions: all other code uses the machine's own order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import gcd
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
    from collections.abc import Hashable, Iterator, Sequence

    from numpy.typing import NDArray

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


def near_pairs(arrays: Sequence[Array], bounds: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """The positions of each two arrays that may share memory.

    Args:
        arrays: the arrays.
        bounds: the first byte of each, and one past its last.
    """
    order = np.lexsort((bounds[:, 1], bounds[:, 0]))
    bounds = bounds[order]
    reached = np.maximum.accumulate(bounds[:, 1])
    borders = [0, *(np.flatnonzero(bounds[1:, 0] >= reached[:-1]) + 1).tolist(), len(order)]
    for first, end in pairwise(borders):
        near = [(*bounds[i].tolist(), int(order[i])) for i in range(first, end)]
        if end - first == 1 or _are_columns([(arrays[i], start) for start, _, i in near]):
            continue
        open_until: list[tuple[int, int]] = []
        for start, stop, i in near:
            open_until = [other for other in open_until if other[0] > start]
            yield from [(i, other) for _, other in open_until]
            open_until.append((stop, i))


def _are_columns(arrays: Sequence[tuple[Array, int]]) -> bool:
    """Whether arrays, each with its address, are columns of one matrix that share no element.

    Each then has the same bytes of every row.
    """
    widths, steps = zip(*(_rows(array) for array, _ in arrays), strict=True)
    row = gcd(*steps)
    if not row:
        return False
    columns = sorted((start % row, n) for (_, start), n in zip(arrays, widths, strict=True))
    ends = [*(start for start, _ in columns[1:]), columns[0][0] + row]
    return all(start + n <= end for (start, n), end in zip(columns, ends, strict=True))


def _rows(array: Array) -> tuple[int, int]:
    """The bytes of a row, and a number of which all distances of rows are multiples.

    A row is a part of the array without gaps. The number is 0 if there is one row.
    """
    width, step = array.itemsize, 0
    for stride, n in sorted(zip(map(abs, array.strides), array.shape, strict=True)):
        if stride == width and not step:
            width *= n
        elif n > 1:
            step = gcd(step, stride)
    return width, step


def share_memory(a: Array, b: Array) -> bool:
    """Whether an element of one array lies in the memory of the other.

    True if that cannot be decided quickly.
    """
    try:
        return bool(np.shares_memory(a, b, max_work=100_000))  # type: ignore[arg-type]  # numpy takes any number here
    except np.exceptions.TooHardError:
        return True


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
