"""Runs are counted as they are made."""

from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.io.runs import RunLimits, count_runs, runs


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(1, 8)), max_size=40),
    st.integers(1, 40),
    st.integers(0, 4),
    st.integers(1, 5),
)
def test_as_many_runs_of_as_many_bytes_as_the_reader_makes(places, nbytes, gap, chunks):
    # Chunks of a file lie one after another, with gaps or without.
    laid, ends = [], [0, 0, 0]
    for file, space, length in places:
        start = ends[file] + (space if space > 20 else 0)
        ends[file] = start + length
        laid.append((file, start, length))
    limits = RunLimits(nbytes, gap, chunks)

    made = list(runs([SimpleNamespace(file=f, offset=o, length=n, stop=o + n) for f, o, n in laid], limits))

    columns = (np.array(column, np.int64) for column in zip(*laid, strict=True)) if laid else [np.empty(0, np.int64)] * 3
    assert count_runs(*columns, limits) == (len(made), sum(run.nbytes for run in made))
