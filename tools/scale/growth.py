"""Growth of a quantity: the exponent of a power law, and the constants of a straight line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["exponent", "per_each"]


def exponent(x: Sequence[float], y: Sequence[float]) -> float | None:
    """The k of the y = c · x^k that fits best, by least squares of logarithms.

    None for less than two points.

    >>> round(exponent([1, 10, 100], [3, 300, 30000]), 3)
    2.0
    """
    if len(x) < 2:
        return None
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def per_each(counts: Sequence[Sequence[float]], y: Sequence[float]) -> list[float]:
    """Contributions of several counted things to y: a constant first, and then one for each.

    Each contribution is one figure, and none is below 0.

    Relative errors count, so that small cases do. What comes out negative is left out, and the
    others are fitted anew.

    >>> counts, y = [(1, 10), (2, 10), (4, 30)], [5 + 2 + 30, 5 + 4 + 30, 5 + 8 + 90]
    >>> [round(c, 6) for c in per_each(counts, y)]
    [5.0, 2.0, 3.0]
    """
    rows = (
        np.column_stack([np.ones(len(y)), np.asarray(counts, float)])
        / np.asarray(y, float)[:, None]
    )
    kept = list(range(rows.shape[1]))
    while True:
        fitted = np.linalg.lstsq(rows[:, kept], np.ones(len(y)), rcond=None)[0]
        if (fitted >= 0).all():
            break
        kept.remove(kept[int(np.argmin(fitted * np.mean(rows[:, kept], axis=0)))])
    contributions = np.zeros(rows.shape[1])
    contributions[kept] = fitted
    return [float(value) for value in contributions]
