"""Optimizers: their state goes by the names of parameters, into optimizers that have none yet."""

from __future__ import annotations

import copy
from collections import OrderedDict

import counting
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from trained import groups, net, steps

import shardckpt
from shardckpt.errors import (
    LeafError,
    NamesMismatchError,
    OptionError,
    ShardckptError,
    StructureMismatchError,
)

KINDS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01),
    "SGD, momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, nesterov=True),
    "Adam, AMSGrad": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "AdamW, lr in a tensor": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01)),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "Adadelta": torch.optim.Adadelta,
    "Adamax": lambda params: torch.optim.Adamax(params, lr=0.01),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "RAdam": lambda params: torch.optim.RAdam(params, lr=0.01),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01, centered=True, momentum=0.5),
    "ASGD": lambda params: torch.optim.ASGD(params, lr=0.01),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
}


def state_of(model, optimizer, **more):
    return shardckpt.train_state(model=model, optimizer=optimizer, rng=False, **more)


def equal(a, b):
    """Whether two states are the same, bit by bit, in types too."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return (
            isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
        )
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", [1, -1], ids=["the same groups", "the groups in another order"])
def test_training_goes_on_bit_by_bit_in_a_new_optimizer(tmp_path, kind, order):
    model = net()
    optimizer = KINDS[kind](groups(model))
    steps(model, optimizer, 0, 3)
    shardckpt.save(tmp_path / "c", state_of(model, optimizer))
    saved = optimizer.state_dict()
    fresh = net()
    other = KINDS[kind](groups(fresh, order=order))
    assert not other.state or kind == "Adagrad"
    shardckpt.restore(tmp_path / "c", state_of(fresh, other))
    if order == 1:
        assert equal(saved, other.state_dict())
    assert steps(fresh, other, 3, 6) == steps(model, optimizer, 3, 6)
    for name, parameter in model.state_dict().items():
        assert torch.equal(parameter, fresh.state_dict()[name]), name


def test_two_parameters_of_one_name_are_refused_and_both_are_given():
    model = nn.ModuleDict({"head": nn.Linear(2, 2, bias=False), "z": nn.Linear(2, 2, bias=False)})
    head = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.Adam([model["head"].weight, head.weight, model["z"].weight])
    message = r"parameter 0 of group 0 and parameter 1 of group 0 .* 'head\.weight'"
    with pytest.raises(LeafError, match=message):
        state_of(model, optimizer, head=head).state_dict()


def test_an_optimizer_whose_state_is_one_for_all_parameters_goes_on(tmp_path):
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    steps(model, optimizer, 0, 3)
    shardckpt.save(tmp_path / "c", state_of(model, optimizer))
    fresh = net()
    other = torch.optim.LBFGS(fresh.parameters(), max_iter=3)
    shardckpt.restore(tmp_path / "c", state_of(fresh, other))
    assert steps(fresh, other, 3, 5) == steps(model, optimizer, 3, 5)


def test_an_optimizer_goes_back_to_a_step_at_which_it_had_a_none_for_a_tensor(tmp_path):
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    state = state_of(model, optimizer)
    steps(model, optimizer, 0, 1)
    (of_one,) = optimizer.state.values()
    kept, of_one["t"] = of_one["t"], None
    shardckpt.save(tmp_path / "c", state)
    of_one["t"] = torch.tensor(kept)
    shardckpt.restore(tmp_path / "c", state)
    assert next(iter(optimizer.state.values()))["t"] is None


def test_a_save_works_out_the_names_of_parameters_once_and_none_of_earlier_releases():
    def block():
        return nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({k: nn.Linear(2, 2) for k in "qkv"}))

    model = nn.Sequential(*(block() for _ in range(50)))
    state = state_of(model, torch.optim.AdamW(model.parameters()))
    state.state_dict()
    made = counting.steps(state.state_dict)
    assert made < 60 * len([*model.parameters()])


def test_moments_are_named_after_their_parameters(tmp_path):
    model = net()
    optimizer = torch.optim.AdamW(groups(model), lr=0.01)
    steps(model, optimizer, 0, 1)
    shardckpt.save(tmp_path / "c", state_of(model, optimizer))
    checkpoint = shardckpt.open(tmp_path / "c")
    moment = checkpoint.read("optimizer/state/first.weight/exp_avg")
    assert torch.equal(torch.from_numpy(moment), optimizer.state[model.first.weight]["exp_avg"])
    assert checkpoint.tree["optimizer"]["param_groups"]["first.weight"]["lr"] == 0.01
    assert checkpoint.tree["optimizer"]["group_of"]["norm.bias"] == "scale"


def test_an_optimizer_that_has_made_steps_loses_what_was_not_saved(tmp_path):
    model = net()
    optimizer = torch.optim.AdamW(groups(model), lr=0.01)
    shardckpt.save(tmp_path / "c", state_of(model, optimizer))
    steps(model, optimizer, 0, 2)
    shardckpt.restore(tmp_path / "c", state_of(model, optimizer))
    assert not optimizer.state
    fresh = net()
    assert steps(model, optimizer, 0, 2) == steps(
        fresh, torch.optim.AdamW(groups(fresh), lr=0.01), 0, 2
    )


def test_moments_of_an_optimizer_that_has_some_are_filled_in_place(tmp_path):
    model = net()
    optimizer = torch.optim.AdamW(groups(model), lr=0.01)
    steps(model, optimizer, 0, 2)
    shardckpt.save(tmp_path / "c", state_of(model, optimizer))
    before = optimizer.state[model.first.weight]["exp_avg"]
    address = before.data_ptr()
    steps(model, optimizer, 2, 4)
    shardckpt.restore(tmp_path / "c", state_of(model, optimizer))
    assert optimizer.state[model.first.weight]["exp_avg"].data_ptr() == address


def test_moments_keep_a_dtype_that_torch_would_convert_to_the_parameters(tmp_path):
    model = net(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    steps(model, optimizer, 0, 1)
    exact = torch.full((7, 5), 1 / 3, dtype=torch.float32)
    optimizer.state[model.first.weight]["momentum_buffer"] = exact
    shardckpt.save(tmp_path / "c", state_of(model, optimizer))
    fresh = net(torch.bfloat16)
    other = torch.optim.SGD(fresh.parameters(), lr=0.01, momentum=0.9)
    shardckpt.restore(tmp_path / "c", state_of(fresh, other))
    moment = other.state[fresh.first.weight]["momentum_buffer"]
    assert moment.dtype == torch.float32
    assert torch.equal(moment, exact)


class Preconditioned(torch.optim.Optimizer):
    """Keeps its state as SOAP, Shampoo and Kron do: tensors of other dtypes in lists, tuples and
    dicts."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            factors = [torch.rand(n, n, dtype=torch.float32) for n in p.shape] or [torch.rand(1)]
            self.state[p] |= {
                "step": 70001,
                "GG": factors,
                "Q": (factors[0].double(), [None, factors[0].clone()]),
                "codes": {
                    "low": torch.randint(-128, 127, p.shape, dtype=torch.int8),
                    "index": torch.tensor([70001, 3]),
                },
                "form": "soap",
                "exp_avg": torch.zeros_like(p, dtype=torch.float32),
            }


