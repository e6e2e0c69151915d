"""Modules: names that do not depend on wrappers, and Parameters that stay the ones that an
optimizer holds."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from lightning.fabric import Fabric
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
    return a.state_dict().keys() == b.state_dict().keys() and all(
        torch.equal(v, b.state_dict()[k]) for k, v in a.state_dict().items()
    )


def changed(model):
    """The same with other values."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(1)
    return model


class Outer(nn.Module):
    """Has children that are called as wrappers call what they wrap."""

    def __init__(self):
        super().__init__()
        for name in (
            "module",
            "_orig_mod",
            "_orig_module",
            "_checkpoint_wrapped_module",
            "_forward_module",
            "_original_module",
        ):
            self.add_module(name, nn.Linear(2, 2, bias=False))
        self.weight = nn.Parameter(torch.randn(2))

    def forward(self, x):
        return sum(child(x) for child in self.children()) * self.weight


def compiled(model):
    return torch.compile(model, backend="eager")


WRAPPED = {
    "activation checkpointing of a child": lambda model: (
        model.add_module("last", checkpoint_wrapper(model.last)),
        model,
    )[1],
    "activation checkpointing of a compiled child": lambda model: (
        model.add_module("last", checkpoint_wrapper(compiled(model.last))),
        model,
    )[1],
    "activation checkpointing": checkpoint_wrapper,
    "compile": compiled,
    "DataParallel of compile": lambda model: nn.DataParallel(compiled(model)),
    "Fabric": lambda model: Fabric(accelerator="cpu", devices=1).setup(model),
    "Fabric over compile": lambda model: Fabric(accelerator="cpu", devices=1).setup(
        compiled(model)
    ),
    "compile over Fabric": lambda model: compiled(
        Fabric(accelerator="cpu", devices=1).setup(model)
    ),
    "nothing": lambda model: model,
}


def trained_once(model):
    """The model's optimizer with its groups' scheduler, after one step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    sum(p.sum() for p in model.parameters()).backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return {"optimizer": optimizer, "scheduler": scheduler}


class Chain(nn.Sequential):
    """Two layers with names."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(2, 3), nn.Linear(3, 2)


@pytest.mark.parametrize("made", [Chain, Outer])
@pytest.mark.parametrize("wrapping", WRAPPED)
def test_a_wrapped_training_is_saved_as_it_is_without_and_restored_into_either(
    tmp_path, wrapping, made
):
    if made is Outer and ("checkpointing" in wrapping or wrapping == "compile over Fabric"):
        pytest.skip(
            "it has no such child, or torch's own load_state_dict mistakes one that it has for "
            "what is wrapped"
        )
    wrapped = WRAPPED[wrapping](made())
    ours = trained_once(wrapped)
    shardckpt.save(tmp_path / "wrapped", state_of(wrapped, **ours))
    bare = made()
    names = {name: parameter.shape for name, parameter in bare.named_parameters()}
    moments = {
        f"optimizer/state/{name}/{moment}"
        for name in names
        for moment in ("step", "exp_avg", "exp_avg_sq")
    }
    assert {*shardckpt.open(tmp_path / "wrapped").names()} == {
        f"model/{name}" for name in names
    } | moments
    for into in (bare, WRAPPED[wrapping](made())):
        fresh = trained_once(into)
        shardckpt.restore(tmp_path / "wrapped", state_of(into, **fresh))
        assert all(map(torch.equal, wrapped.parameters(), into.parameters()))
        own, other = (optimizer["optimizer"].state_dict()["state"] for optimizer in (ours, fresh))
        assert all(torch.equal(own[i][moment], other[i][moment]) for i in own for moment in own[i])
    shardckpt.save(tmp_path / "bare", state_of(bare))
    shardckpt.restore(tmp_path / "bare", state_of(wrapped))


def test_two_tensors_that_wrappers_give_one_name_are_refused():
    averaged = AveragedModel(nn.Linear(2, 2))
    averaged.module.register_buffer("n_averaged", torch.zeros(()))
    with pytest.raises(
        LeafError,
        match=r"'n_averaged' and 'module.n_averaged' are both called 'n_averaged' without the "
        r"wrappers",
    ):
        state_of(averaged).state_dict()


