"""Restores onto CUDA tensors, random states and process groups on a real GPU. `make cuda` runs
them; elsewhere they are skipped."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

import shardckpt
from shardckpt import SaveOptions, Target, errors
from shardckpt.frameworks import cuda_runtime

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(300),
]

MiB = 1 << 20


@pytest.fixture
def pinned(monkeypatch):
    """Most bytes that were pinned at once, as `pinned[0]`."""
    now, most = {}, [0]
    pin, unpin = cuda_runtime.runtime.pin, cuda_runtime.runtime.unpin

    def counted(address, nbytes):
        error = pin(address, nbytes)
        if not error:
            now[address] = nbytes
            most[0] = max(most[0], sum(now.values()))
        return error

    monkeypatch.setattr(cuda_runtime.runtime, "pin", counted)
    monkeypatch.setattr(
        cuda_runtime.runtime, "unpin", lambda address: (now.pop(address), unpin(address))[1]
    )
    yield most
    assert now == {}


def test_tensors_are_filled_in_place_through_a_small_ring(tmp_path, pinned):
    value = {
        "large": torch.randn(16384, 4096),
        "half": torch.randn(513, 77).bfloat16(),
        "scalar": torch.tensor(3.5),
    }
    shardckpt.save(tmp_path / "c", value)
    like = {name: torch.zeros_like(tensor, device="cuda") for name, tensor in value.items()}
    strided = {**like, "large": torch.zeros(4096, 16384, device="cuda").T}
    for places in (like, strided):
        torch.cuda._sleep(200_000_000)
        for place in places.values():
            place.fill_(7)  # queued before: must not come after
        restored = shardckpt.restore(tmp_path / "c", places, memory_limit="64MiB")
        assert all(restored[name] is places[name] for name in value)
        assert all(torch.equal(places[name].cpu(), tensor) for name, tensor in value.items())
    assert 0 < pinned[0] <= 64 * MiB


def test_many_small_tensors_are_copied_together_beside_large_ones(tmp_path, pinned):
    kinds = [
        torch.float32,
        torch.bfloat16,
        torch.int64,
        torch.bool,
        torch.complex128,
        torch.float8_e4m3fn,
    ]
    value = {
        f"s{i}": torch.randint(0, 2, (1 + i % 9, 1 + i % 50)).to(kinds[i % len(kinds)])
        for i in range(2000)
    }
    value |= {f"w{i}": torch.randn(1024, 1024) for i in range(40)}
    shardckpt.save(tmp_path / "c", value)
    places = {name: torch.zeros_like(tensor, device="cuda") for name, tensor in value.items()}
    torch.cuda._sleep(200_000_000)
    for place in places.values():
        place.view(torch.uint8).fill_(1)  # queued before: must not come after
    shardckpt.restore(tmp_path / "c", places, memory_limit="128MiB")
    # Queued later: must not come before.
    changed = {name: place.clone() for name, place in places.items()}
    assert all(
        torch.equal(changed[name].cpu().view(torch.uint8), tensor.view(torch.uint8))
        for name, tensor in value.items()
    )
    assert 0 < pinned[0] <= 128 * MiB


def test_a_damaged_chunk_reaches_no_tensor(tmp_path):
    value = {f"w{i}": torch.full((512, 1024), float(i + 1)) for i in range(12)}
    shardckpt.save(tmp_path / "c", value, options=SaveOptions(layout="zarr"))
    (chunk, *_) = sorted((tmp_path / "c").rglob("w7/c/0/0"))
    damaged = bytearray(chunk.read_bytes())
    damaged[-100] ^= 1
    chunk.write_bytes(damaged)
    like = {name: torch.full_like(tensor, -1.0, device="cuda") for name, tensor in value.items()}
    with pytest.raises(errors.CorruptionError, match="w7"):
        shardckpt.restore(tmp_path / "c", like, memory_limit="16MiB")
    assert all(
        bool(((like[name].cpu() == -1) | (like[name].cpu() == tensor)).all())
        for name, tensor in value.items()
    )


def test_a_target_names_a_device_and_a_dtype(tmp_path):
    value = torch.randn(300, 70)
    shardckpt.save(tmp_path / "c", {"w": value, "v": value})
    device = torch.device("cuda", torch.cuda.current_device())
    restored = shardckpt.restore(
        tmp_path / "c", {"w": Target(device), "v": Target(device, dtype="bfloat16")}, cast=True
    )
    assert restored["w"].device == device
    assert torch.equal(restored["w"].cpu(), value)
    assert torch.equal(restored["v"].cpu(), value.bfloat16())


def test_a_model_made_on_meta_is_restored_onto_the_device(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 8)).cuda()
    shardckpt.save(tmp_path / "c", model.state_dict())
    with torch.device("meta"):
        other = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 8))
    like = {name: Target(torch.device("cuda")) for name in other.state_dict()}
    other.load_state_dict(shardckpt.restore(tmp_path / "c", like), assign=True)
    batch = torch.randn(5, 64, device="cuda")
    assert torch.equal(model(batch), other(batch))


def test_the_numbers_after_restoring_are_those_that_followed_the_save(tmp_path):
    torch.cuda.manual_seed_all(5)
    torch.rand(9, device="cuda")
    shardckpt.save(tmp_path / "c", shardckpt.train_state())
    followed = [
        torch.rand(9, device=f"cuda:{i}").tolist() for i in range(torch.cuda.device_count())
    ]
    torch.cuda.manual_seed_all(6)
    shardckpt.restore(tmp_path / "c", shardckpt.train_state())
    assert [
        torch.rand(9, device=f"cuda:{i}").tolist() for i in range(torch.cuda.device_count())
    ] == followed


@pytest.fixture
def nccl():
    if not dist.is_nccl_available():
        pytest.skip("torch was built without NCCL")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_an_nccl_group_is_found_by_its_store_and_runs_nothing_of_ours(tmp_path, nccl):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = init_device_mesh("cuda", (1,))
    value = torch.randn(64, 32, device="cuda")
    model = {
        "w": distribute_tensor(value, mesh, [Shard(0)]),
        "norm": torch.randn(32, device="cuda"),
    }
    assert type(shardckpt.Coordinator.current()).__name__ == "TorchStore"
    with (
        CommDebugMode() as counted,
        shardckpt.CheckpointManager(
            tmp_path, options=SaveOptions(device_copy="overlap")
        ) as manager,
    ):
        manager.save(1, {"model": model})
        manager.wait()
        with torch.no_grad():
            model["w"].zero_()
        manager.restore({"model": model})
        meta = {"w": Target((mesh, [Shard(0)]))}
        fresh = shardckpt.restore(tmp_path / "1", {"model": meta}, only="model/w")["model"]["w"]
    assert counted.get_total_counts() == 0
    assert torch.equal(model["w"].to_local(), value)
    assert isinstance(fresh, DTensor)
    assert fresh.to_local().is_cuda
    assert torch.equal(fresh.to_local(), value)
    assert np.isfinite(model["norm"].cpu().numpy()).all()
