"""CUDA tensors: event-ordered copies between device and pinned host memory on side streams.

Imported when a state has its first CUDA tensor. All calls of CUDA are in `cuda_runtime`.

Saving (`DeviceCopies`)
1. A `CudaSource` fetches `DeviceArray`s, which `writing` cuts into blocks like arrays. Nothing is
   copied by that.
2. The side stream of each device waits for an event on the current stream: copies begin after the
   work that the program has queued.
3. Blocks are copied to pinned memory on the side stream. Each batch ends with an event; the host
   reads the memory only after it.
4. "wait": the current stream waits for the last copy, so later work of the program cannot change
   what is being copied. "overlap": later work runs at the same time. The hook before
   `Optimizer.step` makes the update wait. Version counters of the tensors show other changes, and
   fail the save.

Tensors are referenced until their copies are done, and their memory is recorded as in use by the
side stream. So the program may drop them, or free their storage, right after the save has returned.

Restoring is in `cuda_fills`.
"""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shardckpt.errors import BudgetError, CommitError
from shardckpt.frameworks import cuda_runtime
from shardckpt.frameworks.base import SourceOf
from shardckpt.frameworks.cuda_runtime import host_tensor, pin, within_slices
from shardckpt.plan.pieces import large_parts
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import DTypeLike, NDArray

    from shardckpt.frameworks.base import Array, Source
    from shardckpt.layout.dtypes import DType

_log = logging.getLogger("shardckpt")
_TEMPORARY = 32 << 20
"""Most bytes of a tensor with gaps that are copied at once: torch makes them contiguous on the
device first, in memory of that size."""


