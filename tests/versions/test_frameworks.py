"""Versions of states as frameworks have them: torch_xla SPMD, and adapters over a frozen base."""

from __future__ import annotations

import json
import os
import sys

import forks
import pytest
import torch
from paths import CHILDREN

import shardckpt


@pytest.mark.long
@pytest.mark.xla
def test_torch_xla_tensors_are_published_in_bfloat16_and_followed_on_other_meshes(tmp_path):
    env = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(CHILDREN / "versions_xla.py"), str(tmp_path / "policy")]
    done = forks.run(command, env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    names = ["0.bias", "0.weight", "1.bias", "1.weight"]
    expected = [
        {
            "step": step,
            "base": step > 0,
            "equal": True,
            "proved": names,
            "compiles": 0,
            "layout": True,
        }
        for step in range(4)
    ]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen == dict.fromkeys(("(4, 2)", "(2, 4)", "(8, 1)"), expected)


def test_adapters_alone_are_published_and_followed_beside_a_base_that_stays(tmp_path):
    generator = torch.Generator().manual_seed(0)
    base = {f"layers.{i}.weight": torch.randn(64, 64, generator=generator) for i in range(2)}
    adapters = {
        f"layers.{i}.lora_{kind}": torch.randn(4, 64, generator=generator)
        for i in range(2)
        for kind in "AB"
    }
    like = {name: torch.zeros_like(tensor) for name, tensor in adapters.items()}
    with (
        shardckpt.Publisher(tmp_path, include="**/*lora_*", dtype="bfloat16") as publisher,
        shardckpt.follow(tmp_path, like={"model": like}, cast=True) as follower,
    ):
        for step in range(3):
            for tensor in adapters.values():
                tensor[step] += 1
            publisher.publish(step, {"model": {**base, **adapters}, "step": step})
            publisher.wait()
            version = follower.poll()
            version.prepare().apply()
            assert all(
                torch.equal(like[name], tensor.bfloat16().float())
                for name, tensor in adapters.items()
            )
            assert version.prove() == []  # these have another dtype than the version
    assert {*shardckpt.open(tmp_path / "2").record.structure.tensors} == {
        f"model/{name}" for name in adapters
    }
