"""Forms of optimizers: what torch and DCP store is what `train_state` stores, told otherwise."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from trained import groups, net, steps

import shardckpt
from shardckpt.errors import NamesMismatchError, StructureMismatchError
from shardckpt.state import flatten, parse, unflatten
from shardckpt.state.document import write
from shardckpt.training.optimizer_state.forms import FORMS, read_optimizer

RATES = torch.optim.lr_scheduler.LambdaLR


def made(order=1, *, scheduled=False):
    model = net()
    optimizer = torch.optim.AdamW(groups(model, order=order), lr=0.01, betas=(0.8, 0.99))
    return (
        (model, optimizer, RATES(optimizer, lambda step: 0.9**step))
        if scheduled
        else (model, optimizer)
    )


def state_of(model, optimizer, scheduler=None, **more):
    return shardckpt.train_state(
        model=model, optimizer=optimizer, scheduler=scheduler, rng=False, **more
    )


def node_of(state):
    return parse(flatten(state, torch.is_tensor).tree)


def value_of(node):
    return unflatten(write(node), {})


NAMES = st.lists(
    st.text("ab.", min_size=1).filter(lambda name: not name.startswith(".")),
    unique=True,
    min_size=1,
    max_size=6,
)


@settings(max_examples=100, deadline=None)
@given(names=NAMES, data=st.data())
def test_any_division_into_groups_is_the_same_after_any_form(names, data):
    firsts = {name: data.draw(st.sampled_from(names[: i + 1])) for i, name in enumerate(names)}
    firsts = {
        name: firsts[first] if firsts[first] == first else name for name, first in firsts.items()
    }
    named = {
        "state": {name: {"step": i} for i, name in enumerate(names)},
        "param_groups": {
            first: {"lr": i / 8, "betas": (0.9, i / 9)}
            for i, first in enumerate(dict.fromkeys(firsts.values()))
        },
        "group_of": {
            name: first
            for group in dict.fromkeys(firsts.values())
            for name, first in firsts.items()
            if first == group
        },
    }
    nodes = read_optimizer(node_of(named))
    assert value_of(nodes.named()) == named
    listed = read_optimizer(parse(write(nodes.listed())))
    assert (listed.form, value_of(listed.named())) == ("listed", named)
    numbered = read_optimizer(parse(write(nodes.listed(numbers=True))))
    places = dict(enumerate(nodes.members()))
    assert (numbered.form, value_of(numbered.renamed(places.__getitem__).named())) == (
        "numbered",
        named,
    )
    flat = read_optimizer(parse(write(nodes.flat())))
    values = value_of(flat.named())
    assert values["state"] == named["state"]
    assert {name: values["param_groups"][name] for name in names} == {
        name: named["param_groups"][firsts[name]] for name in names
    }


def test_forms_are_those_of_torch_itself():
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    model, optimizer = made()
    steps(model, optimizer, 0, 1)
    nodes = read_optimizer(node_of(state_of(model, optimizer).state_dict()["optimizer"]))
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    for form, theirs in {
        "names": get_optimizer_state_dict(model, optimizer),
        "numbers": optimizer.state_dict(),
        "flat": get_optimizer_state_dict(model, optimizer, options=flat),
    }.items():
        assert shape(unflatten(write(FORMS[form](nodes)), Anything())) == shape(theirs), form


def test_state_of_no_parameter_is_in_every_form():
    named = {
        "state": {"a.b": {"step": 1}, "seen": 7},
        "param_groups": {"a.b": {"lr": 0.1}},
        "group_of": {"a.b": "a.b"},
    }
    nodes = read_optimizer(node_of(named))
    for form in FORMS.values():
        again = read_optimizer(parse(write(form(nodes))))
        assert value_of(again.renamed(lambda _: "a.b").named()) == named


def test_names_that_two_parameters_share_do_not_name_them():
    """As where an optimizer was made of two modules' `named_parameters()`."""
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    optimizer = torch.optim.Adam([{"params": one.named_parameters()} for one in model.values()])
    sum(p.sum() for p in model.parameters()).backward()
    optimizer.step()
    nodes = read_optimizer(node_of(optimizer.state_dict()))
    assert (nodes.form, nodes.members(), [*nodes.state]) == ("numbered", [0, 1, 2, 3], [0, 1, 2, 3])
    for group, names in zip(optimizer.param_groups, (["a", "b", "c"], ["d", "a"]), strict=True):
        group["param_names"] = names  # more names than parameters, of which as many are distinct
    assert read_optimizer(node_of(optimizer.state_dict())).form == "numbered"


