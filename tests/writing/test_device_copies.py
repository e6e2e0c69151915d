"""The pinned memory of saves from devices: how much, for how long, and what is left where a device
or the host has no more.

Devices are imitated (`fake_cuda`); tests/cuda has what needs a GPU.
"""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_cuda import Descent, FakeCuda
from hypothesis import given, settings
from hypothesis import strategies as st
from one_of_several import OneOfSeveral

import shardckpt
from shardckpt import CheckpointManager, SaveOptions, errors, frameworks
from shardckpt.frameworks import cuda
from shardckpt.io.buffers import BufferPool
from shardckpt.writing.background import Saver
from shardckpt.writing.replicas import ReplicaChecksums

MiB = 1 << 20
ROUNDING = 64
"""Bytes to which each block in a buffer is rounded up."""


@pytest.fixture
def fake():
    with FakeCuda(1).installed() as fake:
        yield fake
        assert fake.wrong == []
        assert fake.pinned == {}, "pinned memory was not given back"


def filled(fake, mebibytes, tensors=4):
    """Tensors on a device, of so many MiB together, with an optimizer that changes them."""
    rows = mebibytes * MiB // 4096 // tensors
    return Descent(fake, {f"w{i}": fake.put(torch.randn(rows, 1024)) for i in range(tensors)})


def assert_saved(path, expected):
    restored = shardckpt.restore(path)
    assert all(np.array_equal(restored[name], value.numpy()) for name, value in expected.items())


@pytest.mark.parametrize("mode", ["wait", "overlap"])
def test_memory_is_pinned_once_no_more_than_the_share_needs_and_given_back_at_close(
    fake, tmp_path, mode
):
    optimizer = filled(fake, 8)
    with CheckpointManager(tmp_path, options=SaveOptions(device_copy=mode)) as manager:
        for step in range(3):
            manager.save(step, {**optimizer.parameters, "host": np.arange(9.0)})
            optimizer.step()
            assert (fake.pinnings, len(fake.pinned)) == (1, 1)
        manager.wait()
        assert 8 * MiB <= fake.high_water <= 8 * MiB + 6 * ROUNDING
        assert not manager.last_report.streamed


def test_a_larger_state_streams_through_a_smaller_buffer_within_the_limit(fake, tmp_path):
    optimizer, saver = filled(fake, 40), Saver(memory_limit="16MiB")
    expected = {name: value.clone() for name, value in optimizer.values.items()}
    handle = saver.begin(
        tmp_path / "c", {**optimizer.parameters, "host": np.arange(9.0)}, SaveOptions()
    )
    optimizer.step()
    assert handle.wait().streamed
    assert_saved(tmp_path / "c", expected)
    assert fake.high_water <= 16 * MiB
    assert fake.pinnings == 1
    saver.close()


def test_overlap_that_does_not_fit_is_refused_with_the_number_of_bytes(fake, tmp_path):
    optimizer, saver = filled(fake, 20), Saver(memory_limit="16MiB")
    with pytest.raises(
        errors.BudgetError,
        match=r"overlap.*needs 23,068,672 bytes of host memory.*memory_limit=16 MiB; raise "
        r"memory_limit, or use",
    ):
        saver.begin(tmp_path / "c", optimizer.parameters, SaveOptions(device_copy="overlap"))
    assert fake.pinnings == 0
    with pytest.raises(errors.NotFoundError):
        shardckpt.open(tmp_path / "c")
    saver.begin(tmp_path / "c", optimizer.parameters, SaveOptions()).wait()
    saver.close()


def test_overlap_waits_for_the_buffer_of_the_save_before(fake, tmp_path):
    optimizer, saver = filled(fake, 10), Saver(memory_limit="16MiB")
    handles, expected = [], []
    for step in range(3):
        expected.append({name: value.clone() for name, value in optimizer.values.items()})
        handles.append(
            saver.begin(
                tmp_path / str(step), optimizer.parameters, SaveOptions(device_copy="overlap")
            )
        )
        optimizer.step()
    for step, handle in enumerate(handles):
        assert not handle.wait().streamed
        assert_saved(tmp_path / str(step), expected[step])
    assert fake.pinnings == 1
    saver.close()


