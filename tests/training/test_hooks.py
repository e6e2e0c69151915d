"""Modules whose `state_dict` hooks change tensors: a restore gives the module what was read, or
says what it could not give.

Sharded modules and optimizers: `tests/children/training_hooks.py`.
"""

from __future__ import annotations

import logging

import pytest
import torch
from hooked import KINDS, LOST, hooked
from processes import Processes
from torch import nn

import shardckpt
from shardckpt.errors import NamesMismatchError


def state_of(model, **more):
    return shardckpt.train_state(model=model, rng=False, **more)


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def error_text(kind, loads):
    """The text of the error for a kind; None where it is restored."""
    if (kind, loads) not in LOST:
        return None
    lost, unread = LOST[kind, loads]
    ends = (
        [f"{', '.join(unread)} were read, and the module does not hold what was read"]
        if unread
        else []
    )
    return "; ".join([f"{', '.join(lost)} keep the values from before the restore", *ends])


@pytest.mark.parametrize("loads", [True, False], ids=["with a load hook", "without"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_module_with_hooks_holds_what_was_read_or_the_error_names_what_it_lacks(
    tmp_path, kind, loads
):
    saved, fresh = hooked(kind, loads), hooked(kind, loads, seed=1)
    shardckpt.save(tmp_path / "c", state_of(saved))
    expected = error_text(kind, loads)
    if expected is None:
        shardckpt.restore(tmp_path / "c", state_of(fresh))
        assert all(map(torch.equal, weights(fresh), weights(saved)))
    else:
        with pytest.raises(NamesMismatchError, match=f"'model': {expected}: its state_dict"):
            shardckpt.restore(tmp_path / "c", state_of(fresh))


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_with_hooks_and_without_memory_gets_both(tmp_path, kind):
    saved = hooked(kind, loads=True)
    shardckpt.save(tmp_path / "c", state_of(saved))
    with torch.device("meta"):
        fresh = hooked(kind, loads=True)
    parameters = [*fresh.parameters()]
    shardckpt.restore(tmp_path / "c", state_of(fresh), strict=False)
    assert [id(p) for p in fresh.parameters()] == [id(p) for p in parameters]
    for name, own, other in zip(("q", "k"), fresh.parameters(), saved.parameters(), strict=True):
        assert own.is_meta if (kind, name) == ("Dropped", "k") else torch.equal(own, other)


def test_what_a_module_does_not_take_is_a_warning_if_names_may_differ(tmp_path, caplog):
    saved, fresh = hooked("Fused", loads=False), hooked("Fused", loads=False, seed=1)
    before = weights(fresh)
    shardckpt.save(tmp_path / "c", state_of(saved))
    with caplog.at_level(logging.WARNING, "shardckpt"):
        shardckpt.restore(tmp_path / "c", state_of(fresh), strict=False)
    assert all(map(torch.equal, weights(fresh), before))
    assert (
        "0.q.weight, 0.k.weight keep the values from before the restore; 0.qk were read"
        in caplog.text
    )


def test_names_that_are_not_requested_are_not_missed(tmp_path):
    shardckpt.save(tmp_path / "c", state_of(hooked("Fused", loads=True)))
    model = nn.Sequential(hooked("Fused", loads=True, seed=1)[0])
    before = weights(model)
    shardckpt.save(tmp_path / "d", state_of(model))
    shardckpt.restore(tmp_path / "d", state_of(model, step=0), only="model/0.qk")
    assert all(map(torch.equal, weights(model), before))


def test_a_module_may_declare_that_its_state_lacks_a_weight(tmp_path):
    def made(seed):
        model = hooked("Dropped", loads=True, seed=seed)
        model.register_load_state_dict_post_hook(
            lambda _module, keys: keys.missing_keys.remove("0.k.weight")
        )
        return model

    saved, fresh = made(0), made(1)
    kept = fresh[0].k.weight.detach().clone()
    shardckpt.save(tmp_path / "c", state_of(saved))
    shardckpt.restore(tmp_path / "c", state_of(fresh))
    assert torch.equal(fresh[0].q.weight, saved[0].q.weight)
    assert torch.equal(fresh[0].k.weight, kept)


class Partial(nn.Module):
    """Stores its adapter only, by methods of its own."""

    def __init__(self):
        super().__init__()
        self.frozen, self.adapter = nn.Linear(3, 3), nn.Linear(3, 3)

    def state_dict(self, *args, **kwargs):
        state = super().state_dict(*args, **kwargs)
        for name in [name for name in state if name.startswith("frozen")]:
            del state[name]
        return state

    def load_state_dict(self, state, strict=True, assign=False):
        return super().load_state_dict(state, strict=False, assign=assign)


def test_a_class_that_stores_a_part_of_itself_by_methods_of_its_own_is_taken_at_its_word(tmp_path):
    saved, fresh = Partial(), Partial()
    shardckpt.save(tmp_path / "c", state_of(saved))
    shardckpt.restore(tmp_path / "c", state_of(fresh))
    assert torch.equal(fresh.adapter.weight, saved.adapter.weight)


class Stubborn(nn.Module):
    """Says that it loads, and does not: `.data` of a tensor that nobody holds."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_state_dict_post_hook(
            lambda _module, state, p, _: state.update({p + "w": state.pop(p + "weight").clone()})
        )

    def _load_from_state_dict(self, state, prefix, *_):
        self.weight.detach().clone().data = state.pop(prefix + "w")


def test_a_class_that_says_it_loads_and_does_not_is_found_out(tmp_path):
    shardckpt.save(tmp_path / "c", state_of(Stubborn()))
    with pytest.raises(
        NamesMismatchError,
        match=r"'model': w were read, and the module does not hold what was read",
    ):
        shardckpt.restore(tmp_path / "c", state_of(Stubborn()))


@pytest.fixture(scope="module")
def ranks():
    """Runs functions in ranks of a gloo job."""
    with Processes("training_hooks", env={"PYTHONWARNINGS": "ignore"}) as processes:
        yield processes.run


@pytest.mark.long
@pytest.mark.parametrize("layout", ["FSDP2", "meta", "TP"])
def test_sharded_modules_with_hooks_hold_what_was_read_or_the_error_names_what_they_lack(
    ranks, tmp_path, layout
):
    for answer in ranks("restored", 2, layout, tmp_path, timeout=250):
        assert "error" not in answer, answer
        for case, outcome in answer.items():
            kind, loads = case.split()
            # A part of a DTensor is not a view of it.
            expected = error_text("Split" if kind == "SplitViews" else kind, loads == "True")
            if expected is None:
                assert outcome is True, case
            else:
                assert outcome[0] == "NamesMismatchError", case
                assert f"'model': {expected}: its state_dict" in outcome[1]


def test_nested_state_of_sharded_parameters_keeps_its_dtypes(ranks, tmp_path):
    kinds = [["DTensor", "torch.float32"], ["Tensor", "torch.float64"], ["Tensor", "torch.int64"]]
    assert ranks("nested", 2, tmp_path / "c", timeout=250) == [{"same": True, "kinds": kinds}] * 2
