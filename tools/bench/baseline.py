"""Which ratios are worse than they were in an earlier run? Only ratios within one run are compared: machines differ."""

from __future__ import annotations

from typing import Any

from tools.bench.report import OURS, ratios

__all__ = ["TOLERANCE", "worse"]

TOLERANCE = 0.8
"""A ratio that has fallen below this part of what it was counts as worse: medians of one run differ by some 10 % from the next."""


def worse(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """A line for each ratio of ours to a floor or a peer that has fallen."""
    earlier, later = ratios(before), ratios(now)
    return [
        f"{', '.join(key[:-1])}: {OURS} / {key[-1]} was {earlier[key]:.2f} and is {ratio:.2f}"
        for key, ratio in later.items()
        if key in earlier and ratio < earlier[key] * TOLERANCE
    ]
