"""Errors for leaves of another shape or dtype than the tensor's, and shared memory of leaves."""

from __future__ import annotations

from operator import ge
from typing import TYPE_CHECKING

from shardckpt.errors import DtypeMismatchError, ShapeMismatchError, StructureMismatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.format.structure import TensorRecord
    from shardckpt.frameworks.base import Sink
    from shardckpt.io.url import Location


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


def shared_memory(name: str, other: str) -> StructureMismatchError:
    """The error for two leaves that share memory, by their names."""
    return StructureMismatchError(
        f"{name}: in `like` it shares memory with {other}, so both cannot be restored in place; "
        "give each a tensor of its own. If they are one tied parameter that an imported file "
        "stored twice, import the file again with exclude= for one of the names, and restore with "
        "strict=False."
    )
