"""Two jobs that do not know of each other save below one root, the same steps and different ones.

Of two that save one step exactly one wins, for all of its processes; all of the other's get a typed
error that names the place. Of neither anything is lost that was committed.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from aftermath import LAYOUTS, attempts, value_of

import shardckpt
from shardckpt.runs import collecting

pytestmark = pytest.mark.slow


PROCESSES = 2
LOSSES = ("AlreadyExistsError: ", "CommitError: ")
"""A process is refused by the storage, or told by another one of its job which was."""
JOBS = {"first": (1, ["10", "20", "30"]), "second": (2, ["20", "30", "40"])}
VALUES = [value for value, _ in JOBS.values()]


def run_both(jobs, root, steps, options):
    """Run two jobs at once; for each, by value, step → what its processes were told."""
    (root / "start").mkdir(parents=True)
    start = {"place": root / "start", "jobs": len(steps)}

    def run(value, mine):
        answers = jobs.run("save_steps", PROCESSES, root / "run", mine, value, options, start)
        assert all(isinstance(answer, list) for answer in answers), answers
        return dict(zip(mine, zip(*answers, strict=True), strict=True))

    with ThreadPoolExecutor(len(steps)) as pool:
        return dict(zip(steps, pool.map(run, *zip(*steps.items(), strict=True)), strict=True))


def assert_lost(messages, url):
    for message in messages:
        assert message.startswith(LOSSES)
        assert str(url) in message


@pytest.mark.parametrize("layout", LAYOUTS)
def test_of_two_jobs_that_save_a_step_at_once_one_wins(
    tmp_path, jobs, full, layout, record_property
):
    won = Counter()
    for i in range(40 if full else 3):
        root = tmp_path / str(i)
        answers = run_both(jobs, root, dict(JOBS.values()), {"layout": layout})
        for step in ("10", "20", "30", "40"):
            url = root / "run" / f"step_{step}"
            winners = [
                value for value in VALUES if answers[value].get(step) == ("saved",) * PROCESSES
            ]
            assert winners == [value_of(url, PROCESSES)]
            for value in VALUES:
                if step in answers[value] and value not in winners:
                    assert_lost(answers[value][step], url)
                    won[f"job {winners[0]} won"] += 1
        collecting.collect(root / "run", grace=0)
        for step in ("10", "20", "30", "40"):
            url = root / "run" / f"step_{step}"
            assert attempts(url) == [shardckpt.open(url).record.attempt]
            assert value_of(url, PROCESSES) in VALUES
    record_property("outcomes", dict(won))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_jobs_that_replace_a_step_at_once_keep_the_last_save_and_the_loser_is_told(
    tmp_path, jobs, full, layout, record_property
):
    outcomes = Counter()
    for i in range(40 if full else 3):
        root = tmp_path / str(i)
        answers = run_both(
            jobs,
            root,
            {1: ["5", "5", "5"], 2: ["5", "5", "5"]},
            {"layout": layout, "overwrite": True},
        )
        url = root / "run" / "step_5"
        winners = [value for value in VALUES if answers[value]["5"] == ("saved",) * PROCESSES]
        assert value_of(url, PROCESSES) in VALUES
        for value in set(VALUES) - set(winners):
            assert_lost(answers[value]["5"], url)
        outcomes[f"{len(winners)} of 2 won their last save"] += 1
        collecting.collect(url, grace=0)
        assert attempts(url) == [shardckpt.open(url).record.attempt]
        assert value_of(url, PROCESSES) in (winners or VALUES)
    record_property("outcomes", dict(outcomes))
