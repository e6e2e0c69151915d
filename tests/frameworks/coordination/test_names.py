"""Processes that fail before, or during, the agreement on the names of a restore wait for
nobody."""

from __future__ import annotations

import pytest
from processes import Processes


@pytest.fixture(scope="module")
def job():
    with Processes("agreements") as processes:
        yield processes


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "ValueError"])
@pytest.mark.parametrize("who", [0, 1])
def test_a_process_that_fails_tells_the_others_and_ends(job, who, error):
    others = [process for process in range(3) if process != who]
    answers = job.run("fail_before", 3, [who], others, error)
    assert answers == [error if process == who else [] for process in range(3)]


@pytest.mark.parametrize("who", [0, 1])
def test_an_interrupted_process_does_not_wait_for_one_that_never_comes(job, who):
    answers = job.run("fail_before", 2, [who], [], "KeyboardInterrupt")
    assert answers[who] == "KeyboardInterrupt"


def test_an_interrupted_wait_ends_for_all_and_the_next_agreement_is_a_new_one(job):
    assert job.run("interrupt_the_wait", 2) == [["interrupted", ["both"]], [[], ["both"]]]
