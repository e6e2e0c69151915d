"""Cooperative restore: what several processes need, each reads a part of, and the interconnect brings it to the others.

By itself every process reads what its own devices need, so that with R replicas the storage serves every byte R times.
Here it serves it once:

1. Tensors are grouped by who needs the same boxes of them (`Sink.sharers`): with data-parallel replicas that are all
   processes, or those of one place in the model's mesh.
2. Where the caller leaves the choice, `Bandwidths` says of each group whether reading together is worth it.
3. All processes of the job tell each other, once, the digests of the groups that they want to read together: of whose tensors,
   boxes, dtypes and sizes. A group is read together if and only if all its members said the same of it. What was said is the same
   for all, and so is the answer: nobody enters a collective that another one does not.
4. A group is read in rounds (`planning.shares`): each member reads its part into the places where it belongs, packs it, and
   tells the others that it has, or what went wrong. When all have, they send each other their parts (`interconnect`), and
   unpack them. Meanwhile the next round is read.
5. What is read together by nobody is read as ever.

Who fails tells the members of all groups that it has not finished, and they raise the same. Who dies is missed when
the others hear nothing of its round for the coordinator's timeout, or at once by the interconnect.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeAlias, TypeVar

import numpy as np

from shardckpt import errors
from shardckpt.box import BoxArray
from shardckpt.coordination import Coordinator
from shardckpt.errors import OptionError, ShardckptError
from shardckpt.excerpt import excerpt
from shardckpt.interconnect import Interconnect, interconnect_of
from shardckpt.io.budget import round_up
from shardckpt.io.reader import Request
from shardckpt.planning.bandwidths import Bandwidths, Estimate
from shardckpt.planning.shares import Region, Wanted, fellows, rounds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from shardckpt.checkpoint import Checkpoint
    from shardckpt.frameworks.base import Array, Sink
    from shardckpt.structure import TensorRecord
    from shardckpt.world import World

__all__ = ["Choice", "SharedReading", "check_choice", "divide", "exchange_bytes", "telling"]

Choice: TypeAlias = "bool | Literal['auto'] | Bandwidths"
"""Whether to read together: never, always, or as the model says."""
_log = logging.getLogger("shardckpt")


class _Landing(Protocol):
    """One place that a tensor goes to; see `restoring`."""

    sink: Sink
    boxes: BoxArray
    buffers: list[Array]
    converts: bool
    destinations: list[Array] | None


class Job(Protocol):
    """One stored tensor and every place it goes to; see `restoring`."""

    @property
    def tensor(self) -> TensorRecord: ...
    @property
    def landings(self) -> Sequence[_Landing]: ...
    @property
    def staged_bytes(self) -> int: ...
    @property
    def placing_bytes(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


J = TypeVar("J", bound=Job)


def check_choice(choice: object) -> None:
    """Refuse what is no choice.

    Raises:
        OptionError: neither a bool, nor "auto", nor bandwidths.
    """
    if not isinstance(choice, bool | Bandwidths) and choice != "auto":
        raise OptionError(f'restore(cooperative={excerpt(choice)}): use True, False, "auto", or shardckpt.Bandwidths(…).')


def exchange_bytes(limit: int) -> int:
    """Of a restore's memory limit, the part that a round takes: what this process has read of it, and all that comes in."""
    return limit // 4


@dataclass(slots=True)
class _Group(Generic[J]):
    """Tensors whose boxes the same processes need."""

    members: tuple[int, ...]
    jobs: list[J]
    digest: str = ""
    """The same on all members that want the same."""
    estimate: Estimate | None = None

    @property
    def nbytes(self) -> int:
        return sum(job.nbytes for job in self.jobs)


