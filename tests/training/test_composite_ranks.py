"""Composite tensors inside of DTensors, and values that each process has for itself, in jobs of
several processes.

The programs: `tests/children/composite_ranks.py`.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from composites import scaled
from ranks import asked

import shardckpt
from shardckpt.errors import MismatchError


@pytest.fixture(scope="module")
def ranks():
    with asked("composite_ranks") as run:
        yield run


def version_of(path):
    return json.loads((path / "checkpoint.json").read_text())["version"]


def test_shards_of_a_composite_tensor_are_shards_of_its_parts_on_any_mesh(ranks, tmp_path):
    url = tmp_path / "c"
    ranks("save_sharded", 2, url)
    whole = scaled(3)
    parts = shardckpt.restore(url)["w"]
    assert (parts["data_"] == whole.data_.numpy()).all()
    assert (parts["scale"] == whole.scale.numpy()).all()
    like = {"w": scaled(9)}
    shardckpt.restore(url, like)
    assert like["w"].data_.equal(whole.data_)
    for count in (2, 4):
        assert ranks("restore_sharded", count, url) == [True] * count


def test_a_block_as_large_as_a_shard_stays_as_it_is_on_any_mesh(ranks, tmp_path):
    ranks("save_sharded", 2, tmp_path / "c", [4, 4])
    for count in (2, 4):
        assert ranks("restore_sharded", count, tmp_path / "c", [4, 4]) == [True] * count


def test_a_part_that_is_not_sharded_as_its_tensor_is_refused_by_name(ranks, tmp_path):
    answers = ranks("uneven", 2, tmp_path / "c")
    assert answers[0][0] == "ShardingError"
    assert (
        "'w': codes of shape (12,) belongs to a shard of shape (3, 4) of the tensor's (5, 4), "
        "and no tensor has such" in answers[0][1]
    )
    assert (
        not (tmp_path / "c" / "checkpoint.json").exists()
        or "tombstone" in (tmp_path / "c" / "checkpoint.json").read_text()
    )


def test_parts_without_the_sharded_dimension_are_kept_for_each_shard(ranks, tmp_path):
    answers = ranks("one_scale_each", 2, tmp_path / "c")
    assert [answer[1:] for answer in answers] == [[5.0, 5.0, True], [6.0, 6.0, True]]
    for refused, *_ in answers:
        assert refused[0] == "ShardingError"
        assert "'w': scale cannot be sharded as the parameter is" in refused[1]


def test_parts_with_one_element_per_shard_are_restored_for_the_same_shards_and_refused_for_others(
    ranks, tmp_path
):
    for rank, (refused, scales) in enumerate(ranks("other_shards", 4, tmp_path / "c")):
        assert [kind for kind, _ in refused] == ["StructureMismatchError"] * 3
        for (_, message), shards in zip(
            refused,
            ("4 shards from [0:8, 0:2]", "4 shards from [0:4, 0:4]", "2 shards from [0:4, 0:8]"),
            strict=True,
        ):
            assert "'w'" in message
            assert 'the context/shards of the parts is "4 shards from [0:2, 0:8] on (' in message
            assert f'there and "{shards} on (' in message
        assert scales == [rank + 0.5] * 3


def test_ranks_without_a_row_of_a_composite_tensor_save_and_restore_with_the_others(
    ranks, tmp_path
):
    answers = ranks("empty_shards", 4, tmp_path / "c")
    assert [equal for equal, _ in answers] == [True] * 4
    for _, (kind, message) in answers:
        assert kind == "ShardingError"
        assert "use sizes that the mesh divides" in message
    whole = scaled(3, (2, 4))
    parts = shardckpt.restore(tmp_path / "c")["w"]
    assert (parts["data_"] == whole.data_.numpy()).all()
    assert (parts["scale"] == whole.scale.numpy()).all()


def test_8_bit_moments_in_dtensors_resume_before_the_first_step(ranks, tmp_path):
    saved = ranks("train_8_bit", 2, tmp_path / "c", 1)
    resumed = ranks("train_8_bit", 2, tmp_path / "c", 0)
    assert resumed == saved
    assert saved[0][0] == ["DTensor/Code"]


@pytest.mark.parametrize("size", [8, 301])
def test_moments_that_each_rank_has_for_itself_resume_by_rank(ranks, tmp_path, size):
    local = ["optimizer/state/*/q", "optimizer/state/*/scale"]
    saved = ranks("local_optimizer", 2, tmp_path / "c", size, 1, local)
    assert ranks("local_optimizer", 2, tmp_path / "c", size, 0, local) == saved
    assert version_of(tmp_path / "c") == [4, 0]
    names = shardckpt.open(tmp_path / "c").names()
    assert [name for name in names if "/q" in name] == [
        "optimizer/state/weight/q/0",
        "optimizer/state/weight/q/1",
    ]
    both = shardckpt.restore(tmp_path / "c")["optimizer"]["state"]["weight"]["q"]
    assert [both[0].dtype, sum(len(q) for q in both.values())] == [np.int8, size]
    (error,) = ranks("local_optimizer", 1, tmp_path / "c", size, 0, local)
    assert error[0] == MismatchError.__name__
    assert (
        "belongs to each process alone; 2 processes saved it, and 1 restore. Restore in as many "
        "processes" in error[1]
    )


@pytest.mark.parametrize("wrapping", ["DDP", "FSDP2"])
def test_statistics_of_each_rank_in_a_module_come_back_to_that_rank_and_are_refused_unless_named(
    ranks, tmp_path, wrapping
):
    answers = ranks("local_module", 2, tmp_path / "c", wrapping)
    for rank, (statistics, unnamed) in enumerate(answers):
        fill = rank + 3
        assert statistics == [fill, [fill] * (5 + fill), [float(fill)] * 4, [float(fill)] * 2]
        assert unnamed[0] == "CommitError"
    assert "train_state(local=" in answers[0][1][1]


@pytest.mark.parametrize(
    ("pattern", "refused"), [("of the last/value", False), ("model/_extra_stat", True)]
)
def test_a_local_pattern_that_selects_nothing_of_any_rank_is_refused_by_name(
    ranks, tmp_path, pattern, refused
):
    answers = ranks("local_patterns", 2, tmp_path / "c", [pattern])
    if refused:
        assert [kind for kind, _ in answers] == ["OptionError"] * 2
        assert all(
            f"the pattern {pattern!r} selects no value of this state on any process" in text
            for _, text in answers
        )
    else:
        assert answers == [None, None]
