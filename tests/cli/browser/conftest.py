"""The page of one plan."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

import shardckpt
from shardckpt import Mesh, PartitionSpec, SaveOptions, Sharding
from shardckpt.cli.app import app

EVIL = [
    "</script><img src=x onerror=alert(1)>",
    "\"'><svg onload=alert(2)>",
    "&lt;b&gt;\u202e{{7*7}}",
    "a" * 200,
]


@pytest.fixture(scope="session")
def planned(tmp_path_factory):
    """The page of a plan, and its document."""
    top = tmp_path_factory.mktemp("plan")
    mesh = Mesh((4, 2), ("data", "model"))
    rng = np.random.default_rng(0)
    layers = {
        f"layers.{i}.w": rng.integers(0, 9, (256 + 64 * i, 512)).astype(np.float32)
        for i in range(12)
    }
    state = {
        "model": layers | {name: np.ones((300, 300), np.float32) for name in EVIL},
        "embed": np.ones((1031, 256), np.float32),
    }
    shardings = {
        "model/layers*": Sharding(mesh, PartitionSpec("data", "model")),
        "embed": Sharding(mesh, PartitionSpec("data")),
    }
    shardckpt.save(
        top / "</title><script>alert(3)</script>", state, options=SaveOptions(shardings=shardings)
    )
    source = next(path for path in top.rglob("checkpoint.json")).parent
    rules = ["--rule", "model/layers*=(model,data)", "--rule", "embed=(None,model)"]
    command = [
        "plan",
        source,
        "--mesh",
        "data=2,model=3",
        *rules,
        "--devices-per-host",
        1,
        "--rate",
        "1GiB",
        "--html",
        top / "plan.html",
        "--json",
    ]
    result = CliRunner().invoke(app, [str(argument) for argument in command])
    assert result.exit_code == 0, result.output
    return top / "plan.html", json.loads(result.stdout)


@pytest.fixture(scope="session")
def on_one_host(tmp_path_factory):
    """The page of a plan for one host that one host has written."""
    top = tmp_path_factory.mktemp("one")
    sharding = Sharding(Mesh((4, 2), ("data", "model")), PartitionSpec("data", "model"))
    shardckpt.save(
        top / "a",
        {"w": np.ones((256, 256), np.float32)},
        options=SaveOptions(shardings={"w": sharding}),
    )
    command = [
        "plan",
        top / "a",
        "--mesh",
        "model=4",
        "--rule",
        "w=(None,model)",
        "--rate",
        "1GiB",
        "--html",
        top / "plan.html",
    ]
    result = CliRunner().invoke(app, [str(argument) for argument in command])
    assert result.exit_code == 0, result.output
    return top / "plan.html"
