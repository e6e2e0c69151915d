"""Modules: names that do not depend on wrappers, and Parameters that stay the ones that an optimizer holds."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel
from trained import net, steps

import shardckpt
from shardckpt.errors import LeafError, NamesMismatchError


def state_of(model, **more):
    return shardckpt.train_state(model=model, rng=False, **more)


def tensors_of(url):
    return {name.removeprefix("model/") for name in shardckpt.open(url).names()}


def same(a, b):
    return a.state_dict().keys() == b.state_dict().keys() and all(torch.equal(v, b.state_dict()[k]) for k, v in a.state_dict().items())


def changed(model):
    """The same with other values."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(1)
    return model


WRAPPED = {
    "activation checkpointing": lambda model: (setattr(model, "first", checkpoint_wrapper(model.first)), model)[1],
    "nothing": lambda model: model,
}


@pytest.mark.parametrize("wrapping", WRAPPED)
def test_a_wrapped_module_is_saved_as_it_is_without_and_restored_into_either(tmp_path, wrapping):
    plain, wrapped = net(), WRAPPED[wrapping](changed(net()))
    shardckpt.save(tmp_path / "wrapped", state_of(wrapped))
    assert tensors_of(tmp_path / "wrapped") == {*net().state_dict()}
    shardckpt.restore(tmp_path / "wrapped", state_of(plain))
    assert same(plain, changed(net()))
    shardckpt.save(tmp_path / "plain", state_of(net()))
    shardckpt.restore(tmp_path / "plain", state_of(wrapped))
    assert torch.equal([*wrapped.parameters()][1], [*net().parameters()][1])


def test_parameters_are_filled_where_they_are(tmp_path):
    model = net()
    shardckpt.save(tmp_path / "c", state_of(model))
    before = {name: (id(p), p.data_ptr()) for name, p in changed(model).named_parameters()}
    shardckpt.restore(tmp_path / "c", state_of(model))
    assert {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()} == before
    assert same(model, net())


def test_a_module_on_the_meta_device_gets_memory_and_its_optimizer_trains_it(tmp_path):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    steps(model, optimizer, 0, 2)
    shardckpt.save(tmp_path / "c", state_of(model, optimizer=optimizer))
    with torch.device("meta"):
        fresh = type(model)()
    other = torch.optim.AdamW(fresh.parameters(), lr=0.01)
    shardckpt.restore(tmp_path / "c", state_of(fresh, optimizer=other))
    assert {p.device.type for p in fresh.state_dict().values()} == {"cpu"}
    assert steps(fresh, other, 2, 4) == steps(model, optimizer, 2, 4)


def test_tied_parameters_are_stored_once_and_stay_tied(tmp_path):
    def tied():
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        model[1].weight = model[0].weight
        return model

    torch.manual_seed(0)
    model = tied()
    shardckpt.save(tmp_path / "c", state_of(model))
    assert shardckpt.open(tmp_path / "c").info("model/0.weight").tied_names == ("model/1.weight",)
    fresh = tied()
    shardckpt.restore(tmp_path / "c", state_of(fresh))
    assert fresh[0].weight is fresh[1].weight
    assert torch.equal(fresh[0].weight, model[0].weight)


