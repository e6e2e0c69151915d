"""The functions of CUDA, and of devices like it, that `cuda` uses.

They are for streams, events, copies and pinned memory.

Tests replace `runtime` by a device whose order of operations they choose.
"""

from __future__ import annotations

import logging
import os
import weakref
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.errors import BudgetError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

_log = logging.getLogger("shardckpt")
_BITS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}
"""For each item size a dtype that numpy and torch both have. Elements are copied as these, so their
own dtype does not matter."""


class CudaRuntime:
    """The functions of CUDA that this module uses. Streams have `wait_event`, as in torch.

    Another kind of device has them in a module of its own (`torch.xpu`), but no function that pins
    memory: its copies use ordinary memory.

    CUDA's current device is one of the thread, and the first call for it makes a context of some
    hundreds of megabytes there. A new thread has device 0. So calls that name no device are made
    with a device that this process uses.
    """

    def __init__(self) -> None:
        self._streams: dict[Any, Any] = {}
        self._used: Any = None
        """A device with a tensor of this process; None: there was none yet."""

    def device(self, tensor: Any) -> Any:
        """The device that holds a tensor."""
        self._used = tensor.device
        return tensor.device

    def current_stream(self, device: Any) -> Any:
        """The stream on which this thread's work for the device is queued."""
        return _of(device).current_stream(device)

    def side_stream(self, device: Any) -> Any:
        """The stream of all copies from and to the device; the same one each time."""
        if device not in self._streams:
            self._streams[device] = _of(device).Stream(device)
        return self._streams[device]

    def record(self, stream: Any) -> Any:
        """An event after all work that is queued on the stream.

        A thread that waits for an event of CUDA uses no processor time.
        """
        kind = stream.device.type
        event = torch.cuda.Event(blocking=True) if kind == "cuda" else _of(stream.device).Event()
        event.record(stream)
        return event

    def synchronize(self, event: Any) -> None:
        """Wait for an event, on any thread."""
        with _of(event.device).device(event.device):
            event.synchronize()

    def copy(self, target: Any, source: Any, stream: Any) -> None:
        """Queue a copy between device and pinned memory on a stream; see `copy_bits`."""
        with _of(stream.device).stream(stream):
            (target if source.device.type == "cpu" else source).record_stream(stream)
            copy_bits(target, source)

    def spread(
        self, targets: Sequence[Any], starts: Sequence[int], source: Any, stream: Any
    ) -> None:
        """Queue a copy from pinned memory to the device, and copies from there to many tensors.

        The tensors are on the device, and all copies are queued on one stream; see `spread_bits`.
        """
        with _of(stream.device).stream(stream):
            for target in targets:
                target.record_stream(stream)
            spread_bits(targets, starts, torch.empty_like(source, device=stream.device), source)

    def pin(self, address: int, nbytes: int) -> int:
        """Pin host memory for all devices; return CUDA's error number, or 0."""
        if self._used.type != "cuda":
            return 0
        with torch.cuda.device(self._used):
            # 1: cudaHostRegisterPortable.
            return _clear(int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 1)))

    def unpin(self, address: int) -> int:
        """Undo `pin`; return CUDA's error number, or 0."""
        if self._used.type != "cuda":
            return 0
        with torch.cuda.device(self._used):
            return _clear(int(torch.cuda.cudart().cudaHostUnregister(address)))


def _of(device: Any) -> Any:
    """The module with the streams and events of a kind of device."""
    return torch.get_device_module(device.type)


def _clear(error: int) -> int:
    """The error number, after a kernel that reports the error.

    CUDA keeps the error for the thread's next launch, which would be the program's.
    """
    if error:
        try:
            torch.ones(1, device="cuda")
        except RuntimeError as e:
            _log.debug("CUDA has reported the error of pinning memory: %s", e)
    return error


runtime = CudaRuntime()


