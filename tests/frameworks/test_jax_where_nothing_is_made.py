"""Restores where JAX makes no arrays: inside of traces and under transfer guards; what such a
restore leaves behind."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardckpt
from shardckpt import Target, errors


@pytest.fixture
def saved(tmp_path):
    state = {"a": jnp.arange(8.0), "k": jax.random.split(jax.random.key(0), 3)}
    shardckpt.save(tmp_path / "c", state)
    return tmp_path / "c", state


def test_a_restore_inside_of_a_trace_says_to_call_it_outside(saved):
    path, state = saved
    for like in (
        state,
        jax.eval_shape(lambda: state),
        {"a": Target(state["a"].sharding), "k": state["k"]},
    ):
        for trace in (jax.eval_shape, lambda function: jax.jit(function)()):
            with pytest.raises(
                errors.LeafError,
                match=r"cannot be restored while a function is traced, as in jax.jit or "
                r"jax.eval_shape",
            ):
                trace(lambda like=like: shardckpt.restore(path, like))
    assert shardckpt.restore(path, jax.eval_shape(lambda: state))["a"].tolist() == [*range(8)]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int16, jnp.bfloat16])
def test_a_guard_is_named_and_a_restore_after_it_is_not_refused_for_it(tmp_path, dtype):
    state = {"a": jnp.arange(8, dtype=dtype)}
    shardckpt.save(tmp_path / "c", state)
    for _ in range(2):
        with (
            jax.transfer_guard("disallow_explicit"),
            pytest.raises(errors.LeafError, match=r"Disallowed host-to-device transfer"),
        ):
            shardckpt.restore(tmp_path / "c", state)
        for like in (state, {"a": Target(state["a"].sharding)}):
            assert (shardckpt.restore(tmp_path / "c", like)["a"] == state["a"]).all()


def test_the_shapes_of_keys_in_a_message_are_the_keys_own(saved):
    path, state = saved
    with pytest.raises(
        errors.ShapeMismatchError,
        match=r"k: .* has shape \(3,\), the leaf to restore into has \(5,\)",
    ):
        shardckpt.restore(path, {**state, "k": jax.random.split(jax.random.key(0), 5)})


def test_a_clock_in_the_year_9999_saves(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time_ns", lambda: 253_370_764_800 * 10**9)
    shardckpt.save(tmp_path / "c", {"w": np.arange(3)})
    assert shardckpt.open(tmp_path / "c").verify().damage == []