@pytest.mark.parametrize("steps_before", [0, 1], ids=["without a step", "after a step"])
def test_state_in_containers_keeps_its_dtypes(tmp_path, steps_before):
    model = net(torch.bfloat16)
    optimizer = Preconditioned(model.parameters())
    optimizer.step()
    shardckpt.save(tmp_path / "c", state_of(model, optimizer))
    fresh = net(torch.bfloat16)
    other = Preconditioned(fresh.parameters())
    for _ in range(steps_before):
        other.step()
    shardckpt.restore(tmp_path / "c", state_of(fresh, other))
    assert equal(optimizer.state_dict(), other.state_dict())


def test_state_that_an_optimizer_does_not_load_is_named(tmp_path):
    class Forgetful(Preconditioned):
        def load_state_dict(self, state):
            for of_one in state["state"].values():
                del of_one["Q"]
            super().load_state_dict(state)

    model = nn.Linear(2, 2, bias=False)
    optimizer = Forgetful(model.parameters())
    optimizer.step()
    shardckpt.save(tmp_path / "c", state_of(model, optimizer))
    fresh = nn.Linear(2, 2, bias=False)
    restored = shardckpt.restore(
        tmp_path / "c", state_of(fresh, Preconditioned(fresh.parameters()))
    )
    assert restored is not None
    with pytest.raises(
        NamesMismatchError, match=r"load_state_dict\(\) of .*Forgetful has not loaded weight/Q;"
    ):
        shardckpt.restore(tmp_path / "c", state_of(fresh, Forgetful(fresh.parameters())))


