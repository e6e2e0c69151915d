"""The interface to a framework's tensors: sources to save from, sinks to restore into.

A leaf to save becomes a `Source`: shape, dtype, layout, and the boxes that this process holds. A
leaf to restore into becomes a `Sink`: the boxes that this process needs, its memory for them or the
shapes of the buffers to lend it, and a function that takes the filled buffers. Users without a
tensor pass a `Target` as the leaf: it names a sharding.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from operator import index
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self, TypeAlias

import numpy as np

from shardckpt.errors import OptionError
from shardckpt.layout.box import Box, BoxArray
from shardckpt.layout.dtypes import DType, by_name, of_numpy
from shardckpt.text import shorten

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from numpy.typing import NDArray

    from shardckpt.layout.placements import Placements
    from shardckpt.layout.sharding import Layout
    from shardckpt.layout.world import World

Array: TypeAlias = "NDArray[Any]"
"""A host array of the logical dtype, with a dtype of numpy or ml_dtypes."""


class InPlace(NamedTuple):
    """The tie key of a sink that fills memory which the leaf already has."""

    leaf: int
    """Identifies the leaf."""


class Source(Protocol):
    """A tensor leaf to save."""

    @property
    def name(self) -> str:
        """The leaf's name, for messages."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the complete tensor, in elements."""

    @property
    def dtype(self) -> DType:
        """Dtype of the elements."""

    @property
    def layout(self) -> Layout | Placements | None:
        """Layout over devices; None for a plain host tensor."""

    @property
    def boxes(self) -> BoxArray:
        """The distinct, non-empty boxes that this process holds, each once."""

    @property
    def holders(self) -> list[tuple[int, ...]] | None:
        """For each box the processes that hold it, ascending.

        None for a plain host tensor, whose holders are unknown.
        """

    @property
    def own_pieces(self) -> bool:
        """Whether this process knows only its own boxes: each is then stored as its own array."""

    @property
    def staged_bytes(self) -> int:
        """Peak host bytes of fetching this leaf alone; 0 where the arrays are views of the leaf."""

    @property
    def private(self) -> bool:
        """Whether fetched arrays are copies that nobody else holds.

        In this case there is one array per box, and each is alone in its memory.
        """

    @property
    def resident(self) -> bool:
        """Whether fetched arrays get their elements later, when the save writes them.

        Such arrays are kept until then, and not copied.
        """

    @property
    def address(self) -> int:
        """Address of the complete tensor's elements: contiguous, row-major, in native byte order.

        0: they are not so in host memory, or that is not known.
        """

    @property
    def copier(self) -> type | None:
        """The class that copies its elements straight from their device, if they are left there.

        None: they are fetched.
        """

    @property
    def comparer(self) -> str | None:
        """The framework whose module keeps and compares copies of its boxes on their device.

        None: there is none for such a tensor.
        """

    def on_device(self) -> Sequence[Any]:
        """For each box its elements, as the `comparer` takes them."""

    @classmethod
    def fetch(
        cls, sources: Sequence[Self], positions: Sequence[Sequence[int]]
    ) -> list[list[Array]]:
        """The elements of many leaves of this class: for each source, one array per requested box.

        The arrays may be views of the leaves: read them before the leaves change.

        Args:
            sources: the leaves.
            positions: for each source, the positions of the requested boxes in its `boxes`.
        """


