"""CUDA devices that are not there: streams and events whose order is drawn, and that tell when an
order is wrong.

Tensors in the memory of a device are CPU tensors that a `FakeCuda` has marked. Work that is queued
on a stream runs when something waits for it, or when a schedule says so: at each turn a stream is
drawn, and its next operation runs unless it waits for an event. So a program that reads before an
event, or that writes before one, sees wrong bytes in some schedule.

Found besides, whatever the bytes are (`wrong`): copies to host memory for which an earlier copy is
still queued, memory that is given back while a copy to or from it is queued, and copies that cross
the border of two registrations. A copy with host memory that is not pinned is waited for, as CUDA
does.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod

import torch

from shardckpt.frameworks import cuda_runtime, dtensor
from shardckpt.frameworks import torch as frameworks_torch


class Event:
    def __init__(self, fake):
        self.fake, self.done = fake, False

    def synchronize(self):
        self.fake.waits.append(threading.current_thread().name)
        self.fake.run_until(lambda: self.done)


@dataclass(eq=False)
class Stream:
    fake: FakeCuda
    device: torch.device
    queue: deque = field(default_factory=deque)
    """(event to wait for or None, function, (begin, end) of host memory or None)"""

    def wait_event(self, event):
        with self.fake.lock:
            self.queue.append((event, lambda: None, None))

    def launch(self, function, host=None):
        with self.fake.lock:
            self.queue.append((None, function, host))


class FakeCuda(cuda_runtime.CudaRuntime):
    """The devices, and the functions of CUDA for them."""

    def __init__(self, seed=0, pinnable=1 << 40, kind="cuda"):
        super().__init__()
        self.kind = kind
        self.lock = threading.RLock()
        self.wrong = []
        self.pinned = {}
        """Address → bytes."""
        self.pinnings = 0
        """Number of times that memory was pinned."""
        self.high_water = 0
        """Most bytes that were pinned at once."""
        self.waits = []
        """The names of threads that have waited for events."""
        self.copies = 0
        self.spreads = []
        """Number of tensors of each copy that was made for several."""
        self._pinnable = pinnable
        self._random = random.Random(seed)
        self._places = {}
        self._kept = []
        self._all = []
        self._default = {}
        self._current = threading.local()

    # --- what tests do

    @contextmanager
    def installed(self):
        """In the place of CUDA."""
        original = frameworks_torch.device_type
        before = cuda_runtime.runtime

        def device_type(tensor):
            return self.kind if self._key(tensor) in self._places else original(tensor)

        frameworks_torch.device_type = dtensor.device_type = device_type
        cuda_runtime.runtime = self
        try:
            yield self
        finally:
            cuda_runtime.runtime = before
            frameworks_torch.device_type = dtensor.device_type = original

    def put(self, tensor, index=0):
        """Move a tensor, with all others over its storage, to a device."""
        if tensor.device.type != "meta" and tensor.untyped_storage().nbytes():
            self._places[self._key(tensor)] = torch.device(self.kind, index)
            self._kept.append(tensor.untyped_storage())  # no other storage gets its address
        return tensor

    def stream(self, index=0):
        """A stream of the program's own."""
        return self._stream(torch.device(self.kind, index))

    @contextmanager
    def on(self, stream):
        """Make a stream the current one of its device, on this thread."""
        before = self.current_stream(stream.device)
        setattr(self._current, str(stream.device), stream)
        try:
            yield
        finally:
            setattr(self._current, str(stream.device), before)

    def launch(self, function, index=0):
        """Queue the program's own work on the current stream."""
        self.current_stream(torch.device(self.kind, index)).launch(function)

    def idle(self):
        """Run everything."""
        self.run_until(lambda: not any(stream.queue for stream in self._all))

    def turn(self, turns=1):
        """Run some operations."""
        for _ in range(turns):
            self._turn()

    # --- the schedule

    def run_until(self, done):
        while True:
            with self.lock:
                if done():
                    return
                assert self._turn(), "every stream waits for an event that nothing will record"

    def _turn(self):
        with self.lock:
            ready = [
                stream
                for stream in self._all
                if stream.queue and (stream.queue[0][0] is None or stream.queue[0][0].done)
            ]
            if ready:
                self._random.choice(ready).queue.popleft()[1]()
            return bool(ready)

    # --- what shardckpt calls

    def device(self, tensor):
        return self._places[self._key(tensor)]

    def current_stream(self, device):
        if device not in self._default:
            self._default[device] = self._stream(device)
        return getattr(self._current, str(device), self._default[device])

    def side_stream(self, device):
        with self.lock:
            return self._streams.setdefault(
                device, self._streams.get(device) or self._stream(device)
            )

    def synchronize(self, event):
        event.synchronize()

    def record(self, stream):
        event = Event(self)
        stream.launch(lambda: setattr(event, "done", True))
        return event

    def copy(self, target, source, stream):
        self.copies += 1
        on_host = source if self._key(target) in self._places else target
        place = on_host.data_ptr(), on_host.data_ptr() + on_host.numel() * on_host.itemsize
        pinned = any(
            begin <= place[0] and place[1] <= begin + size for begin, size in self.pinned.items()
        )
        if not pinned and any(
            begin < place[1] and place[0] < begin + size for begin, size in self.pinned.items()
        ):
            self.wrong.append(f"a copy with {place} crosses the border of two registrations")
        with self.lock:
            if on_host is target and self._queued(*place):
                self.wrong.append(f"a copy to {place} is queued while an earlier one is")
            stream.launch(lambda: cuda_runtime.copy_bits(target, source), place)
        if not pinned:
            self.record(stream).synchronize()

    def spread(self, targets, starts, source, stream):
        self.copies += 1
        self.spreads.append(len(targets))
        place = source.data_ptr(), source.data_ptr() + source.numel()
        assert any(
            begin <= place[0] and place[1] <= begin + size for begin, size in self.pinned.items()
        )
        between = torch.empty_like(source)
        with self.lock:  # the copy to the device, and only later the copies there
            stream.launch(lambda: between.copy_(source), place)
            stream.launch(
                lambda: cuda_runtime.spread_bits(
                    targets, starts, torch.empty_like(between), between
                )
            )

    def pin(self, address, nbytes):
        with self.lock:
            if sum(self.pinned.values()) + nbytes > self._pinnable:
                return 2
            self.pinned[address] = nbytes
            self.pinnings += 1
            self.high_water = max(self.high_water, sum(self.pinned.values()))
            return 0

    def unpin(self, address):
        with self.lock:
            if self._queued(address, address + self.pinned.pop(address)):
                self.wrong.append("memory is given back while a copy is queued")
            return 0

    def _queued(self, begin, end):
        places = (host for stream in self._all for _, _, host in stream.queue if host is not None)
        return any(a < end and begin < b for a, b in places)

    def _stream(self, device):
        self._all.append(Stream(self, device))
        return self._all[-1]

    def _key(self, tensor):
        return None if tensor.device.type != "cpu" else tensor.untyped_storage().data_ptr()