class Packing(Preconditioned):
    """Wraps state in a dict of its own in `state_dict` and unwraps it to load it, as bitsandbytes'
    8-bit optimizers do."""

    _KEY = "__packed__"

    def state_dict(self):
        packed = super().state_dict()
        packed["state"] = {
            number: {**of, self._KEY: {"Q": of["Q"]}} for number, of in packed["state"].items()
        }
        for of_one in packed["state"].values():
            del of_one["Q"]
        return packed

    def load_state_dict(self, state):
        state = copy.deepcopy(state)
        for of_one in state["state"].values():
            of_one.update(self.unpacked(of_one.pop(self._KEY)))
        super().load_state_dict(state)

    def unpacked(self, packed):
        return packed


@pytest.mark.parametrize("steps_before", [0, 1], ids=["without a step", "after a step"])
def test_state_that_an_optimizer_unpacks_is_loaded_with_its_dtypes(tmp_path, steps_before):
    model, fresh = net(torch.bfloat16), net(torch.bfloat16)
    optimizer, other = Packing(model.parameters()), Packing(fresh.parameters())
    optimizer.step()
    optimizer.state[next(model.parameters())]["Q"][0][0] = float("nan")
    shardckpt.save(tmp_path / "c", state_of(model, optimizer))
    for _ in range(steps_before):
        other.step()
    shardckpt.restore(tmp_path / "c", state_of(fresh, other))
    for one, two in zip(model.parameters(), fresh.parameters(), strict=True):
        assert optimizer.state[one].keys() == other.state[two].keys()
        state = tree_map_only(
            torch.Tensor, torch.nan_to_num, [optimizer.state[one], other.state[two]]
        )
        assert equal(*state)


def test_packed_state_of_which_an_optimizer_drops_a_part_is_named(tmp_path):
    class Forgetful(Packing):
        def unpacked(self, packed):
            return {"Q": packed["Q"][:1]}

    model, fresh = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    optimizer = Packing(model.parameters())
    optimizer.step()
    optimizer.state[model.weight]["Q"][1][0] = 7.0
    shardckpt.save(tmp_path / "c", state_of(model, optimizer))
    with pytest.raises(
        NamesMismatchError,
        match=r"load_state_dict\(\) of .*Forgetful has not loaded weight/__packed__;",
    ):
        shardckpt.restore(tmp_path / "c", state_of(fresh, Forgetful(fresh.parameters())))


def test_one_group_may_take_what_was_in_several_of_equal_settings(tmp_path):
    model = net()
    split = [{"params": [p]} for p in model.parameters()]
    optimizer = torch.optim.AdamW(split, lr=0.02)
    steps(model, optimizer, 0, 2)
    shardckpt.save(tmp_path / "c", state_of(model, optimizer))
    fresh = net()
    other = torch.optim.AdamW(fresh.parameters(), lr=0.5)
    shardckpt.restore(tmp_path / "c", state_of(fresh, other))
    assert other.param_groups[0]["lr"] == 0.02
    assert steps(fresh, other, 2, 4) == steps(model, optimizer, 2, 4)


