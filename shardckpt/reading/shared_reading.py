"""One process's part in a shared read: data that several processes need is read once and exchanged.

1. The needed data is read in rounds (`plan.shares`). In each round every member reads its part into
   its destinations, packs it, and announces that it is ready.
2. When all are ready, they send each other their parts (`interconnect`), and unpack the others'
   parts. Meanwhile the next round is read.
3. A member that fails announces its error instead, and all members raise it. The death of a member
   is detected: a missing announcement by the coordinator's timeout, missing bytes by the
   interconnect.

Memory: one round, besides the destinations. The exchanged bytes have no dtype, so every dtype
works.
"""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from shardckpt import errors
from shardckpt.errors import ShardckptError
from shardckpt.io.buffers import round_up
from shardckpt.io.threads import read_ahead
from shardckpt.layout.box import BoxArray
from shardckpt.plan.blocks import index_within
from shardckpt.plan.shares import Region, SharedBoxes, rounds
from shardckpt.reading.locate import Request

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from shardckpt.frameworks.base import Array
    from shardckpt.frameworks.coordination import Coordinator
    from shardckpt.frameworks.interconnect import Interconnect
    from shardckpt.reading.checkpoint import Checkpoint
    from shardckpt.reading.landing import Landing, RestoreJob


_log = logging.getLogger("shardckpt")


@dataclass(slots=True)
class SharedReading:
    """One process's part in the shared read of a group."""

    checkpoint: Checkpoint
    coordinator: Coordinator
    interconnect: Interconnect
    members: tuple[int, ...]
    jobs: list[RestoreJob]
    """Jobs in an order that all members share."""
    key: str
    """Key of the group and this restore."""
    limit: int
    """Bytes per round."""
    _round: int = 0
    """Number of rounds that this process has announced."""
    _memory: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    """Buffer for sending and receiving, reused by each round."""

    def read(self, batch: Sequence[RestoreJob]) -> None:
        """Fill the buffers of some tensors, which all members pass in the same order.

        A collective of the members.

        Raises:
            CoordinationError: a member is gone.
            ShardckptError: the error of this process's or another member's read.
        """
        tensors = [
            SharedBoxes(job.tensor.pieces, job.landings[0].boxes, _itemsize(job)) for job in batch
        ]
        me = self.members.index(self.coordinator.world.process)
        planned = rounds(tensors, len(self.members), self.limit)

        def read(shares: Sequence[Sequence[Region]]) -> None:
            self._read(batch, shares[me])

        with closing(read_ahead(planned, lambda *_: (), read, ahead=1, copies=False)) as coming:
            for shares, _ in coming:
                parts = self._pack(batch, shares, me)
                self._all_are_ready()
                self.interconnect.all_gather(
                    self.members, self.coordinator.world.process, [part.memory for part in parts]
                )
                for m, part in enumerate(parts):
                    if m != me:
                        part.unpack()

    def give_up(self, error: BaseException) -> None:
        """Announce that this process takes part in no further round."""
        try:
            self._announce(errors.error_document(error))
        except ShardckptError:
            _log.debug("%s: the job's store is gone, too", self.checkpoint.location)

    def _read(self, batch: Sequence[RestoreJob], regions: Sequence[Region]) -> None:
        """Read this process's part of a round into its destinations."""
        requests = []
        for i, group in groupby(regions, lambda region: region.tensor):
            mine = list(group)
            tensor, (landing,) = batch[i].tensor, batch[i].landings
            views = [_view(landing, region) for region in mine]
            boxes = BoxArray.of([region.part for region in mine], len(tensor.shape))
            requests.append(Request.of(tensor, boxes, views, converts=landing.converts))
        with self.checkpoint.reading():
            self.checkpoint.reader.read(requests)

    def _pack(
        self, batch: Sequence[RestoreJob], shares: Sequence[Sequence[Region]], me: int
    ) -> list[_Packed]:
        """Allocate memory for all members' parts, and pack this member's part."""
        views = [
            [_view(batch[region.tensor].landings[0], region) for region in share]
            for share in shares
        ]
        sizes = [sum(round_up(view.nbytes) for view in of_member) for of_member in views]
        if self._memory.size < sum(sizes):
            self._memory = np.empty(sum(sizes), np.uint8)
        stops = np.cumsum(sizes).tolist()
        parts = [
            _Packed(self._memory[stop - n : stop], of_member)
            for stop, n, of_member in zip(stops, sizes, views, strict=True)
        ]
        parts[me].pack()
        return parts

    def _announce(self, failure: object) -> str:
        key = f"cooperative/{self.key}/{self._round}"
        self._round += 1
        self.coordinator.announce(f"{key}/{self.coordinator.world.process}", failure)
        return key

    def _all_are_ready(self) -> None:
        """Wait until all members have their parts of a round in memory.

        From here to the end of the exchange this process does nothing else that could fail.
        """
        key = self._announce(None)
        for member, failure in zip(
            self.members, self.coordinator.listen(key, self.members), strict=True
        ):
            if failure is not None:
                raise errors.by_code(failure["code"])(
                    f"process {member} could not read its part: {failure['message']}"
                )


@dataclass(frozen=True, slots=True)
class _Packed:
    """One member's part of a round."""

    memory: NDArray[np.uint8]
    views: Sequence[Array]
    """Destinations of its elements, in the order in which they lie in the memory."""

    def pack(self) -> None:
        for place, view in self._pairs():
            place[...] = view

    def unpack(self) -> None:
        for place, view in self._pairs():
            view[...] = place

    def _pairs(self) -> Iterator[tuple[Array, Array]]:
        at = 0
        for view in self.views:
            yield self.memory[at : at + view.nbytes].view(view.dtype).reshape(view.shape), view
            at += round_up(view.nbytes)


def _view(landing: Landing, region: Region) -> Array:
    """The part of a landing's buffer for a region."""
    part, corner = region.part, landing.boxes[region.box].start
    view: Array = landing.targets[region.box][index_within(part.start, part.stop, corner)]
    return view


def _itemsize(job: RestoreJob) -> int:
    return max(job.tensor.dtype.itemsize, job.landings[0].sink.dtype.itemsize)
