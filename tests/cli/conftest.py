"""Checkpoints for commands to look at, and a way to run commands in this process."""

import json
from dataclasses import dataclass

import numpy as np
import pytest
from typer.testing import CliRunner

import shardckpt
from shardckpt import Mesh, PartitionSpec, SaveOptions, Sharding
from shardckpt.cli.app import app

MESH = Mesh((4, 2), ("data", "model"))


@dataclass(frozen=True)
class Answer:
    """Status and output of a command."""

    status: int
    out: str
    err: str

    @property
    def json(self):
        """The one document on standard output."""
        assert self.err == ""
        assert self.out.isascii()
        return json.loads(self.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@pytest.fixture
def run(monkeypatch):
    """Runs a command on a terminal of that width, without colours."""

    def run(*args, width=80):
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("PYTHONIOENCODING", "utf-8")
        result = CliRunner().invoke(app, [str(arg) for arg in args])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Answer(result.exit_code, result.stdout, result.stderr)

    return run


def state():
    embed = np.arange(64 * 12, dtype=np.float32).reshape(64, 12)
    return {
        "model": {
            "embed": embed,
            "head": embed,
            "layers": [{"w": np.ones((8, 6))}, {"w": np.ones((8, 6))}],
            "norm": np.ones(16, np.float16),
        },
        "opt": {0: {"lr": 0.1}},
        "step": 100,
    }


def save(place, contents=None, **options):
    """Save a small model, sharded over eight devices."""
    shardings = {
        "model/embed": Sharding(MESH, PartitionSpec("data", "model")),
        "model/norm": Sharding(MESH, PartitionSpec("model")),
    }
    if contents is None:
        options = {"shardings": shardings, "metadata": {"loss": 1.25}} | options
    shardckpt.save(place, state() if contents is None else contents, options=SaveOptions(**options))
    return place


@pytest.fixture(scope="session")
def saver():
    """The function that saves."""
    return save


@pytest.fixture
def model():
    """A function that makes the state of `checkpoint` anew."""
    return state


@pytest.fixture
def checkpoint(tmp_path):
    """A small sharded model."""
    return save(tmp_path / "runs" / "step_100")
