"""Two runs with metrics and layouts, and a service over them."""

import ml_dtypes
import numpy as np
import pytest
from serving import serving

import shardckpt
from shardckpt import Mesh, PartitionSpec, SaveOptions, Sharding

MESH = Mesh((4, 2), ("data", "model"))
SHARDINGS = {"model/embed.weight": Sharding(MESH, PartitionSpec("data", "model")), "model/head": Sharding(MESH, PartitionSpec("model"))}


def state(step):
    rng = np.random.default_rng(step)
    return {
        "model": {
            "embed.weight": rng.normal(size=(64, 48)).astype(np.float32),
            "head": rng.normal(size=(16, 8)).astype(ml_dtypes.bfloat16),
            "scale": np.full((), step, np.float32),
            "none": np.zeros((0, 4), np.float32),
        },
        "optimizer": {"count": np.arange(300, dtype=np.int64)},
        "step": step,
    }


def save_run(root, steps, **metrics):
    """Save steps of a run."""
    for step in steps:
        metadata = {"metrics": {"loss": 4 - step / 10, **metrics}}
        shardckpt.save(root / str(step), state(step), options=SaveOptions(shardings=SHARDINGS, metadata=metadata))


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """The directory of two runs."""
    top = tmp_path_factory.mktemp("served") / "runs"
    save_run(top / "llama", (10, 20, 30))
    save_run(top / "tiny-gpt", (10,), loss="nan")
    return top


@pytest.fixture(scope="session")
def service(runs):
    """The service over them, as `lab`."""
    with serving(("lab", runs)) as running:
        yield running
