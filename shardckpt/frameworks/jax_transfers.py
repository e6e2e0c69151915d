"""Copies between accelerators and the host that XLA makes, with its own kinds of memory.

XLA makes many copies at a time, and compiles nothing.

To the host (`landed`): all shards of a call are copied to XLA's pinned memory at once, at the speed
of the link. This memory comes from a pool of XLA's, which grows up to a cap and does not shrink.
Later saves use the memory of earlier ones again.

From the host (`JaxTransfers`): arrays are made without waiting for one another, and buffers are
reused when their arrays are complete.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import jax
import numpy as np

from shardckpt.plan.pieces import batches

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardckpt.frameworks.base import Array

ACCELERATORS = {"tpu", "gpu", "cuda", "rocm"}
"""Platforms whose devices never use the host's buffer itself. Tests add the CPU, which has pinned
memory in name."""
_SMALL_BATCH = 32 << 20
"""Bytes of shards that are copied by way of pinned memory at a time, where XLA has refused more."""
_log = logging.getLogger("shardckpt")


def on_host(device: Any) -> bool:
    """Whether the memory of a device is the host's."""
    return device.platform == "cpu" and "cpu" not in ACCELERATORS


@cache
def pinned(device: Any) -> Any:
    """The sharding of the pinned host memory of an accelerator; None: it has none."""
    kinds = (
        {memory.kind for memory in device.addressable_memories()}
        if device.platform in ACCELERATORS
        else ()
    )
    return (
        jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
        if "pinned_host" in kinds
        else None
    )


def separate(shard: Any) -> Any:
    """A separate array over a shard's memory."""
    return jax.make_array_from_single_device_arrays(shard.shape, shard.sharding, [shard])


def landed(shards: Sequence[Any]) -> list[Array]:
    """Copies of shards in pinned host memory.

    Where XLA refuses so much, in ordinary memory, by way of a few pinned bytes or none.
    """
    try:
        return _transfer(shards)
    except jax.errors.JaxRuntimeError as e:
        _check_refused(e)
    return [
        array
        for batch in batches(shards, lambda shard: (shard.nbytes,), (_SMALL_BATCH,))
        for array in _copy(batch)
    ]


def _copy(shards: Sequence[Any]) -> list[Array]:
    """Copies of shards in ordinary memory."""
    try:
        return [array.copy() for array in _transfer(shards)]
    except jax.errors.JaxRuntimeError as e:
        _check_refused(e)
    arrays: list[Array] = jax.device_get([*map(separate, shards)])
    return arrays


def _check_refused(error: Exception) -> None:
    """Raise an error of XLA again, unless it is that there is not so much memory."""
    if not str(error).startswith("RESOURCE_EXHAUSTED"):
        raise error


def _transfer(shards: Sequence[Any]) -> list[Array]:
    """Copies of shards in pinned memory, all under way at once.

    Complete at the return, so that the shards may be donated.
    """
    transfers = jax.device_put([*shards], [pinned(next(iter(shard.devices()))) for shard in shards])
    # The same memory; JAX 0.12 takes it for a transfer that nobody asked for.
    with jax.transfer_guard_device_to_host("allow"):
        return [*map(np.asarray, jax.block_until_ready(transfers))]


def warm_pinned(shards: Sequence[tuple[Any, tuple[int, ...], np.dtype[Any]]]) -> None:
    """Have XLA's pool of pinned memory take what copies of these shards need, and give it back.

    A shard is given by its device, shape and dtype.
    """
    if shards:
        sizes = [prod(shape) * dtype.itemsize for _, shape, dtype in shards]
        zeros = np.zeros(max(sizes), np.uint8)  # the kernel has one page for all of it
        arrays = [
            zeros[:n].view(dtype).reshape(shape)
            for n, (_, shape, dtype) in zip(sizes, shards, strict=True)
        ]
        try:
            jax.block_until_ready(jax.device_put(arrays, [pinned(device) for device, *_ in shards]))
        except jax.errors.JaxRuntimeError as e:
            _check_refused(e)


class NewArray(Protocol):
    """A sink that makes an array."""

    def array(self, buffers: Sequence[Array]) -> Any:
        """The new array, to which an accelerator may still be copying from the buffers."""


class JaxTransfers:
    """Copies to accelerators, several arrays at a time; see `Placer`."""

    pin: ClassVar[None] = None

    def __init__(self, sinks: Iterable[NewArray]) -> None:  # noqa: ARG002  (every placer has this signature)
        """Begin nothing yet."""
        self._arrivals: list[JaxArrival] = []

    def place(
        self, filled: Sequence[tuple[NewArray, Sequence[Array]]]
    ) -> tuple[Sequence[object], JaxArrival]:
        """See `Placer`."""
        arrival = JaxArrival([])
        self._arrivals.append(arrival)
        for sink, buffers in filled:
            arrival.arrays.append(sink.array(buffers))
        return [*arrival.arrays], arrival

    def end(self) -> None:
        """Do nothing: what uses an array waits for it."""

    def drain(self) -> bool:
        """See `Placer`; where one transfer has failed, the others are waited for, too."""
        done = True
        for array in [array for arrival in self._arrivals for array in arrival.arrays]:
            try:
                jax.block_until_ready(array)
            except jax.errors.JaxRuntimeError as e:
                _log.warning("JAX could not fill an array: %s", e)
                done = False
        return done


@dataclass(frozen=True, slots=True)
class JaxArrival:
    """Arrays that are on their way to their devices."""

    arrays: list[Any]

    def wait(self) -> None:
        """Wait until the buffers that they are made from are free."""
        jax.block_until_ready(self.arrays)
        self.arrays.clear()
