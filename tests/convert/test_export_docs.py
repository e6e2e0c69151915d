"""The code and the commands of docs/export.md run as they stand there."""

from __future__ import annotations

import re
import shlex
from inspect import signature
from pathlib import Path

import pytest
import safetensors.torch
import torch
from convert_states import random, saved, sharded
from paths import DOCS
from typer.testing import CliRunner

import shardckpt
from shardckpt.cli.app import app
from shardckpt.convert.whole_state import FORMATS

PAGE = (DOCS / "export.md").read_text()
BLOCKS = re.findall(r"^```(python|sh)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
NAMES = [f"model.layers.{i}.q_proj.weight" for i in range(2)]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A working directory with the checkpoint that the page speaks of."""
    monkeypatch.chdir(tmp_path)
    state = {"model": {name: random((64, 32), seed=i) for i, name in enumerate(NAMES)}, "step": 100}
    saved("run/100", state, {"**": sharded("a", "b")})


def loaded(path):
    return {
        name: (tuple(tensor.shape), tensor.dtype)
        for name, tensor in safetensors.torch.load_file(path).items()
    }


def test_the_commands_run(run):
    for line in "".join(block for kind, block in BLOCKS if kind == "sh").splitlines():
        words = shlex.split(line)
        assert words[0] == "shardckpt"
        result = CliRunner().invoke(app, words[1:])
        assert result.exit_code == 0, result.output
    assert loaded("hf/tiny/model.safetensors") == dict.fromkeys(NAMES, ((64, 32), torch.bfloat16))
    assert loaded("model.safetensors") == dict.fromkeys(NAMES, ((64, 32), torch.float32))
    assert loaded("out.safetensors") == {
        f"h.{i}.q_proj.weight": ((64, 32), torch.bfloat16) for i in range(2)
    }
    assert torch.load("state.pt", weights_only=True)["step"] == 100


def test_the_code_runs(run):
    namespace = {}
    for code in (block for kind, block in BLOCKS if kind == "python"):
        exec(compile(code, "docs/export.md", "exec"), namespace)
    assert loaded("weights.safetensors") == dict.fromkeys(NAMES, ((64, 32), torch.bfloat16))
    assert Path("run-dcp/100/.metadata").is_file()


@pytest.mark.parametrize("name", [*signature(shardckpt.export_safetensors).parameters][2:])
def test_every_option_is_described(name):
    assert f"`{name}=" in PAGE


def test_every_format_is_described():
    assert re.findall(r"^\| `([\w-]+)` \|", PAGE, re.MULTILINE) == [
        "safetensors",
        "peft",
        *FORMATS,
        "canonical-delta",
    ]