def divide(
    checkpoint: Checkpoint, jobs: Sequence[J], choice: Choice, coordinator: Coordinator | None, limit: int
) -> tuple[list[J], list[SharedReading[J]]]:
    """Agree with all other processes of the job on what is read together. Blocks until all of them have called it.

    Nobody is asked where the choice is False, the job has one process, or nothing connects its processes; and where the
    choice is "auto" and the checkpoint on a path, since nothing is known of what is behind it.

    Args:
        checkpoint: where from.
        jobs: what this process needs.
        choice: the same on all processes.
        coordinator: of the job; None: found out.
        limit: bytes of a round.

    Returns:
        What this process reads by itself, and what it reads with others, in an order that all of them have.

    Raises:
        CoordinationError: not all processes called it in time.
    """
    if choice is False:
        return list(jobs), []
    if choice == "auto" and checkpoint.location.local is not None:
        _say(checkpoint, "how fast a path is cannot be known; give cooperative=shardckpt.Bandwidths(…), or True, to read together")
        return list(jobs), []
    coordinator = Coordinator.current() if coordinator is None else coordinator
    link = interconnect_of(coordinator) if coordinator.world.processes > 1 else "the job has one process"
    if isinstance(link, str):
        _say(checkpoint, link)
        return list(jobs), []
    groups = _groups(checkpoint, jobs, coordinator.world, limit)
    if choice is not True:
        rates = Bandwidths() if choice == "auto" else choice
        rates = rates if rates.interconnect is not None else replace(rates, interconnect=link.bandwidth)
        for group in groups:
            counts = {"readers": len(group.members), "processes": coordinator.world.processes}
            group.estimate = rates.estimate(nbytes=group.nbytes, rounds=-(-group.nbytes // limit), **counts)
    proposed = [group for group in groups if group.estimate is None or group.estimate.together]
    said = coordinator.share("cooperative", [secrets.token_hex(8), *(group.digest for group in proposed)])
    call = said[0][0]
    agreed = [group for group in proposed if all(group.digest in said[member][1:] for member in group.members)]
    _tell(checkpoint, groups, proposed, agreed)
    shared = {id(job) for group in agreed for job in group.jobs}
    readings = [
        SharedReading(checkpoint, coordinator, link, group.members, group.jobs, f"{call}/{group.digest}", limit) for group in agreed
    ]
    return [job for job in jobs if id(job) not in shared], readings


def _groups(checkpoint: Checkpoint, jobs: Sequence[J], world: World, limit: int) -> list[_Group[J]]:
    """The tensors that this process needs together with others, by with whom; in an order that all of these have, too."""
    found: dict[tuple[int, ...], list[J]] = {}
    for job in jobs:
        sharers = job.landings[0].sink.sharers(world) if len(job.landings) == 1 and job.nbytes else None
        if sharers is not None and len(sharers) > 1 and world.process in sharers:
            found.setdefault(fellows(sharers, world.process), []).append(job)
    groups = [_Group(members, sorted(found[members], key=lambda job: job.tensor.name)) for members in sorted(found)]
    for group in groups:
        said = [checkpoint.record.attempt, limit, group.members, [_said_of(job) for job in group.jobs]]
        group.digest = hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]
    return groups


def _said_of(job: Job) -> list[Any]:
    """All that the members of a group have to have alike: what is read, what is sent, and how it is put into batches."""
    (landing,) = job.landings
    kinds = [array.dtype.str for array in landing.destinations or ()]
    boxes = [landing.boxes.start.tolist(), landing.boxes.stop.tolist()]
    return [job.tensor.name, boxes, landing.sink.dtype.name, kinds, job.staged_bytes, job.placing_bytes, job.nbytes]


def _say(checkpoint: Checkpoint, why: str) -> None:
    _log.info("%s: every process reads by itself: %s", checkpoint.location, why)


def _tell(checkpoint: Checkpoint, groups: Sequence[_Group[J]], proposed: Sequence[_Group[J]], agreed: Sequence[_Group[J]]) -> None:
    """Log what was chosen, and why."""
    if not groups:
        _say(checkpoint, "no tensor is needed by several processes alike")
    for group in groups:
        why = ""
        if group.estimate is not None:
            why = f" (about {group.estimate.together_s:.2g} s, and {group.estimate.alone_s:.2g} s each by itself)"
        together = any(group is other for other in agreed)
        if not together and any(group is other for other in proposed):
            why = " (not all of them restore into the same layouts, with the same options)"
        what = "read together" if together else "each read by itself"
        sizes = len(group.members), what, len(group.jobs), group.nbytes / 1e6
        _log.info("%s: %d processes %s %d tensors, %.1f MB%s", checkpoint.location, *sizes, why)


@contextmanager
def telling(readings: Sequence[SharedReading[J]]) -> Iterator[None]:
    """Tell the other members of groups that have not come to their end what is raised inside, so that they do not wait."""
    try:
        yield
    except BaseException as e:
        for reading in readings:
            reading.give_up(e)
        raise


@dataclass(slots=True)
class SharedReading(Generic[J]):
    """One process's part in reading what a group of them needs."""

    checkpoint: Checkpoint
    coordinator: Coordinator
    interconnect: Interconnect
    members: tuple[int, ...]
    jobs: list[J]
    """In an order that all members have."""
    key: str
    """Of the group and this one restore."""
    limit: int
    """Bytes of a round."""
    _round: int = 0
    """Rounds that this process has announced."""
    _memory: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    """What is sent and received, from round to round."""

    def read(self, batch: Sequence[J]) -> None:
        """Fill the buffers of some tensors, which all members give in the same order. A collective of the members.

        Raises:
            CoordinationError: a member is gone.
            ShardckptError: what this process's or another one's reading raised.
        """
        wanted = [Wanted(job.tensor.pieces, job.landings[0].boxes, _itemsize(job)) for job in batch]
        me = self.members.index(self.coordinator.world.process)
        planned = rounds(wanted, len(self.members), self.limit)
        with ThreadPoolExecutor(1, "shardckpt-share") as ahead:
            shares = next(planned, None)
            coming = None if shares is None else ahead.submit(self._read, batch, shares[me])
            while shares is not None:
                assert coming is not None
                coming.result()
                parts = self._packed(batch, shares, me)
                self._all_are_ready()
                following = next(planned, None)
                coming = None if following is None else ahead.submit(self._read, batch, following[me])
                self.interconnect.all_gather(self.members, self.coordinator.world.process, [part.memory for part in parts])
                for m, part in enumerate(parts):
                    if m != me:
                        part.unpack()
                shares = following

    def give_up(self, error: BaseException) -> None:
        """Let the others know that this process comes to no further round."""
        failure = {"code": getattr(error, "code", None), "message": str(error) or type(error).__name__}
        try:
            self._announce(failure)
        except ShardckptError:
            _log.debug("%s: the job's store is gone, too", self.checkpoint.location)

    def _read(self, batch: Sequence[J], regions: Sequence[Region]) -> None:
        """Read this process's part of a round into the places where it belongs."""
        requests = []
        for i, some in groupby(regions, lambda region: region.tensor):
            mine = list(some)
            tensor, (landing,) = batch[i].tensor, batch[i].landings
            views = [_view(landing, region) for region in mine]
            boxes = BoxArray.of([region.part for region in mine], len(tensor.shape))
            storage = tensor.dtype.storage
            if landing.converts:
                requests.append(Request(tensor.name, storage, tensor.pieces, boxes, views, convert_from=tensor.dtype.numpy))
            else:
                requests.append(Request(tensor.name, storage, tensor.pieces, boxes, [view.view(storage) for view in views]))
        with self.checkpoint.reading():
            self.checkpoint.reader.read(requests)

    def _packed(self, batch: Sequence[J], shares: Sequence[Sequence[Region]], me: int) -> list[_Packed]:
        """Memory for all members' parts, with this one's in it."""
        views = [[_view(batch[region.tensor].landings[0], region) for region in share] for share in shares]
        sizes = [sum(round_up(view.nbytes) for view in some) for some in views]
        if self._memory.size < sum(sizes):
            self._memory = np.empty(sum(sizes), np.uint8)
        stops = np.cumsum(sizes).tolist()
        parts = [_Packed(self._memory[stop - n : stop], some) for stop, n, some in zip(stops, sizes, views, strict=True)]
        parts[me].pack()
        return parts

    def _announce(self, failure: object) -> str:
        key = f"cooperative/{self.key}/{self._round}"
        self._round += 1
        self.coordinator.announce(f"{key}/{self.coordinator.world.process}", failure)
        return key

    def _all_are_ready(self) -> None:
        """Wait until all members have their parts of a round in memory.

        From here to the end of the exchange this process does nothing that could fail by itself.
        """
        key = self._announce(None)
        for member, failure in zip(self.members, self.coordinator.listen(key, self.members), strict=True):
            if failure is not None:
                raise errors.by_code(failure["code"])(f"process {member} could not read its part: {failure['message']}")


@dataclass(frozen=True, slots=True)
class _Packed:
    """One member's part of a round."""

    memory: NDArray[np.uint8]
    views: Sequence[Array]
    """Where its elements belong, in the order in which they lie in the memory."""

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


def _view(landing: _Landing, region: Region) -> Array:
    """The memory of some elements."""
    origin = landing.boxes[region.box].start
    inside: tuple[Any, ...] = tuple(slice(a - o, b - o) for a, b, o in zip(region.part.start, region.part.stop, origin, strict=True))
    view: Array = landing.buffers[region.box][(*inside, ...)]
    return view


def _itemsize(job: Job) -> int:
    return max(job.tensor.dtype.itemsize, job.landings[0].sink.dtype.itemsize)
