"""Indexing a stored tensor reads what numpy would select."""

from __future__ import annotations

import operator
import pickle
import tempfile
import tracemalloc

import numpy as np
import pytest
import safetensors.numpy
import torch
from counting import steps
from forgery import at_most
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import shardckpt
from shardckpt import errors
from shardckpt.layout import dtypes
from shardckpt.reading import lazy_array


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lazy")
    rng = np.random.default_rng(0)
    state = {
        f"w{n}": rng.integers(0, 1 << 30, shape, np.int32)
        for n, shape in enumerate([(), (7,), (6, 5), (4, 3, 9), (0, 4)])
    }
    shardckpt.save(folder / "c", state)
    return shardckpt.open(folder / "c"), state


@settings(deadline=None)
@given(st.data())
def test_any_basic_index_selects_what_numpy_selects(checkpoint, data):
    opened, state = checkpoint
    name = data.draw(st.sampled_from(sorted(state)))
    index = data.draw(hnp.basic_indices(state[name].shape))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lazy_array, "MOST_BOXES", data.draw(st.sampled_from([1, 4, 1 << 16])))
        patch.setattr(lazy_array, "BYTES_BETWEEN", data.draw(st.sampled_from([0, 64, 1 << 16])))
        actual = opened[name][index]
    expected = state[name][index]
    assert type(actual) is type(expected)
    assert actual.shape == expected.shape
    assert np.array_equal(actual, expected)


def test_it_reads_that_and_no_more(tmp_path):
    w = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)
    shardckpt.save(tmp_path / "c", {"w": w})
    opened = shardckpt.open(tmp_path / "c")
    assert np.array_equal(opened["w"][128:256], w[128:256])
    assert opened.stats.bytes_read <= 1.1 * w[128:256].nbytes
    assert opened.stats.bytes_needed == w[128:256].nbytes
    assert np.array_equal(opened["w"][::512, ::-1], w[::512, ::-1])


def test_small_rows_with_a_step_are_read_with_what_lies_between(tmp_path):
    w = np.arange(1 << 16, dtype=np.float32).reshape(1 << 12, 16)
    shardckpt.save(tmp_path / "c", {"w": w})
    lazy, first = shardckpt.open(tmp_path / "c")["w"], []
    lazy[:1]

    def read():
        first.append(lazy[::2])

    assert steps(read) < 4 * steps(lambda: lazy[...])
    assert np.array_equal(first[0], w[::2])


def test_an_index_with_a_step_takes_memory_for_what_it_reads_and_no_more(tmp_path):
    w = np.arange(1 << 20, dtype=np.uint32).astype(np.int8)
    shardckpt.save(tmp_path / "c", {"w": w})
    lazy = shardckpt.open(tmp_path / "c")["w"]
    for index in (slice(None, None, 2), slice(None, None, -3)):
        lazy[:1]
        tracemalloc.start()
        part = lazy[index]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert np.array_equal(part, w[index])
        assert part.base is None or part.base.nbytes == part.nbytes
        assert peak < 8 * w.nbytes


def test_a_part_that_no_memory_holds_is_refused_by_name():
    lazy = lazy_array.LazyArray(
        "w", (1 << 60, 4), dtypes.by_name("int8"), None, lambda *_: None, (1,)
    )
    for index in (..., (slice(None, None, 2), 0)):
        with pytest.raises(errors.BudgetError, match=r"w: there is no memory .*; read a smaller"):
            lazy[index]
    lazy = lazy_array.LazyArray(
        "w", (3 << 30,), dtypes.by_name("int8"), None, lambda *_: None, (1,)
    )
    with at_most(4 << 30), pytest.raises(errors.BudgetError, match="w: there is no memory"):
        lazy[::2]  # all is read, and there is no memory for the half of it beside it


