"""The code and the commands of docs/import.md run as they stand there."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

import numpy as np
import pytest
from paths import DOCS
from safetensors.numpy import save_file
from typer.testing import CliRunner

import shardckpt
from shardckpt.cli.app import app
from shardckpt.convert.detect import FORMATS

if TYPE_CHECKING:
    from pathlib import Path

PAGE = (DOCS / "import.md").read_text()
WEIGHTS = {
    "model.embed_tokens.weight": np.ones((8, 4), np.float32),
    "model.layers.0.mlp.down_proj.weight": np.full((4, 8), 2, np.float32),
    "model.norm.weight": np.ones(4, np.float32),
}


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hf/llama").mkdir(parents=True)
    save_file(WEIGHTS, tmp_path / "hf/llama/model.safetensors")
    return tmp_path / "run/0"


def check(made: Path) -> None:
    got = shardckpt.restore(made)["model"]
    assert {name: array.tobytes() for name, array in got.items()} == {name: array.tobytes() for name, array in WEIGHTS.items()}


def test_the_code_runs(made: Path) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    exec(compile(block, "docs/import.md", "exec"), {})
    check(made)


def test_the_command_runs(made: Path) -> None:
    (block,) = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    result = CliRunner().invoke(app, shlex.split(block)[1:])
    assert result.exit_code == 0, result.output
    check(made)


def test_every_format_of_the_table_is_one() -> None:
    named = set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))
    assert named <= FORMATS.keys()
    assert "safetensors" in named
