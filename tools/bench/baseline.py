"""Ratios that are worse than in an earlier run.

Only ratios within one run are compared: machines differ.

A ratio counts as worse if its median fell by more than `TOLERANCE`, and even its best round now is
below its worst round then: medians of one run differ by some 10 % from the next, and more where few
rounds differ much among themselves.
"""

from __future__ import annotations

from typing import Any

from tools.bench.ratios import OURS, ratios, where

__all__ = ["TOLERANCE", "worse"]

TOLERANCE = 0.15


def worse(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """A line for each ratio of ours to a floor or a peer that has fallen.

    There are also lines for what cannot be compared.
    """
    earlier, was, parts = ratios(before), _parts(before), _parts(now)
    lines = [
        f"{', '.join(place)}: 1/{was[place]} of the bytes then, and 1/{part} now; not compared: "
        f"measure it with --part {was[place]}"
        for place, part in parts.items()
        if was.get(place, part) != part
    ]
    for key, ratio in ratios(now).items():
        then = earlier.get(key) if was.get(key[:-1]) == parts[key[:-1]] else None
        if (
            then is not None
            and ratio.value < then.value * (1 - TOLERANCE)
            and ratio.most < then.least
        ):
            lines.append(
                f"{', '.join(key[:-1])}: {OURS} / {key[-1]} was {then.value:.2f} "
                f"({then.least:.2f} to {then.most:.2f}) and is {ratio.value:.2f} "
                f"({ratio.least:.2f} to {ratio.most:.2f})"
            )
    return lines


def _parts(figures: dict[str, Any]) -> dict[tuple[str, str, str, str], int]:
    """Place, as `where` names it → an Nth of the state's bytes that was measured there."""
    return {where(r): r["part"] for r in figures["results"]}