def test_one_group_cannot_take_what_was_in_several_of_different_settings(tmp_path):
    model = net()
    several = torch.optim.AdamW(groups(model), lr=0.01)
    steps(model, several, 0, 1)
    shardckpt.save(tmp_path / "c", state_of(model, several))
    other = torch.optim.AdamW(model.parameters(), lr=0.5)
    with pytest.raises(
        StructureMismatchError,
        match=r"group 0 has parameters that were saved with different settings, lr=0.003 and 0.01;",
    ):
        shardckpt.restore(tmp_path / "c", state_of(model, other))
    shardckpt.restore(
        tmp_path / "c", state_of(model, other), only=["model/**", "optimizer/state/**"]
    )
    assert other.param_groups[0]["lr"] == 0.5


def test_a_parameter_in_no_module_is_refused_with_its_place():
    model, stranger = net(), nn.Parameter(torch.ones(2, 3))
    optimizer = torch.optim.SGD([*model.parameters(), stranger], lr=0.1)
    with pytest.raises(
        LeafError,
        match=r"'optimizer': parameter 7 of group 0, of shape \(2, 3\), is in none of the modules",
    ):
        state_of(model, optimizer).state_dict()


def test_a_parameter_that_the_checkpoint_lacks_is_missed_by_name(tmp_path):
    model = net()
    shardckpt.save(tmp_path / "c", state_of(model, torch.optim.SGD([model.first.weight], lr=0.1)))
    with pytest.raises(NamesMismatchError, match=r"'optimizer/group_of/last\.weight'"):
        shardckpt.restore(
            tmp_path / "c",
            state_of(model, torch.optim.SGD([model.first.weight, model.last.weight], lr=0.1)),
        )


def test_a_parameter_that_only_the_checkpoint_has_is_an_error_or_left_alone(tmp_path):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    steps(model, optimizer, 0, 1)
    shardckpt.save(tmp_path / "c", state_of(model, optimizer))
    part = torch.optim.Adam([model.last.weight], lr=0.5)
    with pytest.raises(NamesMismatchError, match=r"'optimizer/state/first\.weight/exp_avg'"):
        shardckpt.restore(tmp_path / "c", state_of(model, part))
    shardckpt.restore(tmp_path / "c", state_of(model, part), strict=False)
    assert torch.equal(
        part.state[model.last.weight]["exp_avg"], optimizer.state[model.last.weight]["exp_avg"]
    )
    assert part.param_groups[0]["lr"] == 0.1


def test_the_state_of_some_parameters_can_be_restored_and_not_a_part_of_one(tmp_path):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    steps(model, optimizer, 0, 1)
    shardckpt.save(tmp_path / "c", state_of(model, optimizer))
    saved = optimizer.state[model.last.weight]["exp_avg"].clone()
    steps(model, optimizer, 1, 2)
    kept = optimizer.state[model.first.weight]["exp_avg"].clone()
    shardckpt.restore(
        tmp_path / "c", state_of(model, optimizer), only="optimizer/state/last.weight/*"
    )
    assert torch.equal(optimizer.state[model.last.weight]["exp_avg"], saved)
    assert torch.equal(optimizer.state[model.first.weight]["exp_avg"], kept)
    with pytest.raises(
        OptionError,
        match=r"selects a part of 'optimizer/state/scale', which can only be restored as a whole",
    ):
        shardckpt.restore(
            tmp_path / "c", state_of(model, optimizer), only="optimizer/state/*/exp_avg"
        )


def test_several_modules_and_optimizers_are_told_apart(tmp_path):
    def made():
        generator, critic = net(), net()
        optimizers = (
            torch.optim.Adam(generator.parameters(), lr=0.01),
            torch.optim.RMSprop(critic.parameters(), lr=0.02),
        )
        return generator, critic, *optimizers

    def of(generator, critic, generators, critics):
        return shardckpt.train_state(
            model=generator, optimizer=generators, critic=critic, critics=critics, rng=False
        )

    ours = made()
    steps(ours[0], ours[2], 0, 2)
    steps(ours[1], ours[3], 5, 8)
    shardckpt.save(tmp_path / "c", of(*ours))
    names = shardckpt.open(tmp_path / "c").names()
    assert {
        "optimizer/state/first.weight/exp_avg",
        "critics/state/critic.first.weight/square_avg",
    } <= {*names}
    fresh = made()
    shardckpt.restore(tmp_path / "c", of(*fresh))
    assert steps(fresh[0], fresh[2], 2, 4) == steps(ours[0], ours[2], 2, 4)
    assert steps(fresh[1], fresh[3], 8, 9) == steps(ours[1], ours[3], 8, 9)


