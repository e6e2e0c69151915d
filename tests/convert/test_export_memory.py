"""The memory limit holds for tensors of any size and layout, measured in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from convert_states import MiB, saved, sharded
from paths import CHILDREN

from shardckpt.streaming.memory import PROCESS_BYTES

CHILD = CHILDREN / "export_memory.py"


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
    finished = subprocess.run(
        [sys.executable, CHILD, json.dumps(asked)],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )

    assert finished.returncode == 0, finished.stderr
    took = json.loads(finished.stdout)
    assert took["bytes"] == (256 if options else 128) * MiB
    assert took["peak"] <= 48 * MiB + PROCESS_BYTES
    assert took["read"] <= 1.01 * 128 * MiB
    assert (tmp_path / "a.safetensors").stat().st_size > took["bytes"]
