"""The functions of CUDA that `cuda` uses: streams, events, copies and pinned memory.

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
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

_log = logging.getLogger("shardckpt")
_BITS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}
"""For each item size a dtype that numpy and torch both have. Elements are copied as these, so their own dtype does not matter."""


class CudaRuntime:
    """The functions of CUDA that this module uses. Streams have `wait_event`, as in torch.

    CUDA's current device is one of the thread, and the first call for it makes a context of some hundreds of megabytes there. A new thread
    has device 0. So calls that name no device are made with a device that this process uses.
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
        return torch.cuda.current_stream(device)

    def side_stream(self, device: Any) -> Any:
        """The stream of all copies from the device; the same one each time."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def record(self, stream: Any) -> Any:
        """An event after all work that is queued on the stream. A thread that waits for it uses no processor time."""
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        return event

    def synchronize(self, event: Any) -> None:
        """Wait for an event, on any thread."""
        with torch.cuda.device(event.device):
            event.synchronize()

    def copy(self, target: Any, source: Any, stream: Any) -> None:
        """Queue a copy between device and pinned memory on a stream; see `copy_bits`."""
        with torch.cuda.stream(stream):
            (source if source.is_cuda else target).record_stream(stream)
            copy_bits(target, source)

    def pin(self, address: int, nbytes: int) -> int:
        """Pin host memory for all devices; return CUDA's error number, or 0."""
        with torch.cuda.device(self._used):
            return _cleared(int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 1)))  # 1: cudaHostRegisterPortable

    def unpin(self, address: int) -> int:
        """Undo `pin`; return CUDA's error number, or 0."""
        with torch.cuda.device(self._used):
            return _cleared(int(torch.cuda.cudart().cudaHostUnregister(address)))


def _cleared(error: int) -> int:
    """The error number, after a kernel that reports the error: CUDA keeps it for the thread's next launch, which would be the program's."""
    if error:
        try:
            torch.ones(1, device="cuda")
        except RuntimeError as e:
            _log.debug("CUDA has reported the error of pinning memory: %s", e)
    return error


runtime = CudaRuntime()


def copy_bits(target: Any, source: Any) -> None:
    """Copy a tensor's bits to a tensor of the same shape and item size; if one is in pinned memory, without waiting for the copy."""
    if source.is_conj() or source.is_neg():
        source = source.resolve_conj().resolve_neg()
    bits = getattr(torch, _BITS[source.itemsize])
    target.view(bits).copy_(source.view(bits), non_blocking=True)


def pin(buffer: NDArray[np.uint8]) -> Callable[[], object]:
    """Pin a buffer's memory, until the returned function is called, or no array uses the memory any more.

    Raises:
        BudgetError: CUDA cannot pin so much memory.
    """
    address = buffer.ctypes.data
    if error := runtime.pin(address, buffer.nbytes):
        raise BudgetError(
            f"CUDA cannot pin {buffer.nbytes:,} bytes of host memory (error {error}); lower memory_limit, end other programs, or give this "
            f"process more memory."
        )
    owner = buffer if buffer.base is None else buffer.base
    unpin = weakref.finalize(owner, _unpin, runtime, address, os.getpid())
    unpin.atexit = False
    return unpin


def _unpin(of: CudaRuntime, address: int, process: int) -> None:
    if os.getpid() == process and (error := of.unpin(address)):  # a fork has no CUDA
        _log.warning("CUDA could not give back pinned memory (error %d).", error)


def host_tensor(array: NDArray[Any]) -> Any:
    """An array's memory as a tensor of bits."""
    return torch.from_numpy(array.view(_BITS[array.dtype.itemsize]))
