"""Restores onto CUDA tensors: event-ordered copies from a ring of pinned slots on side streams.

1. The side stream of each device waits for an event on the current stream: copies begin after the
   work that the program has queued.
2. Threads read chunks into a slot, and compare their checksums. Then its copies are queued, large
   tensors part by part (`CudaSink.within`). Small tensors that lie side by side in the slot are one
   copy to the device, and are copied from there.
3. A slot is filled anew after the event of its copies. Nothing waits but for a free slot
   (`reading.landing`).
4. At the end the current stream waits for the side streams, and the host for all events, after an
   error and Ctrl-C too.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from shardckpt.errors import BudgetError
from shardckpt.frameworks import cuda_runtime
from shardckpt.frameworks.cuda import Arrival, SideStreams
from shardckpt.frameworks.cuda_runtime import host_tensor, pin, within_slices
from shardckpt.frameworks.numpy import address_of
from shardckpt.frameworks.torch import TensorSink, array_of
from shardckpt.layout.box import Box, BoxArray
from shardckpt.plan.blocks import index_within

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from shardckpt.frameworks.base import Array

_GATHERED = 1 << 20
"""Bytes of a tensor below which it is copied together with others that are as small: each copy
takes some microseconds."""
_BETWEEN = 64
"""Bytes that lie between two buffers of one lease, at most, plus one."""


@dataclass(slots=True)
class CudaSink(TensorSink):
    """Device memory that is filled for a leaf, from pinned memory, by boxes or parts of boxes."""

    divisible: ClassVar[bool] = True

    @property
    def memory(self) -> list[Array]:
        """Arrays with the addresses of the device memory, which the host must not read."""
        return [array_of(view, self.dtype) for view in self.views]

    def within(self, part: Box) -> CudaSink | None:
        """The sink of the elements inside a part of the tensor; None if it has none there."""
        boxes, views = [], []
        for start, stop, view in zip(
            self.boxes.start.tolist(), self.boxes.stop.tolist(), self.views, strict=True
        ):
            common = Box(tuple(start), tuple(stop)).overlap(part)
            if common is not None:
                boxes.append(common)
                views.append(view[index_within(common.start, common.stop, start)])
        return (
            replace(self, boxes=BoxArray.of(boxes, len(self.shape)), views=tuple(views))
            if boxes
            else None
        )

    def place(self, buffers: Sequence[Array]) -> object:
        """Copy the buffers to the device, after the work that is queued there.

        When this returns they may be reused.
        """
        fills = DeviceFills([self])
        try:
            (leaf,), arrival = fills.place([(self, buffers)])
            fills.end()
            arrival.wait()
        finally:
            fills.drain()
        return leaf


class DeviceFills(SideStreams):
    """The copies of one restore, from pinned host memory to devices; see `Placer`."""

    pin: ClassVar[Any] = staticmethod(pin)

    def __init__(self, sinks: Iterable[CudaSink]) -> None:
        """Order the copies after the work that this thread has queued."""
        super().__init__(view for sink in sinks for view in sink.views)

    def place(
        self, filled: Sequence[tuple[CudaSink, Sequence[Array]]]
    ) -> tuple[list[object], Arrival]:
        """Queue copies of buffers; do not change, free or reuse these before `Arrival.wait`."""
        with self._queue() as (arrival, used):
            small: dict[Any, list[tuple[NDArray[Any], Any]]] = {}
            for sink, buffers in filled:
                for view, buffer in zip(sink.views, buffers, strict=True):
                    device = cuda_runtime.runtime.device(view)
                    used[device] = self._streams[device]
                    arrival.held.append(view)
                    if buffer.nbytes < _GATHERED:
                        small.setdefault(device, []).append((buffer, view))
                    else:
                        _fill([(buffer, view)], used[device])
            for device, pairs in small.items():
                for run in _runs(pairs):
                    _spread(run, used[device])
        for sink, _ in filled:
            sink.mark_written()
        return [sink.leaf for sink, _ in filled], arrival


CudaSink.placer = DeviceFills


def _fill(pairs: Iterable[tuple[NDArray[Any], Any]], stream: Any) -> None:
    """Queue the copy of each buffer to its tensor.

    Raises:
        BudgetError: the device has no memory to make elements contiguous.
    """
    for buffer, view in pairs:
        try:
            for array, tensor in within_slices(buffer, view):
                cuda_runtime.runtime.copy(tensor, host_tensor(array), stream)
        except torch.OutOfMemoryError as e:
            raise BudgetError(
                f"{cuda_runtime.runtime.device(view)} has no memory left to fill a tensor of "
                f"shape {tuple(view.shape)} that is not contiguous ({e}); its contents are "
                "undefined now. Free some memory, or restore to contiguous tensors."
            ) from e


def _spread(run: list[tuple[NDArray[Any], Any]], stream: Any) -> None:
    """Queue one copy of these adjacent buffers to the device, and from there to their tensors."""
    if len(run) > 1:
        (first, _), (last, _) = run[0], run[-1]
        begin, end = address_of(first), address_of(last) + last.nbytes
        memory: Any = first.base
        region = memory[begin - address_of(memory) : end - address_of(memory)]
        if next(within_slices(region, region))[0] is region:
            # One by one they need no memory, if they are contiguous.
            with suppress(torch.OutOfMemoryError):
                starts = [address_of(buffer) - begin for buffer, _ in run]
                cuda_runtime.runtime.spread(
                    [view for _, view in run], starts, torch.from_numpy(region), stream
                )
                run = []
    _fill(run, stream)


def _runs(pairs: list[tuple[NDArray[Any], Any]]) -> Iterator[list[tuple[NDArray[Any], Any]]]:
    """Group buffers that lie side by side in one memory of bytes."""
    run: list[tuple[NDArray[Any], Any]] = []
    for buffer, view in sorted(pairs, key=lambda pair: address_of(pair[0])):
        if run:
            before, _ = run[-1]
            together = buffer.base is not None and buffer.base is before.base
            if not together or address_of(buffer) - address_of(before) - before.nbytes >= _BETWEEN:
                yield run
                run = []
        run.append((buffer, view))
    if run:
        yield run
