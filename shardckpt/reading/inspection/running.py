"""Running statistics of numbers that arrive in parts: extremes, moments and a histogram.

The range of the histogram grows.

The histogram begins with `_FINE` bins between the extremes of the first part. A number outside
doubles the range, and joins the bins in pairs. So it takes constant memory, and one pass; its edges
are the same as numpy's where all numbers come in one part.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

BINS = 40
"""Most bins of a histogram that is shown."""
_FINE = 25 * BINS
_STRIDE = 1 << 16
"""Numbers that are converted at a time, so that they fit the processor's cache."""
_DIGITS = 12
_ROUNDING = 1e-6
"""Bins by which a number may lie outside by rounding alone."""


class RunningStatistics:
    """Statistics of all numbers that were added.

    Those that are not finite are counted, and count for nothing else.
    """

    def __init__(self) -> None:
        """No number was added yet."""
        self.count = self.nans = self.infinities = self.zeros = self.finite = 0
        self.low: float = math.inf
        self.high: float = -math.inf
        self._mean = self._squares = 0.0
        """Mean, and sum of the squared distances from it."""
        self._sum_of_squares = 0.0
        self._begin = self._width = 0.0
        """Lowest edge and bin width of the histogram; without width, all numbers were equal so
        far."""
        self._bins = np.zeros(_FINE, np.int64)

    def add(self, values: NDArray[Any]) -> None:
        """Add numbers: an array of one dimension, of any type that converts to float64."""
        low, high = math.inf, -math.inf
        with np.errstate(all="ignore"):
            for begin in range(0, len(values), _STRIDE):
                part = values[begin : begin + _STRIDE].astype(np.float64)
                self.count += len(part)
                self.zeros += len(part) - int(np.count_nonzero(part))
                finite = np.isfinite(part)
                if not finite.all():
                    nans = int(np.isnan(part).sum())
                    self.nans += nans
                    self.infinities += len(part) - int(finite.sum()) - nans
                    part = part[finite]
                if len(part):
                    low, high = min(low, float(part.min())), max(high, float(part.max()))
                    self._add_moments(part)
            if low <= high:
                self._reach(low, high)
                for begin in range(0, len(values), _STRIDE):
                    self._count(values[begin : begin + _STRIDE].astype(np.float64))

    def merge(self, other: RunningStatistics) -> None:
        """Add all numbers of another tally; its bins count as their middles."""
        self.count += other.count
        self.nans += other.nans
        self.infinities += other.infinities
        self.zeros += other.zeros
        if not other.finite:
            return
        self._merge_moments(other.finite, other._mean, other._squares, other._sum_of_squares)
        self._reach(other.low, other.high)
        with np.errstate(all="ignore"):
            middles = other._begin + (np.arange(_FINE) + 0.5) * other._width
            self._count(np.clip(middles, other.low, other.high), other._bins)

    def to_json(self) -> dict[str, Any]:
        """The statistics; None in place of what no finite number has, or what no float can hold."""
        counts, edges = self._histogram()
        std = math.sqrt(self._squares / self.finite) if self.finite and self._squares >= 0 else None
        known = bool(self.finite)
        return {
            "read": self.count,
            "nans": self.nans,
            "infinities": self.infinities,
            "zeros": self.zeros,
            "min": self.low if known else None,
            "max": self.high if known else None,
            "mean": _finite(self._mean) if known else None,
            "std": _finite(std),
            "norm": _finite(math.sqrt(self._sum_of_squares)) if known else None,
            "histogram": counts,
            "edges": edges,
        }

    def _add_moments(self, part: Floats) -> None:
        mean = float(part.mean())
        squares = float(np.dot(part - mean, part - mean))
        self._merge_moments(len(part), mean, squares, float(np.dot(part, part)))

    def _merge_moments(
        self, count: int, mean: float, squares: float, sum_of_squares: float
    ) -> None:
        total = self.finite + count
        apart = mean - self._mean
        self._mean += apart * (count / total)
        self._squares += squares + (apart * (count / total)) * (apart * self.finite)
        self._sum_of_squares += sum_of_squares
        self.finite = total

    def _reach(self, low: float, high: float) -> None:
        """Extend the histogram's range to these numbers."""
        first = self.low > self.high
        before = self.low
        self.low, self.high = min(self.low, low), max(self.high, high)
        if not math.isfinite(self.high - self.low):
            self._width = math.nan
        if self._width == 0:
            self._begin, self._width = self.low, (self.high - self.low) / _FINE
            if not first and self._width:  # the equal numbers get their bin
                equal, self._bins[0] = self._bins[0], 0
                self._bins[self._places(np.array([before]))] += equal
            return
        while self._width and (self._begin - self.low) > _ROUNDING * self._width:
            self._begin -= _FINE * self._width
            self._join(_FINE // 2)
        while self._width and self.high - self._begin > (_FINE + _ROUNDING) * self._width:
            self._join(0)

    def _join(self, at: int) -> None:
        """Double the width of the bins.

        The old bins become a half of the new ones. This half begins at bin `at`.
        """
        pairs = self._bins.reshape(-1, 2).sum(axis=1)
        self._bins[:] = 0
        self._bins[at : at + len(pairs)] = pairs
        self._width *= 2

    def _count(self, values: Floats, weights: NDArray[np.int64] | None = None) -> None:
        """Count numbers in the histogram; the range includes all that are finite."""
        if math.isnan(self._width):
            return
        finite = np.isfinite(values)
        if not finite.all():
            values = values[finite]
        places = self._places(values)
        if weights is None:
            self._bins += np.bincount(places, minlength=_FINE)
        else:
            np.add.at(self._bins, places, weights)

    def _places(self, values: Floats) -> NDArray[np.int64]:
        """The bin of each number."""
        if not self._width or not math.isfinite(1 / self._width):
            return np.zeros(len(values), np.int64)
        return np.clip((values - self._begin) / self._width, 0, _FINE - 1).astype(np.int64)

    def _histogram(self) -> tuple[list[int], list[float]]:
        """Counts of at most `BINS` bins, and their edges.

        Nothing without finite numbers, or where they are too far apart.
        """
        if not self.finite or math.isnan(self._width):
            return [], []
        if (
            not self._width
            or not math.isfinite(1 / self._width)
            or self._begin + self._width == self._begin
        ):
            return [self.finite], [self.low, self.high]
        used = np.flatnonzero(self._bins)
        first, stop = int(used[0]), int(used[-1]) + 1
        group = -(-(stop - first) // BINS)
        starts = np.arange(first, stop, group)
        counts = np.add.reduceat(self._bins[:stop], starts)
        edges = [self._begin + int(start) * self._width for start in (*starts, starts[-1] + group)]
        return counts.tolist(), [float(f"{edge:.{_DIGITS}g}") for edge in edges]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
