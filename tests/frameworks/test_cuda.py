"""CUDA tensors, on devices of which only streams and events are imitated: no order of theirs gives
wrong bytes.

tests/cuda has what needs a GPU.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from fake_cuda import Descent, FakeCuda, random_tensor, same
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import shardckpt
from shardckpt import SaveOptions, errors
from shardckpt.frameworks import cuda, cuda_runtime
from shardckpt.writing.background import Saver

MiB = 1 << 20
DTYPES = (
    *(
        torch.bool,
        torch.uint8,
        torch.int16,
        torch.uint32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    ),
    *(
        torch.complex64,
        torch.complex128,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e8m0fnu,
    ),
)


@st.composite
def states(draw, devices=2):
    """Tensors of all kinds on some devices, by name: (fake, parameters). Several may be views of
    one storage."""
    seed = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    fake = FakeCuda(draw(st.integers(0, 2**32)))
    tensors = {"first": fake.put(random_tensor((5,), torch.float32, seed))}
    for number in range(draw(st.integers(0, 6))):
        dtype = draw(st.sampled_from(DTYPES))
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        tensor = random_tensor(shape, dtype, seed)
        form = draw(st.sampled_from(["contiguous", "transposed", "sliced", "strided", "conj"]))
        if form == "transposed" and len(shape) > 1:
            tensor = tensor.transpose(0, -1)
        elif form == "sliced" and shape:
            tensor = random_tensor((shape[0] + 3, *shape[1:]), dtype, seed)[1 : shape[0] + 1]
        elif form == "strided" and shape:
            tensor = random_tensor((shape[0] * 2, *shape[1:]), dtype, seed)[::2]
        elif form == "conj" and dtype.is_complex:
            tensor = tensor.conj()
        index = draw(st.integers(0, devices))
        if index < devices:
            tensors[f"t{number}"] = fake.put(tensor, index)
    return fake, tensors


trainings = given(
    states(),
    st.sampled_from(["wait", "overlap"]),
    st.integers(1, 3),
    st.integers(0, 30),
    st.sampled_from(["packed", "zarr"]),
)


@pytest.mark.long
@trainings
@settings(max_examples=40)
def test_what_a_running_training_saves_is_the_state_at_each_save(
    tmp_path_factory, case, mode, saves, turns, layout
):
    train(
        tmp_path_factory.mktemp("run"),
        case,
        SaveOptions(device_copy=mode, layout=layout),
        saves,
        turns,
    )


@pytest.mark.slow
@pytest.mark.timeout(420)
@trainings
@settings(max_examples=400)
def test_what_any_running_training_saves_is_the_state_at_each_save(
    tmp_path_factory, case, mode, saves, turns, layout
):
    train(
        tmp_path_factory.mktemp("run"),
        case,
        SaveOptions(device_copy=mode, layout=layout),
        saves,
        turns,
    )


def train(root, case, options, saves, turns):
    fake, tensors = case
    with fake.installed():
        optimizer, saver = Descent(fake, tensors), Saver(memory_limit="64MiB")
        begun = []
        for number in range(saves):
            optimizer.step()
            expected = {name: value.clone() for name, value in optimizer.values.items()}
            begun.append((saver.begin(root / str(number), dict(tensors), options), expected))
            fake.turn(turns)
            optimizer.step()  # changes what is being copied
        for number, (handle, expected) in enumerate(begun):
            handle.wait()
            like = {name: torch.empty_like(value) for name, value in expected.items()}
            restored = shardckpt.restore(root / str(number), like)
            assert all(same(restored[name], value) for name, value in expected.items())
        saver.close()
        assert fake.wrong == []
        assert fake.pinned == {}


@given(states(), st.booleans())
@settings(max_examples=15)
def test_a_save_that_waits_and_a_fingerprint_come_after_the_work_that_is_queued(
    tmp_path_factory, case, fingerprint
):
    fake, tensors = case
    path = tmp_path_factory.mktemp("run") / "c"
    with fake.installed():
        optimizer = Descent(fake, tensors)
        optimizer.step()
        if fingerprint:
            assert shardckpt.fingerprint(dict(tensors)) == shardckpt.fingerprint(optimizer.values)
            optimizer.step()
        shardckpt.save(path, dict(tensors))
        restored = shardckpt.restore(
            path, {name: torch.empty_like(value) for name, value in optimizer.values.items()}
        )
        assert all(same(restored[name], value) for name, value in optimizer.values.items())
        assert fake.wrong == []
        assert fake.pinned == {}


@given(states(), st.integers(0, 9))
@settings(max_examples=25)
def test_a_restore_comes_after_the_work_that_is_queued_and_before_all_later_work(
    tmp_path_factory, case, turns
):
    fake, tensors = case
    path = tmp_path_factory.mktemp("run") / "c"
    places = {name: tensor for name, tensor in tensors.items() if not tensor.is_conj()}
    with fake.installed():
        stored = {
            name: random_tensor(place.shape, place.dtype, torch.Generator().manual_seed(7))
            for name, place in places.items()
        }
        shardckpt.save(path, stored)
        optimizer = Descent(fake, places)
        optimizer.step()
        fake.turn(turns)
        restored = shardckpt.restore(path, places)
        optimizer.values = stored
        optimizer.step()
        fake.idle()
        assert all(
            restored[name] is place and same(place, optimizer.values[name])
            for name, place in places.items()
        )
        assert fake.wrong == []
        assert fake.pinned == {}


def of_one(fake, shape=(64, 64), **kinds):
    return {
        name: fake.put(torch.zeros(shape, dtype=dtype))
        for name, dtype in (kinds or {"w": torch.float32}).items()
    }


# --- the fake notices


def broken(monkeypatch, what):
    """Take one wait out of the code, or one order."""
    if what == "the host does not wait for events":
        monkeypatch.setattr(cuda.Arrival, "wait", lambda self: None)
    elif what == "later work does not wait":
        monkeypatch.setattr(cuda.DeviceCopies, "_hold", lambda self: None)
    elif what == "copies do not wait for earlier work":
        ended = type("Ended", (), {"done": True})()
        start = cuda.DeviceCopies.__init__

        def begin(self, *arguments, **options):
            record = cuda_runtime.runtime.record
            cuda_runtime.runtime.record = lambda _stream: ended
            try:
                start(self, *arguments, **options)
            finally:
                cuda_runtime.runtime.record = record

        monkeypatch.setattr(cuda.DeviceCopies, "__init__", begin)


@pytest.mark.parametrize(
    "what",
    [
        "the host does not wait for events",
        "later work does not wait",
        "copies do not wait for earlier work",
        "nothing is broken",
    ],
)
@pytest.mark.parametrize("mode", ["wait", "overlap"])
def test_an_order_that_is_left_out_shows_in_some_schedule(tmp_path, monkeypatch, what, mode):
    broken(monkeypatch, what)
    wrong = 0
    for seed in range(12):
        fake = FakeCuda(seed)
        with fake.installed():
            tensors = of_one(fake, a=torch.float32, b=torch.int16)
            optimizer, saver = Descent(fake, tensors), Saver(memory_limit="16MiB")
            for number in range(2):
                optimizer.step()
                expected = {name: value.clone() for name, value in optimizer.values.items()}
                handle = saver.begin(
                    tmp_path / f"{seed}-{number}", dict(tensors), SaveOptions(device_copy=mode)
                )
                optimizer.step()
                handle.wait()
                restored = shardckpt.restore(tmp_path / f"{seed}-{number}")
                wrong += any(
                    restored[name].tobytes() != value.numpy().tobytes()
                    for name, value in expected.items()
                )
            saver.close()
            wrong += len(fake.wrong)
            fake.idle()
        if wrong:
            break
    assert (wrong > 0) == (what != "nothing is broken")


# --- changes during a save


@pytest.mark.parametrize("counted", [True, False])
def test_overlap_fails_by_name_where_a_version_counter_shows_a_change(tmp_path, counted):
    fake = FakeCuda()
    with fake.installed():
        tensors = of_one(fake, a=torch.float32, b=torch.float32)
        optimizer, saver = Descent(fake, tensors), Saver()
        with fake.lock:  # no copy is made meanwhile
            handle = saver.begin(
                tmp_path / "c", {"model": tensors}, SaveOptions(device_copy="overlap")
            )
            optimizer.change("b", counted=counted)
        if counted:
            with pytest.raises(
                errors.CommitError,
                match=r"^'model/b': the tensor was changed.*nothing was published",
            ):
                handle.wait()
            with pytest.raises(errors.NotFoundError):
                shardckpt.open(tmp_path / "c")
        else:
            handle.wait()
        saver.close()
        assert fake.pinned == {}
        assert fake.wrong == []


def test_the_first_change_is_found_even_if_an_optimizer_steps_after_it(tmp_path):
    fake = FakeCuda()
    with fake.installed():
        tensors = of_one(fake, a=torch.float32, b=torch.float32)
        optimizer, saver = Descent(fake, tensors), Saver()
        with fake.lock:
            handle = saver.begin(tmp_path / "c", tensors, SaveOptions(device_copy="overlap"))
            optimizer.change("a")
            optimizer.step()
        with pytest.raises(errors.CommitError, match=r"^'a': "):
            handle.wait()


@pytest.mark.filterwarnings("ignore")  # of dynamo
def test_a_compiled_step_of_an_optimizer_waits_too(tmp_path):
    fake = FakeCuda()
    with fake.installed():
        parameter = torch.nn.Parameter(torch.ones(4))
        parameter.grad = torch.ones(4)
        step, saver = (
            torch.compile(torch.optim.SGD([parameter], lr=0.5).step, backend="eager"),
            Saver(),
        )
        step()
        for number in range(3):
            # The update itself runs at once: only its wait is of the fake's making.
            with fake.lock:
                handle = saver.begin(
                    tmp_path / str(number), of_one(fake), SaveOptions(device_copy="overlap")
                )
                queued = len(fake.current_stream(torch.device("cuda", 0)).queue)
                step()
                assert len(fake.current_stream(torch.device("cuda", 0)).queue) == queued + 1
            handle.wait()
            step()
        saver.close()
        fake.idle()
    torch._dynamo.reset()


def test_wait_needs_no_counters(tmp_path):
    fake = FakeCuda()
    with fake.installed():
        tensors = of_one(fake)
        optimizer, saver = Descent(fake, tensors), Saver()
        expected = optimizer.values["w"].clone()
        handle = saver.begin(tmp_path / "c", tensors, SaveOptions())
        optimizer.change("w", counted=False)
        handle.wait()
        assert same(torch.from_numpy(shardckpt.restore(tmp_path / "c")["w"]), expected)


def test_a_tensor_on_another_stream_is_saved_as_of_the_current_one(tmp_path):
    """As for every operation of torch: the program orders its streams before it calls."""
    for seed in range(8):
        fake = FakeCuda(seed)
        with fake.installed():
            tensors = of_one(fake)
            optimizer, saver, other = Descent(fake, tensors), Saver(), fake.stream()
            with fake.on(other):
                optimizer.step()
            fake.current_stream(other.device).wait_event(fake.record(other))
            expected = optimizer.values["w"].clone()
            handle = saver.begin(tmp_path / str(seed), tensors, SaveOptions())
            other.wait_event(fake.record(fake.current_stream(other.device)))
            with fake.on(other):
                optimizer.step()
            handle.wait()
            assert same(torch.from_numpy(shardckpt.restore(tmp_path / str(seed))["w"]), expected)


# --- DTensor


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("mode", ["wait", "overlap"])
def test_dtensors_are_saved_from_their_shards_and_restored_into_them(tmp_path, mesh, mode):
    for seed in range(4):
        fake = FakeCuda(seed)
        with fake.installed():
            local = fake.put(torch.randn(6, 4).T)
            leaf = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
            optimizer, saver = Descent(fake, {"w": local}), Saver()
            optimizer.step()
            expected = optimizer.values["w"].clone()
            handle = saver.begin(tmp_path / str(seed), {"w": leaf}, SaveOptions(device_copy=mode))
            optimizer.step()
            handle.wait()
            assert same(torch.from_numpy(shardckpt.restore(tmp_path / str(seed))["w"]), expected)
            assert shardckpt.restore(tmp_path / str(seed), {"w": leaf})["w"] is leaf
            fake.idle()
            assert same(local, expected)
            saver.close()
            assert fake.wrong == []
            assert fake.pinned == {}


def test_a_change_of_a_dtensor_shows_in_its_own_counter_or_in_that_of_its_shard(tmp_path, mesh):
    for number, of in enumerate(("leaf", "alias", "shard")):
        fake = FakeCuda()
        with fake.installed():
            local = fake.put(torch.randn(4, 4))
            leaf = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
            saver = Saver()
            with fake.lock:
                saved = leaf.detach() if of == "alias" else leaf
                handle = saver.begin(
                    tmp_path / str(number), {"w": saved}, SaveOptions(device_copy="overlap")
                )
                with torch.no_grad():
                    (leaf._local_tensor if of == "shard" else leaf).add_(1)
            with pytest.raises(errors.CommitError, match=r"^'w': the tensor was changed"):
                handle.wait()
            saver.close()


# --- what is imported


@pytest.mark.long
def test_without_cuda_tensors_nothing_of_cuda_is_imported(tmp_path):
    code = f"""
import sys, torch, shardckpt
state = {{"w": torch.ones(9), "m": torch.zeros(3, dtype=torch.bfloat16)}}
shardckpt.save({str(tmp_path / "a")!r}, state)
shardckpt.save_async({str(tmp_path / "b")!r}, state).wait()
shardckpt.restore({str(tmp_path / "a")!r}, state)
print(
    [name for name in sys.modules if name.startswith("shardckpt.") and "cuda" in name],
    torch.cuda.is_initialized(),
)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=True
    )
    assert done.stdout.strip() == "[] False"
