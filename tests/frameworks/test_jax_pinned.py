"""JAX on accelerators: copies by way of XLA's pinned memory. JAX's CPU lists such memory, too, and
stands for an accelerator here.

Everything is asked of one process: `tests/children/jax_pinned.py`. tests/cuda has what needs a GPU.
"""

import json
import os
import subprocess
import sys

import pytest
from paths import CHILDREN

MiB = 1 << 20


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    child = subprocess.run(
        [sys.executable, CHILDREN / "jax_pinned.py", tmp_path_factory.mktemp("pinned")],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        },
        timeout=250,
    )
    assert child.returncode == 0, child.stderr[-4000:]
    return json.loads(child.stdout.splitlines()[-1])


# --- Saving


def test_arrays_of_every_kind_are_saved_bit_by_bit(answers):
    assert answers["values"] == {"saved": [], "async": []}


def test_one_shard_per_distinct_box_is_copied_and_all_of_them_at_once(answers):
    answer = answers["distinct"]
    assert answer["wrong"] == []
    assert answer["calls"] == [[MiB // 2] * 8 + [2 * MiB] * 2 + [4 * MiB]]


def test_arrays_may_be_donated_and_changed_as_soon_as_the_call_has_returned(answers):
    assert answers["donation"] == []


def test_a_state_within_the_limit_is_one_batch_which_is_written_from_pinned_memory(answers):
    answer = answers["memory"]["52MiB"]
    assert answer == {
        "streamed": [False] * 3,
        "within": True,
        "calls": 3,
        "most": 48,
        "left": 0,
        "kept": 0,
        "wrong": [],
    }


def test_a_larger_state_streams_in_batches_within_the_limit(answers):
    answer = answers["memory"]["24MiB"]
    assert answer["most"] <= 24 / 4
    assert {key: answer[key] for key in ("streamed", "within", "kept", "wrong")} == {
        "streamed": [True] * 3,
        "within": True,
        "kept": 0,
        "wrong": [],
    }


def test_a_manager_has_xla_take_the_memory_of_the_first_save_beforehand_and_give_it_back(answers):
    assert answers["warmed"] == {"asked": 2, "alike": True, "left": 0, "held": 0, "wrong": []}


@pytest.mark.parametrize("cap", [64, 40, 0])
def test_where_xla_refuses_memory_smaller_batches_are_copied_or_none_by_way_of_it(answers, cap):
    asked, streamed, wrong = answers["refused"][str(cap)]
    assert asked == [80, 30, 30, 20]
    assert not streamed
    assert wrong == []


def test_another_error_of_xla_fails_the_call_and_publishes_nothing(answers):
    assert answers["refused"]["-1"] == [[80], "INTERNAL: broken", False]


def test_without_pinned_memory_all_copies_of_a_batch_are_asked_for_in_one_call(answers):
    assert answers["kinds_without"] == {"transferred": 0, "calls": 1, "wrong": []}


# --- Restoring


def test_arrays_are_restored_with_several_transfers_under_way(answers):
    assert answers["restored"]["wrong"] == []
    assert answers["restored"]["waits"] < 40


def test_no_buffer_is_reused_before_its_transfers_are_complete_whatever_their_order(answers):
    (wrong, under_way), (wrong_without_waits, _) = (
        answers["ring"]["whole"],
        answers["ring"]["broken"],
    )
    assert wrong == 0
    assert under_way > 4
    assert wrong_without_waits > 0, "the schedules would not show a wait that is missing"


def test_after_an_error_all_transfers_are_waited_for(answers):
    assert answers["failed"]["names"]
    assert answers["failed"]["most"] > 0
    assert answers["failed"]["pending"] == 0
