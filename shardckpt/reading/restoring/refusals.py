"""Errors for leaves of another shape or dtype than the tensor's, and shared memory of leaves."""

from __future__ import annotations

from itertools import pairwise
from math import gcd
from operator import ge
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.array_utils import byte_bounds

from shardckpt.errors import DtypeMismatchError, ShapeMismatchError, StructureMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from shardckpt.format.structure import TensorRecord
    from shardckpt.frameworks.base import Sink
    from shardckpt.io.url import Location
    from shardckpt.reading.landing import Landing

    Array = NDArray[np.generic]


def another_shape(
    name: str, location: Location, tensor: TensorRecord, sink: Sink
) -> ShapeMismatchError:
    """The error for a leaf of another shape than its tensor."""
    words = getattr(sink, "word_dims", 0)  # of JAX keys, whose own shape has no dimensions of words
    stored_shape, own_shape = (shape[: len(shape) - words] for shape in (tensor.shape, sink.shape))
    return ShapeMismatchError(
        f"{name}: {location} has shape {stored_shape}, the leaf to restore into has {own_shape}; "
        f"make them equal, {_fit_advice(name, tensor.shape, sink.shape, words)}or leave the "
        "tensor out with only=."
    )


def _fit_advice(name: str, stored: Sequence[int], own: Sequence[int], words: int) -> str:
    """The advice to fit a tensor of another size, where that is possible."""
    if len(stored) != len(own) or words:
        return ""
    if all(a <= b for a, b in zip(stored, own, strict=True)):
        return f"pass fit={{'{name}': 'pad'}} to fill the rest with zeros, "
    return (
        f"pass fit={{'{name}': 'slice'}} to restore its first part, "
        if all(map(ge, stored, own))
        else ""
    )


def another_dtype(
    name: str, location: Location, tensor: TensorRecord, sink: Sink, *, cast: bool
) -> DtypeMismatchError:
    """The error for a leaf of another dtype than its tensor, by whether `cast` was given."""
    if not cast:
        return DtypeMismatchError(
            f"{name}: {location} has dtype {tensor.dtype.name}, the leaf to restore into has "
            f"{sink.dtype.name}; pass cast=True to convert."
        )
    return DtypeMismatchError(
        f"{name}: {location} has dtype {tensor.dtype.name}, which cannot be converted to "
        f"{sink.dtype.name}; restore it as it is."
    )


def refuse_shared_memory(landings: Iterable[Landing], title: Callable[[str], str]) -> None:
    """Raise if destinations share memory: threads write to them in no particular order."""
    arrays = [(array, landing) for landing in landings for array in landing.memory]
    bounds = np.array([_bounds(array, landing.sink.address) for array, landing in arrays], np.int64)
    bounds = bounds.reshape(-1, 2)
    order = np.lexsort((bounds[:, 1], bounds[:, 0]))
    bounds = bounds[order]
    reached = np.maximum.accumulate(bounds[:, 1])
    borders = [0, *(np.flatnonzero(bounds[1:, 0] >= reached[:-1]) + 1).tolist(), len(order)]
    for first, end in pairwise(borders):
        if end - first > 1:
            near = [(*bounds[i].tolist(), *arrays[order[i]]) for i in range(first, end)]
            if not _are_columns([(array, start) for start, _, array, _ in near]):
                _refuse_overlap(near, title)


def _refuse_overlap(
    arrays: Sequence[tuple[int, int, Array, Landing]], title: Callable[[str], str]
) -> None:
    """Compare each array with those before it whose bounds it lies in."""
    open_until: list[tuple[int, Array, Landing]] = []
    for start, stop, array, landing in arrays:
        open_until = [other for other in open_until if other[0] > start]
        for _, other, before in open_until:
            same_view = landing.tensor is before.tensor and landing.view == before.view
            if not same_view and share_memory(array, other):
                raise _shared_memory(title(landing.names[0]), title(before.names[0]))
        open_until.append((stop, array, landing))


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
    for n, stride in zip(reversed(array.shape), reversed(array.strides), strict=True):
        if stride == width and not step:
            width *= n
        elif n > 1:
            step = gcd(step, stride)
    return width, step


def _bounds(array: Array, address: int) -> tuple[int, int]:
    """The address of an array's first byte (`address`, if not 0), and one past its last."""
    if array.flags.c_contiguous:
        start: int = address or array.__array_interface__["data"][0]
        return start, start + array.nbytes
    return byte_bounds(array)


def share_memory(a: Array, b: Array) -> bool:
    """Whether an element of one array lies in the memory of the other.

    True if that cannot be decided quickly.
    """
    try:
        return bool(np.shares_memory(a, b, max_work=100_000))  # type: ignore[arg-type]  # numpy takes any number here
    except np.exceptions.TooHardError:
        return True


def _shared_memory(name: str, other: str) -> StructureMismatchError:
    """The error for two leaves that share memory, by their names."""
    return StructureMismatchError(
        f"{name}: in `like` it shares memory with {other}, so both cannot be restored in place; "
        "give each a tensor of its own. If they are one tied parameter that an imported file "
        "stored twice, import the file again with exclude= for one of the names, and restore with "
        "strict=False."
    )