def test_state_that_cannot_be_stored_is_refused_by_name(tmp_path):
    model = net()
    optimizer = torch.optim.SGD(groups(model), lr=0.1)
    optimizer.param_groups[1]["after"] = print
    with pytest.raises(
        LeafError, match=r"'optimizer/param_groups/scale/after' is a builtin_function_or_method"
    ):
        shardckpt.save(tmp_path / "c", state_of(model, optimizer))
    optimizer.param_groups[1].pop("after")
    optimizer.state[model.scale]["history"] = {1, 2}
    with pytest.raises(LeafError, match=r"'optimizer/state/scale/history' is a set"):
        shardckpt.save(tmp_path / "c", state_of(model, optimizer))


SCHEDULERS = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 4, 4, 6], 0.5),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "SWALR, whose state has a function": lambda o: torch.optim.swa_utils.SWALR(
        o, 0.001, anneal_epochs=4
    ),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20),
    "CyclicLR": lambda o: torch.optim.lr_scheduler.CyclicLR(
        o, [g["lr"] for g in o.param_groups], 0.1, 3, cycle_momentum=False
    ),
    "CosineAnnealingWarmRestarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(
        o, 3, 2
    ),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(
        o, patience=0, min_lr=[g["lr"] / 3 for g in o.param_groups]
    ),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, 0.1, 1, 3),
            torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
        ],
        milestones=[3],
    ),
    "ChainedScheduler": lambda o: torch.optim.lr_scheduler.ChainedScheduler(
        [
            torch.optim.lr_scheduler.ConstantLR(o, 0.5, 4),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        ]
    ),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("order", [1, -1], ids=["the same groups", "the groups in another order"])
def test_a_scheduler_goes_on_for_each_group_where_it_was(tmp_path, kind, order):
    def made(order=1):
        model = net()
        optimizer = torch.optim.SGD(groups(model, order=order), lr=0.05)
        return model, optimizer, SCHEDULERS[kind](optimizer)

    def of(model, optimizer, scheduler):
        return state_of(model, optimizer, scheduler=scheduler)

    ours, fresh = made(), made(order)
    steps(ours[0], ours[1], 0, 3, ours[2])
    shardckpt.save(tmp_path / "c", of(*ours))
    shardckpt.restore(tmp_path / "c", of(*fresh))
    if order == 1:
        assert equal(plain(ours[2].state_dict()), plain(fresh[2].state_dict()))
    for step in range(3, 9):
        assert steps(fresh[0], fresh[1], step, step + 1, fresh[2]) == steps(
            ours[0], ours[1], step, step + 1, ours[2]
        )
        assert [group["lr"] for group in fresh[1].param_groups][::order] == [
            group["lr"] for group in ours[1].param_groups
        ]


def plain(value):
    """Without what no scheduler goes by: whether a dict is an OrderedDict, whether a sequence of
    schedulers is a list."""
    if isinstance(value, dict):
        return (
            {key: plain(inner) for key, inner in value.items()}
            if type(value) is OrderedDict
            else value
        )
    return value


def test_a_scheduler_of_other_groups_says_which_it_was_saved_for(tmp_path):
    model = net()
    optimizer = torch.optim.SGD(groups(model), lr=0.05, weight_decay=0)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    optimizer.param_groups[1] |= {
        name: optimizer.param_groups[0][name] for name in ("lr", "initial_lr")
    }
    shardckpt.save(tmp_path / "c", state_of(model, optimizer, scheduler=scheduler))
    other = torch.optim.SGD(model.parameters(), lr=0.05)
    merged = state_of(
        model, other, scheduler=torch.optim.lr_scheduler.LambdaLR(other, lambda step: 0.9**step)
    )
    with pytest.raises(
        ShardckptError,
        match=r"'scheduler': base_lrs was saved for the groups of 'first.weight', 'scale'.* "
        r"different values",
    ):
        shardckpt.restore(tmp_path / "c", merged)


