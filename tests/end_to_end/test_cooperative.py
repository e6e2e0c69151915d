"""Cooperative restore, by real processes: what the storage serves, what arrives, and what happens
when somebody cannot go on."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardckpt

pytestmark = pytest.mark.timeout(400)
from e2e_state import TENSORS, expected

SHAPE = (1536, 800)
"""Halves of it fall on borders of chunks."""


def reading_once(url):
    """The bytes that one process reads of all."""
    checkpoint = shardckpt.open(url)
    shardckpt.restore(checkpoint)
    return checkpoint.stats.bytes_read


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Every dtype, uneven shapes, scalars and tensors without elements; and what reading it once
    takes."""
    url = tmp_path_factory.mktemp("cooperative") / "c"
    shardckpt.save(url, {name.replace("/", "."): expected(name) for name in TENSORS})
    return url, reading_once(url)


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("limit", ["1MiB", "1GiB"])
def test_processes_that_have_all_tensors_read_each_byte_once_together(
    run_job, saved, processes, limit
):
    url, once = saved
    answers = run_job(
        "DTensor",
        "e2e_cooperative:plain",
        processes,
        url,
        {"cooperative": True, "memory_limit": limit},
    )
    assert [answer["wrong"] for answer in answers] == [[]] * processes
    assert all(answer["in place"] for answer in answers)
    assert sum(answer["read"] for answer in answers) == once
    assert processes == 1 or max(answer["read"] for answer in answers) < once


def test_processes_with_other_numbers_of_threads_read_each_byte_once_together(run_job, saved):
    url, once = saved
    answers = run_job("DTensor", "e2e_cooperative:uneven", 2, url, 1 << 20)
    assert [answer["wrong"] for answer in answers] == [[], []]
    assert sum(answer["read"] for answer in answers) == once


def test_everything_as_arrays_is_read_once_too(run_job, saved):
    url, once = saved
    answers = run_job("DTensor", "e2e_cooperative:arrays", 2, url)
    assert [answer["wrong"] for answer in answers] == [[], []]
    assert sum(answer["read"] for answer in answers) == once


def test_replicas_of_a_sharded_model_read_it_once(run_job, tmp_path):
    whole = np.arange(SHAPE[0] * SHAPE[1], dtype=np.float32).reshape(SHAPE)
    shardckpt.save(tmp_path / "c", {"w": whole, "b": np.zeros(1000, np.float32)})
    once = reading_once(tmp_path / "c")
    alone = run_job("DTensor", "e2e_cooperative:hybrid", 4, tmp_path / "c", SHAPE, {})
    together = run_job(
        "DTensor", "e2e_cooperative:hybrid", 4, tmp_path / "c", SHAPE, {"cooperative": True}
    )
    assert not any(answer["wrong"] for answer in alone + together)
    assert sum(answer["read"] for answer in together) == once
    assert sum(answer["read"] for answer in alone) > 1.99 * once


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("limit", ["1MiB", "1GiB"])
def test_jax_processes_read_replicated_arrays_once_with_few_programs(
    run_job, saved, processes, limit
):
    url, once = saved
    answers = run_job(
        "JAX",
        "e2e_cooperative_jax:restored",
        processes,
        url,
        {"cooperative": True, "memory_limit": limit},
    )
    assert [answer["wrong"] for answer in answers] == [[]] * processes
    assert sum(answer["read"] for answer in answers) == once
    assert all(answer["programs"] <= 8 for answer in answers)
    assert processes == 1 or max(answer["read"] for answer in answers) < 0.7 * once


@pytest.mark.slow
@pytest.mark.xla
def test_torch_xla_processes_read_replicated_tensors_once_over_gloo(run_job, saved):
    answers = run_job("torch_xla", "e2e_cooperative_xla:restored", 2, saved[0])
    assert all(wrong == [] for *rounds, _ in answers for _, wrong in rounds)
    once = answers[0][-1]
    replicated, mixed = (sum(answer[i][0] for answer in answers) for i in range(2))
    assert replicated == once
    assert once <= mixed < 2 * once


@pytest.mark.long
@given(seed=st.integers(0, 2**32), limit=st.sampled_from(["64KiB", "1MiB", "1GiB"]))
@settings(max_examples=3, deadline=None)
def test_any_placements_get_the_same_bits_as_by_themselves(run_job, saved, seed, limit):
    url, _ = saved
    answers = run_job(
        "DTensor",
        "e2e_cooperative:dtensors",
        4,
        url,
        seed,
        {"cooperative": True, "memory_limit": limit},
    )
    assert [answer["wrong"] for answer in answers] == [[]] * 4


