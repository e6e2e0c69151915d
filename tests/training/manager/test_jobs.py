"""Trainings of several processes: whatever clocks, delays and signals do, all save the same steps
and resume from the same."""

import numpy as np
import pytest
from one_of_several import Interrupted, on_threads
from processes import Processes

import shardckpt
from shardckpt.errors import CoordinationError, StorageError
from shardckpt.training.resuming import raise_together

OWN_PACE = [0.0, 0.002, 0.0, 0.001]


@pytest.fixture(scope="module")
def job():
    with Processes("manager_jobs") as processes:
        yield processes


def assert_whole(root, steps, processes):
    """Every step is there, and every process saved its own part of that step in it."""
    for step in steps:
        restored = shardckpt.restore(root / str(step))
        np.testing.assert_array_equal(restored["w"], np.full(40_000, step, np.float32))
        assert restored["own"] == [[process, step] for process in range(processes)]


def listed(root):
    return shardckpt.CheckpointManager(root).all_steps()


@pytest.mark.long
@pytest.mark.parametrize("slow", [0, 2])
@pytest.mark.parametrize(
    "every", [[{"seconds": 0.02}], ["continuous"], [50, {"seconds": 0.1}]], ids=str
)
def test_all_save_the_same_steps_with_wrong_clocks_and_one_slow_process(job, tmp_path, slow, every):
    pauses = [0.004 if process == slow else 0.001 for process in range(4)]
    patience = {"timeout": 280}, {"commit_timeout": 280}  # 40 s by the fastest clock
    answers = job.run(
        "train",
        4,
        tmp_path,
        every,
        20_000,
        [1.0, 7.0, 0.1, 1.0],
        pauses,
        None,
        patience[1],
        4,
        **patience[0],
    )
    saved = answers[0]["saved"]
    assert len(saved) == 4
    assert [answer["saved"] for answer in answers] == [saved] * 4
    assert listed(tmp_path) == saved
    assert_whole(tmp_path, saved, 4)


def test_steps_are_skipped_by_all_while_a_save_is_in_flight(job, tmp_path):
    answers = job.run(
        "train", 3, tmp_path, [1], 20_000, None, [0.003] * 3, None, {"in_flight": "skip"}, 4
    )
    saved = answers[0]["saved"]
    assert saved[-1] > 4
    assert [answer["saved"] for answer in answers] == [saved] * 3
    assert_whole(tmp_path, saved, 3)


@pytest.mark.parametrize("receiver", [0, 2])
def test_a_signal_to_one_process_saves_the_same_step_on_all_and_ends_them_there(
    job, tmp_path, receiver
):
    answers = job.run("train", 3, tmp_path, ["preemption"], 100_000, None, OWN_PACE, [receiver, 20])
    (step,) = answers[0]["saved"]
    assert 20 <= step < 99_999
    assert answers == [{"saved": [step], "ended": step, "from": -1}] * 3
    assert_whole(tmp_path, [step], 3)
    resumed = job.run("train", 5, tmp_path, [1000], 3)
    assert [answer["from"] for answer in resumed] == [step] * 5


@pytest.mark.parametrize(
    ("every", "most"),
    [([5], 0), ([5, "preemption"], 0.5), ([{"seconds": 100}], 0.5), (["continuous"], 0.5)],
    ids=str,
)
def test_processes_exchange_as_many_words_per_step_as_documented(job, tmp_path, every, most):
    steps = 60
    answers = job.run("count_words", 3, tmp_path, every, steps)
    for process, counts in enumerate(answers):
        assert counts["looks"] <= most * steps + 1
        assert counts["words"] <= (most * steps + 1 if process == 0 else 0)
    assert (answers[1]["looks"] > 0) == (most > 0)


