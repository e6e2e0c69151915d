"""A process of a save falls asleep (SIGSTOP), is given up, and wakes up late, to go on with what
nobody waits for any more.

Meanwhile the place was collected, deleted, committed or saved to again, or left alone. Whatever is
the checkpoint when the sleeper wakes up stays the checkpoint; the sleeper gets a typed error,
unless its own attempt is what was published. A committer without a job is put to sleep in
test_collecting, and every order of operations is tried in test_collect_races.
"""

from __future__ import annotations

import shutil
from collections import Counter
from contextlib import suppress

import pytest
from aftermath import LAYOUTS, assert_goes_on, contents, copied, saved, value_of
from killing import ORDERS, operations_of
from sleeping import PROCESSES, asleep

import shardckpt
from shardckpt import errors
from shardckpt.runs import collecting

pytestmark = pytest.mark.slow


MEANWHILE = ("nothing", "collect", "save", "commit", "collect and save", "delete")
CASES = [(layout, overwrite) for layout in LAYOUTS for overwrite in (False, True)]
CASE_IDS = [f"{layout}-{'overwrite' if overwrite else 'first'}" for layout, overwrite in CASES]
STRIDE = 61
STRIDE_IN_FULL = 3
"""Every so many-th operation of all processes, with another beginning in each case."""


def act(jobs, url, layout, what):
    """Collect, save, commit or delete at the place while a process sleeps."""
    if "collect" in what:
        collecting.collect(url, grace=0)
    if "save" in what:
        saved(jobs, url, 3, layout, PROCESSES, overwrite=True)
    if what == "commit":
        shardckpt.commit(url)
    if what == "delete":
        with suppress(errors.NotFoundError):
            collecting.delete(url, grace=0)


def record_of(url):
    """The bytes of the commit record."""
    record = url / "checkpoint.json"
    return record.read_bytes() if record.exists() else None


def published(url):
    """The bytes of the commit record, unless it is a tombstone or a placeholder."""
    record = record_of(url)
    return None if record is None or b'"tombstone"' in record else record


def is_typed(answer):
    """Whether an answer is an error of ours."""
    return isinstance(answer, dict) and issubclass(
        getattr(errors, answer.get("error", ""), object), errors.ShardckptError
    )


def sleep_and_wake(job, jobs, base, case, number, fate):
    """Put a process to sleep, do something, wake it up; what became of it."""
    layout, overwrite = case
    root = copied(base, base.parent / f"{fate['process']}-{number}")
    url, what = root / "checkpoint", MEANWHILE[number % len(MEANWHILE)]
    with asleep(job, root, {"layout": layout, "overwrite": overwrite}, fate) as sleeper:
        if sleeper is None:
            return "did not sleep"
        before = value_of(url, PROCESSES)
        others = [sleeper.diary(f"outcome{p}") for p in range(PROCESSES) if p != fate["process"]]
        assert all(
            other == "saved" if before == 2 else other.startswith("CommitError: ")
            for other in others
        )
        earlier = record_of(url)
        act(jobs, url, layout, what)
        meanwhile, record, shown = value_of(url, PROCESSES), record_of(url), published(url)
        woken = sleeper.wake()[fate["process"]]
    after = value_of(url, PROCESSES)
    undisturbed = record == earlier  # there was nothing to collect, to commit or to delete
    if undisturbed and fate["process"] == 0:
        assert (after == 2) == isinstance(woken, list)  # nobody minded that it was late
    else:
        assert (after, published(url)) == (meanwhile, shown)
    if isinstance(woken, list):
        assert 2 in (before, meanwhile, after)
    else:
        assert is_typed(woken), woken
    assert contents(root / "earlier") == contents(base / "earlier")
    assert_goes_on(
        jobs, root, layout, PROCESSES, ORDERS[number % len(ORDERS)], untouched=undisturbed
    )
    shutil.rmtree(root)
    return "published" if isinstance(woken, list) else woken["error"]


@pytest.mark.parametrize("case", CASES, ids=CASE_IDS)
def test_a_process_that_sleeps_at_any_operation(tmp_path, jobs, full, case, record_property):
    layout, overwrite = case
    counts = operations_of(jobs, tmp_path / "base", (layout, PROCESSES, overwrite))
    points = [
        (k, {"process": sleeper, "at": k})
        for sleeper, count in enumerate(counts)
        for k in range(count)
    ]
    stride = STRIDE_IN_FULL if full else STRIDE
    points = [
        (i, fate)
        for i, (_, fate) in enumerate(
            points[CASES.index(case) * 17 % stride :: stride], CASES.index(case)
        )
    ]
    outcomes = jobs.map(
        lambda job, *point: sleep_and_wake(job, jobs, tmp_path / "base", case, *point),
        *zip(*points, strict=True),
    )
    record_property("outcomes", dict(Counter(outcomes)))
    assert outcomes.count("did not sleep") <= max(1, len(points) // 10)
