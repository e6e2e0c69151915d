"""A model that was trained and saved on a mesh of devices answers elsewhere as it did there, from
files that others' loaders know."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from paths import CHILDREN
from safetensors import safe_open

import shardckpt

INDEX = "model.safetensors.index.json"
# `make test` has what others' loaders find in files of a real model, see test_minilm.py and
# test_hf_models.py.
# Frameworks take their time to be imported on a busy machine.
pytestmark = [pytest.mark.xla, pytest.mark.slow, pytest.mark.timeout(300)]


def run(child: str, *arguments: Path, **variables: str) -> str:
    """The last line that a child prints."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        **variables,
    }
    done = subprocess.run(
        [sys.executable, CHILDREN / child, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().rpartition("\n")[2]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a checkpoint of 8 devices, `run`, and what was exported of it, `model`."""
    folder = tmp_path_factory.mktemp("trained")
    layout = json.loads(run("trained_llama.py", folder, PJRT_DEVICE="CPU", CPU_NUM_DEVICES="8"))
    assert "devices=[4,2]" in layout
    report = shardckpt.export_safetensors(
        folder / "run",
        folder / "model",
        include="model/**",
        strip_prefix="model/",
        config=folder / "model",
        max_shard_size="30KB",
    )
    assert len(report.files) > 3
    return folder


def test_transformers_gives_the_same_logits(trained):
    run("inference.py", trained / "model", trained / "loaded.npy", USE_TORCH_XLA="0")
    expected, logits = np.load(trained / "logits.npy"), np.load(trained / "loaded.npy")
    assert logits.dtype == np.float32
    assert logits.tobytes() == expected.tobytes()
    # On the devices XLA multiplies and adds in another order, in float32 as well.
    assert np.allclose(logits, np.load(trained / "on_devices.npy"), rtol=1e-4, atol=1e-5)


def test_a_loader_that_walks_through_the_index_finds_each_tensor_once(trained):
    """As vLLM does it: of the files in the folder those that the index names
    (`filter_duplicate_safetensors_files`), every name in them."""
    folder = trained / "model"
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    named = {str(folder / file) for file in weight_map.values()}
    files = sorted(str(path) for path in folder.glob("*.safetensors"))
    assert [file for file in files if file in named] == files
    seen = []
    for file in files:
        with safe_open(file, "numpy") as opened:
            for name in opened.keys():  # noqa: SIM118
                assert Path(file).name == weight_map[name]
                seen.append(name)
    checkpoint = shardckpt.open(trained / "run")
    assert len(seen) == len(set(seen))
    assert set(seen) == set(weight_map)
    assert {f"model/{name}" for name in seen} == {
        name for name in checkpoint.names() if name.startswith("model/")
    }


def test_a_slice_of_a_file_is_that_of_the_checkpoint(trained):
    """As loaders with tensor parallelism take their part of a weight, and no more."""
    folder, checkpoint = trained / "model", shardckpt.open(trained / "run")
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    for name, file in weight_map.items():
        whole = checkpoint.read(f"model/{name}")
        with safe_open(folder / file, "numpy") as opened:
            part = opened.get_slice(name)
            assert (part.get_shape(), part.get_dtype()) == (list(whole.shape), "F32")
            rows = slice(len(whole) // 4, len(whole) // 2)
            assert np.array_equal(part[rows], whole[rows])
            if whole.ndim == 2:
                columns = slice(whole.shape[1] // 2, None)
                assert np.array_equal(part[:, columns], whole[:, columns])
            assert opened.get_tensor(name).tobytes() == whole.tobytes()
