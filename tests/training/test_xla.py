"""The whole state of a training under torch_xla SPMD, in new objects, on 8 virtual devices."""

from __future__ import annotations

import json
import os
import sys

import forks
import pytest
from paths import CHILDREN

pytestmark = pytest.mark.xla
CHILD = CHILDREN / "training_xla.py"


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    env = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(CHILD), str(tmp_path_factory.mktemp("xla") / "c")]
    done = forks.run(command, env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_on_the_same_mesh_losses_are_those_of_the_uninterrupted_training_bit_by_bit(seen):
    """Dropout draws from torch_xla's generator, which has been put back."""
    assert seen["(4, 2)"]["losses"] == seen["expected"]


def test_on_another_mesh_training_goes_on_from_the_same_step(seen):
    assert seen["(2, 4)"]["losses"] == pytest.approx(seen["expected"], rel=1e-4)
    assert seen["(2, 4)"]["step"] == 3


@pytest.mark.parametrize("mesh", ["(4, 2)", "(2, 4)"])
def test_restoring_compiles_nothing_and_leaves_nothing_to_compute_and_keeps_the_parameters(
    seen, mesh
):
    assert (seen[mesh]["compiles"], seen[mesh]["pending"]) == (0, 0)
    assert seen[mesh]["same parameters"]


@pytest.mark.parametrize(
    ("mesh", "parts"), [("(4, 2)", "devices=[2,4]"), ("(2, 4)", "devices=[4,2]")]
)
def test_moments_of_an_optimizer_that_has_made_no_step_are_sharded_like_their_parameters(
    seen, mesh, parts
):
    weight, moment = seen[mesh]["layouts"]
    assert weight == moment
    assert parts in moment


def test_a_moment_of_another_dtype_than_its_parameter_is_as_it_was_and_sharded_like_it(seen):
    dtype, equal, (weight, moment) = seen["wide moment"]
    assert (dtype, equal) == ("torch.float32", True)
    assert weight == moment
