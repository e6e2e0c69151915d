"""A training that was killed and resumed, on the same processes or on others, is the training that
was never interrupted.

What is trained, and how: `tests/children/e2e_training.py` and `e2e_training_jax.py`.
"""

from __future__ import annotations

import json

import pytest
from faults import TORTURE

import shardckpt
from shardckpt import Mesh, PartitionSpec, Sharding

pytestmark = pytest.mark.timeout(400)

SAVED, KILLED, STEPS = 4, 6, 8
"""Saved after this step, killed in the middle of this one, the last one."""
TOLERANCE = 1e-5
"""Relative difference of losses whose sums were taken in another order; ten times what was seen."""
JOBS = {
    "FSDP2 and TP": ("torch training", 4, [2, 2]),
    "DDP": ("torch training", 2, []),
    "JAX, 2 processes": ("JAX training", 2, [4, 2]),
}
"""An interrupted training: module, processes, and the shape of the mesh (none for DDP)."""
RESUMED = {
    "FSDP2 and TP": {
        "on 2 processes, FSDP2 alone": (2, [2]),
        "on 6 processes": (6, [3, 2]),
        "on 2 processes, tensor parallelism alone": (2, [1, 2]),
        "under DDP": (2, []),
    },
    "DDP": {"on 3 processes": (3, []), "under FSDP2 and TP": (4, [2, 2])},
    "JAX, 2 processes": {"on 1 process": (1, [2, 2]), "on 3 processes": (3, [3, 4])},
}
"""On what else, by what was interrupted."""
TORTURES = {("JAX, 2 processes", "on 3 processes")}
NAMES = [
    pytest.param(name, marks=[] if name == "FSDP2 and TP" else [pytest.mark.slow]) for name in JOBS
]
"""`make sweeps` has DDP and JAX; `make test` resumes under DDP what FSDP2 saved."""
RESUMES = [
    pytest.param(
        n, p, marks=[pytest.mark.slow] if n != "FSDP2 and TP" or p == "on 6 processes" else []
    )
    for n in JOBS
    for p in RESUMED[n]
    if TORTURE or (n, p) not in TORTURES
]


class Training:
    """A training of one kind: never interrupted, and interrupted."""

    def __init__(self, name, run_job, directory):
        self.framework, self.processes, self.shape = JOBS[name]
        self.run_job, self.url = run_job, directory / "checkpoint"
        self.whole = self.train(self.processes, self.shape)
        self.killed = self.train(
            self.processes, self.shape, save=[SAVED, self.url], kill=KILLED, expect="signal"
        )
        self.truth = json.loads(self.url.with_suffix(".json").read_text())

    def train(self, processes, shape, *, expect=None, **options):
        return self.run_job(
            self.framework, "train", processes, shape, STEPS, options, expect=expect
        )

    def resume(self, processes, shape, **options):
        return self.train(processes, shape, restore=self.url, **options)

    @property
    def losses(self):
        """Those after the save."""
        return self.whole[0]["losses"][SAVED:]


@pytest.fixture(scope="module")
def training(run_job, tmp_path_factory):
    """A function: kind → the `Training`."""
    made = {}

    def of(name):
        if name not in made:
            made[name] = Training(name, run_job, tmp_path_factory.mktemp("training"))
        return made[name]

    return of


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_training_resumed_on_the_mesh_it_had_is_the_one_never_interrupted_bit_by_bit(
    training, name
):
    ours = training(name)
    assert ours.killed == [{"signal": 9}] * ours.processes
    resumed = ours.resume(ours.processes, ours.shape)
    for whole, after in zip(ours.whole, resumed, strict=True):
        assert after["digests"] == ours.truth
        assert after["losses"] == whole["losses"][SAVED:]
        assert after.get("own") == whole.get("own", [])[SAVED:] or "own" not in whole


@pytest.mark.long
@pytest.mark.parametrize(("name", "place"), RESUMES)
def test_a_training_resumed_on_other_processes_has_the_state_bit_by_bit_and_goes_on_like_it(
    training, name, place, record_testsuite_property
):
    ours = training(name)
    resumed = ours.resume(*RESUMED[name][place])
    for after in resumed:
        assert after["digests"] == ours.truth
        assert after["losses"] == pytest.approx(ours.losses, rel=TOLERANCE)
    off = max(abs(a - b) / b for a, b in zip(resumed[0]["losses"], ours.losses, strict=True))
    record_testsuite_property(f"losses of {name} resumed {place} are off by", off)


@pytest.mark.long
def test_losses_would_show_that_the_optimizer_was_forgotten(training):
    ours = training("FSDP2 and TP")
    resumed = ours.resume(ours.processes, ours.shape, only=["model/**", "step", "own"])
    assert resumed[0]["digests"] != ours.truth
    assert resumed[0]["losses"][0] == ours.losses[0]
    assert resumed[0]["losses"][1:] != pytest.approx(ours.losses[1:], rel=100 * TOLERANCE)


def test_what_tensor_parallelism_leaves_alone_is_one_tensor_replicated_over_its_ranks(training):
    """FSDP2 has it on a mesh of its own for each of them."""
    checkpoint = shardckpt.open(training("FSDP2 and TP").url)
    for name in ("model/norm.weight", "optimizer/state/blocks.0.before.bias/exp_avg"):
        assert checkpoint.info(name).layout == Sharding(
            Mesh((2, 2), ("dp", "tp")), PartitionSpec("dp")
        )


@pytest.mark.parametrize("name", NAMES)
def test_tensors_are_those_of_each_framework(training, name):
    kinds = {"FSDP2 and TP": ["DTensor"], "DDP": ["Tensor"], "JAX, 2 processes": None}
    assert training(name).whole[0].get("kinds") == kinds[name]