EARLIER = {
    "Fabric": ("", "_forward_module."),
    "DataParallel of compile": ("module.", "module."),
    "a child": ("", ""),
}
"""Parts that release 0.2.0 left in the names of the module's and the optimizer's state."""


@pytest.mark.parametrize("wrapping", EARLIER)
@pytest.mark.parametrize("into", ["wrapped", "bare"])
def test_names_of_an_earlier_release_are_read(tmp_path, wrapping, into):
    in_module, in_optimizer = EARLIER[wrapping]
    if into == "bare" and in_module:
        pytest.skip("the earlier release did not restore that either")
    model = Chain()
    ours = trained_once(model)
    state = state_of(model, **ours).state_dict()
    state["model"] = {in_module + name: value for name, value in state["model"].items()}
    for part in ("state", "group_of", "param_groups"):
        state["optimizer"][part] = {
            in_optimizer + name: value for name, value in state["optimizer"][part].items()
        }
    state["optimizer"]["group_of"] = dict.fromkeys(
        state["optimizer"]["group_of"], in_optimizer + "first.weight"
    )
    for rates in ("base_lrs", "_last_lr"):
        state["scheduler"][rates] = {
            in_optimizer + name: value for name, value in state["scheduler"][rates].items()
        }
    shardckpt.save(tmp_path / "c", state)
    fresh = Chain() if into == "bare" or wrapping == "a child" else WRAPPED[wrapping](Chain())
    other = trained_once(fresh)
    shardckpt.restore(tmp_path / "c", state_of(fresh, **other))
    assert all(map(torch.equal, model.parameters(), fresh.parameters()))
    own, restored = (optimizer["optimizer"].state_dict()["state"] for optimizer in (ours, other))
    assert all(torch.equal(own[i][moment], restored[i][moment]) for i in own for moment in own[i])


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
            self.decay, self.updates, self.shadow = (
                0.9,
                0,
                [p.detach().clone() for p in model.parameters()],
            )

        def state_dict(self):
            return {
                "decay": self.decay,
                "updates": self.updates,
                "shadow": self.shadow,
                "collected": None,
            }

        def load_state_dict(self, state):
            self.decay, self.updates, self.shadow = (
                state["decay"],
                state["updates"],
                list(state["shadow"]),
            )

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
        self.register_load_state_dict_post_hook(
            lambda module, _keys: setattr(module, "loaded", module.loaded + 1)
        )

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


def test_a_buffer_that_cannot_be_stored_is_refused_by_name_and_the_rest_can_be_restored(tmp_path):
    model = nn.Linear(2, 2)
    shardckpt.save(tmp_path / "c", state_of(model))
    other = nn.Linear(2, 2)
    other.register_buffer("mask", torch.eye(2).to_sparse())
    with pytest.raises(
        LeafError, match=r"'model/mask': tensors of layout torch.sparse_coo cannot be stored"
    ):
        shardckpt.save(tmp_path / "d", state_of(other))
    shardckpt.restore(tmp_path / "c", state_of(other), only=["model/weight", "model/bias"])
    assert torch.equal(other.weight, model.weight)


def test_a_name_that_only_one_side_has_is_an_error_unless_told_otherwise(tmp_path):
    shardckpt.save(tmp_path / "c", state_of(nn.Linear(2, 2)))
    torch.manual_seed(1)
    model = nn.Linear(2, 2, bias=False)
    before = model.weight.clone()
    with pytest.raises(
        NamesMismatchError, match=r"in the checkpoint but not in `like`: 'model/bias'"
    ):
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
    assert all(
        torch.equal(tensor, model.state_dict()[name]) for name, tensor in restored["model"].items()
    )


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
    actual, expected = fresh[0].extra, KINDS_OF_EXTRA[stored]
    if isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
    else:
        assert str(actual) == str(expected)
