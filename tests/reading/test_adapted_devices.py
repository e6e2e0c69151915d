"""Fitted and joined tensors on devices, against numpy: JAX and torch_xla on 8 virtual devices, and
two ranks that share reads."""

from __future__ import annotations

import json
import os
import sys

import forks
import numpy as np
import pytest
from paths import CHILDREN
from ranks import asked

import shardckpt


def answer_of(program, folder, **env):
    done = forks.run(
        [sys.executable, CHILDREN / program, folder],
        env={**os.environ, "PYTHONWARNINGS": "ignore", **env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
@pytest.mark.timeout(400)
def test_arrays_of_jax_have_what_both_have_and_zeros_elsewhere_on_any_mesh(tmp_path):
    pytest.importorskip("jax")
    flags = "--xla_force_host_platform_device_count=8"
    answer = answer_of("adapted_jax.py", tmp_path, JAX_PLATFORMS="cpu", XLA_FLAGS=flags)
    assert answer["examples"] >= 60
    assert "shape (4,)" in answer["keys"]


@pytest.mark.long
@pytest.mark.xla
@pytest.mark.timeout(400)
def test_tensors_of_torch_xla_have_what_both_have_and_zeros_elsewhere_on_any_mesh(tmp_path):
    answer = answer_of("adapted_xla.py", tmp_path, PJRT_DEVICE="CPU", CPU_NUM_DEVICES="8")
    assert answer["wrong"] == []
    assert answer["count"] == 19
    assert "devices=[8,1]" in answer["layout"]


def test_two_ranks_read_a_renamed_and_fitted_tensor_once_together(tmp_path):
    rows = np.arange(1 << 18, dtype=np.float32).reshape(-1, 256)
    shardckpt.save(tmp_path / "c", {"w": rows})
    with asked("adapted_ranks") as run:
        answers = run("together", 2, str(tmp_path / "c"))
    assert [answer["right"] for answer in answers] == [True, True]
    assert sum(answer["read"] for answer in answers) <= rows.nbytes * 1.01