@pytest.mark.parametrize("now", [2, 4, 6])
def test_four_processes_save_and_more_or_fewer_resume(job, tmp_path, now):
    job.run("train", 4, tmp_path, [5], 12)
    answers = job.run("train", now, tmp_path, [5], 8)
    assert answers == [{"saved": [15], "ended": 18, "from": 10}] * now
    assert_whole(tmp_path, [5, 10], 4)
    assert_whole(tmp_path, [15], now)


def test_all_resume_from_one_step_though_others_land_meanwhile(job, tmp_path):
    job.run("train", 2, tmp_path, [1], 2)
    for first in range(10, 50, 10):
        answers = job.run("restore_while_steps_land", 3, tmp_path, first)
        assert answers[1:] == answers[:-1]
        step, value = answers[0]
        assert step == value
        assert step in {first - 8, *range(first, first + 3)} | ({1} if first == 10 else set())


@pytest.fixture
def damaged(job, tmp_path):
    """A run whose newest step has damage in what process 1 alone reads."""
    assert job.run("save_own", 2, tmp_path, [1, 2]) == ["saved"] * 2
    (file, *_) = (
        path
        for path in (tmp_path / "2").glob("*/hosts/00001/**/*")
        if path.is_file() and path.stat().st_size > 100_000
    )
    data = bytearray(file.read_bytes())
    data[1000] ^= 1
    file.write_bytes(data)
    return tmp_path


def test_damage_that_one_process_finds_is_an_error_on_all(job, damaged):
    answers = job.run("restore_own", 2, damaged, False)
    assert [answer["error"] for answer in answers] == ["CorruptionError"] * 2
    assert answers[0]["message"].startswith("process 1 could not restore: ")


def test_or_all_fall_back_and_say_why(job, damaged):
    (one, told_one), (other, told_other) = job.run("restore_own", 2, damaged, True)
    assert (one, other) == (1, 1)
    assert [step for step, _ in told_one] == [step for step, _ in told_other] == [2]
    assert "process 1" in told_one[0][1]


def test_a_rollback_holds_on_all_processes(job, tmp_path):
    job.run("train", 3, tmp_path, [1], 5)
    answers = job.run("roll_back", 3, tmp_path, 2, [4])
    expected = [[step, "committed"] for step in (1, 2, 4)]
    assert answers == [[expected[0], expected[1], [3, "superseded"], expected[2]]] * 3
    assert shardckpt.restore(tmp_path / "4")["again"]


@pytest.mark.long
@pytest.mark.parametrize("on_failure", ["raise", "continue"])
def test_a_missing_host_is_named_after_a_bounded_wait_and_on_failure_decides(
    job, tmp_path, on_failure
):
    answers = job.run("train_without", 3, tmp_path, 2, on_failure)
    for answer in answers[:2]:
        name, message, step = answer["told"][0]
        assert (name, step) == ("CommitError", 1)
        assert "host 2 (of 3) did not finish" in message
        assert answer["done"] == (2 if on_failure == "continue" else 1)
    assert listed(tmp_path) == [0]


def test_the_metrics_of_process_0_count(job, tmp_path):
    losses = [[0.5, 9.0], [0.25, 8.0], [0.75, 7.0]]
    assert job.run("save_with_metrics", 2, tmp_path, losses) == [[[2, 3], 2, {"loss": 0.25}]] * 2


@pytest.mark.parametrize("likes", [["a", "b", "cd"], ["abcd", "", ""], ["", "ab", "cd"]])
def test_each_process_restores_its_own_part_if_all_together_take_all_names(tmp_path, job, likes):
    assert job.run("restore_stages", 3, tmp_path, ["a", "bc", "d"], likes) == likes


def test_a_name_that_no_process_takes_is_an_error_on_all(tmp_path, job):
    answers = job.run("restore_stages", 3, tmp_path, ["a", "bc", "d"], ["a", "b", "a"])
    assert {answer["error"] for answer in answers} == {"NamesMismatchError"}
    assert all(
        "2 names are in the checkpoint but not in `like`: 'c', 'd'" in answer["message"]
        for answer in answers
    )
    assert job.run(
        "restore_stages", 3, tmp_path / "like", ["a", "bc", "d"], ["a", "b", "a"], "like"
    ) == ["a", "b", "a"]


