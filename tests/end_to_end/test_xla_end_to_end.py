"""torch_xla SPMD on 8 virtual devices, through real storage, onto other meshes."""

import json
import os
import sys

import forks
import pytest
from paths import CHILDREN

pytestmark = pytest.mark.xla
CHILD = CHILDREN / "xla_end_to_end.py"
PAIRS = 80


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    env = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"}
    command = [sys.executable, str(CHILD), str(tmp_path_factory.mktemp("xla")), str(PAIRS)]
    done = forks.run(command, env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_any_mesh_and_spec_restores_onto_any_other_bit_by_bit(seen):
    assert seen["pairs"]["wrong"] == []
    assert seen["pairs"]["pairs"] == PAIRS


def test_restoring_compiles_nothing(seen):
    assert seen["pairs"]["compiles"] == 0
    assert seen["training"]["compiles"] == 0


def test_training_goes_on_from_a_meta_module_and_a_fresh_optimizer(seen):
    training = seen["training"]
    assert training["equal"]
    assert training["equal_moments"]
    assert training["found"] == pytest.approx(training["expected"], rel=1e-4)


def test_optimizer_moments_are_laid_out_as_asked_without_a_dummy_step(seen):
    assert "devices=[2,4]" in seen["training"]["moment_sharding"]


def test_tied_weights_are_one_tensor_again(seen):
    assert seen["training"]["tied"]
    assert seen["training"]["tied_in_record"]


def test_a_sharding_that_cannot_be_is_refused_with_both_numbers(seen):
    kind, message = seen["errors"]["larger mesh"]
    assert kind == "ShardingError"
    assert "16" in message
    assert "8" in message
    assert "w" in message
    assert seen["errors"]["longer spec"][0] == "ShardingError"


def test_a_skipped_tensor_is_not_read_from_the_devices_and_restores_from_the_base_to_any_layout(
    seen,
):
    answer = seen["skipping"]
    assert answer == {
        **answer,
        "tensors read": 1,
        "written": 8 * 48 * 4,
        "base": True,
        "equal": True,
        "other": True,
    }
    assert answer["op_sharding"].startswith("{devices=[1,4,2]")
