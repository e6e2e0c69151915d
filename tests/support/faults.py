"""A bucket behind the fault proxy, and what must be true of a save or a restore whatever has failed
on the way.

1. The storage answers through `tools/fault_proxy.py`, which is told what to break; shardckpt is led
   to it by the environment, and gives up after `RETRY_SECONDS`, so that tests of giving up are
   short.
2. A save then has succeeded or has raised an error of ours, and what is visible is a whole
   checkpoint or none. That it ends at all is seen to by the time limit of each test.
"""

from __future__ import annotations

import itertools
import os
import uuid
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from emulators import environment
from fault_proxy import FaultProxy
from fault_rules import Rule
from flip_bits import same

import shardckpt
from shardckpt.errors import NotFoundError, ShardckptError
from shardckpt.io.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from emulators import Emulator

__all__ = [
    "NOT_LISTINGS",
    "TORTURE",
    "TRANSIENT",
    "FaultProxy",
    "FaultyCloud",
    "Rule",
    "faulty_cloud",
    "make_state",
    "patience_of",
    "random_rules",
]

TORTURE = os.environ.get("SHARDCKPT_TORTURE") == "1"
"""Whether to take an hour instead of a minute."""
RETRY_SECONDS = "0.05"
"""Five tries."""
TRANSIENT: dict[str, dict[str, Any]] = {
    "408": {"fault": "status", "status": 408},
    "429": {"fault": "status", "status": 429},
    "500": {"fault": "status", "status": 500},
    "503": {"fault": "status", "status": 503},
    "reset": {"fault": "reset"},
    "cut off": {"fault": "reset", "after_bytes": 100},
    "lost answer": {"fault": "lost-answer"},
    "truncated": {"fault": "truncate"},
}
"""Faults after which a request is worth another try, as a rule's fields."""
NOT_LISTINGS = ("upload", "read", "stat", "delete")
"""Listings are tried again by another client, with pauses of its own, which begin at a second."""


def make_state(seed: int = 0) -> dict[str, Any]:
    """Some 100 KB in tensors of several dtypes, and small leaves."""
    rng = np.random.default_rng(seed)
    return {
        "w": rng.standard_normal((96, 128), np.float32),
        "halves": rng.integers(0, 1 << 16, (64, 256), np.uint16).view(ml_dtypes.bfloat16),
        "bytes": rng.integers(0, 256, 20_011, np.uint8),
        "scalar": np.array(seed, np.int64),
        "empty": np.zeros((0, 3)),
        "step": seed,
        "names": ["a", None, 0.5],
    }


@dataclass(frozen=True)
class FaultyCloud:
    """An emulator and the proxy before it."""

    emulator: Emulator
    proxy: FaultProxy

    def place(self) -> str:
        """A url where nothing is yet, in a bucket of its own: the emulators list slower the more
        objects a bucket has."""
        name = uuid.uuid4().hex
        return replace(self.emulator, bucket=self.emulator.new_bucket(f"faults-{name}")).url(
            "faults"
        )

    @staticmethod
    def name_of(url: str, key: str = "") -> str:
        """The proxy's name of an object there: `bucket/name`."""
        return f"{url.partition('://')[2]}/{key}"

    def breaking(self, *rules: Rule) -> AbstractContextManager[None]:
        """Break requests by these rules, for as long as the block runs; what is counted starts from
        zero."""
        self.proxy.traffic.reset()
        return self.proxy.rules.during(*rules)

    def each_request(
        self, fault: dict[str, Any], *, step: int = 1, at_least: int = 1
    ) -> Iterator[int]:
        """Break the first request that the loop's body makes, then in its next turn the second, …
        until there are no more."""
        for k in itertools.count(step=step):
            with self.breaking(Rule(**fault, skip=k)):
                yield k
                if not self.injected():
                    break
        assert k >= at_least

    def injected(self) -> int:
        """Number of requests that were broken since the last block began."""
        return sum(self.proxy.traffic.summary()["faults"].values())

    def keys(self, url: str) -> list[str]:
        """All objects at a place."""
        return Store.open(url).list()

    def attempt_save(self, url: str, state: Any, **options: Any) -> ShardckptError | None:
        """Save, and say what was raised; nothing but an error of ours may be."""
        try:
            shardckpt.save(url, state, options=shardckpt.SaveOptions(**options))
        except ShardckptError as e:
            return e
        return None

    def attempt_restore(self, url: str, state: Any) -> bool:
        """Restore; whether it worked. Then it is right; else an error of ours was raised."""
        try:
            restored = shardckpt.restore(url)
        except ShardckptError:
            return False
        assert same(restored, state)
        return True

    def committed(self, url: str, *states: Any) -> Any:
        """The one of these states that is the checkpoint there, None if there is none; it is whole,
        and no other."""
        try:
            opened = shardckpt.open(url)
        except NotFoundError:
            return None
        report = opened.verify()
        assert report.ok, report
        restored = shardckpt.restore(opened)
        (state,) = (state for state in states if same(restored, state))
        return state

    def assert_whole(self, url: str, state: Any) -> None:
        """A checkpoint is there, and it is this state to the last bit."""
        assert self.committed(url, state) is state


@contextmanager
def faulty_cloud(
    emulator: Emulator, *, retry_seconds: str = RETRY_SECONDS
) -> Iterator[FaultyCloud]:
    """An emulator behind a proxy, and this process led to it; TensorStore then knows no other way
    there."""
    with (
        FaultProxy(emulator.endpoint) as proxy,
        environment(emulator.env(proxy.url)),
        patience_of(retry_seconds),
    ):
        yield FaultyCloud(emulator, proxy)


@contextmanager
def patience_of(retry_seconds: str) -> Iterator[None]:
    """Set the time for which requests are tried again."""
    with environment({"SHARDCKPT_RETRY_SECONDS": retry_seconds}):
        yield


def random_rules(seed: int) -> list[Rule]:
    """Some faults with some probability, the same for the same seed; from a few to more than a save
    can bear."""
    rng = np.random.default_rng(seed)
    probability = float(rng.choice([0.02, 0.1, 0.2, 0.4]))
    faults = [
        *({"fault": "status", "status": status} for status in (408, 429, 500, 503)),
        {"fault": "reset"},
    ]
    faults += [
        {"fault": "reset", "after_bytes": 1000},
        {"fault": "lost-answer"},
        {"fault": "truncate"},
    ]
    if TORTURE:  # an answer that makes no sense is asked for again after a second
        faults.append({"fault": "shorten"})
    chosen = rng.permutation(len(faults))[: rng.integers(1, 5)]
    seeds = itertools.count(seed * 100)
    rules = [
        Rule(**faults[i], kinds=NOT_LISTINGS, probability=probability, times=None, seed=next(seeds))
        for i in chosen
    ]
    # A listing that was broken off is tried again at once.
    return [
        *rules,
        Rule("reset", kinds=("list",), probability=probability, times=None, seed=next(seeds)),
    ]
