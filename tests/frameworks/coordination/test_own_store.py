"""A Coordinator of the user's own, over a store that is a directory: several processes, several
rounds."""

import re

import pytest

SCRIPT = "coordination_files.py"


def job(directory, processes, *, absent=(), timeout=60):
    return [(directory, p, processes, timeout) for p in range(processes) if p not in absent]


def test_processes_agree_share_and_announce_through_a_store_of_the_users_own(run_job, tmp_path):
    answers = run_job(SCRIPT, job(tmp_path, 4))
    assert re.fullmatch(r"\d{8}T\d{6}-[0-9a-f]{8}", answers[0]["run_id"])
    for p, answer in enumerate(answers):
        assert answer["run_id"] == answers[0]["run_id"]
        assert answer["world"] == [p, 4, [0, 0, 1, 1, 2, 2, 3, 3]]
        assert answer["shared"] == [{"of": q, "nothing": None, "pair": [1, 2.5]} for q in range(4)]
        assert answer["shared again"] == [None, "é", None, "é"]
        assert answer["agreed"] == {"step": 100, "asked": 0}
        assert answer["agreed again"] == 0
        assert answer["peeked"] == 2
        assert answer["never announced"] is None
        assert answer["imported"] == []


def test_what_process_0_cannot_decide_is_an_error_on_all_and_can_be_asked_again(run_job, tmp_path):
    first, second = run_job(SCRIPT, job(tmp_path, 2))
    assert first["impossible"] == "ZeroDivisionError: division by zero"
    assert second["impossible"] == (
        "CoordinationError: process 0 could not decide on 'impossible': ZeroDivisionError: "
        "division by zero; see its log."
    )
    assert first["after the impossible"] == second["after the impossible"] == "possible"


@pytest.mark.long
def test_a_round_sees_nothing_of_the_rounds_before_it_in_the_same_store(run_job, tmp_path):
    rounds = [run_job(SCRIPT, job(tmp_path, processes)) for processes in (3, 3, 2)]
    assert len({answers[0]["run_id"] for answers in rounds}) == 3
    for answers in rounds:
        assert {answer["run_id"] for answer in answers} == {answers[0]["run_id"]}
        assert all(answer["left by an earlier round"] is None for answer in answers)


@pytest.mark.long
def test_a_missing_process_is_named_by_those_that_came_and_the_next_round_goes_well(
    run_job, tmp_path
):
    answers = run_job(SCRIPT, job(tmp_path, 3, absent=[1], timeout=10))
    for p, answer in zip((0, 2), answers, strict=True):
        assert answer["is a TimeoutError"]
        assert answer["error"].startswith(
            f"coordination: process {p} waited 10 s for process 1, which did not answer. All "
            "processes of the job must"
        )
    answers = run_job(SCRIPT, job(tmp_path, 3))
    assert len({answer["run_id"] for answer in answers}) == 1


def test_without_process_0_the_others_name_it(run_job, tmp_path):
    (answer,) = run_job(SCRIPT, job(tmp_path, 2, absent=[0], timeout=0.5))
    assert answer["error"].startswith("coordination: process 1 waited 0.5 s for process 0, which")
