"""Random number generators: put back exactly, and made anew for processes that have none to take
back."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import shardckpt
from shardckpt.training.generators import Generators, inherited


def drawn():
    """Some numbers of every generator, and of every kind that keeps something for the next time."""
    values = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.standard_normal()]  # noqa: NPY002
    return [*values, *torch.rand(3).tolist(), torch.randn(3).tolist(), torch.randperm(7).tolist()]


@pytest.fixture(autouse=True)
def generators():
    """As they were before, afterwards."""
    before = Generators().state_dict()
    random.seed(1)
    np.random.seed(2)  # noqa: NPY002
    torch.manual_seed(3)
    drawn()
    yield
    Generators().load_state_dict(before)


def test_the_numbers_after_restoring_are_those_that_followed_the_save(tmp_path):
    shardckpt.save(tmp_path / "c", shardckpt.train_state())
    followed = [drawn() for _ in range(3)]
    shardckpt.restore(tmp_path / "c", shardckpt.train_state())
    assert [drawn() for _ in range(3)] == followed


def test_saving_and_asking_for_a_like_draw_no_numbers(tmp_path):
    state = shardckpt.train_state()
    before = Generators().state_dict()
    shardckpt.save(tmp_path / "c", state)
    after = Generators().state_dict()
    assert torch.equal(before["torch"], after["torch"])
    assert before["python"]["words"].tolist() == after["python"]["words"].tolist()


def test_a_generator_of_another_kind_that_numpy_shares_comes_back(tmp_path):
    bits = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(5))
        shardckpt.save(tmp_path / "c", shardckpt.train_state())
        followed = np.random.rand(3).tolist()  # noqa: NPY002
        shardckpt.restore(tmp_path / "c", shardckpt.train_state())
        assert np.random.rand(3).tolist() == followed  # noqa: NPY002
    finally:
        np.random.set_bit_generator(bits)


def test_without_rng_no_generator_is_saved_or_touched(tmp_path):
    shardckpt.save(tmp_path / "c", shardckpt.train_state(rng=False, step=1))
    assert shardckpt.open(tmp_path / "c").tree == {"step": 1}
    before = torch.get_rng_state()
    shardckpt.restore(tmp_path / "c", shardckpt.train_state(rng=False, step=1))
    assert torch.equal(torch.get_rng_state(), before)


def test_generators_may_be_left_out_of_a_restore(tmp_path):
    shardckpt.save(tmp_path / "c", shardckpt.train_state(step=1))
    drawn()
    before = torch.get_rng_state()
    state = shardckpt.train_state()
    shardckpt.restore(tmp_path / "c", state, only="step")
    assert state.step == 1
    assert torch.equal(torch.get_rng_state(), before)


def of_two_processes():
    """States that differ in everything."""
    first = Generators().state_dict()
    drawn()
    return [first, Generators().state_dict()]


def numbers(states, process):
    Generators().load_state_dict(inherited(states, process))
    return drawn()


@pytest.mark.parametrize("saved", [1, 2])
def test_processes_without_a_counterpart_draw_other_numbers_each_and_the_same_when_resumed_again(
    saved,
):
    states = of_two_processes()[:saved]
    streams = [numbers(states, process) for process in range(saved, 8)]
    assert [numbers(states, process) for process in range(saved, 8)] == streams
    for column in zip(*streams, strict=True):
        assert len({str(value) for value in column}) == len(streams)


def test_generators_of_two_processes_draw_different_numbers():
    states = of_two_processes()
    assert numbers(states[:1], 5) != numbers(states[1:], 5)


def test_generators_that_all_processes_had_in_the_same_state_stay_in_step():
    first, second = of_two_processes()
    second["torch"] = first["torch"].clone()
    chosen = inherited([first, second], 2)
    assert torch.equal(chosen["torch"], first["torch"])
    assert chosen["python"]["words"].tolist() != first["python"]["words"].tolist()


def test_a_program_without_some_framework_puts_back_what_it_has():
    state = Generators().state_dict()
    followed = drawn()
    del state["torch"]
    before = torch.get_rng_state()
    Generators().load_state_dict(state)
    assert torch.equal(torch.get_rng_state(), before)
    assert drawn()[:4] == followed[:4]


# --- CUDA, of which only the generators are imitated: one state per device


class Cuda:
    """`torch.cuda`, with so many devices."""

    def __init__(self, devices, current=0):
        self.states = [
            torch.Generator().manual_seed(100 + device).get_state() for device in range(devices)
        ]
        self.current = current

    def is_available(self):
        return bool(self.states)

    is_initialized = is_available

    def device_count(self):
        return len(self.states)

    def current_device(self):
        return self.current

    def get_rng_state(self, device):
        return self.states[device].clone()

    def set_rng_state(self, state, device):
        self.states[device] = state.clone()


@pytest.fixture
def cuda(monkeypatch):
    """Makes the devices that the program has from then on."""
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda _device="cpu": generator("cpu"))

    def use(devices, current=0):
        monkeypatch.setattr(torch, "cuda", Cuda(devices, current))
        return torch.cuda

    return use


def numbered(cuda):
    return [state.tolist() for state in cuda.states]


@pytest.mark.parametrize("current", [0, 2])
def test_each_cuda_device_gets_its_state_back(tmp_path, cuda, current):
    before = numbered(cuda(4, current))
    shardckpt.save(tmp_path / "c", shardckpt.train_state())
    torch.cuda.states = torch.cuda.states[::-1]
    shardckpt.restore(tmp_path / "c", shardckpt.train_state())
    assert numbered(torch.cuda) == before


@pytest.mark.parametrize(
    ("saved", "now", "current", "then"), [(4, 1, 3, 0), (1, 4, 0, 2), (8, 4, 5, 1), (2, 3, 1, 0)]
)
def test_the_current_cuda_device_draws_on_with_another_number_and_other_devices(
    tmp_path, cuda, saved, now, current, then
):
    before = numbered(cuda(saved, current))
    shardckpt.save(tmp_path / "c", shardckpt.train_state())
    resumed = []
    for _ in range(2):
        shardckpt.restore(tmp_path / "c", shardckpt.train_state())
        cuda(now, then)
        shardckpt.restore(tmp_path / "c", shardckpt.train_state())
        resumed.append(numbered(torch.cuda))
    assert resumed[0] == resumed[1]
    assert resumed[0][then] == before[current]
    assert len({str(state) for state in resumed[0]}) == now


def test_a_process_without_a_counterpart_derives_the_states_of_its_cuda_devices(cuda):
    cuda(2)
    states = of_two_processes()
    torch.cuda.states.reverse()
    states[1] = Generators().state_dict()
    streams = []
    for process in (2, 3):
        Generators().load_state_dict(inherited(states, process))
        streams += numbered(torch.cuda)
    assert len({str(state) for state in streams}) == 4
    states[1]["cuda_devices"] = states[0]["cuda_devices"]
    Generators().load_state_dict(inherited(states, 2))
    assert numbered(torch.cuda) == [state.tolist() for state in states[0]["cuda_devices"]]


def test_cuda_states_of_earlier_versions_go_by_the_number_of_the_device(cuda):
    cuda(2, 1)
    state = Generators().state_dict()
    state["cuda"] = state.pop("cuda_devices")
    Generators().load_state_dict(state)
    assert numbered(torch.cuda) == [of_device.tolist() for of_device in state["cuda"]]


def test_a_program_that_has_no_cuda_restores_what_one_with_cuda_has_saved(tmp_path, cuda):
    cuda(2)
    shardckpt.save(tmp_path / "c", shardckpt.train_state(step=4))
    cuda(0)
    state = shardckpt.train_state(step=0)
    shardckpt.restore(tmp_path / "c", state)
    assert state.step == 4