# --- Saving ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """Elements on a device, with enough of an array's interface to cut them into blocks."""

    tensor: Any
    dtype: np.dtype[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape, in elements."""
        return tuple(self.tensor.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return prod(self.shape) * self.dtype.itemsize

    def view(self, dtype: DTypeLike) -> DeviceArray:
        """The same bits with another dtype of the same size."""
        return DeviceArray(self.tensor, np.dtype(dtype))

    def __getitem__(self, index: Any) -> DeviceArray:
        return DeviceArray(self.tensor[index], self.dtype)


@dataclass(frozen=True, slots=True)
class CudaSource(SourceOf):
    """A tensor in device memory to save."""

    of: Source
    """The tensor's source by its adapter; describes it, and fetches nothing."""
    views: tuple[Any, ...]
    """For each box its elements on the device."""
    watched: tuple[Any, ...]
    """The tensors whose version counters show a change of the elements."""
    lazy: bool = False
    """Whether `fetch` leaves the elements on the device, as `DeviceArray`s for `DeviceCopies`."""
    private: bool = False
    resident: bool = False

    @property
    def comparer(self) -> str | None:
        """As in `Source`."""
        return self.of.comparer

    def on_device(self) -> Sequence[Any]:
        """As in `Source`."""
        return self.views

    @property
    def copier(self) -> type:
        """As in `Source`."""
        return DeviceCopies

    @property
    def dtype(self) -> DType:
        """As in `Source`."""
        return self.of.dtype

    @property
    def staged_bytes(self) -> int:
        """Bytes of all boxes; 0 if they stay on the device."""
        return 0 if self.lazy else int(self.boxes.sizes().sum()) * self.dtype.itemsize

    @classmethod
    def fetch(
        cls, sources: Sequence[CudaSource], positions: Sequence[Sequence[int]]
    ) -> list[list[Array]]:
        """Copies in host memory, which are complete at the return; or `DeviceArray`s."""
        fetched: list[list[Any]] = []
        pairs: list[tuple[Any, DeviceArray]] = []
        for source, boxes in zip(sources, positions, strict=True):
            fetched.append([DeviceArray(source.views[k], source.dtype.numpy) for k in boxes])
            if not source.lazy:
                arrays = [np.empty(on_device.shape, on_device.dtype) for on_device in fetched[-1]]
                pairs += zip(arrays, fetched[-1], strict=True)
                fetched[-1] = arrays
        if pairs:
            DeviceCopies(sources, overlap=False).copy(pairs).wait()
        return fetched


class Arrival:
    """Some copies to pinned memory that are queued."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        """One per device, after its copies."""
        self.held: list[Any] = []
        """The tensors that are copied from; they must exist until then."""

    def wait(self) -> None:
        """Wait until all bytes have arrived; any thread may do so."""
        for event in self.events:
            cuda_runtime.runtime.synchronize(event)
        self.events.clear()
        self.held.clear()


class SideStreams:
    """Copies on one side stream per device.

    They run after the work that this thread has queued, and before the work that it queues later.
    """

    def __init__(self, tensors: Iterable[Any]) -> None:
        """Order the copies after the work that is queued on the tensors' devices."""
        self._arrivals: list[Arrival] = []
        self._streams: dict[Any, Any] = {}
        self._last: dict[Any, Any] = {}
        """For each device the event after its last copy, once all copies are queued."""
        for device in dict.fromkeys(map(cuda_runtime.runtime.device, tensors)):
            self._streams[device] = cuda_runtime.runtime.side_stream(device)
            self._streams[device].wait_event(
                cuda_runtime.runtime.record(cuda_runtime.runtime.current_stream(device))
            )

    @contextmanager
    def _queue(self) -> Iterator[tuple[Arrival, dict[Any, Any]]]:
        """A new arrival, and the streams of the copies that are queued in the block, by device."""
        arrival, used = Arrival(), dict[Any, Any]()
        self._arrivals.append(arrival)
        try:
            yield arrival, used
        finally:
            arrival.events += [cuda_runtime.runtime.record(stream) for stream in used.values()]

    def end(self) -> None:
        """Finish: all copies are queued, and this thread's later work waits for them.

        The thread itself does not wait.
        """
        self._note_last()
        self._hold()

    def _note_last(self) -> None:
        self._last = {
            device: cuda_runtime.runtime.record(stream) for device, stream in self._streams.items()
        }

    def _hold(self) -> None:
        for device, event in self._last.items():
            cuda_runtime.runtime.current_stream(device).wait_event(event)

    def drain(self) -> bool:
        """Wait for all copies, after a failure too.

        Return whether they are done; False: a device has failed, and may still write.
        """
        try:
            for arrival in self._arrivals:
                arrival.wait()
        except RuntimeError as e:  # every later call of this device fails, too
            _log.warning("The device has failed during a copy: %s", e)
            return False
        return True


class DeviceCopies(SideStreams):
    """The copies of one save, from devices to pinned host memory."""

    pin = staticmethod(pin)
    """Pins the memory that is copied to; for a `BufferPool`."""

    def __init__(self, sources: Iterable[CudaSource], *, overlap: bool) -> None:
        """Order the copies after the work that this thread has queued.

        Args:
            sources: all tensors to copy from.
            overlap: whether later work of the program may run at the same time; False: it waits.
        """
        listed = [*sources]
        super().__init__(view for source in listed for view in source.views)
        self._changing = threading.Lock()
        self._stepping = False
        """Whether an optimizer is making its update, which waits for the copies."""
        self._changed: str | None = None
        self._overlap = overlap
        self._versions: dict[str, list[tuple[Any, int | None]]] = {}
        for source in listed if overlap else ():
            self._versions[source.name] = [(tensor, _version(tensor)) for tensor in source.watched]

    @classmethod
    def of(
        cls, sources: Mapping[str, CudaSource], *, overlap: bool
    ) -> tuple[Mapping[str, CudaSource], DeviceCopies]:
        """The sources with their elements left on the devices, and the object that copies these.

        See `__init__`.
        """
        lazy = {name: replace(source, lazy=True) for name, source in sources.items()}
        return lazy, cls(lazy.values(), overlap=overlap)

    # --- the thread that saves

    def copy(self, pairs: Iterable[tuple[NDArray[Any], Any]]) -> Arrival:
        """Queue copies from devices to arrays in pinned memory.

        The arrays are not to be read, freed or reused before `Arrival.wait`.

        Args:
            pairs: arrays, and a `DeviceArray` of the same shape and item size for each.

        Raises:
            BudgetError: the device has no memory to make elements contiguous.
        """
        with self._queue() as (arrival, used):
            try:
                for target, source in pairs:
                    device = cuda_runtime.runtime.device(source.tensor)
                    used[device] = self._streams[device]
                    arrival.held.append(source.tensor)
                    for slab in _slabs(target, source.tensor):
                        for array, tensor in within_slices(*slab):
                            cuda_runtime.runtime.copy(host_tensor(array), tensor, used[device])
            except torch.OutOfMemoryError as e:
                raise BudgetError(
                    f"{device} has no memory left to save a tensor that is not contiguous ({e}); "
                    f"it takes up to {_TEMPORARY:,} bytes more: free some, or save contiguous "
                    "tensors."
                ) from e
        return arrival

    def end(self) -> None:
        """Finish the part of the thread that saves: all copies are queued.

        The program may go on as the mode allows.
        """
        self._note_last()
        if self._overlap:
            _watch(self)
        else:
            self._hold()

    def before_step(self) -> None:
        """Make an optimizer's update wait for the copies; find changes before it."""
        with self._changing:
            self._compare()
            self._stepping = True
            self._hold()

    def after_step(self) -> None:
        """Accept the versions after an optimizer's update."""
        with self._changing:
            self._versions = {
                name: [(tensor, _version(tensor)) for tensor, _ in of]
                for name, of in self._versions.items()
            }
            self._stepping = False

    def _compare(self) -> None:
        if not self._stepping and self._changed is None:
            changed = (
                name
                for name, of in self._versions.items()
                if any(_version(tensor) != version for tensor, version in of)
            )
            self._changed = next(changed, None)

    # --- the thread that writes

    def check(self) -> None:
        """Check that no tensor has changed while it was copied.

        Call it when all copies have arrived.

        Raises:
            CommitError: names the tensor.
        """
        with self._changing:
            self._compare()
            self._versions.clear()
        _unwatch(
            self
            # Not before: an optimizer that steps without `before_step` would look like another
            # change.
        )
        if self._changed is not None:
            raise CommitError(
                f"{shown(self._changed)}: the tensor was changed while it was saved. With "
                'device_copy="overlap", only optimizer.step() may do that; nothing was '
                'published. Change it after the save has ended, or save with device_copy="wait".'
            )

    # --- both

    def drain(self) -> bool:
        """See `SideStreams`; nothing is compared any more."""
        _unwatch(self)
        done = super().drain()
        self._versions.clear()
        return done


_watching: list[DeviceCopies] = []
"""Copies that may overlap with the program's work."""
_hooked = threading.Lock()
_hooks: list[Any] = []


def _watch(copies: DeviceCopies) -> None:
    with _hooked:
        # Never removed: an optimizer on another thread may be going through its hooks.
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_before_step))
            _hooks.append(register_optimizer_step_post_hook(_after_step))
        _watching.append(copies)


def _unwatch(copies: DeviceCopies) -> None:
    with _hooked:
        if copies in _watching:
            _watching.remove(copies)


def _before_step(*_: Any) -> None:
    for copies in [*_watching]:
        copies.before_step()


def _after_step(*_: Any) -> None:
    for copies in [*_watching]:
        copies.after_step()


for _hook in (_before_step, _after_step):
    _hook._torchdynamo_disable = True  # type: ignore[attr-defined]  # as torch.compiler.disable does, which imports all of dynamo


def _version(tensor: Any) -> int | None:
    """The number of changes that torch has counted.

    None for inference tensors, which have no counter.
    """
    return None if tensor.is_inference() else int(tensor._version)


def _slabs(array: NDArray[Any], tensor: Any) -> Iterator[tuple[NDArray[Any], Any]]:
    """Cut a tensor that torch copies by way of a temporary one, so that this one is small."""
    direct = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    if direct or array.nbytes <= _TEMPORARY:
        yield array, tensor
        return
    for part in large_parts(array.shape, array.nbytes, _TEMPORARY):
        yield from _slabs(array[part], tensor[part])
