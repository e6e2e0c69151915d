"""Mistakes of a first day: what was meant is said."""

import numpy as np
import pytest
from safetensors.numpy import save_file


@pytest.fixture
def weights(tmp_path):
    (tmp_path / "hf model").mkdir()
    save_file({"w": np.ones(4, np.float32)}, tmp_path / "hf model" / "model.safetensors")
    return tmp_path / "hf model"


@pytest.mark.parametrize("command", [["reshard", "DST"], ["export", "DST"]])
@pytest.mark.parametrize("of", ["file", "directory"])
def test_a_checkpoint_of_another_format_is_to_be_imported(run, weights, command, of):
    place = weights / "model.safetensors" if of == "file" else weights
    name, *rest = command
    answer = run(name, place, *rest)
    assert (answer.status, answer.out) == (3, "")
    assert answer.err.startswith(
        f"error: {place}: not a shardckpt checkpoint, but safetensors (model.safetensors"
    )
    assert f"`shardckpt import '{place}' DST`" in answer.err


def test_a_directory_of_no_known_format_is_no_checkpoint(run, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("x")
    assert run("info", tmp_path / "notes").err == f"error: {tmp_path}/notes: no checkpoint there.\n"
