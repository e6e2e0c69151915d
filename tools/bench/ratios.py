"""Ratios of our rate to each floor's and peer's.

Only ratios within one run mean something on another machine.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

__all__ = ["OURS", "Key", "Ratio", "is_ours", "ratios", "where"]

OURS = "shardckpt"
"""As users have it, with its defaults; what is compared with others."""

Key = tuple[str, str, str, str, str]
"""Storage, state, group, operation, the other subject."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """Our rate over theirs: above 1, we are faster."""

    value: float
    """Of the medians."""
    least: float
    """In one round: both subjects met the same machine there."""
    most: float
    floor: bool
    """Whether the other only moves bytes."""


def is_ours(subject: str) -> bool:
    """Whether it is shardckpt, with these settings or others, as "shardckpt, not read back"."""
    return subject.partition(",")[0] == OURS


def where(result: dict[str, Any]) -> tuple[str, str, str, str]:
    """All of a result's key but the subject."""
    return result["storage"], result["state"], result["group"], result["operation"]


def ratios(figures: dict[str, Any]) -> dict[Key, Ratio]:
    """All ratios of a run, in the order of its results."""
    ours = {where(r): r for r in figures["results"] if r["subject"] == OURS}
    others = [r for r in figures["results"] if not is_ours(r["subject"]) and where(r) in ours]
    return {(*where(r), r["subject"]): _ratio(ours[where(r)], r) for r in others}


def _ratio(ours: dict[str, Any], theirs: dict[str, Any]) -> Ratio:
    size = ours["nbytes"] / theirs["nbytes"]
    rounds = [
        size * other / own for own, other in zip(ours["seconds"], theirs["seconds"], strict=True)
    ]
    value = size * statistics.median(theirs["seconds"]) / statistics.median(ours["seconds"])
    return Ratio(value, min(rounds), max(rounds), theirs["floor"])
