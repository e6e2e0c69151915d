"""The ring of pinned slots of a restore onto devices, of which only streams and events are imitated
(`fake_cuda`).

Each wait and each order that is taken out of the code shows in some schedule. tests/cuda has what
needs a GPU.
"""

from __future__ import annotations

import gc
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_cuda import Descent, FakeCuda, random_tensor, same, turn_bits

import shardckpt
from shardckpt import SaveOptions, errors
from shardckpt.frameworks import cuda, cuda_fills, cuda_runtime, torch_devices
from shardckpt.reading import landing
from shardckpt.reading.landing import SLOTS
from shardckpt.writing.background import Saver

MiB = 1 << 20
LIMIT = f"{2 * SLOTS}MiB"
"""Room for slots of 2 MiB."""


@pytest.fixture
def fake():
    with FakeCuda(3).installed() as fake:
        yield fake
        assert fake.wrong == []
        assert fake.pinned == {}, "pinned memory was not given back"


def large(count=3 * SLOTS):
    """Tensors of 1 MiB and of 1.5 MiB, one or two of which fill a slot."""
    return {f"w{i}": torch.full((256 + 128 * (i % 2), 1024), float(i)) for i in range(count)}


def small(count=300):
    """Tensors of all sizes of elements, a few bytes to some KiB."""
    seed, kinds = (
        torch.Generator().manual_seed(0),
        [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex128],
    )
    return {
        f"s{i}": random_tensor((i % 7, 1 + i % 50), kinds[i % len(kinds)], seed)
        for i in range(count)
    }


def places(fake, values, *, strided=False):
    made = {}
    for name, value in values.items():
        like = (
            torch.zeros_like(value)
            if not strided
            else torch.zeros(value.shape[::-1], dtype=value.dtype).transpose(0, -1)
        )
        made[name] = fake.put(like)
    return made


def wrong(actual, values):
    return [name for name, value in values.items() if not same(actual[name], value)]


def queued(fake):
    """The host memory of all copies that are queued."""
    return [host for stream in fake._all for _, _, host in stream.queue if host is not None]


# --- planted bugs


def broken(monkeypatch, what):
    """Take one wait or one order out of the code."""
    if what == "a slot is filled before the event of its copies":
        monkeypatch.setattr(cuda.Arrival, "wait", lambda self: None)
    elif what == "copies do not wait for earlier work":
        ended, begin = type("Ended", (), {"done": True})(), cuda_fills.DeviceFills.__init__

        def begin_at_once(self, sinks):
            record, cuda_runtime.runtime.record = cuda_runtime.runtime.record, lambda _stream: ended
            try:
                begin(self, sinks)
            finally:
                cuda_runtime.runtime.record = record

        monkeypatch.setattr(cuda_fills.DeviceFills, "__init__", begin_at_once)
    elif what == "a slot is free when the copies are queued":
        monkeypatch.setattr(landing.Staging, "_land", without_wait)
    elif what == "small tensors are taken from the place beside":
        spread = FakeCuda.spread
        monkeypatch.setattr(
            FakeCuda,
            "spread",
            lambda self, targets, starts, *rest: spread(self, targets, [*starts[1:], 0], *rest),
        )
    elif what == "copies begin while chunks are read":
        copied = landing.Landing.prepare

        def prepared(self, lease, arena):
            copied(self, lease, arena)
            cuda_fills.DeviceFills([self.sink]).place([(self.sink, self.buffers)])

        monkeypatch.setattr(landing.Landing, "prepare", prepared)


def without_wait(self):
    leases, _, nbytes = self._under_way.popleft()
    self._free(leases, nbytes)


BUGS = [
    "a slot is filled before the event of its copies",
    "a slot is free when the copies are queued",
    "copies do not wait for earlier work",
    "small tensors are taken from the place beside",
]


