"""The interface to a framework's tensors: sources to save from, sinks to restore into.

A leaf to be saved becomes a `Source`: shape, dtype, layout, and the boxes of it that this process holds. A leaf to be
restored into becomes a `Sink`: the boxes that this process needs, memory to read them into or the shapes of the
buffers that it wants to be lent, and what to do with them once they are full. `Target` is the leaf for users who have
no tensor to show: it names a sharding.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias

import numpy as np

from shardckpt.errors import OptionError
from shardckpt.layout.box import Box, BoxArray
from shardckpt.layout.dtypes import DType, by_name, of_numpy

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from numpy.typing import NDArray

    from shardckpt.layout.placements import Placements
    from shardckpt.layout.sharding import Layout
    from shardckpt.layout.world import World

__all__ = ["Array", "Sink", "Source", "Target", "dtype_of", "whole"]

Array: TypeAlias = "NDArray[Any]"
"""A host array of the logical dtype, numpy's or ml_dtypes'."""


class Source(Protocol):
    """A tensor leaf to be saved."""

    @property
    def name(self) -> str:
        """The leaf's name, for messages."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor, in elements."""

    @property
    def dtype(self) -> DType:
        """Of its elements."""

    @property
    def layout(self) -> Layout | Placements | None:
        """How it is laid out over devices; None for a plain host tensor."""

    @property
    def boxes(self) -> BoxArray:
        """The distinct boxes that this process holds, each once and none of them empty."""

    @property
    def holders(self) -> list[tuple[int, ...]] | None:
        """Per box the processes that hold it, ascending; None for a plain host tensor, of which nobody knows."""

    @property
    def own_pieces(self) -> bool:
        """Whether this process knows its own boxes only, so that each is stored as an array of its own."""

    @property
    def staged_bytes(self) -> int:
        """Host bytes that fetching this leaf by itself takes at its peak; 0 where the arrays are views of the leaf."""

    @property
    def private(self) -> bool:
        """Whether what is fetched of it is a copy that nobody else has: one per box, with nothing besides in its memory."""

    @classmethod
    def fetch(cls, sources: Sequence[Self], wanted: Sequence[Sequence[int]]) -> list[list[Array]]:
        """The elements of many leaves of this class: per source, one array per box that is wanted of it.

        The arrays may be views of the leaves: read them before the leaves change.

        Args:
            sources: the leaves.
            wanted: per source the positions of boxes among its `boxes`.
        """


class Sink(Protocol):
    """A place to restore a tensor into."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor, in elements."""

    @property
    def dtype(self) -> DType:
        """Of its elements."""

    @property
    def boxes(self) -> BoxArray:
        """The distinct boxes that this process needs, each once and none of them empty."""

    @property
    def buffer_shapes(self) -> list[tuple[int, ...]]:
        """Per box, the shape of the host buffer to be filled: the box's own, or the padded tile of a device shard."""

    @property
    def destinations(self) -> list[Array] | None:
        """Writable views, one per box, to be filled where they are, strided ones too; None: the caller lends buffers."""

    @property
    def adopts(self) -> bool:
        """Whether the buffers become memory of the leaf: the caller makes them for this sink alone, and never lends them again."""

    @property
    def tie_key(self) -> Hashable:
        """Equal for sinks that may share one restored leaf, where the tensor was one when it was saved."""

    @property
    def placing_bytes(self) -> int:
        """Host bytes that `place` takes at its peak, beyond the buffers."""

    def sharers(self, world: World) -> tuple[int, ...] | None:
        """The processes that want the same boxes of it as this one, itself among them, ascending; None where that is not known.

        For what is said of it to be true, all processes restore into leaves of the same layouts; whoever relies on it makes
        sure that they do.

        Args:
            world: this process and the others.
        """

    def place(self, buffers: Sequence[Array]) -> object:
        """The restored leaf.

        Args:
            buffers: `destinations` once they are filled; or buffers of the logical dtype, each of its
                `buffer_shapes` with the elements of its box in the low corner. What lies outside the box is
                overwritten. When this returns, they may be lent to others, unless the sink `adopts` them.
        """


@dataclass(frozen=True, slots=True)
class Target:
    """Where to restore a tensor to, for a `like` that has no tensor to show.

    >>> Target(dtype="bfloat16").dtype
    dtype(bfloat16)
    """

    sharding: object = None
    """A shardckpt `Sharding` or `OpSharding`, or what torch_xla has (a `ShardingSpec`, or a pair of its `Mesh` and a
    partition spec), or a sharding of JAX. None: a numpy array, the whole tensor."""
    shape: tuple[int, ...] | None = None
    """The shape that is expected, in elements; None: as stored."""
    dtype: object = None
    """The dtype that is wanted, of numpy, ml_dtypes, torch or JAX, or its name; None: as stored."""

    def __post_init__(self) -> None:
        """Bring shape and dtype into their one form."""
        if self.shape is not None:
            try:
                shape = tuple(int(n) for n in self.shape)
            except (TypeError, ValueError):
                shape = (-1,)
            if any(n < 0 for n in shape):
                raise OptionError(f"Target(shape={self.shape!r}): give a tuple of sizes, none of them negative.")
            object.__setattr__(self, "shape", shape)
        if self.dtype is not None:
            object.__setattr__(self, "dtype", dtype_of(self.dtype).numpy)

    def resolve(self, shape: tuple[int, ...], dtype: DType) -> tuple[tuple[int, ...], DType]:
        """The shape and dtype to restore, given the stored ones."""
        return (shape if self.shape is None else self.shape), (dtype if self.dtype is None else dtype_of(self.dtype))


def dtype_of(dtype: object) -> DType:
    """The dtype that a user means.

    Args:
        dtype: a `DType`, a numpy, ml_dtypes or JAX dtype or scalar type, a torch dtype, or a name.

    Raises:
        DtypeError: it cannot be stored.
        OptionError: it is no dtype at all.
    """
    if isinstance(dtype, DType):
        return dtype
    if isinstance(dtype, str):
        return by_name(dtype)
    if type(dtype).__module__ == "torch":
        return by_name(str(dtype).removeprefix("torch."))
    try:
        return of_numpy(np.dtype(dtype))  # type: ignore[call-overload]
    except TypeError as e:
        raise OptionError(f"{dtype!r} is no dtype; give one of numpy, ml_dtypes or torch, or a name such as 'bfloat16'.") from e


@lru_cache(maxsize=1024)
def whole(shape: tuple[int, ...]) -> BoxArray:
    """The one box of a tensor that is held whole; none where it has no elements. Of all tensors of that shape: not to be changed."""
    boxes = BoxArray.of([Box.full(shape)] if prod(shape) else [], len(shape))
    for bound in (boxes.start, boxes.stop):
        bound.flags.writeable = False
    return boxes