class Sink(Protocol):
    """A place to restore a tensor into."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the complete tensor, in elements."""

    @property
    def dtype(self) -> DType:
        """Dtype of the elements."""

    @property
    def boxes(self) -> BoxArray:
        """The distinct, non-empty boxes that this process needs, each once."""

    @property
    def buffer_shapes(self) -> list[tuple[int, ...]]:
        """For each box, the shape of the host buffer to fill.

        It is the shape of the box, or of the padded tile of a device shard.
        """

    @property
    def destinations(self) -> list[Array] | None:
        """Writable views, possibly strided, one per box, to fill in place.

        None: the caller lends buffers.
        """

    @property
    def adopts(self) -> bool:
        """Whether the buffers become memory of the leaf.

        In this case the caller makes them for this sink alone, and does not reuse them.
        """

    @property
    def address(self) -> int:
        """Address of its only destination; 0: it has none or several, or that is not known."""

    @property
    def memory(self) -> Sequence[Array]:
        """The leaf's memory on a device as arrays, only to compare addresses.

        The host must not read these arrays.
        """

    @property
    def placer(self) -> type[Placer] | None:
        """Copies buffers to the sink's device while others are filled.

        None: they are `place`d one after another.
        """

    @property
    def divisible(self) -> bool:
        """Whether it can be filled in parts, by the sinks that `within` returns."""

    def within(self, part: Box) -> Sink | None:
        """The sink of the elements inside a part of the tensor; None if it has none there.

        Only of a `divisible` sink.
        """

    @property
    def tie_key(self) -> Hashable:
        """A key that is equal for sinks that may share one restored leaf.

        Sinks may share a leaf if the tensor was one leaf when it was saved.

        It is an `InPlace` if the sink fills memory that the leaf already has.
        """

    @property
    def placing_bytes(self) -> int:
        """Peak host bytes of `place`, beyond the buffers."""

    def sharers(self, world: World) -> tuple[int, ...] | None:
        """The processes that need the same boxes as this one, itself included, ascending.

        None if unknown.

        The answer is true only if all processes restore into leaves of the same layouts; the caller
        must ensure that.

        Args:
            world: this process and the others.
        """

    def place(self, buffers: Sequence[Array]) -> object:
        """Make the restored leaf.

        Args:
            buffers: the filled `destinations`; or buffers of the logical dtype with
                `buffer_shapes`, each with the elements of its box in the low corner. Elements
                outside the box are overwritten. After the call the buffers may be reused, unless
                the sink `adopts` them.
        """


class Transfer(Protocol):
    """Copies that are under way."""

    def wait(self) -> None:
        """Wait until they are complete; any thread may do so."""


class Placer(Protocol):
    """The copies of one restore to devices: they go on while other buffers are filled."""

    pin: ClassVar[Any]
    """Pins the memory of a buffer that is copied from, and returns the function that unpins it;
    None: any memory will do."""

    def __init__(self, sinks: Iterable[Any]) -> None:
        """Order the copies after the work that this thread has queued on the sinks' devices."""

    def place(
        self, filled: Sequence[tuple[Any, Sequence[Array]]]
    ) -> tuple[Sequence[object], Transfer]:
        """Begin to copy.

        Return the restored leaves, and what to wait for before the buffers are reused; after an
        error, `drain`.

        Args:
            filled: sinks and their buffers, as for `Sink.place`.
        """

    def end(self) -> None:
        """Order the work that this thread queues later after all copies.

        Call it when all have begun.
        """

    def drain(self) -> bool:
        """Wait for all copies, after an error too.

        Return whether they are done; False: a device has failed.
        """


class HostSource:
    """Base class of sources whose elements are fetched to the host."""

    __slots__ = ()
    copier: ClassVar[None] = None
    resident: ClassVar[bool] = False

    @property
    def own_pieces(self) -> bool:
        """False: this process knows the boxes of all others, too."""
        return False

    @property
    def private(self) -> bool:
        """False: fetched arrays may be views of the leaf."""
        return False

    @property
    def address(self) -> int:
        """0: not known."""
        return 0

    @property
    def comparer(self) -> str | None:
        """None: nothing is compared on devices."""
        return None

    def on_device(self) -> Sequence[Any]:
        """Raise: without a `comparer` nobody asks."""
        raise NotImplementedError


