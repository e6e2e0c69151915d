"""`shardckpt stats`."""

from __future__ import annotations

import tracemalloc

import ml_dtypes
import numpy as np
import pytest

import shardckpt
from shardckpt import Mesh, PartitionSpec, SaveOptions, Sharding
from shardckpt.reading.inspection.statistics import state_statistics, tensor_statistics
from shardckpt.reading.reader import LOCAL_RUN


def test_all_elements_are_read_within_the_memory_limit(run, saver, tmp_path):
    values = np.random.default_rng(1).standard_normal((1500, 1000)).astype(np.float32)
    saver(tmp_path / "1", {"w": values, "b": np.zeros(7, ml_dtypes.bfloat16), "n": np.arange(5)})
    doc = run("stats", tmp_path / "1", "--memory-limit", "1MiB", "--json").json
    by_name = {one["name"]: one for one in doc["tensors"]}
    assert by_name["w"]["read"] == values.size
    assert by_name["w"]["mean"] == pytest.approx(values.mean(dtype=np.float64))
    assert sum(by_name["w"]["histogram"]) == values.size
    assert (by_name["b"]["zeros"], by_name["n"]["max"]) == (7, 4)
    assert doc["all"]["read"] == values.size + 12
    assert "1,500,012 elements of 3 tensors" in run("stats", tmp_path / "1").out


@pytest.mark.long
def test_tensors_of_two_dtypes_are_read_within_the_memory_limit(saver, tmp_path):
    large = np.zeros((8192, 1024), ml_dtypes.float8_e4m3fn)  # 8 MiB
    places = [tmp_path / name for name in ("small", "wide")]
    for place, dtype in zip(places, (large.dtype, np.float64), strict=True):
        saver(place, {"w": large.astype(dtype)})
    a, b = map(shardckpt.open, places)
    assert a.reader, b.reader
    tracemalloc.start()
    try:
        assert state_statistics(a, b, memory_limit="16MiB").changes[0].norm == 0
        assert tracemalloc.get_traced_memory()[1] < (16 << 20) + 2 * LOCAL_RUN[1]
    finally:
        tracemalloc.stop()


def test_many_tensors_take_little_memory(tmp_path):
    number = 300
    shardckpt.save(tmp_path / "1", {f"w{i}": np.full(2, i) for i in range(number)})
    checkpoint = shardckpt.open(tmp_path / "1")
    state_statistics(checkpoint, only=["w0"])
    tracemalloc.start()
    try:
        statistics = state_statistics(checkpoint)
        assert tracemalloc.get_traced_memory()[0] < number * 2048
    finally:
        tracemalloc.stop()
    assert statistics.to_json()["all"]["read"] == 2 * number
    assert statistics.to_json()["tensors"][7]["max"] == 7


