"""Records that claim more than there is, or what cannot be, are refused before memory is taken for
it."""

import json
import math

import pytest
from forgery import MIB, at_most, seal

import shardckpt
from shardckpt import ShardckptError, errors


def with_tensor(forgery, **entry):
    """The commit record with another entry for w."""
    commit = json.loads(json.dumps(forgery.commit))
    commit["tensors"]["w"] = {
        k: v for k, v in {**commit["tensors"]["w"], **entry}.items() if v is not None
    }
    return commit


@pytest.mark.parametrize("chunks", [[1, 1], [1, 2**30], [2**30, 2**30]])
def test_a_giant_tensor_is_looked_at_without_counting_its_chunks(forgery, chunks):
    forgery.write(commit=with_tensor(forgery, shape=[2**30, 2**30], chunks=chunks))

    with at_most(256 * MIB):
        checkpoint = shardckpt.open(forgery.url)
        assert checkpoint.info("w").num_chunks == math.prod(2**30 // c for c in chunks)
        assert checkpoint.info("w").nbytes == 2**60
        for box in (None, shardckpt.Box((5, 5), (6, 6))):
            with pytest.raises(ShardckptError, match="w"):
                checkpoint.read("w", box)
        report = checkpoint.verify()
        assert {d.tensor for d in report.damage} >= {"w"}
        assert any("more of its chunks" in d.reason for d in report.damage) == (
            checkpoint.info("w").num_chunks > 20_000
        )
        with pytest.raises(errors.BudgetError, match="only="):
            shardckpt.restore(forgery.url)
        assert set(shardckpt.restore(forgery.url, only="pair/**")) == {"pair"}


def test_a_large_tensor_of_tiny_chunks_that_are_not_there_is_refused_before_they_are_planned(
    forgery,
):
    forgery.write(commit=with_tensor(forgery, shape=[4000, 4000], chunks=[1, 1]))
    with (
        at_most(512 * MIB),
        pytest.raises(errors.MissingDataError, match=r"w\[0:1, 4:5\]|w\[0:1, "),
    ):
        shardckpt.open(forgery.url).read("w")


@pytest.mark.parametrize(
    "entry",
    [
        {"shape": [2**61, 4], "dtype": "complex128", "chunks": [1, 1]},  # 2^67 bytes
        # numpy has no such shape, though it is empty.
        {"shape": [0, 2**61], "dtype": "complex128", "chunks": [1, 1]},
        {"shape": [2], "chunks": [2**60], "dtype": "float64"},  # the padded chunk
        {"shape": [2**63], "chunks": [1]},
        {"shape": [1] * 33, "chunks": [1] * 33},
        {"shape": [-1, 2], "chunks": [1, 1]},
        {"shape": [2.0, 2], "chunks": [1, 1]},
        {"shape": [True, 2], "chunks": [1, 1]},
        {"shape": [4, 4], "chunks": [0, 4]},
        {"shape": [0, 4], "chunks": None, "pieces": []},
        {"shape": [4, 4], "sharding": 2},
        {"shape": [4, 4], "sharding": -1},
        {"shape": [4], "chunks": [4], "sharding": 0},  # a spec for two dimensions
        {"dtype": "object"},
        {"dtype": "float128"},
        {"dtype": ["u1"]},
    ],
)
def test_a_tensor_that_cannot_be_is_refused_when_the_checkpoint_is_opened(forgery, entry):
    forgery.write(commit=with_tensor(forgery, **entry))
    with at_most(512 * MIB), pytest.raises(errors.FormatError, match="'w'"):
        shardckpt.open(forgery.url)


def test_a_short_record_cannot_ask_for_the_devices_of_a_thousand_large_meshes(forgery):
    large = {"shape": [1 << 20], "axes": ["x"], "devices": None}
    for change in (
        {"meshes": [large] * 1000},
        {"shardings": [{"op_sharding": "{replicated}", "devices": 1 << 20}] * 1000},
        {"shardings": [{"op_sharding": "{devices=[1048576]<=[1048576]}"}] * 1000},
        {"meshes": [large], "shardings": [{"mesh": 0, "spec": ["x"], "op_sharding": ""}] * 1000},
        {"shardings": [{"mesh": large, "spec": ["x"], "op_sharding": ""}] * 1000},
    ):
        forgery.write_raw(seal({**forgery.commit, **change}))
        with at_most(1024 * MIB), pytest.raises(errors.FormatError, match="devices together"):
            shardckpt.open(forgery.url)


def pieces(*boxes):
    return [{"start": [a, c], "shape": [b - a, d - c], "chunks": [1, 1]} for a, b, c, d in boxes]


@pytest.mark.long
def test_pieces_that_overlap_or_leave_gaps_are_refused_however_many_they_are(forgery):
    """Comparing each with each other would take minutes: these all have the same rows."""
    n = 10_000
    columns = [(0, 2, i, i + 1) for i in range(n)]
    # One column is missing, another one there twice: the sizes add up.
    twice = [*columns[:-1], columns[0]]
    for boxes, why in (
        (columns, None),
        (twice, "same element"),
        (columns[:-1], "hold"),
        ([*columns[:-1], (0, 2, n, n + 1)], "outside"),
    ):
        commit = with_tensor(
            forgery, shape=[2, n], chunks=None, sharding=None, pieces=pieces(*boxes)
        )
        forgery.write(commit=commit)
        if why is None:
            assert len(shardckpt.open(forgery.url).tensor("w").pieces) == n
        else:
            with pytest.raises(errors.FormatError, match=why):
                shardckpt.open(forgery.url)
