"""The code and the commands of docs/export.md run as they stand there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import safetensors.torch
import torch
from convert_states import random, saved, sharded
from typer.testing import CliRunner

from shardckpt.cli.app import app

DOCS = (Path(__file__).parents[2] / "docs" / "export.md").read_text()


def test_the_code_and_the_commands_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = {"model": {"layers": [{"q_proj.weight": random((64, 32), seed=i)} for i in range(2)]}, "step": 100}
    saved("run/100", state, {"**": sharded("a", "b")})
    blocks = re.findall(r"^```(python|sh)\n(.*?)^```", DOCS, re.MULTILINE | re.DOTALL)
    assert [kind for kind, _ in blocks] == ["sh", "python"]
    for kind, block in blocks:
        if kind == "python":
            exec(compile(block, "docs/export.md", "exec"), {})
        else:
            words = shlex.split(block)
            assert words[0] == "shardckpt"
            result = CliRunner().invoke(app, words[1:])
            assert result.exit_code == 0, result.output
        found = safetensors.torch.load_file("model.safetensors")
        assert {name: (tensor.shape, tensor.dtype) for name, tensor in found.items()} == {
            f"model.layers.{i}.q_proj.weight": ((64, 32), torch.bfloat16) for i in range(2)
        }
        Path("model.safetensors").unlink()


@pytest.mark.parametrize("name", ["include", "exclude", "dtype", "metadata", "overwrite", "memory_limit", "verify"])
def test_every_option_is_described(name):
    assert f"`{name}=" in DOCS
