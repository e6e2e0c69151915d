"""Ways to do the same, measured in turn: what the tools that compare speeds share."""

from __future__ import annotations

import json
import os
import resource
import time
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["in_turn", "tell"]


def processor_seconds() -> float:
    """User and system time of this process, and of the children that it has waited for."""
    return sum(
        used.ru_utime + used.ru_stime
        for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def in_turn(
    ways: Mapping[str, Callable[[], object]],
    rounds: int,
    nbytes: int,
    *,
    beside: str,
    before: Callable[[], object],
) -> dict[str, object]:
    """Medians in GB/s, ratios, and seconds of processor time per GB.

    Every other round goes backwards, and a first one does not count.

    Args:
        ways: what is measured, by name.
        rounds: that count.
        nbytes: that each way moves.
        beside: the way that ratios are to.
        before: called before each, to remove what the last one wrote.
    """
    rates: dict[str, list[float]] = {way: [] for way in ways}
    costs: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way, run in list(ways.items())[:: 1 if number % 2 else -1]:
            before()
            os.sync()
            began, used = time.perf_counter(), processor_seconds()
            run()
            seconds, cost = time.perf_counter() - began, processor_seconds() - used
            if number:
                rates[way].append(nbytes / seconds / 1e9)
                costs[way].append(cost / nbytes * 1e9)
    medians = {way: median(rate) for way, rate in rates.items()}
    return {
        "bytes": nbytes,
        "GB/s": medians,
        "rounds": rates,
        "ratio": {way: rate / medians[beside] for way, rate in medians.items()},
        "processor s/GB": {way: median(cost) for way, cost in costs.items()},
    }


def tell(figures: Mapping[str, object], beside: str, *, as_json: bool) -> None:
    """Print what `in_turn` has found: a line per way, or JSON.

    `beside`: what the ratios are to, in words.
    """
    if as_json:
        print(json.dumps(figures))
        return
    for way, rate in figures["GB/s"].items():  # type: ignore[attr-defined]
        ratio, cost, each = (figures[key][way] for key in ("ratio", "processor s/GB", "rounds"))  # type: ignore[index]
        print(
            f"{way:22} {rate:6.2f} GB/s  {ratio:5.2f} of {beside}  {cost:5.2f} processor s/GB   "
            f"{[round(r, 2) for r in each]}"
        )