def test_averaged_weights_are_a_module_as_any_other(tmp_path):
    model = net()
    ema = AveragedModel(model, use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        steps(model, optimizer, step, step + 1)
        ema.update_parameters(model)
    shardckpt.save(tmp_path / "c", state_of(model, ema=ema))
    fresh, other = net(), AveragedModel(net(), use_buffers=True)
    shardckpt.restore(tmp_path / "c", state_of(fresh, ema=other))
    assert same(ema, other)
    assert int(other.n_averaged) == 3
    assert not torch.equal(other.module.first.weight, fresh.first.weight)


def test_averaged_weights_of_any_class_with_a_state_dict_come_back(tmp_path):
    class Shadow:
        def __init__(self, model):
            self.decay, self.updates, self.shadow = 0.9, 0, [p.detach().clone() for p in model.parameters()]

        def state_dict(self):
            return {"decay": self.decay, "updates": self.updates, "shadow": self.shadow, "collected": None}

        def load_state_dict(self, state):
            self.decay, self.updates, self.shadow = state["decay"], state["updates"], list(state["shadow"])

    ema = Shadow(changed(net()))
    ema.updates = 7
    shardckpt.save(tmp_path / "c", state_of(net(), ema=ema))
    other = Shadow(net())
    places = [p.data_ptr() for p in other.shadow]
    shardckpt.restore(tmp_path / "c", state_of(net(), ema=other))
    assert other.updates == 7
    assert all(map(torch.equal, ema.shadow, other.shadow))
    assert [p.data_ptr() for p in other.shadow] == places


class Counting(nn.Module):
    """Has extra state, a buffer that is not saved, and hooks."""

    def __init__(self, extra):
        super().__init__()
        self.weight, self.extra, self.loaded = nn.Parameter(torch.zeros(3)), extra, 0
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.register_load_state_dict_post_hook(lambda module, _keys: setattr(module, "loaded", module.loaded + 1))

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def test_extra_state_comes_back_through_the_module_and_its_hooks_run(tmp_path):
    model = Counting({"scale": 2.5, "history": torch.arange(3)})
    shardckpt.save(tmp_path / "c", state_of(model))
    assert tensors_of(tmp_path / "c") == {"weight", "_extra_state/history"}
    fresh = Counting(None)
    shardckpt.restore(tmp_path / "c", state_of(fresh))
    assert fresh.extra["scale"] == 2.5
    assert fresh.extra["history"].tolist() == [0, 1, 2]
    assert fresh.loaded == 1


def test_extra_state_that_cannot_be_stored_is_refused_by_name(tmp_path):
    with pytest.raises(LeafError, match=r"'model/_extra_state' is a _io.BytesIO"):
        shardckpt.save(tmp_path / "c", state_of(Counting(io.BytesIO(b"pickled"))))
    assert not (tmp_path / "c").exists()


def test_a_name_that_only_one_side_has_is_an_error_unless_told_otherwise(tmp_path):
    shardckpt.save(tmp_path / "c", state_of(nn.Linear(2, 2)))
    torch.manual_seed(1)
    model = nn.Linear(2, 2, bias=False)
    before = model.weight.clone()
    with pytest.raises(NamesMismatchError, match=r"in the checkpoint but not in `like`: 'model/bias'"):
        shardckpt.restore(tmp_path / "c", state_of(model))
    assert torch.equal(model.weight, before)
    shardckpt.restore(tmp_path / "c", state_of(model), strict=False)
    assert not torch.equal(model.weight, before)


def test_a_part_of_a_module_may_be_restored_and_the_rest_stays(tmp_path):
    shardckpt.save(tmp_path / "c", state_of(net()))
    model = changed(net())
    shardckpt.restore(tmp_path / "c", state_of(model), only="model/first.*")
    assert torch.equal(model.first.weight, net().first.weight)
    assert torch.equal(model.last.weight, net().last.weight + 1)


def test_the_model_alone_is_restored_from_the_whole_training_without_its_objects(tmp_path):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    steps(model, optimizer, 0, 2)
    shardckpt.save(tmp_path / "c", state_of(model, optimizer=optimizer, step=2))
    served = changed(net())
    shardckpt.restore(tmp_path / "c", state_of(served), only="model/**")
    assert same(served, model)
    restored = shardckpt.restore(tmp_path / "c", {"model": net().state_dict()}, only="model/**")
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in restored["model"].items())


class Extra(nn.Module):
    """A module with an extra state, as FP8 libraries have it."""

    def __init__(self, extra):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.extra = extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


KINDS_OF_EXTRA = {
    "none": None,
    "bytes as a tensor": torch.arange(5, dtype=torch.uint8),
    "a longer tensor": torch.arange(70, dtype=torch.uint8),
    "another dtype": torch.ones(5),
    "no elements": torch.empty(0, dtype=torch.uint8),
    "a dict": {"amax": torch.ones(3), "n": 1},
    "text": "x",
}


@pytest.mark.parametrize("own", KINDS_OF_EXTRA)
@pytest.mark.parametrize("stored", KINDS_OF_EXTRA)
def test_extra_state_comes_back_as_it_was_whatever_the_module_has_now(tmp_path, own, stored):
    shardckpt.save(tmp_path / "c", state_of(nn.Sequential(Extra(KINDS_OF_EXTRA[stored]))))
    fresh = nn.Sequential(Extra(copy.deepcopy(KINDS_OF_EXTRA[own])))
    shardckpt.restore(tmp_path / "c", state_of(fresh))
    found, expected = fresh[0].extra, KINDS_OF_EXTRA[stored]
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    else:
        assert str(found) == str(expected)
