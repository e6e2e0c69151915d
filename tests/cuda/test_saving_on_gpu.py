"""Saves of CUDA tensors on a real GPU. `make cuda` runs them; without a GPU they are skipped, which
is their purpose."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import shardckpt
from shardckpt import CheckpointManager, SaveOptions, errors
from shardckpt.frameworks import cuda_runtime
from shardckpt.writing.background import Saver

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(300),
]

MiB = 1 << 20
DTYPES = [
    *(
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
    ),
    *(
        "complex64",
        "complex128",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    ),
]
FORMS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.T,
    "sliced": lambda t: t[3:40, 5:9],
    "strided": lambda t: t[::2],
    "0-d": lambda t: t[1, 2],
    "empty": lambda t: t[:0],
    "conjugated": lambda t: t.conj(),
}


def random_bits(shape, dtype, device="cuda"):
    kind = getattr(torch, dtype)
    most = 2 if dtype == "bool" else 256
    return (
        torch.randint(
            0, most, (int(np.prod(shape)) * kind.itemsize,), dtype=torch.uint8, device=device
        )
        .view(kind)
        .reshape(shape)
    )


def bits_of(tensor):
    tensor = tensor.detach().resolve_conj().cpu()
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).reshape(-1).view(torch.uint8)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits_of(a), bits_of(b))


def restored(path, like):
    return shardckpt.restore(
        path, {name: torch.empty(t.shape, dtype=t.dtype) for name, t in like.items()}
    )


def assert_saved(path, expected):
    tensors = restored(path, expected)
    wrong = [name for name, value in expected.items() if not same(tensors[name], value)]
    assert not wrong


def busy(milliseconds=200):
    """Queue a kernel that takes that long, and return the event after it."""
    torch.cuda._sleep(int(milliseconds * 2e6))  # cycles, at 2 GHz
    event = torch.cuda.Event()
    event.record()
    return event


@pytest.mark.parametrize("how", ["save", "wait", "overlap"])
def test_every_dtype_and_form_is_saved_bit_by_bit(tmp_path, how):
    base = {dtype: random_bits((64, 12), dtype) for dtype in DTYPES if hasattr(torch, dtype)}
    state = {
        f"{dtype} {form}": view(tensor)
        for dtype, tensor in base.items()
        for form, view in FORMS.items()
        if form != "conjugated" or tensor.is_complex()
    }
    assert any(tensor.is_conj() for tensor in state.values())
    expected = {name: tensor.detach().resolve_conj().clone() for name, tensor in state.items()}
    if how == "save":
        shardckpt.save(tmp_path / "c", state)
    else:
        shardckpt.save_async(tmp_path / "c", state, options=SaveOptions(device_copy=how)).wait()
    assert_saved(tmp_path / "c", expected)


@pytest.mark.parametrize("mode", ["wait", "overlap"])
def test_100_states_of_a_running_training_are_the_states_at_their_saves(tmp_path, mode):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    wrong = []
    saver = Saver()
    for step in range(100):
        model(torch.randn(256, 512, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 0:
            busy(5)
        state = {
            "model": dict(model.named_parameters()),
            "moments": {str(i): s["exp_avg"] for i, s in enumerate(optimizer.state.values())},
        }
        expected = {
            part: {name: tensor.detach().clone() for name, tensor in tensors.items()}
            for part, tensors in state.items()
        }
        handle = saver.begin(tmp_path / "c", state, SaveOptions(device_copy=mode, overwrite=True))
        model(torch.randn(256, 512, device="cuda")).square().mean().backward()
        optimizer.step()  # changes everything that is being copied
        optimizer.zero_grad()
        handle.wait()
        for part, tensors in expected.items():
            stored = shardckpt.restore(
                tmp_path / "c",
                {part: {n: torch.empty(t.shape, dtype=t.dtype) for n, t in tensors.items()}},
                strict=False,
            )
            wrong += [
                f"{step} {name}"
                for name, tensor in tensors.items()
                if not same(stored[part][name], tensor)
            ]
    saver.close()
    assert not wrong


@pytest.mark.parametrize("mode", ["wait", "overlap"])
def test_the_host_does_not_wait(tmp_path, mode):
    state = {f"w{i}": torch.randn(1024, 1024, device="cuda") for i in range(16)}
    saver = Saver()
    saver.begin(tmp_path / "warm", state, SaveOptions(device_copy=mode)).wait()
    before = busy(1000)
    handle = saver.begin(tmp_path / "c", state, SaveOptions(device_copy=mode))
    assert not before.query(), "save_async has waited for work that was queued before it"
    expected = {name: tensor.clone() for name, tensor in state.items()}
    handle.wait()
    assert_saved(tmp_path / "c", expected)
    saver.close()


def test_overlap_fails_by_name_where_something_else_changes_a_tensor(tmp_path):
    state = {f"w{i}": torch.randn(1024, 1024, device="cuda") for i in range(4)}
    saver = Saver()
    busy(500)
    handle = saver.begin(tmp_path / "c", state, SaveOptions(device_copy="overlap"))
    state["w2"].add_(1)
    with pytest.raises(errors.CommitError, match="'w2': the tensor was changed"):
        handle.wait()
    with pytest.raises(errors.NotFoundError):
        shardckpt.open(tmp_path / "c")
    saver.close()


@pytest.mark.parametrize("mode", ["wait", "overlap"])
def test_tensors_may_be_dropped_and_their_storage_freed_right_after_the_call(tmp_path, mode):
    tensors = {f"w{i}": torch.randn(2048, 1024, device="cuda") for i in range(8)}
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    busy(200)
    handle = shardckpt.save_async(tmp_path / "c", tensors, options=SaveOptions(device_copy=mode))
    tensors["w0"].untyped_storage().resize_(0)
    tensors.clear()
    garbage = [torch.full((2048, 1024), float("nan"), device="cuda") for _ in range(16)]
    handle.wait()
    assert_saved(tmp_path / "c", expected)
    del garbage


def test_a_tensor_of_another_stream_is_saved_as_of_the_current_one(tmp_path):
    tensor, other = torch.zeros(1 << 20, device="cuda"), torch.cuda.Stream()
    with torch.cuda.stream(other):
        torch.cuda._sleep(200_000_000)
        tensor.fill_(1)
    torch.cuda.current_stream().wait_stream(other)
    handle = shardckpt.save_async(tmp_path / "c", {"w": tensor})
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        tensor.fill_(2)
    handle.wait()
    assert (shardckpt.restore(tmp_path / "c")["w"] == 1).all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_several_devices_are_saved_together(tmp_path):
    state = {
        f"w{i}": torch.randn(512, 512, device=f"cuda:{i % torch.cuda.device_count()}")
        for i in range(8)
    }
    expected = {name: tensor.cpu() for name, tensor in state.items()}
    handle = shardckpt.save_async(tmp_path / "c", state)
    for tensor in state.values():
        tensor.zero_()
    handle.wait()
    assert_saved(tmp_path / "c", expected)


def test_pinned_memory_is_pinned_once_kept_and_given_back(tmp_path):
    state = {"w": torch.randn(64, MiB // 4, device="cuda")}
    with CheckpointManager(tmp_path) as manager:
        kept = []
        for step in range(3):
            manager.save(step, state)
            manager.wait()
            kept.append(manager._background._saver.pool.kept)
        assert kept[0] == kept[1] == kept[2]
        assert len(kept[0]) == 1
        # cudaErrorHostMemoryAlreadyRegistered.
        assert cuda_runtime.runtime.pin(kept[0][0], MiB) == 712
        address = kept[0][0]
    torch.ones(1, device="cuda")  # no error of the call above is left
    assert cuda_runtime.runtime.unpin(address) != 0


def test_memory_that_was_prepared_is_what_the_first_save_takes(tmp_path, monkeypatch):
    state = {f"w{i}": torch.randn(2048, 2048, device="cuda") for i in range(8)}
    expected = {name: tensor.clone() for name, tensor in state.items()}
    pinned, pin = [], cuda_runtime.runtime.pin
    monkeypatch.setattr(cuda_runtime.runtime, "pin", lambda *of: (pinned.append(of), pin(*of))[1])
    with CheckpointManager(tmp_path, every=1, keep=1) as manager:
        manager.warm(state)
        manager.save(1, state)  # waits for the pinning
        assert len(pinned) == 1
        manager.wait()
        assert not manager.last_report.streamed
    assert_saved(tmp_path / "1", expected)


def test_copies_are_cut_where_slices_of_pinned_memory_meet(tmp_path, monkeypatch):
    monkeypatch.setattr(cuda_runtime, "SLICE", 1 * MiB)
    state = {
        "large": torch.randn(3000, 999, device="cuda"),
        "columns": torch.randn(999, 700, device="cuda").T,
        "small": torch.ones(3).cuda(),
    }
    expected = {name: tensor.clone() for name, tensor in state.items()}
    shardckpt.save_async(tmp_path / "c", state).wait()
    for tensor in state.values():
        tensor.zero_()
    shardckpt.restore(tmp_path / "c", state)
    assert all(same(state[name], tensor) for name, tensor in expected.items())


def test_an_error_of_pinning_does_not_fail_the_next_kernel():
    assert cuda_runtime.runtime.pin(4096, MiB) != 0
    assert torch.ones(3, device="cuda").add_(1).sum().item() == 6


def test_a_full_device_leaves_the_state_whole_and_publishes_nothing(tmp_path):
    state = {"w": torch.randn(8192, 4096, device="cuda").T}  # to make it contiguous takes memory
    expected = state["w"].cpu()
    torch.cuda.empty_cache()
    filled = []
    for size in (1 << 30, 64 * MiB, MiB, 1 << 12):
        try:
            while True:
                filled.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            pass
    try:
        with pytest.raises(
            errors.BudgetError, match="has no memory left to save a tensor that is not contiguous"
        ):
            shardckpt.save_async(tmp_path / "c", state)
    finally:
        filled.clear()
        torch.cuda.empty_cache()
    with pytest.raises(errors.NotFoundError):
        shardckpt.open(tmp_path / "c")
    assert torch.equal(state["w"].cpu(), expected)
    shardckpt.save_async(tmp_path / "c", state).wait()
    assert_saved(tmp_path / "c", {"w": expected})