def test_a_save_that_waits_pins_two_small_buffers(fake, tmp_path):
    optimizer = filled(fake, 40, tensors=1)
    shardckpt.save(
        tmp_path / "c",
        {**optimizer.parameters, "host": np.arange(9.0)},
        options=SaveOptions(memory_limit="16MiB"),
    )
    assert_saved(tmp_path / "c", optimizer.values)
    assert fake.high_water <= 4 * MiB


def test_saves_of_host_tensors_share_the_pool(fake, tmp_path):
    optimizer, saver = filled(fake, 4), Saver()
    host = {"w": np.arange(1000.0)}
    for number, state in enumerate([host, optimizer.parameters, host, optimizer.parameters]):
        saver.begin(tmp_path / str(number), state, SaveOptions()).wait()
    assert fake.pinnings == 2  # for the share of the device, and for that of the host
    saver.close()


# --- where something fails


def no_memory(fake, monkeypatch, after):
    """Make the copies on a device fail after so many."""
    copy = fake.copy

    def failing(target, source, stream):
        if fake.copies >= after:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        copy(target, source, stream)

    monkeypatch.setattr(fake, "copy", failing)


@pytest.mark.long
@given(
    after=st.integers(0, 3),
    seed=st.integers(0, 100),
    mode=st.sampled_from(["wait", "overlap", "save"]),
)
@settings(max_examples=15)
def test_a_device_without_memory_leaves_the_state_whole_and_publishes_nothing(
    tmp_path_factory, after, seed, mode
):
    path, fake = tmp_path_factory.mktemp("c") / "c", FakeCuda(seed)
    with fake.installed():
        optimizer, saver = filled(fake, 4), Saver(memory_limit="16MiB")
        with pytest.MonkeyPatch.context() as patch:
            no_memory(fake, patch, after)
            save = (
                shardckpt.save
                if mode == "save"
                else partial(saver.begin, options=SaveOptions(device_copy=mode))
            )
            with pytest.raises(
                errors.BudgetError,
                match=r"cuda:0 has no memory left to save a tensor that is not contiguous",
            ):
                save(path, optimizer.parameters)
        with pytest.raises(errors.NotFoundError):
            shardckpt.open(path)
        fake.idle()
        assert all(
            torch.equal(tensor, optimizer.values[name])
            for name, tensor in optimizer.parameters.items()
        )
        optimizer.step()
        saver.begin(path, optimizer.parameters, SaveOptions(device_copy="wait")).wait()
        assert_saved(path, optimizer.values)
        saver.close()
        assert fake.wrong == []
        assert fake.pinned == {}


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_host_that_pins_no_more_is_told_with_the_number_of_bytes(tmp_path, asynchronous):
    with FakeCuda(1, pinnable=MiB).installed() as fake:
        optimizer, saver = filled(fake, 4), Saver()
        save = partial(saver.begin, options=SaveOptions()) if asynchronous else shardckpt.save
        with pytest.raises(
            errors.BudgetError, match=r"CUDA cannot pin [\d,]+ bytes of host memory \(error 2\)"
        ):
            save(tmp_path / "c", optimizer.parameters)
        with pytest.raises(errors.NotFoundError):
            shardckpt.open(tmp_path / "c")
        assert fake.pinned == {}
        saver.begin(tmp_path / "c", {"w": optimizer.parameters["w0"][:16]}, SaveOptions()).wait()
        saver.close()
        assert fake.pinned == {}


def test_a_device_that_fails_fails_the_save_and_its_buffer_is_not_used_again(tmp_path, monkeypatch):
    with FakeCuda(1).installed() as fake:
        optimizer, saver = filled(fake, 4), Saver()

        def lost(arrival):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        with monkeypatch.context() as patch:
            patch.setattr(cuda.Arrival, "wait", lost)
            handle = saver.begin(tmp_path / "c", optimizer.parameters, SaveOptions())
            with pytest.raises(RuntimeError, match="illegal memory access"):
                handle.wait()
        with pytest.raises(errors.NotFoundError):
            shardckpt.open(tmp_path / "c")
        assert saver.pool.kept == []
        assert fake.pinned == {}


