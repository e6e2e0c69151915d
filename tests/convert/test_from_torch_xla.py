"""Directories that torch_xla's own CheckpointManager wrote on 8 virtual devices, on a (4, 2)
mesh."""

from __future__ import annotations

import json
import sys

import forks
import ml_dtypes
import numpy as np
import pytest
from foreign_contents import contents
from paths import CHILDREN

from shardckpt import restore
from shardckpt.convert.files.file_version import Candidate
from shardckpt.convert.formats.dcp import source as from_dcp
from shardckpt.convert.formats.torch_xla import source as from_torch_xla
from shardckpt.convert.importing import import_checkpoint
from shardckpt.errors import NotFoundError, OptionError
from shardckpt.io.url import parse

pytestmark = [pytest.mark.xla, pytest.mark.slow]
CHILD = CHILDREN / "torch_xla_manager.py"
SHAPES = {
    "both": ((8, 6), np.float32),
    "uneven": ((10, 3), ml_dtypes.bfloat16),
    "columns": ((3, 16), np.int64),
    "unsigned": ((16,), np.uint16),
    "replicated": ((5,), np.float32),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Steps 10 and 20 of one state."""
    directory = tmp_path_factory.mktemp("xla") / "base"
    forks.run(
        [sys.executable, CHILD],
        input=json.dumps(str(directory)),
        text=True,
        check=True,
        capture_output=True,
        timeout=250,
    )
    return directory


def check(state, unsigned=np.uint16):
    assert set(state["model"]) == set(SHAPES)
    for name, (shape, dtype) in {**SHAPES, "unsigned": ((16,), unsigned)}.items():
        expected = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
        assert state["model"][name].dtype == expected.dtype
        assert state["model"][name].tobytes() == expected.tobytes()
    assert state["optimizer"] == {
        "state": {"0": {"step": np.float32(3)}},
        "param_groups": [{"lr": 0.1, "params": [0, 1]}],
    }
    assert state["epoch"] == 2


def test_a_step_is_read_and_what_torch_xla_dropped_is_named(base, tmp_path):
    report = import_checkpoint(base / "10", tmp_path / "ours", trust_pickle=True)
    assert report.format == "torch_xla"
    check(restore(tmp_path / "ours"))
    assert "the state had names without stored data: model.dropped." in report.notes
    assert "silently drops" in report.notes[-1]


def test_an_asynchronous_save_is_read_too_with_the_dtypes_that_it_says(base):
    state = contents(from_torch_xla.open_foreign(parse(base / "20"), trust_pickle=True))
    check(state, unsigned=np.int16)  # torch_xla says so: its copy on the host is signed


def test_every_device_has_a_piece_of_its_own(base):
    tensors = from_torch_xla.open_foreign(parse(base / "10"), trust_pickle=True).structure.tensors
    assert [piece.shape for piece in tensors["model/both"].pieces] == [(2, 3)] * 8
    assert [piece.shape for piece in tensors["model/uneven"].pieces] == [(2, 3)] * 5


def test_of_several_steps_one_is_to_be_named_and_of_one_it_is_taken(base, tmp_path):
    assert (
        from_torch_xla.looks_like(Candidate.at(parse(base)))
        == "steps of torch_xla's CheckpointManager: 10, 20"
    )
    with pytest.raises(OptionError, match=r"has the steps 10, 20; name one: .*/20"):
        from_torch_xla.open_foreign(parse(base), trust_pickle=True)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "30").mkdir()
    with pytest.raises(NotFoundError, match="no complete step"):
        from_torch_xla.open_foreign(parse(tmp_path / "base"), trust_pickle=True)
    (tmp_path / "base" / "40").symlink_to(base / "10")
    check(contents(from_torch_xla.open_foreign(parse(tmp_path / "base"), trust_pickle=True)))


def test_a_step_is_told_from_other_directories_of_dcp(base):
    assert (
        from_torch_xla.looks_like(Candidate.at(parse(base / "10")))
        == "a step of torch_xla's CheckpointManager: .metadata and .manager_metadata"
    )
    assert from_dcp.looks_like(Candidate.at(parse(base / "10"))) is None