def test_the_log_says_what_was_chosen_and_a_path_is_never_chosen_unasked(run_job, saved):
    url, once = saved
    answers = run_job("DTensor", "e2e_cooperative:plain", 2, url, {"cooperative": "auto"})
    assert all(answer["read"] == once for answer in answers)
    assert all(
        "every process reads by itself: the speed of a file system is not known"
        in answer["said"][0]
        for answer in answers
    )


def test_processes_that_want_different_things_read_by_themselves(run_job, saved):
    url, once = saved
    answers = run_job("DTensor", "e2e_cooperative:plain", 2, url, {"cooperative": True}, True)
    assert [answer["wrong"] for answer in answers] == [[], []]
    assert answers[0]["read"] == once
    assert answers[1]["read"] < once
    assert all(
        any("not all of them restore into the same layouts" in line for line in answer["said"])
        for answer in answers
    )


def damage(url):
    """Change a bit in the middle of the largest data file."""
    (data,) = sorted(url.glob("*/hosts/*/*/d/*"), key=lambda path: path.stat().st_size)[-1:]
    with data.open("r+b") as file:
        file.seek(data.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))


def test_damage_that_one_process_finds_is_raised_by_all(run_job, tmp_path):
    url = tmp_path / "c"
    shardckpt.save(url, {name.replace("/", "."): expected(name) for name in TENSORS})
    damage(url)
    answers = run_job("DTensor", "e2e_cooperative:damaged", 4, url, expect="error")
    assert [answer["error"] for answer in answers] == ["CorruptionError"] * 4
    (finder,) = [
        p for p, answer in enumerate(answers) if "could not read its part" not in answer["message"]
    ]
    assert all(
        f"process {finder} could not read its part" in a["message"]
        for p, a in enumerate(answers)
        if p != finder
    )
    assert all("undefined now" in answer["message"] for answer in answers)


def test_a_manager_falls_back_from_a_damaged_step_on_all_processes(run_job, tmp_path):
    for step in (1, 2):
        shardckpt.save(
            tmp_path / str(step), {name.replace("/", "."): expected(name) for name in TENSORS}
        )
    damage(tmp_path / "2")
    assert run_job("DTensor", "e2e_cooperative:managed", 2, tmp_path) == [[1, []]] * 2


def test_a_process_whose_state_does_not_fit_keeps_nobody_waiting(run_job, saved):
    answers = run_job("DTensor", "e2e_cooperative:mismatched", 3, saved[0], {})
    assert [kind for kind, _, _ in answers] == ["ShapeMismatchError"] * 3
    assert all("process 1 could not restore: host.large" in answers[p][1] for p in (0, 2))
    assert all(untouched for _, _, untouched in answers)


def test_a_process_that_has_an_impossible_option_keeps_nobody_waiting(run_job, saved):
    answers = run_job("DTensor", "e2e_cooperative:mismatched", 3, saved[0], {"memory_limit": 0})
    assert [kind for kind, _, _ in answers] == ["OptionError"] * 3
    assert all(
        "process 1 could not restore: restore(memory_limit=0)" in answers[p][1] for p in (0, 2)
    )


def test_a_process_whose_url_is_none_keeps_nobody_waiting(run_job, saved):
    answers = run_job(
        "DTensor", "e2e_cooperative:mismatched", 3, saved[0], {"source": "gs3://bucket/a"}
    )
    assert [kind for kind, _, _ in answers] == ["UrlError"] * 3
    assert all("process 1 could not restore: " in answers[p][1] for p in (0, 2))


def test_a_process_that_cannot_go_on_is_heard_by_all(run_job, saved):
    first, failing, last = run_job(
        "DTensor", "e2e_cooperative:interrupted", 3, saved[0], "packing", "unable"
    )
    kind, message = failing
    assert kind == "BudgetError"
    assert message.startswith(
        f"{saved[0]}: the system gave this process no more memory (there is none left); lower "
        "memory_limit"
    )
    for kind, message in (first, last):
        assert kind == "CoordinationError"
        assert "process 1 could not read its part: there is none left" in message


@pytest.mark.long
@pytest.mark.parametrize("where", ["packing", "sending"])
def test_a_process_that_dies_is_missed_by_all_others(run_job, saved, where):
    answers = run_job(
        "DTensor", "e2e_cooperative:interrupted", 3, saved[0], where, "killed", expect="signal"
    )
    assert answers[1] == {"signal": 9}
    for process in (0, 2):
        kind, message = answers[process]
        assert kind == "CoordinationError"
        missed = (
            r"for process(es)? 1\b"
            if where == "packing"
            else rf"process {process} lost the connection to another of the processes \[0, 1, 2\]"
        )
        # Process 0 misses it at the same time, and the store ends with process 0.
        if (where, process) == ("packing", 2):
            missed += "|the process that holds it has ended"
        assert re.search(missed, message)
        assert "undefined now" in message
