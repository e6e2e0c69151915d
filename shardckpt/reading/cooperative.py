"""Cooperative restore: each process reads a part of what all need, and sends it to the others.

Without it every process reads what its own devices need, so with R replicas the storage serves
every byte R times. With it the storage serves every byte once:

1. Tensors are grouped by the processes that need the same boxes of them (`Sink.sharers`). With
   data-parallel replicas these are all processes, or the processes at one position of the model's
   mesh.
2. If the caller leaves the choice, `Bandwidths` estimates for each group whether a shared read is
   faster.
3. All processes of the job exchange once the digests of the groups that they propose to share: a
   digest covers the tensors, boxes, dtypes and sizes. A group is shared if and only if all its
   members proposed the same digest. All processes see the same proposals and come to the same
   result, so no process enters a collective that another one does not.
4. Group after group, in the same order everywhere, is read together (`shared_reading`); the rest
   each process reads alone.

A process that fails before the exchange sends its error instead of digests, and all raise it. A
process that fails later announces its error to the groups that it has not finished.
"""

from __future__ import annotations

import logging
import secrets
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from shardckpt.errors import OptionError
from shardckpt.format.documents import document_digest
from shardckpt.frameworks.coordination import Coordinator, check_outcomes, share_failure
from shardckpt.frameworks.interconnect import Interconnect, interconnect_of
from shardckpt.io.cores import note_local_processes
from shardckpt.io.store import kind_of
from shardckpt.plan.bandwidths import Bandwidths, Estimate
from shardckpt.plan.shares import peers_sharing_reads
from shardckpt.reading.read_list import MadeTensor
from shardckpt.reading.shared_reading import SharedReading
from shardckpt.text import file_size, shorten

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from shardckpt.io.url import Location
    from shardckpt.layout.world import World
    from shardckpt.reading.checkpoint import Checkpoint
    from shardckpt.reading.landing import RestoreJob


Choice: TypeAlias = "bool | Literal['auto'] | Bandwidths"
"""Whether to share reads: never, always, or as the estimate says."""
_log = logging.getLogger("shardckpt")
_KEY = "cooperative"


def check_choice(choice: object) -> None:
    """Refuse an invalid choice.

    Call it inside the meeting, so that the other processes learn of the error.

    Raises:
        OptionError: not a bool, "auto" or bandwidths.
    """
    if not _is_choice(choice):
        raise OptionError(
            f'restore(cooperative={shorten(choice)}): use True, False, "auto", or '
            "shardckpt.Bandwidths(…)."
        )


def _is_choice(choice: object) -> bool:
    return isinstance(choice, bool | Bandwidths) or (isinstance(choice, str) and choice == "auto")


def exchange_bytes(limit: int) -> int:
    """Bytes of a restore's memory limit for one round of a cooperative read.

    They hold this process's part and everything that it receives.
    """
    return limit // 4