def test_a_pool_unpins_what_it_frees_though_arrays_over_it_exist():
    with FakeCuda().installed() as fake:
        pool = BufferPool(4 * MiB, cuda.pin)
        with pool.take(3 * MiB) as lease:
            array = lease.array((4,), np.float32)
        assert len(fake.pinned) == 1
        pool.take(2 * MiB + 1).give_back()
        assert fake.pinnings == 1
        with pool.take(MiB), pool.take(MiB):
            assert sum(fake.pinned.values()) <= 4 * MiB
        pool.clear()
        assert fake.pinned == {}
        array[:] = 1


# --- the host does not wait


class OfTwo(OneOfSeveral):
    """The first of two processes, of which the other one never comes."""

    def _set(self, key, value):
        """Nobody hears it."""

    def _get(self, key):
        return None


@pytest.mark.parametrize("mode", ["wait", "overlap"])
@pytest.mark.parametrize("processes", [1, 2])
def test_the_thread_that_saves_does_not_wait_for_the_device(fake, tmp_path, mode, processes):
    """In a job of several processes small plain tensors are part of the contents, which are
    complete when they have arrived."""
    shapes = {"norm": (64,), "empty": (0, 3), "scalar": (), "large": (300, 300)}
    optimizer = Descent(
        fake, {name: fake.put(torch.randn(shape)) for name, shape in shapes.items()}
    )
    optimizer.step()
    expected = {name: value.clone() for name, value in optimizer.values.items()}
    contents = []
    for name, state in (("device", optimizer.parameters), ("host", expected)):
        saver = Saver(coordinator=OfTwo(0, 2) if processes == 2 else None)
        with fake.lock:  # nothing runs on the device meanwhile
            handle = saver.begin(
                tmp_path / name,
                state,
                SaveOptions(device_copy=mode, commit_timeout=0.5, host_tensors="local"),
            )
            optimizer.step()
        assert threading.current_thread().name not in fake.waits
        handle.wait("commit" if processes == 1 else "local")
        (file,) = [
            *(tmp_path / name).glob("*/contents/*"),
            *(tmp_path / name).glob("*/hosts/00000/contents.json"),
        ]
        contents.append(file.read_bytes())
        if processes == 1:
            assert_saved(tmp_path / name, expected)
        saver.close()
    assert contents[0] == contents[1]


def test_samples_of_replicas_on_devices_are_those_of_the_host_and_come_behind_the_call(fake):
    """The samples are copied in stream order, so an update that is queued later does not change
    them."""
    values = {
        "w": torch.randn(600, 40),
        "transposed": torch.randn(700, 30).T,
        "scalar": torch.tensor(3.0),
    }
    plan = SimpleNamespace(replicated={name: [(0, 1)] for name in values})
    expected = ReplicaChecksums(plan, frameworks.sources(values), wholly=False).complete()
    on_device = {name: fake.put(value.clone()) for name, value in values.items()}
    sources = frameworks.sources(on_device)
    checksums = ReplicaChecksums(plan, sources, wholly=False)
    left, copies = frameworks.on_devices(sources, overlap=False)
    pool = BufferPool(1 * MiB, copies.pin)
    with pool.take(checksums.late_bytes()) as lease:
        checksums.queue(
            left, copies, lease.array((checksums.late_bytes(),), np.uint8).view(np.uint8)
        )
        copies.end()
        for tensor in on_device.values():
            fake.launch(partial(tensor.fill_, -1))
        assert checksums.complete() == expected
        fake.idle()
    pool.clear()
    sources = frameworks.sources({name: fake.put(value.clone()) for name, value in values.items()})
    again = ReplicaChecksums(plan, sources, wholly=False)
    again.fetch_late(sources)
    assert again.complete() == expected
