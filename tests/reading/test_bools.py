"""Bools whose bytes are neither 0 nor 1 (a view of bytes, memory that nothing has written) are
stored and restored as 0 and 1."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import tensorstore as ts
import torch

import shardckpt
from shardckpt import SaveOptions
from shardckpt.writing import encoder, save_plan

ODD = [0, 1, 2, 255]


def state():
    """A small one, a large one in many chunks, one with gaps, a scalar."""
    raw = np.resize(np.array(ODD, np.uint8), 400_000)
    return {
        "small": torch.tensor(ODD, dtype=torch.uint8).view(torch.bool),
        "large": raw.view(bool).reshape(400, 1000).copy(),
        "gaps": raw.view(bool).reshape(1000, 400)[:, ::3],
        "scalar": np.array(7, np.uint8).view(bool),
        "other": raw,
    }


def expected():
    return {
        name: np.asarray(leaf)
        if name == "other"
        else np.asarray(np.asarray(leaf).view(np.uint8) != 0)
        for name, leaf in state().items()
    }


def assert_plain(arrays):
    for name, value in expected().items():
        assert arrays[name].view(np.uint8).tobytes() == np.ascontiguousarray(value).tobytes(), name


@pytest.fixture(params=["now", "earlier"])
def saved(request, tmp_path, monkeypatch):
    """Checkpoints of this release and, as an earlier one wrote them, with all bytes as they
    were."""
    if request.param == "earlier":
        for module in (encoder, save_plan):
            monkeypatch.setattr(module, "with_plain_bools", lambda array: array)
    shardckpt.save(tmp_path / "c", state(), options=SaveOptions(fingerprint=True))
    monkeypatch.undo()
    return request.param, tmp_path / "c"


def test_they_are_restored_as_0_and_1_wherever_they_go(saved):
    _, path = saved
    assert_plain(shardckpt.restore(path))
    like = {
        name: np.zeros(np.shape(leaf), np.asarray(leaf).dtype) for name, leaf in state().items()
    }
    assert_plain(shardckpt.restore(path, like))
    array = shardckpt.restore(
        path, {"large": jax.ShapeDtypeStruct((400, 1000), "bool")}, strict="like"
    )["large"]
    assert int(array.sum()) == int(expected()["large"].sum())
    cast = shardckpt.restore(
        path,
        {"large": torch.zeros(400, 1000), "gaps": np.zeros((1000, 134), np.int8)},
        strict="like",
        cast=True,
    )
    assert (cast["large"].unique().tolist(), np.unique(cast["gaps"]).tolist()) == ([0, 1], [0, 1])
    part = shardckpt.open(path).read("large", shardckpt.Box((10, 5), (20, 9)))
    assert set(part.view(np.uint8).ravel().tolist()) == {0, 1}


def test_their_fingerprint_is_that_of_the_values(saved):
    _, path = saved
    plain = {
        name: value if name != "small" else torch.from_numpy(value)
        for name, value in expected().items()
    }
    assert shardckpt.fingerprint(state()) == shardckpt.fingerprint(plain)
    opened = shardckpt.open(path)
    assert (
        opened.fingerprint(recorded=False).tensors
        == opened.fingerprint().tensors
        == shardckpt.fingerprint(plain).tensors
    )


def test_new_checkpoints_and_copies_of_earlier_ones_are_read_by_tensorstore(saved, tmp_path):
    when, path = saved
    if when == "earlier":
        # A copy with other chunks or compression; one without differences links the files as they
        # are.
        mesh = shardckpt.Mesh((2,), ("x",))
        shardckpt.reshard(
            path, tmp_path / "r", mesh=mesh, rules=["large=(x,)", "**=()"], compression="zstd"
        )
        path = tmp_path / "r"
    opened = shardckpt.open(path)
    assert opened.verify().damage == []
    for name in ("small", "large", "scalar"):
        assert (ts.open(opened.stock_spec(name)).result().read().result() == expected()[name]).all()
