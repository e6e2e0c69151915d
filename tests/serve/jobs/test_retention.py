"""Rules for runs that have ended: what they delete, and what they never do."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paths import CHILDREN

import shardckpt
from shardckpt import SaveOptions
from shardckpt.commit.markers import PINNED, SUPERSEDED, Protection
from shardckpt.errors import CommitError, OptionError, StorageError
from shardckpt.format.documents import open_envelope, seal
from shardckpt.io.store import Store
from shardckpt.runs import pinning
from shardckpt.runs.ended import check_idle, mark_ended
from shardckpt.runs.job import JobFence
from shardckpt.runs.leases import leased
from shardckpt.runs.retention import Best, EveryKth, Latest, Younger, any_of
from shardckpt.serve.jobs import retention
from shardckpt.serve.jobs.retention import RetentionRules, retain


def save(place, base=None, skipped="frozen", *, overwrite=False, **metrics):
    skip = {} if base is None else {"base": base, "skip": skipped}
    state = {"w": np.ones(100), "frozen": np.ones(100)}
    options = {"layout": "zarr", "metadata": {"metrics": metrics}, "overwrite": overwrite}
    shardckpt.save(place, state, options=SaveOptions(**options, **skip))


def attempt_of(place):
    return shardckpt.open(place).record.attempt


def doomed(root, rule):
    return [one.name for one in retain(root, rule).deleted]


def steps_in(root):
    return sorted(int(path.parent.name) for path in Path(root).glob("*/checkpoint.json"))


def expected_of(report):
    return {one.name: one.attempt for one in report.deleted}


@pytest.fixture
def run(tmp_path):
    """An ended run with the steps 1 to 6."""
    for step in range(1, 7):
        save(tmp_path / str(step), loss=float(step))
    mark_ended(Store.open(tmp_path), "ann")
    return tmp_path


# --- the file of rules ----------------------------------------------------------------------------

RULES = """
[[keep]]
runs = "llama/*"
latest = 3
every = 1000
younger = "7d"
best = { metric = "loss", n = 2, mode = "max" }

[[keep]]
runs = "**/eval-*"
latest = 1