def test_a_name_that_one_process_lacks_in_the_checkpoint_is_an_error_also_as_a_part(tmp_path, job):
    for strict in (True, "like"):
        answers = job.run(
            "restore_stages", 2, tmp_path / str(strict), ["a", "b"], ["a", "bx"], strict
        )
        assert {answer["error"] for answer in answers} == {"NamesMismatchError"}
        assert "1 name is in `like` but not in the checkpoint: 'x'" in answers[0]["message"]


def test_a_process_that_fails_before_it_compares_names_keeps_nobody_waiting(tmp_path, job):
    answers = job.run("restore_stages", 2, tmp_path, ["a", "b"], ["ab", "wrong"])
    assert "`like`: 'step'" in answers[0]["message"]
    assert answers[1]["error"] == "LeafError"


@pytest.mark.parametrize("damaged", ["checkpoint.json", "fingerprint.json", None])
def test_a_process_that_fails_before_it_restores_keeps_nobody_waiting(tmp_path, job, damaged):
    answers = job.run("restore_where_one_fails", 2, tmp_path / "run", damaged, timeout=60)
    if damaged is None:
        message = "process 0 could not restore: 'loss of the rule'"
        assert answers == [
            [["KeyError", "'loss of the rule'"], None],
            [["CoordinationError", message], None],
        ]
    else:
        assert [kind for kind, _ in answers] == ["FormatError"] * 2
        assert answers[0][1].startswith("process 1 could not restore: ")


@pytest.mark.parametrize("where", ["before a restore", "resumed"])
def test_an_interrupted_restore_keeps_nobody_waiting(tmp_path, where):
    with shardckpt.CheckpointManager(tmp_path) as manager:
        manager.save(7, {"w": np.ones(3)})

    def restore(coordinator):
        manager = shardckpt.CheckpointManager(tmp_path, coordinator=coordinator)
        if not coordinator.world.process:
            return manager.restore({"w": np.zeros(3)})
        coordinator.at = f"/shares/{where}#0/1"
        with pytest.raises(KeyboardInterrupt):
            manager.restore({"w": np.zeros(3)})
        return None

    error, _ = on_threads(2, restore, Interrupted)
    assert str(error).startswith("process 1 has failed, or was interrupted")


def test_a_restore_that_is_interrupted_while_it_reads_keeps_nobody_waiting(tmp_path):
    with shardckpt.CheckpointManager(tmp_path) as manager:
        manager.save(7, {"w": np.ones(3)})

    def interrupt(_):
        raise KeyboardInterrupt

    def restore(coordinator):
        manager = shardckpt.CheckpointManager(tmp_path, coordinator=coordinator)
        only = interrupt if coordinator.world.process else None
        return manager.restore({"w": np.zeros(3)}, only=only)

    def act(coordinator):
        if not coordinator.world.process:
            return restore(coordinator)
        with pytest.raises(KeyboardInterrupt):
            restore(coordinator)
        return None

    error, _ = on_threads(2, act)
    assert str(error).startswith("process 1 has failed, or was interrupted")


def test_an_interrupted_restore_is_not_taken_for_an_earlier_failure():
    def restore(coordinator):
        process = coordinator.world.process

        def fail():
            if process:
                raise StorageError("the save before failed")

        try:
            raise_together(coordinator, fail)
        except StorageError as error:
            first = str(error)
        if process:
            coordinator.at = "/shares/before a restore#1/1"
            with pytest.raises(KeyboardInterrupt):
                raise_together(coordinator, lambda: None)
            return first
        with pytest.raises(CoordinationError, match=r"^process 1 has failed, or was interrupted"):
            raise_together(coordinator, lambda: None)
        return first

    message = "the save before failed"
    assert on_threads(2, restore, Interrupted) == [
        f"process 1 could not restore: {message}",
        message,
    ]
