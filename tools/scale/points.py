"""Points of a run, each measured in a process of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tools.scale.layouts import KINDS
from tools.scale.trees import TREES

__all__ = ["DCP_LIMIT", "FULL", "QUICK", "SMALLEST", "Points"]

DCP_LIMIT = 20.0
"""Seconds of processor time after which DCP's planner is cut off; larger jobs are then not
tried."""
DCP_KINDS = ("FSDP", "HSDP")
"""Of which it is asked: the two of FSDP2."""
LARGE = 10_000
"""Devices of a job from which on all layouts' restores are counted."""


@dataclass(frozen=True, slots=True)
class Points:
    """All of a run.

    Of several trees the last is measured everywhere; the others show that a plan does not know how
    large tensors are.
    """

    trees: tuple[str, ...]
    kinds: tuple[str, ...]
    devices: tuple[int, ...]
    others: tuple[int, ...]
    """Of them, those of the other trees."""
    tensors: tuple[int, ...]
    """Besides 1,000: at 16,384 devices."""
    dcp_most: tuple[int, int]
    """Devices up to which DCP's planner is tried, of the last tree, and of the others; where ours
    is, too."""
    commits: tuple[tuple[int, int], ...]
    """Hosts, and chunks of each."""
    hosts: tuple[int, ...]
    """That start a save at once."""
    reshard: bool = True

    def jobs(self) -> list[dict[str, Any]]:
        """Requests to the processes that measure, without those for DCP."""
        last = self.trees[-1]
        shared = [
            {"tree": tree, "kind": kind, "devices": n}
            for tree in self.trees
            for kind in self.kinds
            for n in self._devices(tree)
        ]
        largest = [job for job in shared if job["tree"] == last]
        jobs = [{"what": "save"} | job for job in shared]
        jobs += [
            {"what": "restore"} | job
            for job in shared
            if job["tree"] == last or job["kind"] in DCP_KINDS
        ]
        jobs += [{"what": "metadata"} | job for job in largest]
        jobs += [
            {"what": "save", "tree": last, "kind": "FSDP+TP", "devices": 16384, "tensors": n}
            for n in self.tensors
        ]
        jobs.append(
            {"what": "save", "tree": last, "kind": "FSDP", "devices": 1024, "tensors": 1024}
        )
        jobs += [{"what": "requests", "tree": last} | restored for restored in self._restored()]
        jobs += [
            {"what": "commit", "hosts": hosts, "chunks": chunks} for hosts, chunks in self.commits
        ]
        return [*jobs, *([{"what": "reshard"}] if self.reshard else [])]

    def dcp(self) -> list[list[dict[str, Any]]]:
        """Requests to the processes that measure DCP.

        Of each list the rest is left out after one that was cut off.
        """
        return [
            [
                {"what": what, "tree": tree, "kind": kind, "devices": n, "limit": DCP_LIMIT}
                for n in self._devices(tree)
                if n <= self.dcp_most[tree != self.trees[-1]]
            ]
            for what in ("dcp save", "dcp restore")
            for tree in self.trees
            for kind in DCP_KINDS
            if kind in self.kinds
        ]

    def _devices(self, tree: str) -> tuple[int, ...]:
        return self.devices if tree == self.trees[-1] else self.others

    def _restored(self) -> list[dict[str, Any]]:
        """The saved layouts, and the layouts onto which each of them is restored.

        Each is restored onto itself, and FSDP also onto half as many devices.
        """
        large = [n for n in self.devices if n > LARGE]
        return [
            *({"kind": "FSDP", "devices": n} for n in self.devices),
            *({"kind": "FSDP", "devices": n, "onto_devices": n // 2} for n in large),
            *({"kind": kind, "devices": n} for n in large for kind in self.kinds if kind != "FSDP"),
        ]


FULL = Points(
    trees=tuple(TREES),
    kinds=KINDS,
    devices=(8, 64, 256, 1024, 16384, 100_000),
    others=(8, 64, 1024, 100_000),
    tensors=(125, 250, 500, 2000, 3400),
    dcp_most=(1024, 64),
    commits=(
        (8, 40),
        (64, 40),
        (256, 40),
        (1024, 40),
        (4096, 40),
        (64, 400),
        (64, 4000),
        (256, 1000),
    ),
    hosts=(1, 16, 256, 1024, 4096, 12_500),
)
QUICK = Points(
    trees=("405B",),
    kinds=KINDS,
    devices=(8, 64, 1024, 100_000),
    others=(),
    tensors=(250, 2000),
    dcp_most=(64, 0),
    commits=((8, 40), (64, 40), (256, 40), (64, 400)),
    hosts=(1, 256, 4096),
)
SMALLEST = Points(
    trees=("8B",),
    kinds=("FSDP",),
    devices=(8,),
    others=(),
    tensors=(),
    dcp_most=(8, 0),
    commits=((2, 8),),
    hosts=(),
    reshard=False,
)
"""Points so few that a test can wait for them."""
