"""Landings: the places that stored tensors go to, checked before anything is read.

A `RestoreJob` is one stored tensor with a `Landing` for every place that it goes to. A landing has
the needed boxes and provides memory for them. At the end the elements go to its sink.

With `naming.adapt` a job may also be a tensor that is made of several stored ones, and a landing
may have another size than the tensor: it needs what both have, and the rest of it is zero.
"""

from __future__ import annotations

from collections import deque
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from operator import gt
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.typing import NDArray

from shardckpt import frameworks
from shardckpt.frameworks.base import InPlace
from shardckpt.frameworks.numpy import near_pairs, share_memory
from shardckpt.io.buffers import Arena, round_up
from shardckpt.io.threads import collector_paused, read_ahead
from shardckpt.layout.box import Box, BoxArray
from shardckpt.layout.dtypes import castable
from shardckpt.plan.cut import Order, cut
from shardckpt.plan.pieces import batches
from shardckpt.reading.locate import Request
from shardckpt.reading.read_list import MadeTensor
from shardckpt.reading.restoring import refusals

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

    from shardckpt.format.structure import TensorRecord
    from shardckpt.frameworks.base import Placer, Sink, Transfer
    from shardckpt.io.buffers import BufferPool, Lease
    from shardckpt.reading.checkpoint import Checkpoint
    from shardckpt.reading.naming.adapt import Adaptation

Array = NDArray[np.generic]
Beside: TypeAlias = "Sequence[Landing] | None"
"""Destinations that are filled without reading; None: no memory that is filled is the caller's."""
SLOTS, COPIED = 5, 2
"""Most batches in memory at a time where devices copy; and those of them that are being copied, or
about to be, while others are read."""


class Landing:
    """One destination of a tensor."""

    def __init__(self, tensor: TensorRecord, sink: Sink) -> None:
        self.tensor = tensor
        self.sink = sink
        self.names: list[str] = []
        """The names in the result that it is returned under."""
        self.boxes = sink.boxes
        self.destinations = sink.destinations
        self.buffers: list[Array] = self.destinations or []
        """One buffer per box of the sink: the leaf's own memory, or what `prepare` provides."""
        self.filled: list[int] | None = None
        """The sink's boxes that have elements of the tensor, if the sink is larger than that: those
        that `boxes` has, cut. None: all."""
        if sink.shape != tensor.shape and any(map(gt, sink.shape, tensor.shape)):
            stop = np.minimum(sink.boxes.stop, tensor.shape)
            self.filled = np.flatnonzero((sink.boxes.start < stop).all(axis=1)).tolist()
            self.boxes = BoxArray(sink.boxes.start[self.filled], stop[self.filled])
        self.memory: Sequence[Array] = (
            sink.memory if self.destinations is None else self.destinations
        )
        """The leaf's own memory: only to compare addresses, as it may be on a device."""
        same = sink.dtype is tensor.dtype or sink.dtype == tensor.dtype
        self.converts = not same or not all([v.dtype.isnative for v in self.destinations or ()])  # noqa: C419  (faster than a generator)
        """Whether elements are converted on their way into the buffers."""
        self.staged_bytes = 0
        """Host bytes that it needs in addition to its own memory."""
        if self.destinations is None and not sink.adopts:
            self.staged_bytes = sum(
                round_up(prod(shape) * sink.dtype.numpy.itemsize) for shape in sink.buffer_shapes
            )

    @property
    def fills_leaf(self) -> bool:
        """Whether it changes memory that the leaf of `like` already has."""
        return isinstance(self.sink.tie_key, InPlace) and len(self.sink.boxes) > 0

    @property
    def targets(self) -> list[Array]:
        """One buffer per box that the chunks are read into."""
        return self.buffers if self.filled is None else [self.buffers[i] for i in self.filled]

    @property
    def view(self) -> list[object]:
        """Addresses, shapes, strides and dtypes of the memory that is filled in place."""
        return [(v.ctypes.data, v.shape, v.strides, v.dtype) for v in self.memory]

    def prepare(self, lease: Lease, arena: Arena) -> None:
        """Provide buffers in the sink's dtype, unless the leaf has its own memory.

        The buffers are memory that the sink keeps, or leased memory.
        """
        if self.destinations is None:
            memory = arena if self.sink.adopts else lease
            self.buffers = [
                memory.array(shape, self.sink.dtype.numpy) for shape in self.sink.buffer_shapes
            ]

    def within(self, part: Box) -> Landing | None:
        """The landing of the elements inside a part of the tensor; None if it needs none of them.

        Only for `divisible` sinks.
        """
        sink = self.sink.within(part)
        if sink is None:
            return None
        landing = Landing(self.tensor, sink)
        landing.names = self.names
        return landing

    def complete(self) -> None:
        """Zero what the sink has beyond the tensor; then the elements can go to the sink."""
        if self.filled is not None:
            extents = np.clip(np.array(self.tensor.shape) - self.sink.boxes.start, 0, None).tolist()
            for buffer, inside in zip(self.buffers, extents, strict=True):
                for d, n in enumerate(inside):
                    buffer[(*[slice(None)] * d, slice(n, None))] = 0


