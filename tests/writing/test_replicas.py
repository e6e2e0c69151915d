"""Tensors that describe their own shards, and tensors that several processes hold, in jobs of real processes."""

from __future__ import annotations

import numpy as np
import pytest
from processes import Processes

import shardckpt


@pytest.fixture(scope="module")
def job():
    with Processes("replicas") as processes:
        yield processes


def numbered(columns):
    return np.arange(8 * columns, dtype=np.float32).reshape(8, columns)


@pytest.mark.parametrize("columns", [3, 5000])
def test_tensors_that_describe_their_shards_are_saved_as_one_and_restored_in_place(tmp_path, job, columns):
    assert job.run("save_described", 2, tmp_path / "c", columns) == ["saved"] * 2
    found = shardckpt.open(tmp_path / "c")
    np.testing.assert_array_equal(found.read("w"), numbered(columns))
    assert found.verify().damage == []
    assert job.run("restore_described", 2, tmp_path / "c", columns) == [[True] * 3] * 2
    assert job.run("restore_described", 4, tmp_path / "c", columns) == [[True] * 3] * 4


def test_equal_shards_of_two_processes_make_the_global_shape_and_not_one_shard_s(tmp_path, job):
    assert job.run("save_described", 2, tmp_path / "c", 5000, 0.0) == ["saved"] * 2
    assert shardckpt.open(tmp_path / "c").info("w").shape == (8, 5000)


def test_described_shards_are_exported_and_resharded_like_any_others(tmp_path, job):
    from safetensors.numpy import load_file

    job.run("save_described", 2, tmp_path / "c", 40)
    shardckpt.export_safetensors(tmp_path / "c", tmp_path / "e.safetensors")
    np.testing.assert_array_equal(load_file(tmp_path / "e.safetensors")["w"], numbered(40))
    shardckpt.reshard(tmp_path / "c", tmp_path / "r", mesh=shardckpt.Mesh((4,), ("x",)), rules=["w=(x,)"])
    np.testing.assert_array_equal(shardckpt.restore(tmp_path / "r")["w"], numbered(40))


def test_a_module_with_described_parameters_resumes_with_its_moments(tmp_path, job):
    saved = job.run("train_described", 2, tmp_path / "c", False)
    assert job.run("train_described", 2, tmp_path / "c", True) == saved


def test_two_processes_that_describe_the_same_shard_are_named(tmp_path, job):
    answers = job.run("save_same_shard", 2, tmp_path / "c")
    assert {answer["error"] for answer in answers} == {"CommitError"}
    assert "'w' describes its own shards, and processes 0-1 describe the same one" in answers[0]["message"]