class Anything(dict):
    """Has a tensor under every name."""

    def __contains__(self, _name):
        return True

    def __missing__(self, _name):
        return torch.zeros(())


def shape(value):
    """The same without elements."""
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items()}
    return (
        [shape(inner) for inner in value]
        if isinstance(value, list)
        else "tensor"
        if torch.is_tensor(value)
        else value
    )


def test_optimizer_state_that_torch_numbers_is_matched_by_position(tmp_path):
    model, optimizer = made()
    steps(model, optimizer, 0, 2)
    shardckpt.save(
        tmp_path / "c",
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2},
    )
    fresh = made()
    state = state_of(*fresh, step=0)
    shardckpt.restore(tmp_path / "c", state)
    assert state.step == 2
    assert steps(*fresh, 2, 4) == steps(model, optimizer, 2, 4)


def test_numbers_with_names_beside_them_go_by_names(tmp_path):
    def named(order):
        model = net()
        return model, torch.optim.AdamW(list(model.named_parameters())[::order], lr=0.01)

    model, optimizer = named(1)
    steps(model, optimizer, 0, 2)
    shardckpt.save(
        tmp_path / "c", {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    )
    fresh = named(-1)
    shardckpt.restore(tmp_path / "c", state_of(*fresh))
    assert steps(*fresh, 2, 4) == steps(model, optimizer, 2, 4)


def test_names_in_a_part_of_the_module_give_no_parameter_the_moments_of_another(tmp_path):
    """ "1.weight" is the name of one parameter in the module, and of another one in its part."""

    def made():
        inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        model = torch.nn.Sequential(inner, torch.nn.Linear(2, 2))
        last = [(f"last.{name}", of) for name, of in model[1].named_parameters()]
        groups = [{"params": inner.named_parameters()}, {"params": last}]
        return model, torch.optim.Adam(groups)

    model, optimizer = made()
    model(torch.ones(2)).square().sum().backward()
    optimizer.step()
    shardckpt.save(
        tmp_path / "c", {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    )
    fresh = made()
    for strict in (True, False):
        with pytest.raises(StructureMismatchError, match=r"param_names have '0\.bias'"):
            shardckpt.restore(tmp_path / "c", state_of(*fresh), strict=strict)
    assert not fresh[1].state
    shardckpt.restore(tmp_path / "c", state_of(*fresh), only="model/**")


def test_names_beside_numbers_of_which_a_few_remain_go_by_names(tmp_path):
    model, other = net(), net()
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.01)
    steps(model, optimizer, 0, 2)
    shardckpt.save(
        tmp_path / "c", {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    )
    fewer = torch.optim.AdamW([other.last.weight], lr=0.01)
    shardckpt.restore(tmp_path / "c", state_of(other, fewer), strict=False)
    (moments,) = fewer.state.values()
    assert torch.equal(moments["exp_avg"], optimizer.state[model.last.weight]["exp_avg"])


def test_numbers_in_groups_of_other_lengths_are_refused_and_the_weights_can_be_had(tmp_path):
    model, optimizer = made()
    steps(model, optimizer, 0, 1)
    shardckpt.save(
        tmp_path / "c", {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    )
    fresh = made(order=-1)
    for strict in (True, False):
        with pytest.raises(
            StructureMismatchError,
            match=r"'optimizer' has .* in groups of \[2, 5\], .* here has groups of \[5, 2\]",
        ):
            shardckpt.restore(tmp_path / "c", state_of(*fresh), strict=strict)
    assert not fresh[1].state
    shardckpt.restore(tmp_path / "c", state_of(*fresh), only="model/**")
    assert torch.equal(fresh[0].first.weight, model.first.weight)


def test_a_parameter_of_another_name_is_an_error(tmp_path):
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model, optimizer = made()
    steps(model, optimizer, 0, 1)
    listed = get_optimizer_state_dict(model, optimizer)
    listed["state"]["other"] = listed["state"].pop("scale")
    listed["param_groups"][1]["params"] = [
        "other" if name == "scale" else name for name in listed["param_groups"][1]["params"]
    ]
    shardckpt.save(tmp_path / "c", {"model": model.state_dict(), "optimizer": listed})
    with pytest.raises(
        NamesMismatchError, match=r"'optimizer/param_groups/scale'.*'optimizer/state/other/exp_avg'"
    ):
        shardckpt.restore(tmp_path / "c", state_of(*made()))


def test_some_parameters_of_a_listed_optimizer_can_be_restored(tmp_path):
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model, optimizer = made()
    steps(model, optimizer, 0, 1)
    shardckpt.save(
        tmp_path / "c",
        {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)},
    )
    fresh = made()
    shardckpt.restore(tmp_path / "c", state_of(*fresh), only="optimizer/state/last.weight/*")
    assert torch.equal(
        fresh[1].state[fresh[0].last.weight]["exp_avg"],
        optimizer.state[model.last.weight]["exp_avg"],
    )
    assert set(fresh[1].state) == {fresh[0].last.weight}


def test_rates_that_no_group_can_be_told_by_are_refused(tmp_path):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    model, optimizer, scheduler = made(scheduled=True)
    steps(model, optimizer, 0, 1, scheduler)
    flat = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    schedule = {**scheduler.state_dict(), "base_lrs": [0.7, 0.8], "_last_lr": [0.7, 0.8]}
    shardckpt.save(
        tmp_path / "c", {"model": model.state_dict(), "optimizer": flat, "scheduler": schedule}
    )
    with pytest.raises(
        StructureMismatchError,
        match=r"scheduler/base_lrs is a list with an item per group, but 'optimizer' is stored "
        r"without the order",
    ):
        shardckpt.restore(tmp_path / "c", state_of(*made(scheduled=True)))
    fresh = made(scheduled=True)
    shardckpt.restore(tmp_path / "c", state_of(*fresh), only=["model/**", "optimizer/**"])
    assert fresh[1].param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_a_schedule_for_another_number_of_groups_is_refused(tmp_path):
    model, _, scheduler = made(scheduled=True)
    shardckpt.save(
        tmp_path / "c", {"model": model.state_dict(), "scheduler": scheduler.state_dict()}
    )
    fresh = net()
    single = torch.optim.AdamW(fresh.parameters(), lr=0.5)
    state = state_of(fresh, single, RATES(single, lambda step: 0.9**step))
    with pytest.raises(
        StructureMismatchError,
        match=r"'scheduler': base_lrs was saved for 2 groups, but the optimizer has 1",
    ):
        shardckpt.restore(tmp_path / "c", state, only="scheduler/**")


def test_lists_that_were_tuples_become_tuples_again(tmp_path):
    model, optimizer = made()
    listed = optimizer.state_dict()
    for group in listed["param_groups"]:
        group["betas"] = list(group["betas"])
    shardckpt.save(tmp_path / "c", {"model": model.state_dict(), "optimizer": listed})
    fresh = made()
    shardckpt.restore(tmp_path / "c", state_of(*fresh))
    assert fresh[1].param_groups[1]["betas"] == (0.8, 0.99)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_names_that_torch_gives_to_a_group_do_not_bind_it_to_the_groups_of_the_save(tmp_path):
    def made_of_names(*groups):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        named = list(model.named_parameters())
        return model, torch.optim.AdamW(
            [{"params": named[first:last]} for first, last in groups], lr=0.25
        )

    model, optimizer = made_of_names((0, 2), (2, 4))
    flat = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    assert "param_groups.0.weight.param_names" in flat
    shardckpt.save(tmp_path / "c", {"model": model.state_dict(), "optimizer": flat})
    fresh, single = made_of_names((0, 4))
    shardckpt.restore(tmp_path / "c", state_of(fresh, single))
    assert single.param_groups[0]["param_names"] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_one_warning_says_what_was_left_alone(tmp_path, caplog):
    model, _ = made()
    shardckpt.save(tmp_path / "c", {"model": model.state_dict(), "epoch": 3})
    state = state_of(*made(), step=5)
    with caplog.at_level(logging.WARNING, "shardckpt"):
        shardckpt.restore(tmp_path / "c", state, strict=False)
    (record,) = caplog.records
    message = record.getMessage()
    assert "only in `like`, left unchanged: 'optimizer/" in message
    assert "1 name is only in the checkpoint, not read: 'epoch'" in message
    assert state.step == 5
    caplog.clear()
    shardckpt.restore(tmp_path / "c", {"model": model.state_dict(), "epoch": 0}, strict=False)
    assert not caplog.records