@dataclass(slots=True)
class RestoreJob:
    """One stored tensor and every place it goes to."""

    tensor: TensorRecord
    landings: list[Landing]
    nbytes: int = field(init=False)
    """Stored bytes of the boxes that this process needs: its own share, not the complete tensor."""
    staged_bytes: int = field(init=False)
    """Bytes of staging that the job leases from the pool."""
    placing_bytes: int = field(init=False)
    """Additional host bytes while a leaf is placed; one leaf is placed at a time."""

    def __post_init__(self) -> None:
        """Count the bytes once."""
        elements = self.staged_bytes = self.placing_bytes = 0
        for landing in self.landings:
            elements += landing.boxes.elements
            self.staged_bytes += landing.staged_bytes
            self.placing_bytes = max(self.placing_bytes, landing.sink.placing_bytes)
        self.nbytes = elements * self.tensor.dtype.storage.itemsize

    @property
    def is_in_place(self) -> bool:
        """Whether chunks are read straight into the leaves' own memory, without a later copy."""
        return not self.placing_bytes and all(
            landing.destinations is not None for landing in self.landings
        )

    def divided(self, room: int) -> list[RestoreJob]:
        """The job, divided if possible into parts that need `room` bytes of staging.

        A job is divided only if all its sinks can be filled in parts. No chunk is read for two
        parts.

        A part needs more if its chunks do, or if pieces of the tensor divide each other.
        """
        if self.staged_bytes <= room or not all(
            one.sink.divisible and one.filled is None for one in self.landings
        ):
            return [self]
        boxes = [landing.boxes for landing in self.landings]
        start, stop = (
            np.concatenate([b.start for b in boxes]).min(axis=0),
            np.concatenate([b.stop for b in boxes]).max(axis=0),
        )
        around = Box(tuple(start.tolist()), tuple(stop.tolist()))
        parts = cut(around, self.tensor.pieces, room, Order.HALVES, size=self._needs)
        inside = (
            [inner for landing in self.landings if (inner := landing.within(part.box)) is not None]
            for part in parts
        )
        return [RestoreJob(self.tensor, landings) for landings in inside if landings]

    def _needs(self, part: Box) -> int:
        """Bytes of staging for a part of the tensor."""
        needed = 0
        for landing in self.landings:
            start, stop = (
                np.maximum(landing.boxes.start, part.start),
                np.minimum(landing.boxes.stop, part.stop),
            )
            sizes = np.maximum(stop - start, 0).prod(axis=1) * landing.sink.dtype.numpy.itemsize
            needed += sum(map(round_up, sizes.tolist()))
        return needed

    @property
    def stored(self) -> tuple[TensorRecord, ...]:
        """The stored tensors that are read."""
        return (
            tuple(record for _, record in self.tensor.sources)
            if isinstance(self.tensor, MadeTensor)
            else (self.tensor,)
        )

    def requests(self) -> list[Request]:
        """Requests for all boxes of all landings together.

        So a chunk that several boxes need is read once.
        """
        if len(self.landings) == 1 and not isinstance(self.tensor, MadeTensor):
            (landing,) = self.landings
            return [
                Request.of(self.tensor, landing.boxes, landing.targets, converts=landing.converts)
            ]
        converts = any(landing.converts for landing in self.landings)
        boxes = BoxArray.concatenate([landing.boxes for landing in self.landings])
        buffers = [buffer for landing in self.landings for buffer in landing.targets]
        if isinstance(self.tensor, MadeTensor):
            return self.tensor.requests(boxes, buffers, converts=converts)
        return [Request.of(self.tensor, boxes, buffers, converts=converts)]


def fills_leaves(
    jobs: Iterable[RestoreJob], beside: Beside, filling: Callable[[list[str]], None] | None
) -> bool:
    """Whether jobs fill memory of leaves in place.

    `filling` is called with the names of these leaves, and of those that are filled beside them.
    """
    if beside is None:
        return False
    filled = [landing for job in jobs for landing in job.landings if landing.fills_leaf]
    if filling is not None:
        every = (*filled, *(landing for landing in beside if landing.fills_leaf))
        filling([name for landing in every for name in landing.names])
    return bool(filled)


