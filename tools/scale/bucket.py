"""Requests per second to a bucket when all hosts of a large job start a save at the same moment.

Cloud Storage's initial limits for a bucket are 1,000 writes and 5,000 reads per second; beyond them
it answers 429 until it has scaled up, over minutes. The requests are simulated, from what is
counted:

1. A small job saves for real (`counted.py`): which requests an ordinary host makes, in which order;
   and what the committer asks for besides, by host and in all.
2. Many hosts make those same requests, with as many data files as their share has bytes, all
   starting within `--spread` seconds. Each keeps the rate limit of
   `shardckpt.io.buckets.rate_limit`, by a simulated clock; what TensorStore asks by itself (reading
   an index back) is not paced. Requests take `LATENCY`, uploads what the host's network takes;
   nothing fails. Filling a data file takes no time, so that hosts are as fast as they can be.
3. The committer looks for records with growing pauses, a page per 1,000 of them, and when all are
   there reads them, the tables and the lanes.
4. The most that fall into any one second are reported, and how long it all took.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.commit import waiting
from shardckpt.io.buckets.bucket import Bucket
from shardckpt.io.buckets.cloud import BUCKET
from shardckpt.io.buckets.rate_limit import ALONE, RateLimiter, RequestShare
from shardckpt.io.threads import AT_ONCE
from shardckpt.writing.packed import MOST_UPLOADS, OBJECT_BYTES
from tools.scale.counted import Request

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Job", "Load", "simulate"]

INITIAL = {"read": 5000, "write": 1000}
"""Requests per second that a new bucket bears:
https://cloud.google.com/storage/docs/request-rate."""
LATENCY = 0.02
"""Seconds for a small request; short, as that is what makes many of them."""
NETWORK = 12.5e9
"""Bytes per second that a host sends."""
CHUNK_BYTES = 1 << 20
"""Of an object of the plain layout, about."""
NOT_PACED = ("hosts/#/#/d/tree", "hosts/#/#/manifest.ocdbt")
"""Objects that TensorStore reads by itself."""


@dataclass(frozen=True, slots=True)
class Job:
    """A save: its hosts, bytes, layout and pace."""

    hosts: int
    bytes_per_host: int
    layout: str = "packed"
    paced: bool = True
    spread: float = 0.1
    """Seconds within which all hosts start."""
    clock_error: float = 0.05
    """Seconds, standard deviation: hosts' clocks are not the same."""

    @property
    def data_objects(self) -> int:
        """Objects of chunks per host."""
        return -(-self.bytes_per_host // (OBJECT_BYTES if self.layout == "packed" else CHUNK_BYTES))


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of a save to the bucket, and its duration."""

    reads: int
    writes: int
    most_reads: int
    """In any one second."""
    most_writes: int
    seconds: float
    """Until the checkpoint is committed."""


class _Clock:
    """A host's own time."""

    def __init__(self, now: float, error: float) -> None:
        self.now, self.error = now, error

    def __call__(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now + self.error

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class _Host:
    """One host of the job, at a time of its own; notes when it begins which request."""

    def __init__(self, job: Job, share: RequestShare, start: float, error: float) -> None:
        self.clock = _Clock(start, error)
        self.began: dict[str, list[float]] = {"read": [], "write": []}
        self._paces = {
            kind: RateLimiter(
                rate, share, clock=self.clock, wall=self.clock.wall, sleep=self.clock.sleep
            )
            for kind, rate in BUCKET.items()
            if job.paced
        }

    def begin(self, request: Request) -> None:
        """Begin it as soon as it may."""
        kind = "write" if request.writes else "read"
        if kind in self._paces and (request.writes or request.what not in NOT_PACED):
            self._paces[kind].wait()
        self.began[kind].append(self.clock.now)

    def save(self, requests: Sequence[Request], data_objects: int, nbytes: int) -> None:
        """Make the requests one after another; where the script has data, all of the host's."""
        is_data = [request.what == "data" for request in requests]
        for request in requests[: is_data.index(True)]:
            self._one(request)
        under_way: deque[float] = deque()
        sent = self.clock.now
        for _ in range(data_objects):
            if len(under_way) >= MOST_UPLOADS:
                self.clock.now = max(self.clock.now, under_way.popleft())
            self.begin(requests[is_data.index(True)])
            sent = max(sent, self.clock.now) + nbytes / data_objects / NETWORK
            under_way.append(max(sent, self.clock.now + LATENCY))
        self.clock.now = max(under_way)
        for request, data in zip(
            requests[is_data.index(True) :], is_data[is_data.index(True) :], strict=True
        ):
            if not data:
                self._one(request)

    def commit(
        self, finished: Sequence[float], each: Sequence[Request], rest: Sequence[Request]
    ) -> None:
        """Wait for all records, read what each host left, then make the committer's requests.

        Args:
            finished: when each host's record was there.
            each: what is asked about every single host.
            rest: what is asked once.
        """
        began, everybody = self.clock.now, max(finished)
        records = np.sort(finished)
        while True:
            looked = self.clock.now
            for _ in range(max(1, -(-int(np.searchsorted(records, looked)) // Bucket.page))):
                self._one(Request("list", "records/"))
            if looked >= everybody:
                break
            self.clock.now += waiting.pause(looked - began)
        for request in each:  # a few at a time
            under_way: deque[float] = deque()
            for _ in finished:
                if len(under_way) >= AT_ONCE:
                    self.clock.now = max(self.clock.now, under_way.popleft())
                self.begin(request)
                under_way.append(self.clock.now + LATENCY)
            self.clock.now = max(under_way)
        for request in rest:
            self._one(request)

    def _one(self, request: Request) -> None:
        self.begin(request)
        self.clock.now += LATENCY


def simulate(job: Job, counted: Sequence[Sequence[Request]], seed: int = 0) -> Load:
    """Load on the bucket in a simulated save by that many hosts.

    Args:
        job: the save.
        counted: what the hosts of a small job have asked, at least two; the first one commits.
        seed: of starts and clocks.
    """
    rng = np.random.default_rng(seed)
    starts = rng.uniform(0, job.spread, job.hosts)
    errors = rng.normal(0, job.clock_error, job.hosts)
    committer, ordinary = counted[0], counted[1]
    hosts = [_Host(job, RequestShare(i, job.hosts), starts[i], errors[i]) for i in range(job.hosts)]
    for host in hosts:
        host.save(ordinary, job.data_objects, job.bytes_per_host)
    finished = [host.clock.now for host in hosts]
    each = [r for r in committer if r.host == 1]
    own = Counter((r.kind, r.what) for r in ordinary)
    rest = []
    for request in committer:  # beyond what it asks as a host
        if request.host is None and request.kind != "list" and request.what != "data":
            own[request.kind, request.what] -= 1
            if own[request.kind, request.what] < 0:
                rest.append(request)
    process = _Host(job, ALONE, finished[0], errors[0])
    process.commit(finished, each, rest)
    began = {
        kind: np.sort(np.concatenate([host.began[kind] for host in (*hosts, process)]))
        for kind in ("read", "write")
    }
    return Load(
        len(began["read"]),
        len(began["write"]),
        _most(began["read"]),
        _most(began["write"]),
        float(process.clock.now - starts.min()),
    )


def _most(times: np.ndarray) -> int:
    """Of so many moments, in ascending order, the most within a second."""
    return int((np.searchsorted(times, times + 1) - np.arange(len(times))).max(initial=0))