class Slow(torch.optim.Optimizer):
    """An optimizer around another one, as Lookahead is: its state_dict has a form of its own, with
    tuples for keys."""

    def __init__(self, inner):
        self.inner, self.slow = inner, {}
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})
        self.param_groups = inner.param_groups

    def step(self, closure=None):
        loss = self.inner.step(closure)
        for k, group in enumerate(self.param_groups):
            for i, parameter in enumerate(group["params"]):
                slow = self.slow.setdefault((k, i), {"slow": parameter.detach().clone(), "n": 0})
                slow["slow"].lerp_(parameter.detach(), 0.5)
                slow["n"] += 1
                parameter.data.copy_(slow["slow"])
        return loss

    def state_dict(self):
        return {"slow": self.slow, "inner": self.inner.state_dict()}

    def load_state_dict(self, state):
        self.slow = state["slow"]
        self.inner.load_state_dict(state["inner"])


def test_an_optimizer_with_a_form_of_its_own_goes_on_by_that_form(tmp_path):
    model = net()
    optimizer = Slow(torch.optim.AdamW(groups(model), lr=0.01))
    steps(model, optimizer, 0, 3)
    shardckpt.save(tmp_path / "c", state_of(model, optimizer))
    fresh = net()
    other = Slow(torch.optim.AdamW(groups(fresh), lr=0.01))
    shardckpt.restore(tmp_path / "c", state_of(fresh, other))
    assert equal(optimizer.state_dict(), other.state_dict())
    assert steps(fresh, other, 3, 6) == steps(model, optimizer, 3, 6)


def test_an_optimizer_that_stores_one_dict_by_name_goes_on(tmp_path):
    class Flat(Slow):
        def state_dict(self):
            return {
                f"{i}.{key}": value
                for i, of in self.inner.state_dict()["state"].items()
                for key, value in of.items()
            }

        def load_state_dict(self, flat):
            packed = self.inner.state_dict()
            for path, value in flat.items():
                number, key = path.split(".")
                packed["state"].setdefault(int(number), {})[key] = value
            self.inner.load_state_dict(packed)

    model = net()
    optimizer = Flat(torch.optim.AdamW(groups(model), lr=0.01))
    steps(model, optimizer, 0, 3)
    shardckpt.save(tmp_path / "c", state_of(model, optimizer))
    fresh = net()
    other = Flat(torch.optim.AdamW(groups(fresh), lr=0.01))
    shardckpt.restore(tmp_path / "c", state_of(fresh, other))
    assert equal(optimizer.inner.state_dict()["state"], other.inner.state_dict()["state"])


class Counting(torch.optim.SGD):
    """State that belongs to no parameter, as MADGRAD has it."""

    def step(self, closure=None):
        loss = super().step(closure)
        self.state["k"] = self.state.get("k", torch.zeros(1, dtype=torch.int64)) + 1
        self.state["shared"] = {
            "n": int(self.state["k"]),
            "ema": torch.full((3,), float(self.state["k"])),
        }
        return loss


@pytest.mark.parametrize("strict", [True, False])
def test_state_that_belongs_to_no_parameter_is_restored_before_the_first_step(tmp_path, strict):
    model = net()
    optimizer = Counting(groups(model), lr=0.01, momentum=0.9)
    steps(model, optimizer, 0, 3)
    shardckpt.save(tmp_path / "c", state_of(model, optimizer))
    fresh = net()
    other = Counting(groups(fresh), lr=0.01, momentum=0.9)
    shardckpt.restore(tmp_path / "c", state_of(fresh, other), strict=strict)
    assert equal(optimizer.state_dict(), other.state_dict())


