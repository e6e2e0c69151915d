"""The code and the commands of docs/reshard.md run as they stand there."""

import re
import shlex

import numpy as np
import pytest
from paths import DOCS
from typer.testing import CliRunner

import shardckpt
from shardckpt import Mesh, PartitionSpec, SaveOptions, Sharding
from shardckpt.cli.app import app

PAGE = (DOCS / "reshard.md").read_text()


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = {
        "layers": [
            {"q_proj.weight": np.random.default_rng(i).random((64, 32), np.float32)}
            for i in range(2)
        ],
        "step": 100,
    }
    fsdp = Sharding(Mesh((8,), ("fsdp",)), PartitionSpec("fsdp"))
    shardckpt.save("run/100", state, options=SaveOptions(shardings={"**": fsdp}))
    return state


@pytest.mark.parametrize(
    "block", re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
)
def test_the_code_runs(run, block):
    exec(compile(block, "docs/reshard.md", "exec"), {})
    check(run)


@pytest.mark.parametrize("block", re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
def test_the_commands_run(run, block):
    for line in block.splitlines():
        words = shlex.split(line)
        assert words[0] == "shardckpt"
        result = CliRunner().invoke(app, words[1:])
        assert result.exit_code == 0, result.output
    check(run)


def check(state):
    made = shardckpt.open("run/100-tp4")
    assert made.verify().ok
    assert made.info("layers/0/q_proj.weight").layout == Sharding(
        Mesh((4,), ("model",)), PartitionSpec("model")
    )
    got = shardckpt.restore("run/100-tp4")
    assert got["step"] == 100
    for before, after in zip(state["layers"], got["layers"], strict=True):
        assert before["q_proj.weight"].tobytes() == after["q_proj.weight"].tobytes()