class Staging:
    """The buffers of batches: leased, filled, handed to sinks, and given back.

    A buffer is given back when no device copies from it any more.
    """

    def __init__(
        self,
        pool: BufferPool | None,
        placers: Mapping[type[Placer], Placer],
        least: int,
        placed: Callable[[int], None],
    ) -> None:
        """Lease nothing yet.

        Args:
            pool: leases the buffers; None: none are needed.
            placers: copy to devices, by the class that sinks name.
            least: least bytes of a buffer that a placer copies from: buffers of one size are
                reused.
            placed: called with the bytes of each batch that has arrived.
        """
        self._pool = pool
        self._placers = placers
        self._least = least if placers else 0
        self._placed = placed
        self._arena = None if pool is None else Arena()
        self._leases: list[Lease] = []
        """Leases that are not given back."""
        self._under_way: deque[tuple[list[Lease], list[Transfer], int]] = deque()

    def lend(self, batch: Sequence[RestoreJob], wait: bool) -> list[Lease] | None:
        """Provide buffers for a batch, and return their leases, of which it may need none.

        None: there is no room, and `wait` is False.
        """
        if self._pool is None or self._arena is None:
            return []
        nbytes = max(self._least, sum(job.staged_bytes for job in batch))
        beside = sum(job.placing_bytes for job in batch)
        while self._under_way and len(self._leases) >= SLOTS:
            self._land()
        while (lease := self._pool.take_at_once(nbytes, beside=beside)) is None and self._under_way:
            self._land()
        if lease is None and wait:
            lease = self._pool.take(nbytes, beside=beside)
        if lease is None:
            return None
        self._leases.append(lease)
        for job in batch:
            for landing in job.landings:
                landing.prepare(lease, self._arena)
        return [lease]

    def place(self, batch: Sequence[RestoreJob], leases: list[Lease]) -> dict[str, object]:
        """Hand the elements of a batch to the sinks, and return the restored leaves by name.

        The buffers are released.
        """
        restored: dict[str, object] = {}
        groups: dict[type[Placer], list[Landing]] = {}
        for job in batch:
            for landing in job.landings:
                landing.complete()
                kind = landing.sink.placer
                if kind is not None:
                    groups.setdefault(kind, []).append(landing)
                    continue
                leaf = landing.sink.place(landing.buffers)
                for name in landing.names:
                    restored[name] = leaf
                landing.buffers = []
        arrivals = []
        for kind, landings in groups.items():
            leaves, arrival = self._placers[kind].place(
                [(landing.sink, landing.buffers) for landing in landings]
            )
            arrivals.append(arrival)
            for landing, leaf in zip(landings, leaves, strict=True):
                restored |= dict.fromkeys(landing.names, leaf)
                landing.buffers = []
        nbytes = sum(job.nbytes for job in batch)
        if arrivals:
            self._under_way.append((leases, arrivals, nbytes))
        else:
            self._free(leases, nbytes)
        return restored

    def finish(self) -> None:
        """Wait for all copies."""
        while self._under_way:
            self._land()

    def _land(self) -> None:
        """Wait for the copies of the oldest batch; then its buffers are free."""
        leases, arrivals, nbytes = self._under_way[0]
        for arrival in arrivals:
            arrival.wait()
        self._under_way.popleft()
        self._free(leases, nbytes)

    def _free(self, leases: list[Lease], nbytes: int) -> None:
        for lease in leases:
            self._leases.remove(lease)
            lease.give_back()
        self._placed(nbytes)

    def close(self) -> None:
        """Give everything back, also after an error.

        The call waits for all copies, however often Ctrl-C is pressed meanwhile.
        """
        interrupted: list[KeyboardInterrupt] = []
        for placer in self._placers.values():
            done = None
            while done is None:
                try:
                    done = placer.drain()
                except KeyboardInterrupt as e:
                    interrupted = [e]
        for lease in self._leases:
            lease.give_back()
        self._leases.clear()
        if interrupted:
            raise interrupted.pop()


