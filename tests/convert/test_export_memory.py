"""The memory limit holds for tensors of any size and layout, measured in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from convert_states import MiB, saved, sharded
from paths import CHILDREN

import shardckpt
from shardckpt.streaming.memory import PROCESS_BYTES

CHILD = CHILDREN / "export_memory.py"


def exported(asked):
    """The figures of an export in a process of its own."""
    finished = subprocess.run(
        [sys.executable, CHILD, json.dumps(asked)],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )

    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


@pytest.mark.long
@pytest.mark.parametrize(
    ("spec", "options"),
    [(("a", "b"), {}), (("", "ab"), {"dtype": "float64"})],
    ids=["tiles", "converted columns"],
)
def test_a_tensor_much_larger_than_the_limit_is_exported_within_it(tmp_path, spec, options):
    saved(
        tmp_path / "c",
        {"w": np.arange(32 * MiB, dtype=np.float32).reshape(8192, 4096)},
        {"w": sharded(*spec)},
    )
    asked = {
        "src": str(tmp_path / "c"),
        "dst": str(tmp_path / "a.safetensors"),
        "memory_limit": 48 * MiB,
        **options,
    }
    took = exported(asked)
    assert took["bytes"] == (256 if options else 128) * MiB
    assert took["peak"] <= 48 * MiB + PROCESS_BYTES
    assert took["read"] <= 1.01 * 128 * MiB
    assert (tmp_path / "a.safetensors").stat().st_size > took["bytes"]


@pytest.mark.long
@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_differences_of_a_version_are_written_within_the_limit(tmp_path, encoding):
    rng = np.random.default_rng(0)
    with shardckpt.Publisher(tmp_path / "policy") as publisher:
        for step in (1, 2):
            publisher.publish(
                step, {f"w{i:02d}": rng.integers(0, 256, MiB, np.uint8) for i in range(64)}
            )
            publisher.wait()
    asked = {
        "src": str(tmp_path / "policy"),
        "dst": str(tmp_path / "out"),
        "to": "canonical-delta",
        "since": 1,
        "delta_encoding": encoding,
        "memory_limit": 16 * MiB,
    }
    model = 64 * MiB
    assert exported(asked)["peak"] <= 2 * model + 16 * MiB + PROCESS_BYTES
