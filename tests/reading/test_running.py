"""Running statistics: equal to numpy's, however the numbers arrive."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.reading.inspection.running import BINS, RunningStatistics

NUMBERS = st.lists(st.floats(-1e6, 1e6) | st.integers(-5, 5).map(float), min_size=1, max_size=60)


def tallied(*parts):
    tally = RunningStatistics()
    for part in parts:
        tally.add(np.asarray(part))
    return tally.to_json()


def test_numbers_in_one_part_have_the_histogram_of_numpy():
    values = np.random.default_rng(0).standard_normal(200_000).astype(np.float32)
    tally = tallied(values)
    counts, edges = np.histogram(values.astype(np.float64), BINS)
    assert tally["histogram"] == pytest.approx(counts, abs=1)
    assert tally["edges"] == pytest.approx(edges, abs=1e-9)


@given(st.lists(NUMBERS, min_size=1, max_size=6))
def test_parts_count_as_their_union(parts):
    tally, every = tallied(*parts), np.concatenate(parts)
    assert (tally["min"], tally["max"], tally["read"]) == (every.min(), every.max(), len(every))
    assert tally["zeros"] == (every == 0).sum()
    assert tally["mean"] == pytest.approx(every.mean(), rel=1e-9, abs=1e-6)
    assert tally["std"] == pytest.approx(every.std(), rel=1e-6, abs=1e-6)
    assert tally["norm"] == pytest.approx(np.linalg.norm(every), rel=1e-9, abs=1e-9)
    assert sum(tally["histogram"]) == len(every)
    assert len(tally["histogram"]) <= BINS
    assert len(tally["edges"]) == len(tally["histogram"]) + 1
    assert tally["edges"][0] <= every.min() + 1e-6 * (1 + abs(every.min()))
    assert tally["edges"][-1] >= every.max() - 1e-6 * (1 + abs(every.max()))


@given(st.lists(NUMBERS, min_size=1, max_size=4))
def test_merged_tallies_keep_every_number(parts):
    total = RunningStatistics()
    for part in parts:
        one = RunningStatistics()
        one.add(np.asarray(part))
        total.merge(one)
    tally, every = total.to_json(), np.concatenate(parts)
    assert (tally["min"], tally["max"], sum(tally["histogram"])) == (
        every.min(),
        every.max(),
        len(every),
    )
    assert tally["mean"] == pytest.approx(every.mean(), rel=1e-9, abs=1e-6)


def test_what_is_not_finite_is_counted_and_left_out():
    tally = tallied([1.0, np.nan, np.inf], [-np.inf, 3.0, np.nan])
    assert (tally["nans"], tally["infinities"], tally["min"], tally["max"], tally["mean"]) == (
        2,
        2,
        1,
        3,
        2,
    )
    assert tallied([np.nan])["min"] is None
    assert tallied(np.empty(0))["mean"] is None


@pytest.mark.parametrize(
    "values",
    [[-1.7e308, 1.7e308], [5e-324, 0.0], [1e300, 1e300], [2.0**60, 2.0**60 + 256], [True, False]],
)
def test_numbers_at_the_ends_of_floats_break_nothing(values):
    tally = tallied(np.asarray(values), np.asarray(values))
    assert sum(tally["histogram"]) in (0, 4)
    assert tally["max"] == max(values)