class Meeting:
    """One restore, in which all processes of the job agree on the reads to share.

    A context manager around all code that may fail: an error inside is announced to the others, so
    that they do not wait. There is no communication if the job has one process, or nothing connects
    its processes; nor if the choice is "auto" and the checkpoint is on a path, whose speed is not
    known.
    """

    def __init__(self, choice: Choice, coordinator: Coordinator | None) -> None:
        """Prepare without communication.

        Args:
            choice: the same on all processes, and not False; it need not be valid (`check_choice`).
            coordinator: coordinator of the job; None: detected.
        """
        # With an invalid choice the others expect this process.
        self._choice: Choice = choice if _is_choice(choice) else True
        self._given = coordinator
        self.location: Location | None = None
        """Location of the checkpoint; None: not known yet."""
        self._met = False
        self._readings: list[SharedReading] = []

    def __enter__(self) -> Self:
        """The meeting itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Announce the error, if any, to the others."""
        if error is None:
            return
        for reading in self._readings:
            reading.give_up(error)
        if not self._met:
            with suppress(Exception):  # the error of this process is the one to raise
                connection = self._connection()
                if not isinstance(connection, str):
                    share_failure(connection[0], _KEY, error)

    def divide(
        self, checkpoint: Checkpoint, jobs: Sequence[RestoreJob], limit: int
    ) -> tuple[list[RestoreJob], list[SharedReading]]:
        """Agree with all other processes of the job on the reads to share.

        Blocks until all of them have called it.

        Args:
            checkpoint: the source.
            jobs: the jobs of this process.
            limit: bytes of host staging; `exchange_bytes` of them are for a round.

        Returns:
            The jobs that this process reads alone, and the shared reads in an order that all
            processes use.

        Raises:
            CoordinationError: not all processes called it in time, or one was interrupted.
            ShardckptError: the error of another process that failed before.
        """
        connection = self._connection()
        if isinstance(connection, str):
            _say(checkpoint, connection)
            return list(jobs), []
        coordinator, link = connection
        groups = _groups(checkpoint, jobs, coordinator.world, limit)
        if self._choice is not True:
            rates = self._choice if isinstance(self._choice, Bandwidths) else Bandwidths()
            rates = (
                rates
                if rates.interconnect is not None
                else replace(rates, interconnect=link.bandwidth)
            )
            for group in groups:
                counts = {
                    "readers": len(group.members),
                    "processes": coordinator.world.processes,
                    "nbytes": group.nbytes,
                }
                group.estimate = rates.estimate(
                    rounds=-(-group.nbytes // max(exchange_bytes(limit), 1)), **counts
                )
        proposed = [group for group in groups if group.estimate is None or group.estimate.together]
        self._met = True
        answers = coordinator.share(
            _KEY,
            {"call": secrets.token_hex(8), "groups": [group.digest for group in proposed]},
        )
        check_outcomes(answers, "could not restore:")
        agreed = [
            group
            for group in proposed
            if all(group.digest in answers[member]["groups"] for member in group.members)
        ]
        _tell(checkpoint, groups, proposed, agreed)
        for group in agreed:
            key = f"{answers[0]['call']}/{group.digest}"
            self._readings.append(
                SharedReading(
                    checkpoint,
                    coordinator,
                    link,
                    group.members,
                    group.jobs,
                    key,
                    exchange_bytes(limit),
                )
            )
        shared = {id(job) for group in agreed for job in group.jobs}
        return [job for job in jobs if id(job) not in shared], self._readings

    def _connection(self) -> tuple[Coordinator, Interconnect] | str:
        """The connection to the other processes, or the reason why every process reads alone.

        The result is the same on all processes.
        """
        if self._choice == "auto" and (self.location is None or kind_of(self.location).near):
            return (
                "the speed of a file system is not known; to read together, give "
                "cooperative=True or shardckpt.Bandwidths(…)"
            )
        coordinator = Coordinator.current() if self._given is None else self._given
        note_local_processes(coordinator.world.sharing)
        link = (
            interconnect_of(coordinator)
            if coordinator.world.processes > 1
            else "the job has one process"
        )
        return link if isinstance(link, str) else (coordinator, link)


@dataclass(slots=True)
class _Group:
    """Tensors whose boxes the same processes need."""

    members: tuple[int, ...]
    jobs: list[RestoreJob]
    digest: str = ""
    """Digest, equal on all members with equal jobs."""
    estimate: Estimate | None = None

    @property
    def nbytes(self) -> int:
        return sum(job.nbytes for job in self.jobs)


def _groups(
    checkpoint: Checkpoint, jobs: Sequence[RestoreJob], world: World, limit: int
) -> list[_Group]:
    """The tensors that this process needs together with others, grouped by those processes.

    In the same order on all of them.
    """
    by_members: dict[tuple[int, ...], list[RestoreJob]] = {}
    for job in jobs:
        alone = len(job.landings) > 1 or not job.nbytes or isinstance(job.tensor, MadeTensor)
        sharers = None if alone else job.landings[0].sink.sharers(world)
        if sharers is not None and len(sharers) > 1 and world.process in sharers:
            by_members.setdefault(peers_sharing_reads(sharers, world.process), []).append(job)
    groups = [
        _Group(members, sorted(by_members[members], key=lambda job: job.tensor.name))
        for members in sorted(by_members)
    ]
    for group in groups:
        description = [
            checkpoint.record.attempt,
            limit,
            kind_of(checkpoint.location).near,
            group.members,
            [_description_of(job) for job in group.jobs],
        ]
        group.digest = document_digest(description)[:32]
    return groups


def _description_of(job: RestoreJob) -> list[Any]:
    """Everything that must be equal on all members of a group.

    This covers what is read, what is sent, and how batches are formed.
    """
    (landing,) = job.landings
    kinds = [array.dtype.str for array in landing.destinations or ()]
    boxes = [landing.boxes.start.tolist(), landing.boxes.stop.tolist()]
    return [
        job.tensor.name,
        boxes,
        landing.sink.dtype.name,
        kinds,
        job.staged_bytes,
        job.placing_bytes,
        job.nbytes,
    ]


def _say(checkpoint: Checkpoint, why: str) -> None:
    _log.info("%s: every process reads by itself: %s", checkpoint.location, why)


def _tell(
    checkpoint: Checkpoint,
    groups: Sequence[_Group],
    proposed: Sequence[_Group],
    agreed: Sequence[_Group],
) -> None:
    """Log the choice and its reason."""
    if not groups:
        _say(checkpoint, "no tensor is needed by several processes")
    for group in groups:
        why = ""
        if group.estimate is not None:
            why = (
                f" (estimate: {group.estimate.together_s:.2g} s together, "
                f"{group.estimate.alone_s:.2g} s alone)"
            )
        together = any(group is other for other in agreed)
        if not together and any(group is other for other in proposed):
            why = " (not all of them restore into the same layouts, with the same options)"
        what = "share the reads of" if together else "each read"
        sizes = len(group.members), what, len(group.jobs), file_size(group.nbytes)
        _log.info("%s: %d processes %s %d tensors, %s%s", checkpoint.location, *sizes, why)