@pytest.mark.long
@pytest.mark.parametrize("what", [*BUGS, "nothing is broken"])
def test_an_order_that_is_left_out_of_a_restore_shows_in_some_schedule(tmp_path, monkeypatch, what):
    values = large() | small(60)
    shardckpt.save(tmp_path / "c", values)
    broken(monkeypatch, what)
    bad = 0
    for seed in range(8):
        fake = FakeCuda(seed)
        with fake.installed():
            optimizer = Descent(fake, places(fake, values))
            optimizer.step()
            shardckpt.restore(tmp_path / "c", optimizer.parameters, memory_limit=LIMIT)
            optimizer.values = {name: value.clone() for name, value in values.items()}
            optimizer.step()
            fake.idle()
            bad += bool(wrong(optimizer.parameters, optimizer.values) or fake.wrong)
        if bad:
            break
    assert (bad > 0) == (what != "nothing is broken")


@pytest.mark.parametrize("early", [False, True])
def test_no_byte_is_placed_before_its_checksum_is_compared(tmp_path, monkeypatch, early):
    values = {f"w{i}": torch.full((512, 1024), float(i + 1)) for i in range(12)}
    shardckpt.save(tmp_path / "c", values, options=SaveOptions(layout="zarr"))
    (chunk, *_) = sorted((tmp_path / "c").rglob("w7/c/0/0"))
    damaged = bytearray(chunk.read_bytes())
    damaged[-100] ^= 1
    chunk.write_bytes(damaged)
    if early:
        broken(monkeypatch, "copies begin while chunks are read")
    fake = FakeCuda(1)
    with fake.installed():
        like = {name: fake.put(torch.full_like(value, -1.0)) for name, value in values.items()}
        with pytest.raises(errors.CorruptionError, match="w7"):
            shardckpt.restore(tmp_path / "c", like, memory_limit=LIMIT)
        fake.idle()
    placed = all(
        bool(((like[name] == -1) | (like[name] == value)).all()) for name, value in values.items()
    )
    assert placed == (not early)


@pytest.mark.parametrize("drained", [True, False])
def test_after_an_error_all_copies_are_waited_for_before_the_slots_go(
    tmp_path, monkeypatch, drained
):
    values = large()
    shardckpt.save(tmp_path / "c", values)
    if not drained:
        monkeypatch.setattr(cuda.SideStreams, "drain", lambda self: True)
    fake = FakeCuda(2)
    copy = fake.copy

    def failing(target, source, stream):
        if fake.copies == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        copy(target, source, stream)

    with fake.installed():
        monkeypatch.setattr(fake, "copy", failing)
        with pytest.raises(errors.BudgetError):
            shardckpt.restore(tmp_path / "c", places(fake, values), memory_limit=LIMIT)
        assert (queued(fake) == []) == drained
        fake.idle()


def test_after_ctrl_c_amid_a_wait_all_copies_are_waited_for_too(fake, tmp_path, monkeypatch):
    values, pressed = large(), []
    shardckpt.save(tmp_path / "c", values)
    synchronize = fake.synchronize

    def interrupted(event):
        if len(pressed) < 3:
            pressed.append(event)
            raise KeyboardInterrupt
        synchronize(event)

    monkeypatch.setattr(fake, "synchronize", interrupted)
    with pytest.raises(KeyboardInterrupt) as raised:
        shardckpt.restore(tmp_path / "c", places(fake, values), memory_limit=LIMIT)
    del raised
    gc.collect()  # the errors that one another replaced hold the frames
    assert len(pressed) == 3
    assert queued(fake) == []


# --- waits, and copies


def test_nothing_waits_while_there_is_a_free_slot_and_each_slot_is_pinned_once(
    fake, tmp_path, monkeypatch
):
    values, waits = large(2 * SLOTS), []
    shardckpt.save(tmp_path / "c", values)
    copy = fake.copy
    monkeypatch.setattr(fake, "copy", lambda *of: (waits.append(len(fake.waits)), copy(*of))[1])
    restored = shardckpt.restore(tmp_path / "c", places(fake, values), memory_limit=LIMIT)
    assert wrong(restored, values) == []
    assert waits[0] == waits[1] == 0
    assert fake.pinnings <= SLOTS
    assert fake.high_water <= SLOTS * 2 * MiB