def test_it_is_an_array_for_others(checkpoint):
    opened, state = checkpoint
    lazy = opened["w3"]
    assert (lazy.shape, lazy.dtype, lazy.ndim, lazy.size, lazy.nbytes, len(lazy)) == (
        (4, 3, 9),
        np.dtype(np.int32),
        3,
        108,
        432,
        4,
    )
    assert np.array_equal(np.asarray(lazy), state["w3"])
    assert np.array_equal(np.from_dlpack(lazy), state["w3"])
    assert np.array_equal(np.asarray(lazy, np.float64), state["w3"].astype(np.float64))
    with pytest.raises(ValueError, match="must copy"):
        np.asarray(lazy, copy=False)
    assert [row.tolist() for row in opened["w2"]] == state["w2"].tolist()


def test_an_array_without_dimensions_is_its_element(checkpoint):
    opened, state = checkpoint
    lazy = opened["w0"]
    assert lazy == state["w0"]
    assert (int(lazy), float(lazy), bool(lazy)) == (state["w0"], state["w0"], True)
    assert np.from_dlpack(lazy) == state["w0"]
    assert torch.from_dlpack(lazy).shape == ()
    with pytest.raises(TypeError, match="without dimensions"):
        list(lazy)


def test_arrays_are_compared_by_their_elements(checkpoint):
    opened, state = checkpoint
    assert (opened["w1"] == state["w1"]).all()
    assert (opened["w1"] != opened["w1"]).tolist() == [False] * 7
    for number in (bool, int, float):
        with pytest.raises(TypeError, match=r"w1: an array of shape \(7,\) is not one number"):
            number(opened["w1"])


def test_a_comparison_that_needs_no_elements_reads_none(tmp_path):
    shardckpt.save(tmp_path / "c", {"w": np.arange(6).reshape(2, 3)})
    opened = shardckpt.open(tmp_path / "c")
    w = opened["w"]
    assert w not in (None, "a", {}, shardckpt.Target())
    assert w != "a"
    for other in (np.ones(2), [1, 2], torch.ones(3, 2)):
        for compare in (operator.eq, operator.ne):
            with pytest.raises(ValueError, match="shape mismatch"):
                compare(w, other)
    assert opened.stats.bytes_read == 0
    assert (w == 1).tolist() == (w == np.int8(1)).tolist() == [[False, True, False], [False] * 3]
    assert (w == [[0], [4]]).sum() == 2
    assert (torch.ones(3) != w).sum() == 5


def test_it_can_be_pickled_and_reads_the_same_checkpoint_or_says_that_it_is_gone(tmp_path):
    shardckpt.save(tmp_path / "c", {"w": np.arange(5)})
    pickled = pickle.dumps(shardckpt.open(tmp_path / "c")["w"])
    assert pickle.loads(pickled)[1:3].tolist() == [1, 2]
    options = shardckpt.SaveOptions(overwrite=True)
    shardckpt.save(tmp_path / "c", {"w": np.zeros(5)}, options=options)
    with pytest.raises(errors.ReplacedError, match="was replaced"):
        pickle.loads(pickled)
    safetensors.numpy.save_file({"w": np.arange(5)}, tmp_path / "w.safetensors")
    with pytest.raises(errors.OptionError, match="format safetensors cannot be pickled; pass its"):
        pickle.dumps(shardckpt.open(tmp_path / "w.safetensors")["w"])


@pytest.mark.parametrize("index", [7, (0, 0, 0, 0), "a", [1, 2], True, (..., ...), 1.5])
def test_other_indices_are_errors(checkpoint, index):
    with pytest.raises(IndexError, match="w3"):
        checkpoint[0]["w3"][index]


def test_dtypes_of_ml_dtypes_and_layouts_are_kept():
    import torch

    with tempfile.TemporaryDirectory() as folder:
        shardckpt.save(f"{folder}/c", {"w": torch.arange(6, dtype=torch.bfloat16)})
        lazy = shardckpt.open(f"{folder}/c")["w"]
        assert (lazy.dtype.name, lazy[2:4].tolist(), lazy.sharding) == ("bfloat16", [2, 3], None)
