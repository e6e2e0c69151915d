"""Plan of a run: states, storages, operations, the part of the bytes, and number of rounds.

Each line is so large that the state is beyond every cache, and so small that a whole run ends in
half an hour on two cores and fits into 20 GiB of memory, files on tmpfs included: at the most there
are the state, memory to restore it into, and the checkpoint of each subject. At half of the
Llama-like state, restoring took 11 GiB with torch and 15 with jax. In a bucket there are 256 MiB,
because an emulator takes some hundred MB/s; and 1 GiB where the way is long, because each restore
begins with two short requests.

Of two cores' time, estimated from single tasks and what they share, a task of half of that state
takes 30 to 60 s: 8 to make the state, as many again for each checkpoint that is read, and the
rounds. Minutes, line by line: 4 (torch), 3 (DTensor), 5 (JAX), 2 (torch_xla), 1½ (bfloat16), 2½
(small tensors, of which Orbax takes 2), ½ (ten), 1 (flat), 3 and 2 (one large), 3 (disk), and 5 for
the buckets; 33 in all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tools.bench.bucket import DELAYS
from tools.bench.measure import OPERATIONS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

__all__ = ["PLAN", "QUICK", "STORAGES", "Line", "Task", "tasks"]

STORAGES = {
    "tmpfs": "on tmpfs",
    "disk": "on a disk",
    "gs": "in a bucket",
    "gs-tls": "in a bucket, over TLS",
    "gs-20ms": "in a bucket 20 ms away",
    "gs-100ms": "in a bucket 100 ms away",
}
"""Storage → in words; in this order."""
assert STORAGES.keys() > DELAYS.keys()


@dataclass(frozen=True, slots=True)
class Line:
    """One state on one storage."""

    storage: str
    state: str
    groups: tuple[str, ...]
    operations: tuple[str, ...]
    part: int = 1
    """An Nth of the state's bytes is measured."""
    rounds: int = 5
    """At most; see `tools.bench.measure.SECONDS`."""


@dataclass(frozen=True, slots=True)
class Task:
    """One operation of one group: what one process, or one group of processes, measures."""

    storage: str
    state: str
    group: str
    operation: str
    part: int
    rounds: int

    def gave(self, result: dict[str, Any]) -> bool:
        """Whether that is a result or failure of it, of whatever part of the bytes."""
        return (result["storage"], result["state"], result["task"], result["operation"]) == (
            self.storage,
            self.state,
            self.group,
            self.operation,
        )

    def to_json(self) -> dict[str, Any]:
        """Keys that name the task in results and failures.

        A result's `group` is the group in words.
        """
        return {
            "storage": self.storage,
            "state": self.state,
            "task": self.group,
            "operation": self.operation,
            "part": self.part,
        }


PLAN = (
    Line("tmpfs", "llama", ("torch", "dtensor", "jax", "xla"), tuple(OPERATIONS), part=2),
    Line("tmpfs", "bf16", ("torch", "jax"), ("save", "restore"), part=2),
    Line("tmpfs", "small", ("torch", "jax"), ("save", "restore")),
    Line("tmpfs", "ten", ("torch",), ("save", "restore"), rounds=15),
    Line("tmpfs", "flat", ("torch",), ("save", "restore")),
    Line("tmpfs", "one", ("torch",), ("save", "restore", "columns"), rounds=3),
    Line("tmpfs", "one", ("jax",), ("save", "restore", "columns"), part=2, rounds=3),
    Line("disk", "llama", ("torch", "jax"), ("save", "restore", "export"), part=4, rounds=3),
    Line("gs", "flat", ("torch",), ("save", "restore"), part=4),
    Line("gs", "matrices", ("torch", "jax"), ("save", "restore"), part=4),
    Line("gs-tls", "flat", ("torch",), ("save", "restore"), part=4),
    Line("gs-20ms", "matrices", ("torch",), ("restore",)),
    Line("gs-100ms", "matrices", ("torch",), ("restore",)),
)
LEFT_OUT = frozenset({"disk", "gs-100ms"})
"""Storages that a quick run does not measure."""
QUICK = tuple(replace(line, part=16, rounds=3) for line in PLAN if line.storage not in LEFT_OUT)
SHARDED = frozenset({"save", "stall", "restore", "other"})
ABLE = {
    "torch": OPERATIONS.keys() - {"other"},
    "dtensor": SHARDED,
    "jax": OPERATIONS.keys(),
    "xla": SHARDED,
}
"""Group → what it can be asked for."""


def tasks(
    lines: Collection[Line],
    groups: Collection[str],
    states: Collection[str],
    storages: Collection[str],
    operations: Collection[str],
) -> Iterator[Task]:
    """The tasks of those lines that are asked for: for empty collections, all."""
    for line in lines:
        if (states and line.state not in states) or (storages and line.storage not in storages):
            continue
        for group in line.groups:
            for operation in line.operations:
                chosen = (not groups or group in groups) and (
                    not operations or operation in operations
                )
                if chosen and operation in ABLE[group]:
                    yield Task(line.storage, line.state, group, operation, line.part, line.rounds)
