"""Estimate of whether processes that need the same bytes finish sooner if they share the reads.

In a shared read, each process reads a part of the bytes and sends it to the others.

Reading alone, a process gets its bytes at the rate of its own connection to the storage, or at its
share of the storage's total rate over all processes that read at once, whichever is lower. Reading
together, each of k processes reads one k-th of the bytes and receives the rest from the others; all
processes wait for each other once per round:

    alone    = bytes · max(1 / process, processes / store)
    together = alone / k + bytes · (k - 1) / k / interconnect + rounds · latency

Reading together is chosen if it is faster by a factor of `gain`. All processes compute with the
same numbers in the same order, so all reach the same answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from shardckpt.errors import OptionError
from shardckpt.text import shorten


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """Rates of a job's storage and network, for `restore(cooperative=…)`.

    With them, a restore decides whether processes that need the same bytes each read a part and
    send it to the others, or read everything themselves. The defaults fit a Google Cloud Storage
    bucket.

    Raises:
        OptionError: a rate is not a positive number.

    Examples:
        >>> rates = Bandwidths(interconnect=2e9)
        >>> rates.estimate(nbytes=10**10, readers=2, processes=2, rounds=20).together
        False
        >>> rates.estimate(nbytes=10**10, readers=32, processes=32, rounds=20).together
        True
    """

    store: float = 25e9
    """Bytes per second that all processes together read from the storage; by default 200 Gbit/s,
    the quota of a project in a region."""
    process: float = 2e9
    """Maximum bytes per second that one process reads."""
    interconnect: float | None = None
    """Bytes per second that a process receives from the others. None: 1.25e9 over gloo, and 10e9
    between JAX's accelerators."""
    latency: float = 0.05
    """Seconds of overhead per round of messages between the processes."""
    gain: float = 1.5
    """Minimum speed-up at which processes read together. It is above 1 because the rates are
    rough."""

    def __post_init__(self) -> None:
        """Refuse invalid rates."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "interconnect" and value is None:
                continue
            least = field.name == "latency" and value == 0
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not (0 < value < math.inf or least)
            ):
                raise OptionError(
                    f"Bandwidths({field.name}={shorten(value)}): give a positive number."
                )

    def estimate(self, *, nbytes: int, readers: int, processes: int, rounds: int) -> Estimate:
        """Estimate the seconds of reading alone and of reading together.

        Args:
            nbytes: bytes that each process needs; all `readers` need the same bytes.
            readers: number of processes that need these bytes.
            processes: number of processes in the job; all of them read at the same time.
            rounds: number of rounds of messages for reading together.
        """
        assert self.interconnect is not None, "only the interconnect at hand knows"
        alone = nbytes * max(1 / self.process, processes / self.store)
        spread = nbytes * (readers - 1) / readers / self.interconnect
        return Estimate(alone, alone / readers + spread + rounds * self.latency, self.gain)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimated times for reading some bytes."""

    alone_s: float
    """Seconds if each process reads everything."""
    together_s: float
    """Seconds if each process reads a part."""
    gain: float
    """Minimum speed-up, from `Bandwidths`."""

    @property
    def together(self) -> bool:
        """Whether reading together is fast enough."""
        return self.alone_s >= self.gain * self.together_s