@pytest.mark.parametrize("strided", [False, True])
def test_small_tensors_that_lie_side_by_side_are_one_copy(fake, tmp_path, strided):
    values = small()
    shardckpt.save(tmp_path / "c", values)
    like = places(fake, values, strided=strided)
    assert wrong(shardckpt.restore(tmp_path / "c", like), values) == []
    assert fake.copies == len(fake.spreads) == 1
    assert fake.spreads[0] == sum(value.numel() > 0 for value in values.values())


def test_small_tensors_between_large_ones_are_gathered_as_far_as_they_are_neighbours(
    fake, tmp_path
):
    values = {**small(20), **large(4), **{f"t{i}": torch.full((9,), i) for i in range(20)}}
    shardckpt.save(tmp_path / "c", values)
    assert wrong(shardckpt.restore(tmp_path / "c", places(fake, values)), values) == []
    assert fake.copies < 4 + 12


def test_a_device_without_memory_for_that_gets_small_tensors_one_by_one(
    fake, tmp_path, monkeypatch
):
    values = small(40)
    shardckpt.save(tmp_path / "c", values)

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(fake, "spread", full)
    assert wrong(shardckpt.restore(tmp_path / "c", places(fake, values)), values) == []
    assert fake.copies == sum(value.numel() > 0 for value in values.values())


# --- other kinds of devices


def kind_of_torch(monkeypatch, kind, *names):
    """Make torch say that it was built for a kind of device, whose module has these names."""
    torch_devices.has_streams.cache_clear()
    original, module = torch.get_device_module, SimpleNamespace(**dict.fromkeys(names))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    monkeypatch.setattr(
        torch, "get_device_module", lambda device: module if device == kind else original(device)
    )


@pytest.fixture
def _forgets():
    yield
    torch_devices.has_streams.cache_clear()


ALL = ("Stream", "Event", "current_stream", "stream", "device")


@pytest.mark.usefixtures("_forgets")
def test_the_accelerator_of_torch_is_copied_by_streams_if_it_has_them(monkeypatch):
    kind_of_torch(monkeypatch, "xpu", *ALL)
    assert [torch_devices.has_streams(kind) for kind in ("cuda", "xpu", "mps", "cpu")] == [
        True,
        True,
        False,
        False,
    ]
    kind_of_torch(monkeypatch, "mps", "Event")
    assert not torch_devices.has_streams("mps")
    monkeypatch.delattr(torch, "accelerator")
    torch_devices.has_streams.cache_clear()
    assert [torch_devices.has_streams(kind) for kind in ("cuda", "xpu")] == [True, False]


@pytest.mark.usefixtures("_forgets")
@pytest.mark.parametrize("mode", ["wait", "overlap"])
def test_tensors_of_another_kind_of_device_take_the_same_way(tmp_path, monkeypatch, mode):
    kind_of_torch(monkeypatch, "xpu", *ALL)
    fake = FakeCuda(1, kind="xpu")
    with fake.installed():
        optimizer, saver = Descent(fake, {"w": fake.put(torch.ones(300, 70))}), Saver()
        expected = optimizer.values["w"].clone()
        handle = saver.begin(tmp_path / "c", optimizer.parameters, SaveOptions(device_copy=mode))
        optimizer.step()
        handle.wait()
        saver.close()
        restored = shardckpt.restore(tmp_path / "c", optimizer.parameters)
        assert restored["w"] is optimizer.parameters["w"]
        assert same(restored["w"], expected)
        assert fake.copies >= 2
        assert fake.wrong == []


def test_bits_are_spread_to_tensors_of_every_size_of_elements():
    values = [value for value in small(50).values() if value.numel()]
    starts = np.cumsum(
        [0, *(-(-value.numel() * value.itemsize // 64) * 64 for value in values)]
    ).tolist()
    source = torch.zeros(starts[-1], dtype=torch.uint8)
    for value, start in zip(values, starts, strict=False):
        source[start : start + value.numel() * value.itemsize] = value.reshape(-1).view(torch.uint8)
    targets = [torch.zeros_like(value) for value in values]
    cuda_runtime.spread_bits(targets, starts[:-1], torch.empty_like(source), source)
    assert all(same(target, value) for target, value in zip(targets, values, strict=True))
    turn_bits(targets[0])
    assert not same(targets[0], values[0])
