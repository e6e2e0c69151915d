"""Memory for saves that is prepared in the background: how much, when, and what the first save
finds."""

from __future__ import annotations

import ctypes
import logging
import mmap

import numpy as np
import pytest
import torch
from fake_cuda import Descent, FakeCuda

import shardckpt
from shardckpt import CheckpointManager, SaveOptions, errors
from shardckpt.frameworks import cuda, cuda_fills, cuda_runtime
from shardckpt.io import buffers
from shardckpt.writing import memory
from shardckpt.writing.background import Saver

MiB = 1 << 20


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


def untouched(pool):
    """Number of pages of a pool's only buffer that the kernel has not provided, and of all of its
    pages."""
    (buffer,) = pool._kept
    begin = buffer.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    length = buffer.ctypes.data + buffer.nbytes - begin
    states = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(length), states) == 0
    return sum(not state & 1 for state in states), len(states)


def warmed(saver, url, state, **options):
    saver.warm(url, state, SaveOptions(**options))
    saver._settle()
    return saver.pool


@pytest.mark.parametrize("on_device", [True, False])
def test_every_page_of_the_first_saves_buffer_is_touched_and_that_save_takes_no_other(
    fake, tmp_path, on_device
):
    optimizer, saver = filled(fake, 40), Saver()
    state = optimizer.parameters if on_device else {"w": np.ones((40, MiB), np.uint8)}
    pool = warmed(saver, tmp_path / "c", state)
    kept, most = pool.kept, pool.high_water
    assert untouched(pool) == (0, untouched(pool)[1])
    assert untouched(pool)[1] >= 40 * MiB // mmap.PAGESIZE
    assert fake.pinnings == on_device
    saver.begin(tmp_path / "c", state, SaveOptions()).wait()
    assert (pool.kept, pool.high_water, fake.pinnings) == (kept, most, on_device)
    saver.close()


def test_a_buffer_that_was_only_allocated_has_pages_that_are_not_touched():
    """The count of pages shows what it is to show."""
    ctypes.CDLL(None).malloc_trim(0)  # free memory of other tests has touched pages
    pool = buffers.BufferPool(64 * MiB)
    pool.take(64 * MiB).give_back()
    assert untouched(pool)[0] > 1000


def test_a_state_beyond_the_limit_has_the_buffer_prepared_that_it_streams_through(fake, tmp_path):
    optimizer, saver = filled(fake, 40), Saver(memory_limit="16MiB")
    pool = warmed(saver, tmp_path / "c", optimizer.parameters)
    assert untouched(pool)[0] == 0
    assert saver.begin(tmp_path / "c", optimizer.parameters, SaveOptions()).wait().streamed
    assert fake.high_water <= 16 * MiB
    assert fake.pinnings == 1
    saver.close()


@pytest.mark.parametrize(
    ("free", "prepared"), [(80 * MiB, True), (80 * MiB - 1, False), (None, True)]
)
def test_no_more_than_half_of_the_free_memory_is_taken(fake, tmp_path, monkeypatch, free, prepared):
    monkeypatch.setattr(memory, "free_memory", lambda: free)
    optimizer, saver = filled(fake, 40), Saver()
    assert bool(warmed(saver, tmp_path / "c", optimizer.parameters).kept) == prepared
    saver.close()


def test_while_a_save_is_in_flight_nothing_is_prepared(fake, tmp_path):
    optimizer, saver = filled(fake, 4), Saver()
    with fake.lock:  # no copy is made meanwhile
        handle = saver.begin(tmp_path / "c", optimizer.parameters, SaveOptions())
        saver.warm(tmp_path / "d", optimizer.parameters, SaveOptions())
        assert saver._warming._thread is None
    handle.wait()
    saver.close()


def test_memory_that_cannot_be_pinned_is_a_line_in_the_log_and_the_first_save_tries_again(
    tmp_path, caplog
):
    with FakeCuda(1, pinnable=MiB).installed() as fake:
        optimizer, saver = filled(fake, 8), Saver()
        with caplog.at_level(logging.WARNING, "shardckpt"):
            warmed(saver, tmp_path / "c", optimizer.parameters)
        assert "memory for saves could not be prepared (CUDA cannot pin" in caplog.text
        with pytest.raises(errors.BudgetError, match="cannot pin"):
            saver.begin(tmp_path / "c", optimizer.parameters, SaveOptions())
        saver.close()


