"""Saving asks nothing of other processes: no collective, no message, no wait at a store; and no
program is run for it."""

from __future__ import annotations

import pytest

import shardckpt

pytestmark = [pytest.mark.xla, pytest.mark.timeout(400)]

JOBS = {
    "DTensor, 2 processes": ("DTensor", 2),
    "DTensor, 4 processes": ("DTensor", 4),
    "torch_xla, 2 processes": ("torch_xla", 2),
    "JAX, 2 processes": ("JAX", 2),
}
WORDS = {"torch": {"set", "check", "get"}, "JAX": {"key_value_set", "key_value_try_get"}}
"""Operations on a store that return at once."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.slow] if "4" in name or "xla" in name else [])
        for name in JOBS
    ],
)
def job(request, run_job, tmp_path_factory):
    """The framework, the checkpoints' place, and what each process has counted."""
    framework, processes = JOBS[request.param]
    root = tmp_path_factory.mktemp("saves")
    return framework, root, run_job(framework, "count", processes, root)


@pytest.fixture
def words(job):
    return WORDS["JAX" if job[0] == "JAX" else "torch"]


def test_ten_saves_take_no_collective_no_wait_and_no_program(job, words, record_testsuite_property):
    _, root, answers = job
    for answer in answers:
        assert set(answer["counted"]["saves"]) <= words
    # "committed", ten times; and in the first save below the root, what process 0 has written first
    assert {"set": 11, "key_value_set": 11}.items() & answers[0]["counted"]["saves"].items()
    record_testsuite_property(
        "store operations in ten saves", [answer["counted"]["saves"] for answer in answers]
    )
    assert {path.name for path in root.iterdir()} == {
        *(str(i) for i in range(10) if i % 4 != 3),
        "in turn",
    }
    assert all(shardckpt.open(path).verify().ok for path in root.iterdir())


def test_words_are_announced_and_heard_without_waiting(job, words):
    for answer in job[2]:
        assert answer["heard"] == [99, None]
        assert set(answer["counted"]["words"]) <= words


def test_a_process_writes_its_share_before_the_next_one_has_begun(job, words):
    """Were there anything to wait for, process 0 would still be waiting."""
    for process, answer in enumerate(job[2]):
        assert answer["in turn"] == [f"{p:05}.json" for p in range(process)]
        assert set(answer["counted"]["in turn"]) <= words


def test_what_other_programs_ask_of_each_other_is_counted(job, words):
    """Else the zeros above would mean nothing."""
    for answer in job[2]:
        controls = {
            name: counted
            for name, counted in answer["counted"].items()
            if name not in ("saves", "words", "in turn")
        }
        assert controls
        for name, counted in controls.items():
            assert set(counted) - words, name
