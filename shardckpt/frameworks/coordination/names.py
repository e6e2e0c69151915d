"""Agreement of the processes of a job on the names of a checkpoint that none of them takes.

A pipeline stage, or a process without a shard of some parameter, takes a part of the names. A name
is unexpected only if no process takes it. Each process sends one bit per stored name. If their
names differ (a `train_state` names an optimizer's state by its own parameters), they send the
names.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

import numpy as np

if TYPE_CHECKING:
    from types import TracebackType

    from shardckpt.frameworks.coordination.base import Coordinator


_KEY = "restored names"


class Agreement:
    """One agreement.

    A process that leaves the block without a call has failed, and the others do not wait for it.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        """Nothing is sent before the call."""
        self._coordinator = coordinator
        self._open = coordinator.world.processes > 1

    def __call__(self, names: list[str], unexpected: list[str]) -> list[str]:
        """The names that no process takes, all of them stored.

        Args:
            names: all stored names, in order.
            unexpected: those that this process does not take.
        """
        if not self._open:
            return unexpected
        self._open = False
        lacking = set(unexpected)
        bits = np.packbits([name in lacking for name in names])
        data = base64.b85encode(zlib.compress(bits.tobytes())).decode()
        names_of = hashlib.sha256("\0".join(names).encode("utf-8", "surrogatepass")).hexdigest()
        answers = self._coordinator.share(_KEY, {"names": names_of, "unexpected": data})
        if any(one is None for one in answers):
            return []  # a process has failed, and tells why after the reading
        if len({one["names"] for one in answers}) == 1:
            every = np.bitwise_and.reduce([_bits(one["unexpected"]) for one in answers])
            return [name for name, none in zip(names, np.unpackbits(every), strict=False) if none]
        for one in self._coordinator.share(f"{_KEY} in full", unexpected):
            lacking.intersection_update(one or ())
        return [name for name in unexpected if name in lacking]

    def __enter__(self) -> Self:
        """The agreement itself."""
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        """Tell the others if this process leaves the block without a call.

        Its own error stays the one that is raised, at once.
        """
        if self._open:
            self._open = False
            with suppress(*(() if error is None else (Exception,))):
                self._coordinator.decline(_KEY)


def _bits(text: str) -> Any:
    return np.frombuffer(zlib.decompress(base64.b85decode(text)), np.uint8)