def read_and_place(
    jobs: Sequence[RestoreJob],
    fetch: Callable[[Sequence[RestoreJob]], None],
    *,
    pool: BufferPool | None,
    largest: int,
    staged: int,
    ahead: int,
    placed: Callable[[int], None],
    placers: Mapping[type[Placer], Placer] | None = None,
) -> dict[str, object]:
    """Read and place some tensors; return the restored leaves by name.

    Args:
        jobs: the tensors and their destinations.
        fetch: fills the buffers of a batch.
        pool: leases the buffers; None: all tensors are read straight into the memory of their
            leaves.
        largest: bytes of one batch, unless one tensor has more.
        staged: bytes of staging for one batch, unless one tensor needs more.
        ahead: most batches that are read at a time.
        placed: called with the bytes placed, batch after batch.
        placers: copy to devices, while other batches are read.
    """
    restored: dict[str, object] = {}
    staging = Staging(
        pool, placers or {}, min(staged, sum(job.staged_bytes for job in jobs)), placed
    )
    if pool is None:
        groups = batches(jobs, lambda job: (job.nbytes,), (largest,))
    else:
        # Batches have at most half of the limit each: one batch is placed while the next one is
        # read.
        limits = (pool.limit // 2, largest, staged)
        groups = batches(
            jobs,
            lambda job: (job.staged_bytes + job.placing_bytes, job.nbytes, job.staged_bytes),
            limits,
        )
    copies = any(job.placing_bytes for job in jobs)
    try:
        with closing(read_ahead(groups, staging.lend, fetch, ahead=ahead, copies=copies)) as coming:
            for batch, leases in coming:
                restored |= staging.place(batch, leases)
        staging.finish()
    finally:
        staging.close()
    return restored


def sinks_of(
    leaves: Mapping[str, Sequence[tuple[str, object]]], record: Callable[[str], TensorRecord]
) -> Iterator[tuple[TensorRecord, list[tuple[str, Sink]]]]:
    """Per stored tensor, the sinks of the leaves that get it, with their names in `like`."""
    frameworks.settle(leaf for targets in leaves.values() for _, leaf in targets)
    for stored, targets in leaves.items():
        tensor = record(stored)
        yield (
            tensor,
            [
                (name, frameworks.target(name, leaf, tensor.shape, tensor.dtype))
                for name, leaf in targets
            ],
        )


@collector_paused()
def restore_jobs(
    checkpoint: Checkpoint,
    places: Iterable[tuple[TensorRecord, Iterable[tuple[str, Sink]]]],
    *,
    cast: bool,
    adaptation: Adaptation | None = None,
    beside: Iterable[Landing] = (),
) -> list[RestoreJob]:
    """The restore jobs for some tensors, after a check of every shape and dtype.

    Args:
        checkpoint: the source.
        places: tensor, and (name for messages, sink) of every destination of it.
        cast: whether dtypes may differ.
        adaptation: names tensors in messages, and says which sinks may have another size.
        beside: destinations that are filled without reading.
    """
    jobs, where = [], checkpoint.location
    title = str if adaptation is None else adaptation.title
    for tensor, sinks in places:
        landings: dict[Hashable, Landing] = {}
        for name, sink in sinks:
            if sink.shape != tensor.shape and not (
                adaptation is not None and adaptation.fits(name, tensor, sink)
            ):
                raise refusals.another_shape(title(name), where, tensor, sink)
            same = sink.dtype is tensor.dtype or sink.dtype == tensor.dtype
            if not same and not (cast and castable(tensor.dtype, sink.dtype)):
                raise refusals.another_dtype(title(name), where, tensor, sink, cast=cast)
            # Tied leaves with equal sinks get one object, because they were one object when saved.
            landing = landings.get(sink.tie_key)
            if landing is None:
                landing = landings[sink.tie_key] = Landing(tensor, sink)
            landing.names.append(name)
        jobs.append(RestoreJob(tensor, list(landings.values())))
    _refuse_shared_memory(chain(chain.from_iterable(job.landings for job in jobs), beside), title)
    return jobs


def _refuse_shared_memory(landings: Iterable[Landing], title: Callable[[str], str]) -> None:
    """Raise if destinations share memory: threads write to them in no particular order."""
    arrays = [(array, landing) for landing in landings for array in landing.memory]
    bounds = np.array([_bounds(array, landing.sink.address) for array, landing in arrays], np.int64)
    bounds = bounds.reshape(-1, 2)
    starts, stops = bounds[np.lexsort((bounds[:, 1], bounds[:, 0]))].T
    if (starts[1:] >= stops[:-1]).all():
        return
    for i, j in near_pairs([array for array, _ in arrays], bounds):
        (array, landing), (other, before) = arrays[i], arrays[j]
        same_view = landing.tensor is before.tensor and landing.view == before.view
        if not same_view and share_memory(array, other):
            raise refusals.shared_memory(title(landing.names[0]), title(before.names[0]))


def _bounds(array: Array, address: int) -> tuple[int, int]:
    """The address of an array's first byte (`address`, if not 0), and one past its last."""
    if array.flags.c_contiguous:
        start: int = address or array.__array_interface__["data"][0]
        return start, start + array.nbytes
    return byte_bounds(array)
