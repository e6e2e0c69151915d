"""The processes' clocks are an hour wrong, some ahead and some behind: what must not depend on them
does not.

Ages come from the storage's own clock. Names of attempts and the times in records come from a
process's, and order nothing that matters.
"""

from __future__ import annotations

import datetime as dt
import os
import time
from pathlib import Path

import pytest
from aftermath import LAYOUTS, attempts, prepare, saved, value_of
from placeholders import put_placeholder
from sleeping import asleep

import shardckpt

pytestmark = pytest.mark.slow


HOUR = 3600
PROCESSES = 3
CLOCKS = [(HOUR, 0, -HOUR), (-HOUR, HOUR, 0)]
GRACE = HOUR / 2


def age(place, seconds):
    """Nothing has been written there for so long."""
    then = time.time() - seconds
    for path in [place, *place.rglob("*")]:
        os.utime(path, (then, then))


def collected(jobs, clock, root, grace):
    """Attempts that a machine with such a clock collects: attempt → outcome."""
    (answer,) = jobs.run("with_clocks", 1, [clock], "collect", root, grace)
    assert isinstance(answer, list), answer
    return dict(answer)


def listed(jobs, clock, root):
    """Entries that a machine with such a clock lists."""
    (answer,) = jobs.run("with_clocks", 1, [clock], "listed", root)
    assert isinstance(answer, list), answer
    return answer


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("clocks", CLOCKS, ids=str)
def test_a_save_by_processes_whose_clocks_differ_is_whole_and_later_ones_replace_it(
    tmp_path, jobs, layout, clocks
):
    url = tmp_path / "step_1"
    for value, turned in enumerate([clocks, (0, 0, 0), clocks[::-1]], 1):
        options = {"layout": layout, "overwrite": value > 1, "commit_timeout": 30}
        answers = jobs.run("with_clocks", PROCESSES, turned, "save", url, value, options)
        assert all(isinstance(answer, list) for answer in answers), answers
        assert value_of(url, PROCESSES) == value
        assert len(attempts(url)) == 1
        created = dt.datetime.fromisoformat(shardckpt.open(url).record.created)
        ahead = (created - dt.datetime.now(dt.UTC)).total_seconds()
        assert round(ahead / HOUR) == turned[0] / HOUR  # so the clocks really were wrong


@pytest.mark.parametrize("clock", [HOUR, -HOUR])
def test_a_list_is_in_order_of_steps_whatever_the_clocks(tmp_path, jobs, clock):
    for step, ahead in ((9, HOUR), (10, 0), (11, -HOUR)):
        options = {"commit_timeout": 30}
        answers = jobs.run(
            "with_clocks", 2, (ahead, -ahead), "save", tmp_path / f"step_{step}", step, options
        )
        assert all(isinstance(answer, list) for answer in answers), answers
    entries = listed(jobs, clock, tmp_path)
    assert [(name, state) for name, state, *_ in entries] == [
        (f"step_{step}", "committed") for step in (9, 10, 11)
    ]


@pytest.mark.parametrize("clock", [HOUR, -HOUR])
def test_a_collector_with_a_wrong_clock_takes_nothing_of_a_save_under_way_and_all_that_is_old(
    tmp_path, jobs, clock
):
    prepare(jobs, tmp_path / "root", "packed", PROCESSES, overwrite=True)
    url = tmp_path / "root" / "checkpoint"
    options = {"layout": "packed", "overwrite": True}
    with (
        jobs.one() as job,
        asleep(
            job, tmp_path / "root", options, {"process": 0, "before": "checkpoint.json"}
        ) as sleeper,
    ):
        (live,) = set(attempts(url)) - {shardckpt.open(url).record.attempt}
        assert collected(jobs, clock, tmp_path / "root", GRACE) == {live: "kept"}
        (idle,) = (entry[4] for entry in listed(jobs, clock, tmp_path / "root") if entry[2] == live)
        assert idle >= 0
        assert isinstance(sleeper.wake()[0], list)
    assert value_of(url, PROCESSES) == 2
    for old, outcome in ((0.4 * HOUR, "kept"), (0.6 * HOUR, "removed")):
        orphan = url / "20200101T000000-00000000-1"
        (orphan / "records").mkdir(parents=True, exist_ok=True)
        (orphan / "records" / "00000.json").write_bytes(b"{}")
        age(orphan, old)
        assert collected(jobs, clock, url, GRACE) == {orphan.name: outcome}
    assert value_of(url, PROCESSES) == 2


def test_of_two_whole_attempts_the_later_is_committed_whichever_clock_named_them(tmp_path, jobs):
    url = tmp_path / "root" / "checkpoint"
    put_placeholder(url)
    for value, ahead in ((2, HOUR), (3, 0)):
        before_the_commit = {"process": 0, "act": "kill", "before": "checkpoint.json"}
        options = {"commit_timeout": 30}
        answers = jobs.run(
            "with_clocks",
            PROCESSES,
            [ahead] * PROCESSES,
            "save",
            url,
            value,
            options,
            before_the_commit,
        )
        assert "signal" in answers[0]
    assert len(attempts(url)) == 2
    outcomes = {outcome.attempt: outcome.state for outcome in shardckpt.commit(url)}
    # By name the later one, whose clock was right, comes first.
    assert [outcomes[attempt] for attempt in attempts(url)] == ["committed", "overtaken"]
    assert value_of(url, PROCESSES) == 3
    assert set(collected(jobs, -HOUR, url, 0).values()) == {"removed"}
    assert Path(url / shardckpt.open(url).record.attempt).is_dir()
    saved(jobs, url, 4, "packed", PROCESSES, overwrite=True)
    assert value_of(url, PROCESSES) == 4
