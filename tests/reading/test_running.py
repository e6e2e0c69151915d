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
    found = tallied(values)
    counts, edges = np.histogram(values.astype(np.float64), BINS)
    assert found["histogram"] == pytest.approx(counts, abs=1)
    assert found["edges"] == pytest.approx(edges, abs=1e-9)


@given(st.lists(NUMBERS, min_size=1, max_size=6))
def test_parts_count_as_their_union(parts):
    found, every = tallied(*parts), np.concatenate(parts)
    assert (found["min"], found["max"], found["read"]) == (every.min(), every.max(), len(every))
    assert found["zeros"] == (every == 0).sum()
    assert found["mean"] == pytest.approx(every.mean(), rel=1e-9, abs=1e-6)
    assert found["std"] == pytest.approx(every.std(), rel=1e-6, abs=1e-6)
    assert found["norm"] == pytest.approx(np.linalg.norm(every), rel=1e-9, abs=1e-9)
    assert sum(found["histogram"]) == len(every)
    assert len(found["histogram"]) <= BINS
    assert len(found["edges"]) == len(found["histogram"]) + 1
    assert found["edges"][0] <= every.min() + 1e-6 * (1 + abs(every.min()))
    assert found["edges"][-1] >= every.max() - 1e-6 * (1 + abs(every.max()))


@given(st.lists(NUMBERS, min_size=1, max_size=4))
def test_merged_tallies_keep_every_number(parts):
    total = RunningStatistics()
    for part in parts:
        one = RunningStatistics()
        one.add(np.asarray(part))
        total.merge(one)
    found, every = total.to_json(), np.concatenate(parts)
    assert (found["min"], found["max"], sum(found["histogram"])) == (every.min(), every.max(), len(every))
    assert found["mean"] == pytest.approx(every.mean(), rel=1e-9, abs=1e-6)


def test_what_is_not_finite_is_counted_and_left_out():
    found = tallied([1.0, np.nan, np.inf], [-np.inf, 3.0, np.nan])
    assert (found["nans"], found["infinities"], found["min"], found["max"], found["mean"]) == (2, 2, 1, 3, 2)
    assert tallied([np.nan])["min"] is None
    assert tallied(np.empty(0))["mean"] is None


@pytest.mark.parametrize("values", [[-1.7e308, 1.7e308], [5e-324, 0.0], [1e300, 1e300], [2.0**60, 2.0**60 + 256], [True, False]])
def test_numbers_at_the_ends_of_floats_break_nothing(values):
    found = tallied(np.asarray(values), np.asarray(values))
    assert sum(found["histogram"]) in (0, 4)
    assert found["max"] == max(values)
