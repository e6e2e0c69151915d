"""Rounds of a torch.distributed job: new groups, new workers, and stores that remember the old
ones."""

import subprocess
import sys

import pytest
from paths import CHILDREN

SCRIPT = "coordination_torch.py"
SECONDS = 250


def job(scenario, place):
    return [(scenario, place, rank, 2) for rank in range(2)]


def test_another_group_in_the_same_processes_is_another_round(run_job, tmp_path):
    answers = run_job(SCRIPT, job("two_rounds", tmp_path))
    assert answers[0] == answers[1]
    assert len(set(answers[0]["run_ids"])) == 2
    assert answers[0]["peeked"] is None
    assert not answers[0]["same object"]


@pytest.mark.slow
def test_a_round_sees_nothing_of_the_rounds_before_it_in_a_store_that_outlived_them(run_job, port):
    rounds = [run_job(SCRIPT, job("same_store", port)) for _ in range(2)]
    assert len({answers[0]["run_id"] for answers in rounds}) == 2
    for answers in rounds:
        for answer in answers:
            assert answer == {
                "run_id": answers[0]["run_id"],
                "left": None,
                "agreed": answers[0]["run_id"],
            }


@pytest.mark.long
def test_workers_that_torchrun_starts_again_are_a_new_round(tmp_path):
    child = CHILDREN / "coordination_torchrun.py"
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    with subprocess.Popen(
        [*command, "--max-restarts", "1", str(child), str(tmp_path)],
        stderr=subprocess.PIPE,
        text=True,
    ) as agent:
        try:
            _, err = agent.communicate(timeout=SECONDS)
        finally:
            agent.terminate()  # ends its workers too
    assert agent.returncode == 0, err[-4000:]
    reports = {path.name: path.read_text().split() for path in tmp_path.iterdir()}
    assert set(reports) == {f"round {n} rank {rank}" for n in range(2) for rank in range(2)}
    for n in range(2):
        assert reports[f"round {n} rank 0"][:3] == reports[f"round {n} rank 1"][:3]
        assert reports[f"round {n} rank 0"][1:3] == ["None", "0"]
    assert reports["round 0 rank 0"][0] != reports["round 1 rank 0"][0]
    # The agent's store is the same one in both rounds, keys and all.
    assert reports["round 1 rank 0"][3] == "True"