class SourceOf:
    """Base class of sources that describe a tensor as another source of it does."""

    __slots__ = ()
    of: Source
    """The tensor's source by its adapter."""

    @property
    def address(self) -> int:
        """0: not known."""
        return 0

    @property
    def name(self) -> str:
        """See `Source`."""
        return self.of.name

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Source`."""
        return self.of.shape

    @property
    def layout(self) -> Layout | Placements | None:
        """See `Source`."""
        return self.of.layout

    @property
    def boxes(self) -> BoxArray:
        """See `Source`."""
        return self.of.boxes

    @property
    def holders(self) -> list[tuple[int, ...]] | None:
        """See `Source`."""
        return self.of.holders

    @property
    def own_pieces(self) -> bool:
        """See `Source`."""
        return self.of.own_pieces


class PlainSink:
    """Defaults of `Sink`: it takes buffers of any memory, and all of them at once."""

    __slots__ = ()
    adopts: ClassVar[bool] = False
    divisible: ClassVar[bool] = False
    placer: ClassVar[type[Placer] | None] = None

    @property
    def address(self) -> int:
        """0: not known."""
        return 0

    @property
    def placing_bytes(self) -> int:
        """0: buffers are copied straight to the leaf."""
        return 0

    @property
    def memory(self) -> Sequence[Array]:
        """No memory to compare."""
        return ()

    def within(self, part: Box) -> Sink | None:
        """Raise: such a sink has no parts."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Target:
    """A destination in `like` without a tensor: a sharding, a shape and a dtype.

    Examples:
        >>> Target(dtype="bfloat16").dtype
        dtype(bfloat16)
    """

    sharding: object = None
    """The sharding of the new tensor. It decides the framework:

    | `sharding` | result |
    |---|---|
    | None | numpy array with the complete tensor |
    | `Sharding`, `OpSharding` of shardckpt | torch_xla tensor if that is imported, else JAX array |
    | `ShardingSpec`, or pair of `Mesh` and partition spec, of torch_xla | torch_xla tensor |
    | pair of a `DeviceMesh` and placements | DTensor |
    | `torch.device` | torch tensor on this device |
    | JAX sharding | JAX array |
    """
    shape: tuple[int, ...] | None = None
    """The expected shape, in elements; None for the stored shape."""
    dtype: object = None
    """The requested dtype of numpy, ml_dtypes, torch or JAX, or its name; None for the stored
    dtype."""

    def __post_init__(self) -> None:
        """Normalize shape and dtype."""
        if self.shape is not None:
            try:
                shape = tuple(map(index, self.shape))
            except TypeError:
                shape = (-1,)
            if any(n < 0 for n in shape):
                raise OptionError(
                    f"Target(shape={shorten(self.shape)}): give a tuple of sizes, none of them "
                    "negative."
                )
            object.__setattr__(self, "shape", shape)
        if self.dtype is not None:
            object.__setattr__(self, "dtype", dtype_of(self.dtype).numpy)

    def resolve(self, shape: tuple[int, ...], dtype: DType) -> tuple[tuple[int, ...], DType]:
        """The shape and dtype to restore, given the stored ones."""
        return (shape if self.shape is None else self.shape), (
            dtype if self.dtype is None else dtype_of(self.dtype)
        )


def dtype_of(dtype: object) -> DType:
    """The `DType` for a user's dtype.

    Args:
        dtype: a `DType`, a numpy, ml_dtypes or JAX dtype or scalar type, a torch dtype, or a name.

    Raises:
        DtypeError: the dtype cannot be stored.
        OptionError: the value is not a dtype.
    """
    if isinstance(dtype, DType):
        return dtype
    if isinstance(dtype, str):
        return by_name(dtype)
    if type(dtype).__module__ == "torch":
        return by_name(str(dtype).removeprefix("torch."))
    try:
        return of_numpy(np.dtype(dtype))  # type: ignore[call-overload]
    except (TypeError, ValueError) as e:
        raise OptionError(
            f"{shorten(dtype)} is not a dtype; give one of numpy, ml_dtypes or torch, or a name "
            "such as 'bfloat16'."
        ) from e


@lru_cache(maxsize=1024)
def whole(shape: tuple[int, ...]) -> BoxArray:
    """The single box of an unsharded tensor; none if it has no elements.

    All tensors of the shape share it: do not change it.
    """
    boxes = BoxArray.of([Box.full(shape)] if prod(shape) else [], len(shape))
    for bound in (boxes.start, boxes.stop):
        bound.flags.writeable = False
    return boxes
