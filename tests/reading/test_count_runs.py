"""Runs are counted as they are made."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.format.table import OWN_OBJECT
from shardckpt.reading.runs import RunLimits, count_runs, join


@given(
    st.lists(
        st.tuples(st.sampled_from([0, 1, OWN_OBJECT]), st.integers(0, 60), st.integers(1, 12)),
        max_size=40,
    ),
    st.integers(1, 40),
    st.integers(0, 5),
    st.integers(1, 6),
)
def test_runs_hold_every_chunk_once_and_keep_to_their_limits(chunks, nbytes, gap, most):
    file, offset, length = (
        (np.array(column, np.int64) for column in zip(*chunks, strict=True))
        if chunks
        else [np.empty(0, np.int64)] * 3
    )
    order, begins = join(file, offset, length, RunLimits(nbytes, gap, most))
    assert sorted(order.tolist()) == list(range(len(chunks)))
    runs = [order[begin:end] for begin, end in itertools.pairwise([*begins, len(order)])]
    total = 0
    for run in runs:
        span = offset[run[-1]] + length[run[-1]] - offset[run[0]]
        total += span
        assert len(set(file[run])) == 1
        assert len(run) == 1 or (span <= nbytes and len(run) <= most and file[run[0]] != OWN_OBJECT)
        between = offset[run[1:]] - (offset + length)[run[:-1]]
        assert (between >= 0).all()
        assert (between <= gap).all()
    for before, run in itertools.pairwise(runs):  # no two could have been one
        first, last, new = before[0], before[-1], run[0]
        apart = (
            file[first] != file[new]
            or file[new] == OWN_OBJECT
            or not 0 <= offset[new] - offset[last] - length[last] <= gap
        )
        assert apart or len(before) == most or offset[new] + length[new] - offset[first] > nbytes
    assert count_runs(file, offset, length, RunLimits(nbytes, gap, most)) == (len(runs), total)