def copy_bits(target: Any, source: Any) -> None:
    """Copy a tensor's bits to a tensor of the same shape and item size.

    If one of the tensors is in pinned memory, the function does not wait for the copy.
    """
    if source.is_conj() or source.is_neg():
        source = source.resolve_conj().resolve_neg()
    bits = getattr(torch, _BITS[source.itemsize])
    target.view(bits).copy_(source.view(bits), non_blocking=True)


SLICE = 256 << 20
"""Most bytes that are pinned in one call: a long call stops the driver for everybody. No copy may
cross the border of two slices."""
_sliced: dict[int, int] = {}
"""The end of each pinned buffer of several slices, by its first address."""


def spread_bits(targets: Sequence[Any], starts: Sequence[int], between: Any, source: Any) -> None:
    """Copy bytes to as many bytes on the device, and from there to tensors.

    `starts` are the bytes at which the tensors' elements begin. The function does not wait for the
    copies.
    """
    between.copy_(source, non_blocking=True)
    bits = [getattr(torch, _BITS[target.itemsize]) for target in targets]
    parts = [
        between[start : start + target.numel() * target.itemsize].view(kind).view(target.shape)
        for target, start, kind in zip(targets, starts, bits, strict=True)
    ]
    torch._foreach_copy_(
        [target.view(kind) for target, kind in zip(targets, bits, strict=True)], parts
    )


def pin(
    buffer: NDArray[np.uint8], touched: Callable[[int], Iterable[NDArray[np.uint8]]]
) -> Callable[[], object]:
    """Pin a buffer's memory, slice by slice.

    The memory stays pinned until the returned function is called, or no array uses the memory any
    more.

    Args:
        buffer: the memory.
        touched: cuts the buffer into parts of so many bytes, and touches their pages: pinning them
            takes a fifth as long then.

    Raises:
        BudgetError: CUDA cannot pin so much memory.
    """
    slices: list[int] = []
    unpin = weakref.finalize(
        buffer if buffer.base is None else buffer.base, _unpin, runtime, slices, os.getpid()
    )
    unpin.atexit = False
    try:
        for part in touched(SLICE):
            _pin_slice(part, buffer.nbytes)
            slices.append(part.ctypes.data)
    except BaseException:
        unpin()
        raise
    if len(slices) > 1:
        _sliced[slices[0]] = slices[0] + buffer.nbytes
    return unpin


def _pin_slice(part: NDArray[np.uint8], nbytes: int) -> None:
    if error := runtime.pin(part.ctypes.data, part.nbytes):
        raise BudgetError(
            f"CUDA cannot pin {nbytes:,} bytes of host memory (error {error}); lower "
            "memory_limit, end other programs, or give this process more memory."
        )


def _unpin(of: CudaRuntime, slices: list[int], process: int) -> None:
    if os.getpid() != process:  # a fork has no CUDA
        return
    if slices:
        _sliced.pop(slices[0], None)
    for address in slices:
        if error := of.unpin(address):
            _log.warning("CUDA could not give back pinned memory (error %d).", error)


def within_slices(array: NDArray[Any], tensor: Any) -> Iterator[tuple[NDArray[Any], Any]]:
    """Cut a pinned array, and a tensor of its shape, into parts that cross no border of slices."""
    if _sliced and _crosses(array):
        d = next(d for d, n in enumerate(array.shape) if n > 1)  # an element crosses none
        half = array.shape[d] // 2
        for part in (slice(None, half), slice(half, None)):
            index = (*[slice(None)] * d, part)
            yield from within_slices(array[index], tensor[index])
    else:
        yield array, tensor


def _crosses(array: NDArray[Any]) -> bool:
    address = array.__array_interface__["data"][0]
    for begin, end in [*_sliced.items()]:
        if begin <= address < end:
            return (
                bool(array.nbytes)
                and (address - begin) // SLICE != (address + array.nbytes - 1 - begin) // SLICE
            )
    return False


def host_tensor(array: NDArray[Any]) -> Any:
    """An array's memory as a tensor of bits."""
    return torch.from_numpy(array.view(_BITS[array.dtype.itemsize]))
