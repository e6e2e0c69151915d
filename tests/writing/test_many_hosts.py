"""One checkpoint, written by several processes that do not wait for each other."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from processes import Processes

import shardckpt
from shardckpt import SaveOptions, errors

LAYOUTS = ["packed", "zarr"]


@pytest.fixture(scope="module")
def job():
    with Processes("many_hosts") as processes:
        yield processes


def state(shift=0):
    return {
        "large": np.arange(2_400_000, dtype=np.float32).reshape(2400, 1000) + shift,
        "medium": np.arange(40_000, dtype=np.int32) + shift,
        "small": np.arange(5) + shift,
        "empty": np.zeros((0, 3)),
        "scalar": np.array(2.5 + shift),
        "step": 7 + shift,
        "nested": [{"lr": 0.1}, ("a", None)],
    }


def assert_holds(url, shift=0):
    restored, expected = shardckpt.restore(url), state(shift)
    assert set(restored) == set(expected)
    for name, value in expected.items():
        np.testing.assert_equal(restored[name], value)
    assert shardckpt.open(url).verify().damage == []


def attempts(url):
    return sorted(p for p in Path(url).iterdir() if p.is_dir())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("processes", [2, 5])
def test_hosts_write_one_checkpoint_between_them(tmp_path, job, processes, layout):
    assert job.run("save", processes, tmp_path / "c", {"layout": layout}) == ["saved"] * processes
    assert_holds(tmp_path / "c")
    records = [
        json.loads(p.read_text())["record"] for p in sorted((tmp_path / "c").glob("*/records/*"))
    ]
    assert [r["host"] for r in records] == list(range(processes))
    assert all(r["chunks"] > 0 for r in records)


def test_hosts_with_the_same_state_describe_it_once(tmp_path, job):
    job.run("save", 4, tmp_path / "c")
    assert len(list((tmp_path / "c").glob("*/contents/*"))) == 1


def test_stock_tensorstore_reads_what_several_hosts_wrote(tmp_path, job):
    import tensorstore as ts

    for layout in LAYOUTS:
        job.run("save", 3, tmp_path / layout, {"layout": layout})
        opened = shardckpt.open(tmp_path / layout)
        for name in ("large", "small", "scalar"):
            elements = ts.open(opened.stock_spec(name)).result().read().result()
            np.testing.assert_array_equal(elements, state()[name])


def test_a_coordinator_keeps_no_more_keys_however_many_saves_there_are(tmp_path, job):
    few = job.run("save_many", 2, tmp_path / "few", 2)
    many = job.run("save_many", 2, tmp_path / "many", 12)
    assert max(many) <= max(few) + 10
    assert_holds(tmp_path / "many" / "11", 11)


def test_the_word_on_one_save_is_not_taken_for_that_on_another(tmp_path, job):
    """Two places, one of which has a checkpoint already: all processes see that the second save
    failed, by name or url."""
    for first, second in (("a/100", "b/100"), ("c/1", "c/2")):
        job.run("save", 2, tmp_path / second)
        answers = job.run("save_two", 2, tmp_path / first, tmp_path / second)
        assert [answer["error"] for answer in answers] == ["AlreadyExistsError"] * 2
        assert_holds(tmp_path / first)


def test_a_failure_of_the_committer_reaches_all(tmp_path, job):
    answers = job.run("save_then_differ", 3, tmp_path)
    assert {answer["error"] for answer in answers} == {"CommitError"}
    assert_holds(tmp_path / "same")


def test_an_error_on_one_process_reaches_all_in_words(tmp_path, job):
    answers = job.run("save_what_cannot_be_encoded", 3, tmp_path / "c")
    for answer in (answers[0], answers[2]):
        assert answer["error"] == "CommitError"
        assert (
            "process 1 could not write its share: 'leaf': the encode function registered as "
            "'unsaveable' failed (KeyError: 'missing'). Nothing was published." in answer["message"]
        )


def test_a_committer_that_has_lost_the_coordinator_s_store_commits_all_the_same(tmp_path, job):
    answers = job.run("save_with_the_store_lost", 2, tmp_path / "c", 0)
    assert answers[0] == "saved"
    assert_holds(tmp_path / "c")


def test_a_process_that_cannot_ask_says_why(tmp_path, job):
    answers = job.run("save_with_the_store_lost", 2, tmp_path / "c", 0, 1)
    assert answers[0] == "saved"
    if answers[1] != "saved":
        assert "does not answer (the store is gone)" in answers[1]["message"]
        assert (
            "If process 0 is gone, `shardckpt commit` publishes the save." in answers[1]["message"]
        )


def test_a_process_that_hears_nothing_of_the_commit_finds_it_in_the_storage(tmp_path, job):
    (tmp_path / "c").mkdir()
    (tmp_path / "latest").symlink_to(tmp_path / "c")
    assert job.run("save_under_two_names", 2, tmp_path / "c", tmp_path / "latest") == ["saved"] * 2
    assert_holds(tmp_path / "c")


def test_a_step_can_be_saved_again_and_only_with_overwrite(tmp_path, job):
    job.run("save", 2, tmp_path / "c")
    refused = job.run("save", 2, tmp_path / "c", None, 1)
    assert [answer["error"] for answer in refused] == ["AlreadyExistsError"] * 2
    assert_holds(tmp_path / "c", 0)
    assert job.run("save", 2, tmp_path / "c", {"overwrite": True}, 1) == ["saved"] * 2
    assert_holds(tmp_path / "c", 1)
    assert len(attempts(tmp_path / "c")) == 1


# --- processes with states of their own -----------------------------------------------------------


def array(value, shape=(100, 300)):
    return {"shape": shape, "value": value}


def test_the_tree_is_the_union_over_processes(tmp_path, job):
    """As pipeline ranks have: each its own layers, and what all have."""
    states = [
        {"step": 3, "norm": array(1, [3]), "first": array(2)},
        {"step": 3, "norm": array(1, [3]), "last": array(4)},
    ]
    assert (
        job.run("save_different", 2, tmp_path / "c", states, {"host_tensors": "local"})
        == ["saved"] * 2
    )
    restored = shardckpt.restore(tmp_path / "c")
    assert list(restored) == ["step", "norm", "first", "last"]
    assert (restored["first"] == 2).all()
    assert (restored["last"] == 4).all()


def failing(job, url, states, options=None):
    """The errors of all processes; nothing was published."""
    answers = job.run("save_different", len(states), url, states, options)
    assert {answer["error"] for answer in answers} == {"CommitError"}
    with pytest.raises(errors.NotFoundError):
        shardckpt.open(url)
    return answers[0]["message"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_large_plain_tensor_that_a_process_lacks_is_an_error_with_its_name_and_the_option(
    tmp_path, job, layout
):
    states = [{"w": array(1)}, {}, {"w": array(1)}]
    message = failing(job, tmp_path / "c", states, {"layout": layout})
    assert "'w'" in message
    assert "'w' is missing from process 1" in message
    assert "host_tensors='local'" in message


@pytest.mark.parametrize("layout", LAYOUTS)
def test_where_a_process_lacks_one_plain_tensor_that_one_is_named_whichever_has_gaps(
    tmp_path, job, layout
):
    """Process 0 deals out "w" alone, the others "w" and "y": their shares of "w" do not fit."""
    for i, lacking in enumerate((0, 1, 2)):
        states = [{"w": array(1), **({} if p == lacking else {"y": array(2)})} for p in range(3)]
        message = failing(job, tmp_path / str(i), states, {"layout": layout})
        assert f"'y' is missing from process {lacking}" in message


def test_unequal_small_leaves_are_an_error_with_their_name_and_the_processes(tmp_path, job):
    message = failing(job, tmp_path / "c", [{"lr": 0.1}, {"lr": 0.1}, {"lr": 0.2}])
    assert "'lr'" in message
    assert "process 2" in message
    assert "PerProcess" in message


def test_large_plain_tensors_of_one_name_and_other_elements_are_an_error_rather_than_mixed(
    tmp_path, job
):
    states = [
        {
            "moments": {"shape": [100, 400], "value": value},
            "same": {"shape": [100, 400], "value": 1},
        }
        for value in (1, 2, 2)
    ]
    answers = job.run("save_different", 3, tmp_path / "c", states)
    assert answers[0]["error"] == "CommitError"
    for words in ("'moments'", "on process 0 than on processes 1-2", 'host_tensors="local"'):
        assert words in answers[0]["message"]
    with pytest.raises(errors.NotFoundError):
        shardckpt.open(tmp_path / "c")


def test_unequal_small_plain_tensors_are_an_error_with_their_name_and_the_processes(tmp_path, job):
    message = failing(job, tmp_path / "c", [{"seed": array(1, [3])}, {"seed": array(2, [3])}])
    assert "'seed'" in message
    assert "on process 0 than on process 1" in message


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_tensor_with_two_shapes_is_an_error(tmp_path, job, layout):
    states = [{"w": array(1, [200, 300])}, {"w": array(1, [300, 200])}]
    message = failing(job, tmp_path / "c", states, {"layout": layout})
    assert "'w': its shape is (200, 300) on process 0 and (300, 200) on process 1" in message


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes_with_local_tensors_of_one_name_are_an_error_with_the_name(
    tmp_path, job, layout
):
    options = {"host_tensors": "local", "layout": layout}
    message = failing(job, tmp_path / "c", [{"w": array(1)}, {"w": array(2)}], options)
    assert "more than one host wrote the same chunks of 'w'" in message
    assert "missing" not in message


def test_two_processes_with_one_name_for_other_dimensions_are_an_error_in_layout_zarr(
    tmp_path, job
):
    options = {"host_tensors": "local", "layout": "zarr"}
    states = [{"w": array(1, [300, 200])}, {"w": array(1, [60_000])}]
    for i, pair in enumerate((states, states[::-1])):
        answers = job.run("save_different", 2, tmp_path / str(i), pair, options)
        assert {answer["error"] for answer in answers} == {"CommitError"}
        assert "give tensors that differ names of their own" in answers[0]["message"]


def test_options_that_differ_are_an_error(tmp_path, job):
    message = failing(job, tmp_path / "c", [{"a": 1}, {"a": 1, "b": [1]}, {"a": 1, "b": [1, 2]}])
    assert "'b'" in message


# --- values of each process's own -----------------------------------------------------------------


def test_every_process_gets_its_own_values_back(tmp_path, job):
    answers = job.run("save_per_process", 3, tmp_path / "c")
    assert answers == [[p, [p, p + 1, p + 2], list(range(10))] for p in range(3)]
    everything = shardckpt.restore(tmp_path / "c")["rng"]
    assert [value["seed"] for value in everything] == [0, 1, 2]


def test_another_number_of_processes_is_an_error_that_says_so_or_a_choice(tmp_path, job):
    job.run("save_per_process", 3, tmp_path / "c")
    answers = job.run("restore_without_choice", 2, tmp_path / "c")
    for answer in answers:
        assert answer["error"] == "MismatchError"
        assert "3 processes saved the checkpoint, and 2 restore it" in answer["message"]
        assert "choose=" in answer["message"]
    assert job.run("choose", 2, tmp_path / "c") == [3, 3]


# --- committing later -----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("overwrite", [False, True])
def test_what_all_hosts_have_finished_is_committed_from_the_records_alone(
    tmp_path, job, layout, overwrite
):
    url = tmp_path / "run" / "100"
    if overwrite:
        job.run("save", 2, url, {"layout": layout}, 5)
    job.run("save_without_committing", 3, url, {"layout": layout, "overwrite": overwrite})
    if overwrite:
        assert_holds(url, 5)
    else:
        with pytest.raises(errors.UncommittedError):
            shardckpt.open(url)
    (outcome,) = shardckpt.commit(tmp_path / "run")
    assert (outcome.name, outcome.state) == ("100", "committed")
    assert_holds(url)
    assert len(attempts(url)) == 1
    assert shardckpt.commit(tmp_path / "run") == []


def test_of_several_committers_at_once_one_publishes_and_the_others_find_it_published(
    tmp_path, job
):
    for i in range(4):
        url = tmp_path / str(i)
        job.run("save_without_committing", 2, url, {"layout": LAYOUTS[i % 2]})
        states = job.run("commit_at_once", 4, url)
        assert all(outcomes in ([], ["committed"]) for outcomes in states), states
        assert ["committed"] in states
        assert_holds(url)


@pytest.mark.long
def test_an_attempt_that_lacks_a_host_is_not_committed_and_names_it(tmp_path, job):
    messages = job.run("save_without_committing", 3, tmp_path / "c", {"commit_timeout": 10}, 0, [1])
    assert "host 1 (of 3) did not finish within 10 s" in messages[0]
    (outcome,) = shardckpt.commit(tmp_path / "c")
    assert outcome.state == "incomplete"
    assert outcome.reason == "host 1 (of 3) did not finish"
    with pytest.raises(errors.UncommittedError):
        shardckpt.open(tmp_path / "c")


def test_a_retry_never_mixes_with_what_was_left(tmp_path, job):
    job.run("save_without_committing", 3, tmp_path / "c", {"commit_timeout": 0.3}, 100, [2])
    assert job.run("save", 2, tmp_path / "c", None, 1) == ["saved"] * 2
    assert_holds(tmp_path / "c", 1)
    (outcome,) = shardckpt.commit(tmp_path / "c")
    assert outcome.state == "incomplete"
    assert_holds(tmp_path / "c", 1)


def test_an_attempt_is_overtaken_by_what_was_committed_since(tmp_path, job):
    job.run("save_without_committing", 2, tmp_path / "c", None, 100)
    shardckpt.save(tmp_path / "c", state(1))
    (outcome,) = shardckpt.commit(tmp_path / "c")
    assert outcome.state == "overtaken"
    assert_holds(tmp_path / "c", 1)


def test_the_newest_of_several_complete_attempts_is_committed(tmp_path, job):
    job.run("save_without_committing", 2, tmp_path / "c", None, 1)
    job.run("save_without_committing", 2, tmp_path / "c", None, 2)
    newest, older = sorted(
        shardckpt.commit(tmp_path / "c"), key=lambda outcome: outcome.attempt, reverse=True
    )
    assert sorted([newest.state, older.state]) == ["committed", "overtaken"]
    committed = next(o for o in (newest, older) if o.state == "committed")
    assert shardckpt.open(tmp_path / "c").record.attempt == committed.attempt


def test_places_whose_saves_have_succeeded_cost_a_number_and_no_name_returns(tmp_path, job):
    (kept, names), other = job.run("save_and_forget", 2, tmp_path)
    assert other == [kept, names]
    assert kept == 0
    assert len({*names}) == 6


def test_saving_alone_needs_no_coordinator(tmp_path):
    shardckpt.save(tmp_path / "c", state(), options=SaveOptions(commit_timeout=1))
    assert_holds(tmp_path / "c")
