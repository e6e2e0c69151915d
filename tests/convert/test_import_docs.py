"""The code and the commands of docs/import.md run as they stand there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from paths import DOCS
from safetensors.numpy import save_file
from typer.testing import CliRunner

import shardckpt
from shardckpt.cli.app import app
from shardckpt.convert.detect import FORMATS
from shardckpt.errors import FormatError

PAGE = (DOCS / "import.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
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
    assert {name: array.tobytes() for name, array in got.items()} == {
        name: array.tobytes() for name, array in WEIGHTS.items()
    }


def test_the_code_runs(made: Path) -> None:
    exec(compile(BLOCKS[0], "docs/import.md", "exec"), {})
    check(made)


@pytest.mark.usefixtures("made")
def test_the_code_joins_a_universal_checkpoint_of_deepspeed() -> None:
    for kind, value in (("fp32", 1), ("exp_avg", 2), ("exp_avg_sq", 3)):
        for name in ("a.weight", "b.weight"):
            Path("universal/zero", name).mkdir(parents=True, exist_ok=True)
            torch.save(
                {"param": torch.full((2, 3), value), "cat_dim": 0},
                Path("universal/zero", name, f"{kind}.pt"),
            )
    with pytest.raises(FormatError, match=r"universal checkpoint of DeepSpeed.*docs/import\.md"):
        shardckpt.import_checkpoint("universal", "run/universal")
    exec(compile(BLOCKS[2], "docs/import.md", "exec"), {"shardckpt": shardckpt})
    state = shardckpt.restore("run/universal")
    assert {
        kind: {name: int(array.max()) for name, array in tensors.items()}
        for kind, tensors in state.items()
    } == {
        "model": {"a.weight": 1, "b.weight": 1},
        "exp_avg": {"a.weight": 2, "b.weight": 2},
        "exp_avg_sq": {"a.weight": 3, "b.weight": 3},
    }


def test_the_command_runs(made: Path) -> None:
    (block,) = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    result = CliRunner().invoke(app, shlex.split(block)[1:])
    assert result.exit_code == 0, result.output
    check(made)


def test_every_format_of_the_table_is_one() -> None:
    named = set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))
    assert named <= FORMATS.keys()
    assert "safetensors" in named