# --- when a manager does so


def saved(fake, root):
    """A run of one step, and the tensors of another process of the run."""
    state = filled(fake, 8).parameters
    with CheckpointManager(root) as manager:
        manager.save(1, state)
    fake.pinnings = 0
    return state


@pytest.mark.parametrize(
    ("every", "prepared"), [({"every": 5}, True), ({}, False), ({"every": None}, False)]
)
def test_a_manager_that_is_told_when_to_save_prepares_memory_after_a_restore(
    fake, tmp_path, every, prepared
):
    state = saved(fake, tmp_path)
    with CheckpointManager(tmp_path, keep=9, **every) as manager:
        manager.restore(state)
        after_restore = fake.pinnings
        manager._background._saver._settle()
        assert (len(manager._background._saver.pool.kept) == 1) == prepared
        ring = fake.pinnings
        assert ring >= after_restore
        manager.save(2, state, force=True)
        manager.wait()
        assert fake.pinnings == ring + (not prepared)


def test_a_manager_prepares_memory_once_at_the_first_step_that_is_not_due(fake, tmp_path):
    state = saved(fake, tmp_path / "other")
    with CheckpointManager(tmp_path / "run", every=5, keep=9) as manager:
        assert manager.restore(state) is None
        assert fake.pinnings == 0
        for step in range(1, 6):
            assert manager.save(step, state) == (step == 5)
            manager._background._saver._settle()
            assert fake.pinnings == 1


def test_a_manager_prepares_memory_by_itself_for_devices_alone_and_on_demand_for_any_state(
    fake, tmp_path
):
    saved(fake, tmp_path / "other")
    state = {"w": np.ones((8, MiB), np.uint8)}
    with CheckpointManager(tmp_path / "run", every=5, keep=9) as manager:
        manager.save(1, state)
        manager._background._saver._settle()
        assert not manager._background._saver.pool.kept
        manager.warm(state)
        manager._background._saver._settle()
        assert untouched(manager._background._saver.pool)[0] == 0
    with pytest.raises(errors.OptionError, match="closed"):
        manager.warm(state)


# --- slices


@pytest.fixture
def slices(monkeypatch):
    monkeypatch.setattr(cuda_runtime, "SLICE", 256 << 10)


def forms(fake):
    """Tensors that cross borders of slices in each form of memory, and their values."""
    values = {
        "large": torch.randn(700, 999),
        "columns": torch.randn(999, 700).T,
        "rows": torch.randn(1, 1, 300_001),
        "small": torch.ones(3),
    }
    return {name: fake.put(value.clone()) for name, value in values.items()}, values


def same_after_both_ways(fake, path):
    state, values = forms(fake)
    saver = Saver()
    saver.begin(path, state, SaveOptions()).wait()
    saver.close()
    for tensor in state.values():
        tensor.zero_()
    shardckpt.restore(path, state)
    return all(torch.equal(state[name], value) for name, value in values.items())


def test_memory_is_pinned_in_slices_and_no_copy_crosses_a_border(fake, tmp_path, slices):
    assert same_after_both_ways(fake, tmp_path / "c")
    assert fake.pinnings > 20
    assert cuda_runtime._sliced == {}


def test_a_copy_that_crosses_a_border_would_be_seen(tmp_path, slices, monkeypatch):
    for module in (cuda, cuda_fills):
        monkeypatch.setattr(module, "within_slices", lambda array, tensor: iter([(array, tensor)]))
    with FakeCuda(1).installed() as fake:
        same_after_both_ways(fake, tmp_path / "c")
        assert any("crosses the border" in wrong for wrong in fake.wrong)


def test_where_one_slice_cannot_be_pinned_the_others_are_given_back(tmp_path, slices):
    with FakeCuda(1, pinnable=2 * MiB).installed() as fake:
        optimizer, saver = filled(fake, 4), Saver()
        with pytest.raises(errors.BudgetError, match="cannot pin"):
            saver.begin(tmp_path / "c", optimizer.parameters, SaveOptions())
        assert fake.pinnings == 8
        assert fake.pinned == {}
        saver.close()
