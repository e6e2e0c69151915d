"""A state's fingerprint is that of its checkpoint, however the state was cut, and not that of any
other state."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from one_of_several import Interrupted, on_threads

import shardckpt
from shardckpt import Mesh, SaveOptions, Sharding, errors
from shardckpt import PartitionSpec as P
from shardckpt.format.documents import open_envelope
from shardckpt.format.fingerprint import Fingerprint

DTYPES = ["float32", "bfloat16", "float8_e4m3fn", "uint4", "int64", "bool", "complex64"]
SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)


def array(shape, dtype, seed):
    bits = np.random.default_rng(seed).integers(0, 2, (*shape, np.dtype(dtype).itemsize), np.uint8)
    return np.ascontiguousarray(bits).reshape(-1).view(dtype)[: int(np.prod(shape))].reshape(shape)


def fingerprint_recorded(url):
    """The fingerprint that the save recorded, which equals the one computed by reading."""
    recorded = shardckpt.open(url).fingerprint()
    assert recorded == shardckpt.open(url).fingerprint(recorded=False)
    return recorded


@pytest.mark.long
@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), min_size=1, max_size=5),
    st.sampled_from(["packed", "zarr"]),
    st.sampled_from([None, "zstd"]),
    st.booleans(),
    st.integers(0, 3),
)
def test_what_was_recorded_is_the_states_own_however_it_was_stored(
    tmp_path_factory, tensors, layout, compression, background, axis
):
    path = tmp_path_factory.mktemp("c")
    state = {f"t{i}": array(shape, dtype, i) for i, (shape, dtype) in enumerate(tensors)}
    on_paper = {
        name: Sharding(Mesh((4,), ("x",)), P(*[None] * axis, "x"))
        for name, a in state.items()
        if a.ndim > axis
    }
    options = SaveOptions(
        layout=layout, compression=compression, shardings=on_paper, fingerprint=True
    )
    if background:
        shardckpt.save_async(path / "c", state, options=options).wait()
    else:
        shardckpt.save(path / "c", state, options=options)
    assert shardckpt.open(path / "c").record.fingerprint is not None
    assert fingerprint_recorded(path / "c") == shardckpt.fingerprint(state)
    assert shardckpt.open(path / "c").verify().ok
    shardckpt.save(path / "plain", state)
    assert shardckpt.open(path / "plain").record.fingerprint is None
    assert shardckpt.open(path / "plain").fingerprint() == shardckpt.fingerprint(state)


def test_large_tensors_of_several_blocks_and_threads(tmp_path):
    rng = np.random.default_rng(0)
    state = {
        "a": rng.standard_normal((6000, 3000), np.float32),
        "b": torch.randn(3000, 7000),
        "c": torch.randn(7000, 3000).t(),
    }
    shardckpt.save(tmp_path / "c", state, options=SaveOptions(fingerprint=True))
    assert fingerprint_recorded(tmp_path / "c") == shardckpt.fingerprint(state)


def test_a_host_lists_the_sums_of_those_tensors_alone_of_which_it_writes_elements(tmp_path):
    state = {f"w{i}": np.full(100_000, i, np.float32) for i in range(8)}

    def act(coordinator):
        shardckpt.save(
            tmp_path / "c",
            state,
            options=SaveOptions(fingerprint=True),
            coordinator=coordinator,
        )

    assert on_threads(2, act) == [None, None]
    files = [*(tmp_path / "c").rglob("sums.json")]
    listed = [
        name for file in files for name in open_envelope(file.read_bytes(), file.name)["sums"]
    ]
    assert len(files) == 2
    assert sorted(listed) == sorted(state.keys() - {"w0"}), "the sums of zeros are zero"
    assert fingerprint_recorded(tmp_path / "c") == shardckpt.fingerprint(state)


def test_numpy_torch_and_a_transposed_view_have_one_fingerprint_and_a_changed_bit_another():
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    fingerprint = shardckpt.fingerprint({"w": a})
    assert fingerprint == shardckpt.fingerprint({"w": torch.arange(12.0).reshape(3, 4)})
    assert fingerprint == shardckpt.fingerprint(
        {"w": torch.arange(12.0).reshape(3, 4).t().contiguous().t()}
    )
    assert fingerprint != shardckpt.fingerprint({"w": np.nextafter(a, 99)})
    assert fingerprint != shardckpt.fingerprint({"v": a})
    assert fingerprint != shardckpt.fingerprint({"w": a.reshape(4, 3)})
    assert fingerprint != shardckpt.fingerprint({"w": a.view(np.int32)})
    assert len(fingerprint.total) == 32


def test_tied_tensors_count_once_and_small_leaves_do_not(tmp_path):
    weight = torch.randn(5, 5)
    fingerprint = shardckpt.fingerprint({"a": weight, "b": weight, "step": 3})
    assert [*fingerprint.tensors] == ["a"]
    shardckpt.save(
        tmp_path / "c", {"a": weight, "b": weight, "step": 4}, options=SaveOptions(fingerprint=True)
    )
    assert fingerprint_recorded(tmp_path / "c") == fingerprint


def test_tensors_in_a_base_are_read(tmp_path):
    frozen, own = np.arange(20000.0), np.ones(9)
    shardckpt.save(tmp_path / "1", {"frozen": frozen, "own": own})
    options = SaveOptions(base=tmp_path / "1", skip="frozen", fingerprint=True)
    shardckpt.save(tmp_path / "2", {"frozen": frozen, "own": own * 2}, options=options)
    assert fingerprint_recorded(tmp_path / "2") == shardckpt.fingerprint(
        {"frozen": frozen, "own": own * 2}
    )


def test_a_comparison_reads_no_tensor_whose_recorded_fingerprints_are_equal(tmp_path):
    from shardckpt.reading.compare import compare

    state = {"same": np.arange(5000.0), "other": np.zeros(5000)}
    for name, value in (("a", 0), ("b", 1)):
        shardckpt.save(
            tmp_path / name,
            state | {"other": state["other"] + value},
            options=SaveOptions(fingerprint=True),
        )
    a, b = shardckpt.open(tmp_path / "a"), shardckpt.open(tmp_path / "b")
    comparison = compare(a, b)
    assert [value.name for value in comparison.values] == ["other"]
    assert comparison.tensors_compared == 2
    assert 40000 <= a.stats.bytes_read < 80000


def test_a_damaged_record_of_a_fingerprint_is_refused_and_reported(tmp_path):
    shardckpt.save(tmp_path / "c", {"w": np.arange(5.0)}, options=SaveOptions(fingerprint=True))
    (file,) = (tmp_path / "c").glob("*/fingerprint.json")
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(data)
    with pytest.raises(errors.FormatError, match=r"fingerprint\.json"):
        shardckpt.open(tmp_path / "c").fingerprint()
    assert [
        damage.file.rpartition("/")[2] for damage in shardckpt.open(tmp_path / "c").verify().damage
    ] == ["fingerprint.json"]
    assert shardckpt.open(tmp_path / "c").fingerprint(recorded=False) == shardckpt.fingerprint(
        {"w": np.arange(5.0)}
    )


def test_a_manager_proves_what_lies_in_memory(tmp_path, monkeypatch):
    with shardckpt.CheckpointManager(tmp_path, options=SaveOptions(fingerprint=True)) as manager:
        state = {"model": {"w": torch.randn(30, 40)}, "step": 1}
        manager.save(1, state)
        manager.wait()
        into = {"model": {"w": torch.zeros(30, 40)}, "step": 0}
        assert manager.restore(into, check=True).state["step"] == 1
        assert manager.restore(into, only="model/**", check=True).step == 1
        half = {"model": {"w": torch.zeros(30, 40, dtype=torch.float16)}, "step": 0}
        with pytest.raises(errors.CorruptionError, match="model/w differ"):
            manager.restore(half, cast=True, check=True)
        monkeypatch.setattr(
            "shardckpt.training.manager.restore_adapted",
            lambda *_, **__: {"model": {"w": into["model"]["w"] + 1}},
        )
        with pytest.raises(errors.CorruptionError, match="model/w differ"):
            manager.restore(into, check=True)
    with shardckpt.CheckpointManager(tmp_path / "none") as manager:
        manager.save(1, state)
        manager.wait()
        with pytest.raises(errors.OptionError, match=r"fingerprint=True"):
            manager.restore(into, check=True)


@pytest.mark.long
def test_the_command_prints_it(tmp_path):
    state = {"a": np.arange(5.0), "b": np.ones((3, 3), ml_dtypes.bfloat16)}
    shardckpt.save(tmp_path / "c", state)
    fingerprint = shardckpt.fingerprint(state)
    command = [sys.executable, "-m", "shardckpt", "fingerprint", tmp_path / "c"]
    printed = subprocess.run(
        [*command, "--tensors"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"COLUMNS": "200"},
    ).stdout
    assert [line.split()[0] for line in printed.splitlines()] == [
        fingerprint.total,
        *fingerprint.tensors.values(),
    ]
    document = json.loads(
        subprocess.run(
            [*command, "--json", "--read"], capture_output=True, text=True, check=True
        ).stdout
    )
    assert (document["fingerprint"], document["tensors"]) == (
        fingerprint.total,
        fingerprint.tensors,
    )
    assert Fingerprint(document["tensors"]) == fingerprint


def test_an_interrupted_fingerprint_is_an_error_that_names_the_process():
    def act(coordinator):
        process = coordinator.world.process
        state = {"w": np.ones(3), f"own{process}": np.ones(3)}
        if process:
            coordinator.at = "/shares/fingerprint#0/1"
            with pytest.raises(KeyboardInterrupt):
                shardckpt.fingerprint(state, coordinator=coordinator)
            return None
        return shardckpt.fingerprint(state, coordinator=coordinator)

    error, _ = on_threads(2, act, Interrupted)
    assert str(error).startswith("process 1 has failed, or was interrupted")


def test_a_process_that_cannot_read_its_tensors_is_heard_by_all():
    def act(coordinator):
        kind = "datetime64[s]" if coordinator.world.process else np.float32
        return shardckpt.fingerprint({"w": np.ones(3).astype(kind)}, coordinator=coordinator)

    heard, own = on_threads(2, act)
    assert type(heard) is type(own) is errors.DtypeError
    assert str(heard) == f"process 1 failed with {own}"


def test_small_tensors_that_all_processes_have_are_sent_as_a_digest():
    def act(coordinator):
        state = {f"step of parameter {i}": np.full(3, i) for i in range(1000)}
        return shardckpt.fingerprint(state, coordinator=coordinator).total, dict(coordinator.keys)

    (one, keys), (other, _) = on_threads(2, act)
    assert one == other
    assert max(map(len, keys.values())) < 100_000
