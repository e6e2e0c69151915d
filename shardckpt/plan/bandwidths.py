"""Estimate whether processes that need the same bytes get them faster when each reads a part and sends it to the others.

Reading alone, a process gets its bytes at the rate of its own connection to the storage, or at its part of what the whole
storage gives to all processes that read at once, whichever is less. Reading together, each of k processes reads
a k-th of them, gets the rest from the others, and all wait for each other once per round:

    alone    = bytes · max(1 / process, processes / store)
    together = alone / k + bytes · (k - 1) / k / interconnect + rounds · latency

Together is chosen where it is faster by a factor of `gain`. Sums and products of the same numbers on all processes
give all of them the same answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from shardckpt.errors import OptionError


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """What a job's storage and network do, for `restore(cooperative=…)`. Defaults are of a bucket of Google Cloud Storage.

    >>> Bandwidths(interconnect=2e9).estimate(nbytes=10**10, readers=2, processes=2, rounds=20).together
    False
    >>> Bandwidths(interconnect=2e9).estimate(nbytes=10**10, readers=32, processes=32, rounds=20).together
    True
    """

    store: float = 25e9
    """Bytes per second of the whole storage, to all processes. 200 Gbit/s is what a bucket's region gives a project by default."""
    process: float = 2e9
    """Bytes per second that one process reads, at most."""
    interconnect: float | None = None
    """Bytes per second that come in at a process from the others. None: 1.25e9 over gloo, which is 10 Gbit/s, and 10e9 between
    JAX's accelerators, which is less than what their hosts copy from them (15e9 and more)."""
    latency: float = 0.05
    """Seconds of a round beside its bytes: the processes find each other at the job's key-value store."""
    gain: float = 1.5
    """How many times faster reading together must be to be chosen: the numbers above are rough, and reading alone needs nobody."""

    def __post_init__(self) -> None:
        """Refuse what is no rate."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "interconnect" and value is None:
                continue
            least = field.name == "latency" and value == 0
            if isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value < math.inf or least):
                raise OptionError(f"Bandwidths({field.name}={value!r}): give a positive number.")

    def estimate(self, *, nbytes: int, readers: int, processes: int, rounds: int) -> Estimate:
        """Seconds of both ways, for one of several processes that need the same.

        Args:
            nbytes: that each of them needs.
            readers: how many they are.
            processes: of the job; all of them read at the same time.
            rounds: in which it is read together.
        """
        assert self.interconnect is not None, "only the interconnect at hand knows"
        alone = nbytes * max(1 / self.process, processes / self.store)
        spread = nbytes * (readers - 1) / readers / self.interconnect
        return Estimate(alone, alone / readers + spread + rounds * self.latency, self.gain)


@dataclass(frozen=True, slots=True)
class Estimate:
    """How long it takes to read some bytes."""

    alone_s: float
    """Seconds, each process for itself."""
    together_s: float
    """Seconds, each process a part."""
    gain: float
    """Of `Bandwidths`."""

    @property
    def together(self) -> bool:
        """Whether reading together is worth it."""
        return self.alone_s >= self.gain * self.together_s