@pytest.mark.parametrize("key", ["1.weight", 99, (0, 1)])
def test_state_under_a_key_that_cannot_be_named_is_refused_by_it(tmp_path, key):
    model = nn.Sequential(nn.ReLU(), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer.state[key] = {"n": 1}
    with pytest.raises(LeafError, match="SGD keeps state under"):
        shardckpt.save(tmp_path / "c", state_of(model, optimizer))
    assert not (tmp_path / "c" / "checkpoint.json").exists()


class Tied(nn.Module):
    """One layer under two names."""

    def __init__(self, first, second):
        super().__init__()
        layer = nn.Linear(2, 2)
        self.add_module(first, layer)
        self.add_module(second, layer)


def test_tied_modules_in_another_order_get_their_state(tmp_path):
    def made(first, second):
        model = Tied(first, second)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01 if first == "y" else 0.5)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3)

    (old, moments, rates), (new, moments_now, rates_now) = made("y", "x"), made("x", "y")
    old.x(torch.ones(2)).sum().backward()
    moments.step()
    rates.step()
    shardckpt.save(
        tmp_path / "c", shardckpt.train_state(model=old, optimizer=moments, scheduler=rates)
    )
    shardckpt.restore(
        tmp_path / "c", shardckpt.train_state(model=new, optimizer=moments_now, scheduler=rates_now)
    )
    assert torch.equal(old.x.weight, new.y.weight)
    assert rates_now.state_dict() == rates.state_dict()
    for model, optimizer in ((old, moments), (new, moments_now)):
        for _ in range(2):
            optimizer.zero_grad()
            model.x(torch.ones(2)).square().sum().backward()
            optimizer.step()
    assert torch.equal(old.x.weight, new.x.weight)


def test_modules_that_share_a_weight_in_another_order_get_its_state(tmp_path):
    def made():
        one, other = nn.Linear(2, 2), nn.Linear(2, 2)
        other.weight = one.weight
        return one, other, torch.optim.Adam([one.weight, one.bias, other.bias])

    (one, other, moments), (one_now, other_now, moments_now) = made(), made()
    (one(torch.ones(2)) + other(torch.ones(2))).sum().backward()
    moments.step()
    shardckpt.save(tmp_path / "c", shardckpt.train_state(a=one, b=other, optimizer=moments))
    shardckpt.restore(
        tmp_path / "c", shardckpt.train_state(b=other_now, a=one_now, optimizer=moments_now)
    )
    for name, tensor in moments.state[one.weight].items():
        assert torch.equal(tensor, moments_now.state[one_now.weight][name])
    assert torch.equal(other.bias, other_now.bias)


def test_settings_of_another_class_of_optimizer_are_refused_before_anything_changes(tmp_path):
    model = torch.nn.Linear(3, 2)
    saved = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(3)).sum().backward()
    saved.step()
    shardckpt.save(tmp_path / "c", shardckpt.train_state(model=model, optimizer=saved, step=1))
    other = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = shardckpt.train_state(model=model, optimizer=other, step=0)
    with pytest.raises(
        StructureMismatchError, match=r"another class of optimizer \(.*betas.*SGD needs .*momentum"
    ):
        shardckpt.restore(tmp_path / "c", state)
    assert other.param_groups[0]["lr"] == 0.1
    shardckpt.restore(tmp_path / "c", state, only=["model/**", "step"])
    other.step()


@pytest.mark.parametrize(
    "kind",
    [
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.SGD,
        torch.optim.RMSprop,
        torch.optim.Adagrad,
    ],
)
def test_settings_that_later_versions_of_torch_have_may_be_missing(tmp_path, kind):
    model = torch.nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.5)
    later = {
        "maximize",
        "foreach",
        "differentiable",
        "fused",
        "capturable",
        "decoupled_weight_decay",
    } & optimizer.param_groups[0].keys()
    for name in later:
        del optimizer.param_groups[0][name]
    optimizer.param_groups[0] |= {"initial_lr": 0.5, "of_mine": 1}
    shardckpt.save(tmp_path / "c", shardckpt.train_state(model=model, optimizer=optimizer))
    new = kind(model.parameters(), lr=0.1)
    shardckpt.restore(tmp_path / "c", shardckpt.train_state(model=model, optimizer=new))
    assert new.param_groups[0]["lr"] == 0.5
    new.zero_grad()
    model(torch.ones(3)).sum().backward()
    new.step()