def test_a_sample_of_a_tensor_of_many_chunks_takes_little_memory(tmp_path):
    n = 1 << 16
    sharding = Sharding(Mesh((n,), ("x",)), PartitionSpec("x"))
    options = SaveOptions(shardings={"w": sharding})
    shardckpt.save(tmp_path / "1", {"w": np.arange(n, dtype=np.int32)}, options=options)
    checkpoint = shardckpt.open(tmp_path / "1")
    assert checkpoint.tensor("w").num_chunks == n
    checkpoint["w"][:1]  # the chunk table is read
    tracemalloc.start()
    try:
        sample = tensor_statistics(checkpoint, "w", budget=4096)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert (sample["read"], sample["min"], sample["max"]) == (64, 0, n - n // 64)


def test_two_checkpoints_are_listed_by_the_size_of_changes(run, saver, tmp_path):
    a = {
        "same": np.ones(4),
        "little": np.ones(4),
        "much": np.ones(4),
        "shape": np.ones(3),
        "gone": np.ones(2),
        "zero": np.zeros(2),
    }
    b = {
        "same": np.ones(4),
        "little": np.full(4, 1.01),
        "much": np.full(4, 2.0),
        "shape": np.ones(4),
        "new": np.ones(2),
        "zero": np.ones(2),
    }
    saver(tmp_path / "a", a)
    saver(tmp_path / "b", b)
    doc = run("stats", tmp_path / "a", tmp_path / "b", "--json").json
    assert [(change["name"], change["relative"]) for change in doc["other"]["changes"]] == [
        ("zero", None),
        ("much", 1.0),
        ("little", pytest.approx(0.01)),
        ("same", 0.0),
    ]
    assert {one["name"] for one in doc["left_out"]} == {"shape", "gone", "new"}
    lines = run("stats", tmp_path / "a", tmp_path / "b").out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["zero", "much", "little"]
    assert "3 tensors changed, 1 unchanged" in lines


def test_changes_to_nan_come_first_and_no_difference_is_too_small_to_count(run, saver, tmp_path):
    a = {
        "to nan": np.ones(4, np.float32),
        "nan in both": np.array([np.nan, 1.0]),
        "tiny": np.array([1e-200, 1.0]),
        "last bit": np.array([2**62, 5]),
        "far apart": np.array([-(2**63)]),
        "of another dtype": np.array([2**60]),
        **{f"much {i}": np.ones(4) for i in range(40)},
    }
    b = {
        **{name: value + 1 for name, value in a.items()},
        "to nan": np.array([1, np.nan, 1, 1], np.float32),
        "nan in both": a["nan in both"],
        "tiny": np.array([0.0, 1.0]),
        "last bit": np.array([2**62 + 1, 5]),
        "far apart": np.array([2**63 - 1]),
        "of another dtype": np.array([2**60 + 1], np.uint64),
    }
    saver(tmp_path / "1", a)
    saver(tmp_path / "2", b)
    changes = run("stats", tmp_path / "1", tmp_path / "2", "--json").json["other"]["changes"]
    by_name = {change["name"]: change for change in changes}
    assert changes[0] == {"name": "to nan", "norm": "nan", "relative": "nan", "largest": "nan"}
    assert changes[-1] == {"name": "nan in both", "norm": 0.0, "relative": 0.0, "largest": 0.0}
    assert by_name["tiny"]["norm"] == by_name["tiny"]["largest"] == 1e-200
    assert by_name["last bit"]["norm"] == by_name["last bit"]["largest"] == 1
    assert by_name["far apart"]["largest"] == 2.0**64
    assert by_name["of another dtype"]["largest"] == 1
    out = run("stats", tmp_path / "1", tmp_path / "2").out
    assert out.splitlines()[1].startswith("to nan")
    assert "45 tensors changed, 1 unchanged" in out


def test_tensors_without_finite_elements_do_not_change_from_zero_and_empty_ones_are_counted(
    run, saver, tmp_path
):
    for name, value in (("a", np.nan), ("b", 1.0)):
        saver(tmp_path / name, {"w": np.full(3, value), "none": np.zeros((0, 3))})
    text = run("stats", tmp_path / "a", tmp_path / "b").out
    assert "from 0" not in text
    assert text.splitlines()[1].split()[:2] == ["w", "–"]
    assert "1 tensor changed, 1 unchanged" in text


def test_the_change_of_a_tensor_whose_norm_no_float_can_hold_is_not_a_percentage(
    run, saver, tmp_path
):
    for name, value in (("a", 1e200), ("b", 2e200)):
        saver(tmp_path / name, {"w": np.full(3, value)})
    assert "nan%" not in run("stats", tmp_path / "a", tmp_path / "b").out


def test_what_is_not_finite_stands_out(run, saver, tmp_path):
    saver(tmp_path / "1", {"w": np.array([1.0, np.nan, np.inf, np.nan])})
    out = run("stats", tmp_path / "1").out
    assert "2 NaN, 1 infinite" in out
    assert "2 NaN and 1 infinite" in out


def test_complex_tensors_are_left_out_with_the_reason(run, saver, tmp_path):
    saver(tmp_path / "1", {"z": np.ones(2, np.complex64), "w": np.ones(2)})
    assert "left out: z: elements of complex64" in run("stats", tmp_path / "1").out


def test_a_pattern_that_selects_nothing_and_a_limit_too_low_are_errors(run, checkpoint):
    assert run("stats", checkpoint, "--only", "nosuch").status == 5
    assert run("stats", checkpoint, "--memory-limit", "1KiB").status == 2


def test_damage_is_an_error_that_names_the_tensor(run, tmp_path):
    shardckpt.save(tmp_path / "1", {"w": np.arange(100_000)})
    for path in (tmp_path / "1").rglob("d/*"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    answer = run("stats", tmp_path / "1")
    assert answer.status == 4
    assert "w[" in answer.err
