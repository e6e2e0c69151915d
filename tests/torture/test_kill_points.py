"""One process of a save is killed, at every operation on the storage in turn; the others go on.

Whatever was there before is still there, the new checkpoint is whole or absent, all processes that
survive know which, and the place can be committed, collected and saved to again, in any order.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from killing import CASE_IDS, CASES, kill, operations_of

pytestmark = pytest.mark.slow


STRIDE = 19
"""Unless in full, every so many-th operation, with another beginning in each case."""
MOMENTS = 50
"""In full, at so many moments in each case: also within what is one operation elsewhere."""


@pytest.mark.parametrize("case", CASES, ids=CASE_IDS)
def test_a_process_killed_at_any_operation(tmp_path, jobs, full, case, record_property):
    """In full every operation of every process; else every so many-th."""
    counts = operations_of(jobs, tmp_path / "base", case)
    points = [
        (k, {"process": victim, "act": "kill", "at": k})
        for victim, count in enumerate(counts)
        for k in range(count)
    ]
    if not full:
        points = points[CASES.index(case) * 5 % STRIDE :: STRIDE]
    outcomes = jobs.map(
        lambda job, *point: kill(job, tmp_path / "base", case, *point), *zip(*points, strict=True)
    )
    record_property("outcomes", dict(Counter(outcomes)))
    # Which of two processes writes what both would write is decided by chance: there may be some
    # operations fewer.
    assert outcomes.count("got through") <= max(2, len(points) // 10)
    assert len(set(outcomes)) > 2 or not full


@pytest.mark.parametrize("case", CASES, ids=CASE_IDS)
def test_a_process_killed_at_any_moment(tmp_path, jobs, full, case, record_property):
    operations_of(jobs, tmp_path / "base", case)
    chance = random.Random(str(case))
    points = [
        (i, {"process": chance.randrange(case[1]), "seconds": chance.uniform(0.001, 0.2)})
        for i in range(MOMENTS if full else 1)
    ]
    outcomes = jobs.map(
        lambda job, *point: kill(job, tmp_path / "base", case, *point), *zip(*points, strict=True)
    )
    record_property("outcomes", dict(Counter(outcomes)))
    assert set(outcomes) != {"got through"} or not full
