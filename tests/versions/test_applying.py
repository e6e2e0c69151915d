"""The pause of a follower: `apply` copies what has changed, plans nothing, and finds out that
tensors were replaced."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import shardckpt
from shardckpt.errors import CorruptionError, LeafError, ShapeMismatchError
from shardckpt.versions import applying

SHAPE = (2048, 512)
"""In bfloat16 sixteen chunks of 128 KiB."""


def bfloat16(array):
    return torch.from_numpy(array.astype(np.float32)).bfloat16()


@pytest.fixture
def copied(monkeypatch):
    """Bytes that each call has copied, and whether it planned first."""
    calls = []

    def copy_all(pairs):
        calls.append(sum(target.nbytes for target, _ in pairs))
        real(pairs)

    def plan(*args):
        calls.append("planned")
        return planning(*args)

    real, planning = applying.copy_all, applying.plan_apply
    monkeypatch.setattr(applying, "copy_all", copy_all)
    monkeypatch.setattr("shardckpt.versions.follower.plan_apply", plan)
    return calls


def published(url, states):
    with shardckpt.Publisher(url, keep=None) as publisher:
        for step, state in enumerate(states):
            publisher.publish(step, state)
            publisher.wait()


def states_of(count):
    """Versions of two tensors, of which one element of `w` changes at a time."""
    states = [{"w": np.zeros(SHAPE, np.float32), "layers": [np.ones(SHAPE, np.float32)]}]
    for step in range(1, count):
        w = states[-1]["w"].copy()
        w[600 * step, 3] = step
        states.append({"w": w, "layers": states[0]["layers"]})
    return [
        {"w": bfloat16(state["w"]), "layers": [bfloat16(state["layers"][0])]} for state in states
    ]


def test_apply_copies_the_chunks_that_have_changed_and_plans_nothing(tmp_path, copied):
    states = states_of(3)
    published(tmp_path, states)
    like = {
        "w": torch.zeros(SHAPE, dtype=torch.bfloat16),
        "layers": [torch.zeros(SHAPE, dtype=torch.bfloat16)],
    }
    whole = 2 * like["w"].nbytes
    with shardckpt.follow(tmp_path, like, mode="each") as follower:
        for expected in (whole, 128 << 10, 128 << 10):
            version = follower.poll().prepare()
            assert copied.pop() == "planned"
            assert not copied
            version.apply()
            assert [copied.pop()] == [expected]
            assert not copied
            assert torch.equal(like["w"], states[version.step]["w"])
            assert sorted(version.prove()) == ["layers/0", "w"]


def test_versions_that_are_prepared_and_not_applied_are_copied_with_the_next(tmp_path, copied):
    states = states_of(4)
    published(tmp_path, states)
    like = {
        "w": torch.zeros(SHAPE, dtype=torch.bfloat16),
        "layers": [torch.zeros(SHAPE, dtype=torch.bfloat16)],
    }
    with shardckpt.follow(tmp_path, like, mode="each") as follower:
        follower.poll().prepare().apply()
        follower.poll().prepare()
        follower.poll().prepare()
        follower.poll().prepare().apply()
    assert copied[-1] == 3 * (128 << 10)
    assert torch.equal(like["w"], states[3]["w"])


@pytest.mark.parametrize("replaced", ["before prepare", "after prepare"])
@pytest.mark.parametrize("what", ["the leaf", "its memory"])
def test_tensors_that_were_replaced_get_all_elements(tmp_path, copied, replaced, what):
    states = states_of(2)
    published(tmp_path, states)
    like = {
        "w": torch.zeros(SHAPE, dtype=torch.bfloat16),
        "layers": [torch.zeros(SHAPE, dtype=torch.bfloat16)],
    }

    def replace():
        if what == "the leaf":
            like["w"] = torch.full(SHAPE, 7, dtype=torch.bfloat16)
            follower.like["w"] = like["w"]
        else:
            like["layers"][0].data = torch.full(SHAPE, 7, dtype=torch.bfloat16)

    with shardckpt.follow(tmp_path, like, mode="each") as follower:
        follower.poll().prepare().apply()
        if replaced == "before prepare":
            replace()
        version = follower.poll().prepare()
        copied.clear()
        if replaced == "after prepare":
            replace()
        state = version.apply()
        assert ("planned" in copied) == (replaced == "after prepare")
        assert copied[-1] == 2 * like["w"].nbytes
        assert state["w"] is like["w"]
        assert torch.equal(like["w"], states[1]["w"])
        assert sorted(version.prove()) == ["layers/0", "w"]


def test_a_tensor_of_another_shape_after_prepare_is_refused_before_anything_is_copied(
    tmp_path, copied
):
    published(tmp_path, states_of(2))
    like = {
        "w": torch.zeros(SHAPE, dtype=torch.bfloat16),
        "layers": [torch.zeros(SHAPE, dtype=torch.bfloat16)],
    }
    with shardckpt.follow(tmp_path, like) as follower:
        version = follower.poll().prepare()
        like["w"].data = torch.zeros((3, 3), dtype=torch.bfloat16)
        with pytest.raises(ShapeMismatchError, match="w"):
            version.apply()
        assert not like["w"].any()
        assert not like["layers"][0].any()
        assert copied == ["planned"] * 2


def test_elements_that_prove_finds_changed_are_copied_with_their_whole_tensor(tmp_path, copied):
    states = states_of(3)
    published(tmp_path, states)
    like = {
        "w": torch.zeros(SHAPE, dtype=torch.bfloat16),
        "layers": [torch.zeros(SHAPE, dtype=torch.bfloat16)],
    }
    with shardckpt.follow(tmp_path, like, mode="each") as follower:
        first, second = follower.poll(), follower.poll()
        first.prepare().apply()
        like["layers"][0][1500, 5] = 9
        second.prepare()
        with pytest.raises(CorruptionError, match="layers"):
            first.prove()
        second.apply()
        assert torch.equal(like["layers"][0], states[1]["layers"][0])
        assert sorted(second.prove()) == ["layers/0", "w"]


def test_tensors_that_are_converted_or_not_filled_in_place_follow_beside_those_that_are(
    tmp_path, copied
):
    jnp = pytest.importorskip("jax.numpy")
    states = [
        {
            "a": np.full(10, step + 1.0),
            "b": np.full(10, step + 1.0),
            "c": np.full(10, step > 0),
            "n": step,
        }
        for step in range(3)
    ]
    published(tmp_path, states)
    like = {
        "a": np.zeros(10, ml_dtypes.bfloat16),
        "b": jnp.zeros(10, jnp.float32),
        "c": np.zeros(10, bool),
        "n": 0,
    }
    with shardckpt.follow(tmp_path, like, mode="each", cast=True) as follower:
        for step in range(3):
            state = follower.poll().prepare().apply()
            assert (like["a"] == step + 1).all()
            assert (np.asarray(state["b"]) == step + 1).all()
            assert (like["c"] == (step > 0)).all()
            assert state["n"] == step


def test_a_tensor_whose_storage_shrank_where_it_is_is_an_error_before_anything_is_copied(
    tmp_path, copied
):
    published(tmp_path, states_of(2))
    like = {
        "w": torch.zeros(SHAPE, dtype=torch.bfloat16),
        "layers": [torch.zeros(SHAPE, dtype=torch.bfloat16)],
    }
    with shardckpt.follow(tmp_path, like, mode="each") as follower:
        follower.poll().prepare().apply()
        version = follower.poll().prepare()
        storage = like["w"].untyped_storage()
        nbytes = storage.nbytes()
        storage.resize_(0)
        storage.resize_(nbytes // 2)  # mostly at the address of before
        copied.clear()
        with pytest.raises(LeafError, match="w': this tensor's elements take"):
            version.apply()
        assert copied == ["planned"]


def test_a_shard_of_a_dtensor_whose_storage_moved_gets_all_elements(tmp_path, copied):
    states = states_of(2)
    published(tmp_path, states)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        like = {
            "w": distribute_tensor(torch.zeros(SHAPE, dtype=torch.bfloat16), mesh, [Shard(0)]),
            "layers": [torch.zeros_like(states[0]["w"])],
        }
        with shardckpt.follow(tmp_path, like, mode="each") as follower:
            follower.poll().prepare().apply()
            version = follower.poll().prepare()
            storage = like["w"].to_local().untyped_storage()
            nbytes, address, others = storage.nbytes(), storage.data_ptr(), []
            while storage.data_ptr() == address:  # the allocator may give the old memory again
                storage.resize_(0)
                others.append(torch.ones(SHAPE, dtype=torch.bfloat16))
                storage.resize_(nbytes)
            like["w"].to_local().zero_()
            copied.clear()
            version.apply()
            assert copied[0] == "planned"
            assert torch.equal(like["w"].to_local(), states[1]["w"])
            assert version.prove() == ["w", "layers/0"]
            assert all((other == 1).all() for other in others)
    finally:
        dist.destroy_process_group()