[[keep]]
runs = "**"
best = { metric = "loss" }
"""


def test_rules_are_read_and_the_first_entry_that_matches_applies(tmp_path):
    (tmp_path / "rules.toml").write_text(RULES)
    rules = RetentionRules.read(tmp_path / "rules.toml")
    assert rules.rule_for("llama/7") == any_of(
        Latest(3), EveryKth(1000), Younger(7 * 86400.0), Best(2, "loss", "max")
    )
    assert rules.rule_for("lab/deep/eval-7") == any_of(Latest(1))
    assert rules.rule_for("llama/deep/7") == any_of(Best(1, "loss", "min"))
    (tmp_path / "rules.toml").write_text('[[keep]]\nruns = "a/*"\nlatest = 1\n')
    assert RetentionRules.read(tmp_path / "rules.toml").rule_for("b/1") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "write \\[\\[keep\\]\\] entries, and nothing else"),
        ("keep = 3", "write \\[\\[keep\\]\\] entries"),
        ("keep = [3]", "entry 1: write \\[\\[keep\\]\\]"),
        ("[[keep", "cannot be read"),
        ('other = 1\n[[keep]]\nruns = "*"\nlatest = 1', "and nothing else"),
        ("[[keep]]\nlatest = 1", "entry 1: runs is missing"),
        ("[[keep]]\nruns = 7\nlatest = 1", "entry 1: runs is missing, or is not a string"),
        ('[[keep]]\nruns = "*"', "entry 1: it keeps nothing of the runs '\\*'"),
        (
            '[[keep]]\nruns = "*"\nlatest = 1\n[[keep]]\nruns = "*"\nlatest = 0',
            "entry 2: .*give a whole number of at least 1",
        ),
        ('[[keep]]\nruns = "*"\nlatest = "3"', "entry 1: .*give a whole number"),
        ('[[keep]]\nruns = "*"\nlatest = true', "entry 1: .*give a whole number"),
        ('[[keep]]\nruns = "*"\nevery = 0.5', "entry 1: .*give a whole number"),
        ('[[keep]]\nruns = "*"\nyounger = 7', 'entry 1: younger=7: give text such as "7d"'),
        (
            '[[keep]]\nruns = "*"\nyounger = "7 weeks"',
            "entry 1: younger '7 weeks': give a number and a unit",
        ),
        ('[[keep]]\nruns = "*"\nyounger = "0"', "entry 1: .*give a positive number"),
        ('[[keep]]\nruns = "*"\nbest = "loss"', "entry 1: best='loss': write"),
        ('[[keep]]\nruns = "*"\nbest = { n = 2 }', "entry 1: best=.*: write"),
        (
            '[[keep]]\nruns = "*"\nbest = { metric = "loss", least = true }',
            "entry 1: best=.*: write",
        ),
        (
            '[[keep]]\nruns = "*"\nbest = { metric = "loss", mode = "least" }',
            'entry 1: .*give "min" or "max"',
        ),
        ('[[keep]]\nruns = "*"\nlates = 1', "entry 1: there is no key lates"),
        ('[[keep]]\nruns = "[b-a]"\nlatest = 1', "entry 1: .*is not a pattern of names"),
    ],
)
def test_what_is_no_rule_is_refused_with_the_file_and_the_entry(tmp_path, text, message):
    (tmp_path / "rules.toml").write_text(text)
    with pytest.raises(OptionError, match=f"the rules {tmp_path}/rules.toml.*{message}"):
        RetentionRules.read(tmp_path / "rules.toml")


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "rules.toml").write_bytes(b"\xff")
    for name in ("rules.toml", "none.toml", "."):
        with pytest.raises(OptionError, match="cannot be read"):
            RetentionRules.read(tmp_path / name)


# --- one run --------------------------------------------------------------------------------------


def test_a_dry_run_deletes_nothing_and_says_what_goes(run):
    root = Store.open(run)
    report = retain(root, any_of(2, EveryKth(3)))
    assert [one.name for one in report.deleted] == ["1", "2", "4"]
    assert (
        report.nbytes
        == sum(shardckpt.open(run / name).record.totals["stored_bytes"] for name in "124")
        > 0
    )
    assert steps_in(run) == [1, 2, 3, 4, 5, 6]
    calls = []
    done = retain(
        root,
        any_of(2, EveryKth(3)),
        expected_of(report),
        progress=lambda *numbers: calls.append(numbers),
    )
    assert (done.deleted, done.left) == (report.deleted, {})
    assert calls == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert {path.name for path in run.iterdir()} == {"3", "5", "6", "ended.json"}


def test_only_what_was_listed_and_is_still_given_up_is_deleted(run):
    root = Store.open(run)
    expected = expected_of(retain(root, Latest(2)))
    pinning.pin(run / "1")
    pinning.tag(run / "2", "best")
    shutil.copytree(run / "3", run / "9")
    old = expected["4"]
    expected["4"] = "20200101T000000-00000000"
    expected["5"] = attempt_of(run / "5")
    mark_ended(root, "ann")
    report = retain(root, Latest(1), expected)
    assert [one.name for one in report.deleted] == ["3", "5"]
    assert [*report.left] == ["4", "1", "2", "6"]  # a failure is never cut off
    assert "another checkpoint has taken its place" in report.left.pop("4")
    assert report.left == {
        "1": "it is pinned",
        "2": "it is tagged best",
        "6": "it was not among the steps that the dry run listed",
    }
    assert steps_in(run) == [1, 2, 4, 6, 9]
    assert attempt_of(run / "4") == old
    assert retain(root, Latest(9), {"4": old}).left == {"4": "the rules keep it now"}


def test_a_pin_that_comes_in_the_last_moment_wins(run, monkeypatch):
    root = Store.open(run)
    expected = expected_of(retain(root, Latest(1)))
    delete = retention.delete_place

    def late(place, **options):
        if place.location.name == "2":
            pinning.pin(run / "2")
        return delete(place, **options)

    monkeypatch.setattr(retention, "delete_place", late)
    report = retain(root, Latest(1), expected)
    assert "is pinned, so it is not deleted" in report.left["2"]
    assert steps_in(run) == [2, 6]


def test_a_run_that_has_not_ended_loses_nothing(run):
    root = Store.open(run)
    expected = expected_of(retain(root, Latest(1)))
    JobFence(root, "20270101T000000-00000000").hold()
    with pytest.raises(CommitError, match="saves there now"):
        retain(root, Latest(1), expected)
    assert steps_in(run) == [1, 2, 3, 4, 5, 6]


def retain_and(root, expected, number, act):
    """Keep the latest step alone, and act after the deletion of so many steps."""
    return retain(
        root, Latest(1), expected, progress=lambda done, _: act() if done == number else None
    )


def test_a_job_that_comes_in_between_stops_it(run, monkeypatch):
    root = Store.open(run)
    expected = expected_of(retain(root, Latest(1)))
    report = retain_and(
        root, expected, 2, lambda: JobFence(root, "20270101T000000-00000000").hold()
    )
    assert [one.name for one in report.deleted] == ["1", "2"]
    assert report.left.keys() == {"3", "4", "5"}
    assert all("saves there now" in why for why in report.left.values())
    assert steps_in(run) == [3, 4, 5, 6]


def test_a_save_that_comes_in_between_stops_it(run):
    root = Store.open(run)
    expected = expected_of(retain(root, Latest(1)))
    report = retain_and(root, expected, 2, lambda: save(run / "100", base=run / "3"))
    assert [one.name for one in report.deleted] == ["1", "2"]
    assert all("100 was saved after the run was marked" in why for why in report.left.values())
    assert shardckpt.open(run / "100").verify().ok


def test_a_place_beside_the_steps_that_is_overwritten_in_between_stops_it(tmp_path):
    for place in ("1", "2", "3", "4", "best"):
        save(tmp_path / place)
    root = Store.open(tmp_path)
    mark_ended(root, "ann")
    expected = expected_of(retain(root, Latest(1)))
    report = retain_and(
        root, expected, 1, lambda: save(tmp_path / "best", base=tmp_path / "3", overwrite=True)
    )
    assert [one.name for one in report.deleted] == ["1"]
    assert all("best was saved after the run was marked" in why for why in report.left.values())
    assert shardckpt.open(tmp_path / "best").verify().ok


def test_bases_stay_while_they_are_needed_and_go_after_what_needs_them(tmp_path):
    save(tmp_path / "1")
    save(tmp_path / "2")
    for step in (3, 4):
        save(tmp_path / str(step), base=tmp_path / "1")
    save(tmp_path / "5", base=tmp_path / "2")
    save(tmp_path / "eval", base=tmp_path / "4", skipped="w")
    save(tmp_path / "6")
    save(tmp_path / "7")
    root = Store.open(tmp_path)
    mark_ended(root, "ann")
    report = retain(root, Latest(1))
    assert [one.name for one in report.deleted] == ["3", "5", "6", "2"]
    assert report.left == {"4": "eval stays, and needs it", "1": "4 stays, and needs it"}
    expected = expected_of(report)
    del expected["5"]
    assert retain(root, Latest(1), expected).left["2"] == "5 stayed, and needs it"
    assert {path.parent.name for path in tmp_path.glob("*/checkpoint.json")} == {*"12457", "eval"}
    for name in ("4", "5", "eval"):
        assert shardckpt.open(tmp_path / name).verify().ok


def test_where_a_checkpoint_cannot_be_read_everything_stays(run):
    (run / "3" / "checkpoint.json").write_text("{}")
    root = Store.open(run)
    mark_ended(root, "ann")
    report = retain(root, Latest(1))
    assert report.deleted == ()
    assert set(report.left) == set("1245")
    assert report.left["1"].startswith("3 cannot be read, and may store tensors in it")


def test_ages_are_by_the_storages_clock(run, monkeypatch):
    root = Store.open(run)
    then = time.time() - 8 * 86400
    for name in "123":
        os.utime(run / name / "checkpoint.json", (then, then))
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 365 * 86400)
    assert doomed(root, Younger(7 * 86400)) == ["1", "2", "3"]


def test_where_the_storage_keeps_no_times_everything_is_young(tmp_path):
    root = Store.open(f"memory://{tmp_path.name}/run")
    for step in (1, 2):
        save(f"{root}/{step}")
    assert doomed(root, Younger(1e-9)) == []
    assert doomed(root, Latest(1)) == ["1"]


def test_a_storage_that_fails_is_told_and_the_others_go(run, monkeypatch):
    root = Store.open(run)
    expected = expected_of(retain(root, Latest(1)))
    delete = retention.delete_place

    def fails(place, **options):
        if place.location.name == "2":
            raise StorageError("the bucket is away")
        return delete(place, **options)

    monkeypatch.setattr(retention, "delete_place", fails)
    report = retain(root, Latest(1), expected)
    assert report.left == {"2": "the bucket is away"}
    assert steps_in(run) == [2, 6]


def test_on_any_storage(store):
    url = str(store.location.join("run"))
    for step in range(1, 4):
        save(f"{url}/{step}")
    root = Store.open(url)
    mark_ended(root, "ann")
    report = retain(root, Latest(1))
    assert retain(root, Latest(1), expected_of(report)).deleted == report.deleted
    assert root.list_children() == ["3/", "ended.json"]


@pytest.mark.long
def test_killed_at_any_operation_it_is_finished_by_the_same_call(tmp_path):
    base = tmp_path / "base"
    save(base / "1")
    save(base / "2", base=base / "1")
    save(base / "3")
    mark_ended(Store.open(base), "ann")
    expected = expected_of(retain(Store.open(base), Latest(1)))
    (tmp_path / "expected.json").write_text(json.dumps(expected))
    command = [sys.executable, CHILDREN / "retention_killed.py", tmp_path]
    died_before = json.loads(
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=250).stdout
    )
    assert {"rename", "unlink", "rmdir"} <= set(died_before)
    for k in range(len(died_before) + 1):
        root = Store.open(tmp_path / str(k))
        if is_there(tmp_path / str(k) / "2"):
            assert shardckpt.open(tmp_path / str(k) / "2").verify().ok, "its base goes after it"
        assert retain(root, Latest(1), expected).left == {}
        left = {
            path.name for path in (tmp_path / str(k)).iterdir() if not path.name.startswith(".now-")
        }
        assert left == {"3", "ended.json"}, (k, died_before[k])
        assert shardckpt.open(tmp_path / str(k) / "3").verify().ok
        check_idle(root)


def is_there(place):
    try:
        shardckpt.open(place)
    except shardckpt.errors.NotFoundError:
        return False
    return True


# --- any run --------------------------------------------------------------------------------------

STEPS = 8


@st.composite
def described_runs(draw):
    """Steps, with a loss, protection, bases among earlier ones, and whether each is superseded."""
    runs = {}
    for step in range(draw(st.integers(1, STEPS))):
        runs[step] = {
            "loss": draw(st.sampled_from([None, "nan", 0.5, 1.0, 2.0])),
            "marker": draw(
                st.sampled_from(
                    [
                        None,
                        None,
                        None,
                        Protection(pinned=True),
                        Protection(tags=("best",)),
                        Protection(),
                    ]
                )
            ),
            "bases": sorted(draw(st.sets(st.sampled_from(sorted(runs)), max_size=2)))
            if runs
            else [],
            "superseded": draw(st.sampled_from([False, False, False, True])),
        }
    return runs


RULES_OF_ANY_KIND = st.lists(
    st.one_of(
        st.builds(Latest, st.integers(1, 4)),
        st.builds(EveryKth, st.integers(1, 4)),
        st.builds(Best, st.integers(1, 2), st.just("loss"), st.sampled_from(["min", "max"])),
        st.builds(Younger, st.sampled_from([1e-9, 3600.0])),
    ),
    min_size=1,
    max_size=3,
).map(lambda rules: any_of(*rules))


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    place = tmp_path_factory.mktemp("template") / "1"
    save(place)
    return place


def build(root, template, described):
    attempt = attempt_of(template)
    for step, about in described.items():
        place = root / str(step)
        shutil.copytree(template, place)
        record = open_envelope((place / "checkpoint.json").read_bytes(), "test")
        record["metadata"]["metrics"] = {} if about["loss"] is None else {"loss": about["loss"]}
        record["bases"] = [
            {"url": f"../{base}", "attempt": attempt, "layout": "zarr", "compression": None}
            for base in about["bases"]
        ]
        (place / "checkpoint.json").write_bytes(seal(record, (2, 0)))
        if about["marker"] is not None:
            (place / PINNED).write_bytes(about["marker"].sealed(attempt))
        if about["superseded"]:
            (place / SUPERSEDED).write_bytes(seal({"attempt": attempt}))


@pytest.mark.long
@settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(described_runs(), RULES_OF_ANY_KIND, st.data())
def test_of_any_run_nothing_goes_that_is_needed_and_a_dry_run_says_what_goes(
    template, described, rule, data
):
    with TemporaryDirectory() as name:
        root = Store.open(name)
        build(Path(name), template, described)
        mark_ended(root, "ann")
        report = retain(root, rule)
        assert steps_in(name) == sorted(described)
        expected = expected_of(report)
        listed = data.draw(
            st.one_of(st.just(set(expected)), st.sets(st.sampled_from(sorted(expected))))
            if expected
            else st.just(set())
        )
        done = retain(root, rule, {step: expected[step] for step in listed})
        if listed == set(expected):
            assert done.deleted == report.deleted
            assert done.left == {}
        assert {one.name for one in done.deleted} <= listed
        there = steps_in(name)
        assert sorted(described) == sorted([*there, *(int(one.name) for one in done.deleted)])
        live = [step for step, about in described.items() if not about["superseded"]]
        assert not live or max(live) in there
        assert live or there == sorted(described)
        for step, about in described.items():
            if about["marker"]:
                assert step in there
            if about["superseded"] and live and step > max(live):
                assert step in there
            if step in there:
                assert set(about["bases"]) <= set(there)
        kept = rule.kept([_saved(step, described[step]) for step in sorted(live)])
        assert kept <= set(there)


def _saved(step, about):
    from shardckpt.runs.retention import SavedStep

    return SavedStep(step, 1.0, {} if about["loss"] is None else {"loss": float(about["loss"])})


def test_a_step_that_a_reader_holds_stays_until_its_lease_ends(run):
    root = Store.open(run)
    expected = expected_of(retain(root, Latest(1)))
    with leased(root, [1]):
        report = retain(root, Latest(1), expected)
    assert report.left == {"1": "a reader holds a lease on it"}
    assert steps_in(run) == [1, 6]
    assert retain(root, Latest(1), expected).left == {}
    assert steps_in(run) == [6]
