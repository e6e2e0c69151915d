"""All processes of a save are killed at once, whatever each of them is at; then the job starts
anew, and tries again.

What one attempt has left is committed as it is or never; no later attempt takes any of it.
"""

from __future__ import annotations

from collections import Counter

import pytest
from killing import CASE_IDS, CASES, kill, operations_of

pytestmark = pytest.mark.slow


STRIDE = 97
STRIDE_IN_FULL = 5
"""Every so many-th operation, with another beginning in each case: at it one process kills the
others, then itself."""


@pytest.mark.parametrize("case", CASES, ids=CASE_IDS)
def test_a_job_killed_at_any_operation(tmp_path, jobs, full, case, record_property):
    counts = operations_of(jobs, tmp_path / "base", case)
    points = [
        (k, {"process": killer, "act": "kill all", "at": k})
        for killer, count in enumerate(counts)
        for k in range(count)
    ]
    stride = STRIDE_IN_FULL if full else STRIDE
    points = points[CASES.index(case) * 13 % stride :: stride]
    outcomes = jobs.map(
        lambda job, *point: kill(job, tmp_path / "base", case, *point), *zip(*points, strict=True)
    )
    record_property("outcomes", dict(Counter(outcomes)))
    assert outcomes.count("got through") <= max(1, len(points) // 10)