class Descent(torch.optim.Optimizer):
    """An optimizer whose update runs on the fake device. What has been queued is also done at once
    to `values`, by name."""

    def __init__(self, fake, parameters):
        super().__init__(list(parameters.values()), {})
        self.fake, self.parameters = fake, parameters
        self.values = {name: tensor.detach().clone() for name, tensor in parameters.items()}

    def step(self):
        for name in self.parameters:
            self.change(name)

    def change(self, name, *, counted=True):
        """Change one tensor on the current stream of its device."""
        tensor, value = self.parameters[name], self.values[name]
        turn_bits(value)
        if counted:
            torch.autograd.graph.increment_version(tensor)
        if tensor.numel():
            self.fake.launch(lambda: turn_bits(tensor.data), self.fake.device(tensor).index)


def turn_bits(tensor):
    """Change every element, of any dtype, in its memory."""
    tensor = tensor.conj() if tensor.is_conj() else tensor
    if tensor.dtype == torch.bool:
        tensor.logical_not_()
    elif tensor.dtype == torch.complex128:
        torch.view_as_real(tensor).view(torch.int64).bitwise_xor_(1)
    else:
        tensor.view(
            {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
        ).bitwise_xor_(1)


def random_tensor(shape, dtype, seed):
    bits = torch.randint(
        0,
        2 if dtype == torch.bool else 256,
        (prod(shape) * dtype.itemsize,),
        dtype=torch.uint8,
        generator=seed,
    )
    return bits.view(dtype).reshape(shape)


def bits_of(tensor):
    return (
        torch.empty(tensor.numel(), dtype=tensor.dtype)
        .copy_(tensor.detach().reshape(-1))
        .view(torch.uint8)
    )


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits_of(a), bits_of(b))
