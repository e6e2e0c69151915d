"""Ranks of torch.distributed jobs, coordinated through the store of their default group."""

import re

import pytest

SCRIPT = "coordination_torch.py"


def job(scenario, place, world):
    return [(scenario, place, rank, world) for rank in range(world)]


def test_ranks_agree_share_and_announce_through_their_groups_store(run_job, port):
    answers = run_job(SCRIPT, job("everything", port, 4))
    for rank, answer in enumerate(answers):
        assert answer["kind"] == "TorchStore"
        assert answer["same object"]
        assert answer["world"] == [rank, 4, {}, 4]
        assert answer["run_id"] == answers[0]["run_id"]
        assert answer["shared"] == 3
        assert answer["agreed"] == [7, 0]
        assert answer["before"] is None
        assert answer["peeked"] == {"stop": 2}
        assert answer["fork refused"]
        assert answer["after the group"] == ["SingleProcess", 1, True]


@pytest.mark.long
def test_a_rank_that_does_not_come_is_named_and_may_come_later(run_job, port):
    answers = run_job(SCRIPT, job("absent", port, 2))
    assert answers[0]["failure"].startswith(
        "CoordinationError: process 0 waited 1 s for process 1, which did not answer. All "
        "processes of the job must"
    )
    assert answers[0]["in a handler"].startswith("CoordinationError: this thread is joining")
    assert answers[0]["later"].startswith("CoordinationError: process 0 waited 1 s for process 1")
    assert len({answer["run_id"] for answer in answers}) == 1


@pytest.mark.long
def test_a_first_save_on_one_rank_keeps_its_time_limit_and_says_who_must_call_it(
    run_job, port, tmp_path
):
    first, second = run_job(SCRIPT, job("saves_alone", port, 2), SAVE_TO=str(tmp_path / "run"))
    for call in ("save", "save_async", "manager"):
        assert first[call].startswith(
            "CoordinationError: process 0 waited 1 s for process 1, which did not answer. All "
            "processes of the"
        )
        assert "coordinator=shardckpt.SingleProcess()" in first[call]
    assert len(first["logged"]) == 3
    notice = r"has waited \d+ s for process 1, and still waits\. All processes of the job must"
    assert all(re.search(notice, line) for line in first["logged"])
    assert first["files"] == []
    for answer in (first, second):
        assert (answer["timeout"], answer["saved"]) == (600, ["all", "alone"])


def test_no_operation_waits_for_a_key_that_is_missing(run_job, port):
    assert (
        run_job(SCRIPT, job("counted", port, 2)) == [{"waited": [], "peeked": None, "own": 1}] * 2
    )


def test_a_store_that_is_gone_is_an_error_that_says_so(run_job, tmp_path):
    for answer in run_job(SCRIPT, job("store_gone", tmp_path, 2)):
        assert answer["failure"].startswith(
            "CoordinationError: torch.distributed's store does not answer ("
        )
