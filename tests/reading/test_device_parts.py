"""Restoring onto devices in parts: little host memory, every chunk read once, and new tensors on a
given device.

Devices are imitated (`fake_cuda`); tests/cuda has what needs a GPU.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fake_cuda import FakeCuda

import shardckpt
from shardckpt import Mesh, PartitionSpec, SaveOptions, Sharding, Target, errors
from shardckpt.reading.landing import SLOTS

MiB = 1 << 20


@pytest.fixture
def fake():
    with FakeCuda(1).installed() as fake:
        yield fake
        assert fake.wrong == []
        assert fake.pinned == {}, "pinned memory was not given back"


@pytest.mark.parametrize("layout", ["packed", "zarr"])
@pytest.mark.parametrize("spec", [("x", None), (None, "x"), ("x", "y")])
def test_a_large_tensor_takes_a_small_ring_and_each_chunk_is_read_once(
    fake, tmp_path, spec, layout
):
    value = torch.randn(2048, 1536)
    sharding = Sharding(Mesh((4, 2), ("x", "y")), PartitionSpec(*spec))
    shardckpt.save(
        tmp_path / "c",
        {"w": value, "b": value[0]},
        options=SaveOptions(shardings={"w": sharding}, layout=layout),
    )
    like = {"w": fake.put(torch.zeros(2048, 1536)), "b": fake.put(torch.zeros(1536))}
    seen, once, checkpoint = [], shardckpt.open(tmp_path / "c"), shardckpt.open(tmp_path / "c")
    shardckpt.restore(once, {"w": torch.zeros(2048, 1536), "b": torch.zeros(1536)})
    shardckpt.restore(
        checkpoint,
        like,
        memory_limit="4MiB",
        progress=lambda done, total: seen.append((done, total)),
    )
    assert checkpoint.stats.bytes_read == once.stats.bytes_read
    assert checkpoint.stats.bytes_needed == once.stats.bytes_needed
    assert torch.equal(like["w"], value)
    assert torch.equal(like["b"], value[0])
    assert fake.high_water <= 4 * MiB
    assert fake.pinnings <= SLOTS  # each slot once, however many parts there are
    assert len(seen) > 4
    assert seen[-1] == (value.nbytes + value[0].nbytes,) * 2


def test_tensors_on_a_device_are_sliced_and_joined_in_parts_and_padded_as_a_whole(fake, tmp_path):
    (tmp_path / "m.toml").write_text('[[map]]\nfrom = "e/{i}"\nto = "e"\nstack = 1\n')
    value = torch.randn(1024, 768)
    sharding = Sharding(Mesh((4, 2), ("x", "y")), PartitionSpec("x", "y"))
    state = {"w": value, "v": value[:600], "e": {str(i): value[i * 300 :][:300] for i in range(3)}}
    shardckpt.save(tmp_path / "c", state, options=SaveOptions(shardings={"**": sharding}))
    shapes = {"w": (900, 700), "v": (700, 800), "e": (300, 3, 768)}
    like = {name: fake.put(torch.full(shape, -1.0)) for name, shape in shapes.items()}
    checkpoint = shardckpt.open(tmp_path / "c")
    fit = {"w": "slice", "v": "pad"}
    shardckpt.restore(checkpoint, like, mapping=tmp_path / "m.toml", fit=fit, memory_limit="5MiB")
    assert torch.equal(like["w"], value[:900, :700])
    assert torch.equal(like["v"], torch.nn.functional.pad(value[:600], (0, 32, 0, 100)))
    assert torch.equal(like["e"], torch.stack([value[i * 300 :][:300] for i in range(3)], 1))
    assert fake.high_water <= 5 * MiB


def test_dtypes_are_converted_on_the_way(fake, tmp_path):
    value = torch.randn(300, 70)
    shardckpt.save(tmp_path / "c", {"w": value})
    place = fake.put(torch.zeros(70, 300, dtype=torch.bfloat16).T)
    version = place._version
    assert shardckpt.restore(tmp_path / "c", {"w": place}, cast=True)["w"] is place
    assert torch.equal(place, value.bfloat16())
    assert place._version > version


def test_leaves_that_share_device_memory_are_refused_by_name(fake, tmp_path):
    shardckpt.save(tmp_path / "c", {"a": np.zeros(10, np.float32), "b": np.ones(10, np.float32)})
    memory = fake.put(torch.zeros(15))
    with pytest.raises(
        errors.StructureMismatchError, match=r"^[ab]: in `like` it shares memory with [ab]"
    ):
        shardckpt.restore(tmp_path / "c", {"a": memory[:10], "b": memory[5:]})


def test_tied_leaves_on_a_device_are_one_tensor(fake, tmp_path):
    weight = torch.arange(6.0)
    shardckpt.save(tmp_path / "c", {"a": weight, "b": weight})
    place = fake.put(torch.zeros(6))
    restored = shardckpt.restore(tmp_path / "c", {"a": place, "b": place})
    assert restored["a"] is restored["b"] is place
    assert torch.equal(place, weight)


# --- new tensors


@pytest.mark.parametrize("shape", [(), (0, 4), (5, 3)])
def test_a_target_names_a_device(tmp_path, shape):
    value = torch.randn(shape).bfloat16()
    shardckpt.save(tmp_path / "c", {"w": value, "tied": value})
    cpu = torch.device("cpu")
    restored = shardckpt.restore(tmp_path / "c", {"w": Target(cpu), "tied": Target(cpu)})
    assert restored["w"].device == cpu
    assert torch.equal(restored["w"], value)
    assert restored["w"] is restored["tied"] or not value.numel()
    other = shardckpt.restore(
        tmp_path / "c", {"w": Target(cpu, shape, "float32"), "tied": Target(cpu)}, cast=True
    )
    assert torch.equal(other["w"], value.float())


def test_a_target_of_a_dtype_that_torch_lacks_is_refused_by_name(tmp_path):
    shardckpt.save(tmp_path / "c", {"w": np.zeros(3, "<U1").view(np.int8)[:3]})
    with pytest.raises(errors.DtypeError, match="'w': torch has no dtype int4"):
        shardckpt.restore(
            tmp_path / "c", {"w": Target(torch.device("cpu"), dtype="int4")}, cast=True
        )


@pytest.mark.parametrize(
    ("device", "words"),
    [("meta", "has no memory to restore to"), ("cuda:99", "no tensor can be made on cuda:99 here")],
)
def test_a_device_that_is_not_there_is_refused_by_name(tmp_path, device, words):
    shardckpt.save(tmp_path / "c", {"w": np.zeros(3)})
    with pytest.raises(errors.LeafError, match=f"'w': .*{words}"):
        shardckpt.restore(tmp_path / "c", {"w": Target(torch.device(device))})


def test_a_device_without_memory_for_a_new_tensor_is_named(tmp_path, monkeypatch):
    shardckpt.save(tmp_path / "c", {"model": {"w": np.zeros(3)}})

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(
        errors.BudgetError, match="'model/w': cpu has no memory left to restore this tensor to"
    ):
        shardckpt.restore(tmp_path / "c", {"model": {"w": Target(torch.device("cpu"))}})


def test_a_device_that_runs_full_while_a_tensor_is_filled_is_named(fake, tmp_path, monkeypatch):
    shardckpt.save(tmp_path / "c", {"w": torch.randn(40, 3)})

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(fake, "copy", full)
    with pytest.raises(
        errors.BudgetError, match=r"has no memory left to fill a tensor of shape \(40, 3\)"
    ):
        shardckpt.restore(tmp_path / "c", {"w": fake.put(torch.zeros(40, 3))})


def test_the_default_device_of_the_program_changes_nothing(fake, tmp_path):
    """A model is often made under torch.device("meta"), and restored there too."""
    value = torch.randn(40, 3)
    with torch.device("meta"):
        model = torch.nn.Linear(3, 40)
        assert model.weight.is_meta
        shardckpt.save(tmp_path / "c", {"weight": fake.put(value.clone()), "bias": value[:, 0]})
        like = {"weight": fake.put(torch.zeros(40, 3, device="cpu")), "bias": model.bias}
        restored = shardckpt.restore(tmp_path / "c", like)
    assert torch.equal(restored["weight"], value)
    assert restored["bias"].device.type == "cpu"
    assert torch.equal(restored["bias"], value[:, 0])
