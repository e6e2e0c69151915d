"""Composite tensors: stored as their parts, and restored into tensors of the same class bit by
bit."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from composites import Code, CodedSGD, Preference, Scaled, register_code, scaled, train
from torch import nn

import shardckpt
from shardckpt.errors import LeafError, OptionError, StructureMismatchError
from shardckpt.state.composites import tensor_type


def same(a, b):
    return all(torch.equal(getattr(a, key), getattr(b, key)) for key in a.__tensor_flatten__()[0])


def version_of(path):
    return json.loads((path / "checkpoint.json").read_text())["version"]


@pytest.mark.parametrize("options", [{}, {"layout": "zarr"}, {"fingerprint": True}])
def test_a_composite_tensor_is_filled_in_place_bit_by_bit(tmp_path, options):
    tensor, like = scaled(), scaled(1)
    shardckpt.save(
        tmp_path / "c", {"w": tensor, "b": torch.ones(2)}, options=shardckpt.SaveOptions(**options)
    )
    memory = like.data_.data_ptr()
    back = shardckpt.restore(tmp_path / "c", {"w": like, "b": torch.zeros(2)})["w"]
    assert back is like
    assert like.data_.data_ptr() == memory
    assert same(like, tensor)
    assert shardckpt.open(tmp_path / "c").verify().damage == []


def test_without_the_class_its_parts_are_plain_arrays(tmp_path):
    tensor = scaled()
    shardckpt.save(tmp_path / "c", {"w": tensor})
    parts = shardckpt.restore(tmp_path / "c")["w"]
    assert parts["data_"].dtype == np.int8
    assert (parts["data_"] == tensor.data_.numpy()).all()
    assert (parts["scale"] == tensor.scale.numpy()).all()
    like = {"w": {"data_": np.zeros((8, 4), np.int8), "scale": np.zeros((8, 1), np.float32)}}
    assert (shardckpt.restore(tmp_path / "c", like)["w"]["data_"] == tensor.data_.numpy()).all()
    assert shardckpt.open(tmp_path / "c").names() == ["w/data_", "w/scale"]


def test_only_records_with_a_composite_tensor_have_the_newer_version(tmp_path):
    shardckpt.save(
        tmp_path / "plain",
        {"w": torch.ones(2), "note": '{"$composite": {', "$composite": {"type": 1}},
    )
    shardckpt.save(tmp_path / "composite", {"w": scaled()})
    assert version_of(tmp_path / "plain") == [1, 0]
    assert version_of(tmp_path / "composite") == [5, 0]
    assert shardckpt.restore(tmp_path / "plain")["$composite"] == {"type": 1}


def test_a_part_may_be_composite_and_tied(tmp_path):
    class Outer(Scaled):
        pass

    def made(seed):
        inner = scaled(seed)
        return {"w": Outer(inner, torch.full((8, 1), float(seed))), "tied": inner}

    shardckpt.save(tmp_path / "c", made(3))
    like = made(4)
    shardckpt.restore(tmp_path / "c", like)
    assert same(like["tied"], scaled(3))
    assert like["w"].data_ is like["tied"]
    assert like["w"].scale.tolist() == [[3.0]] * 8


@pytest.mark.parametrize(
    ("like", "words"),
    [
        (
            lambda: torch.zeros(8, 4),
            (
                "is a composite tensor .*Scaled. of shape .8, 4. and the parts data_, scale in the "
                "checkpoint"
            ),
        ),
        (
            lambda: scaled(block=(1, 2)),
            r"another context: the context/block/\$tuple/1 is 4 there and 2 here",
        ),
        (
            lambda: scaled(preference=Preference.FAST),
            'the context/preference is "Preference.AUTO" there and "Preference.FAST" here',
        ),
        (
            lambda: scaled(shape=(4, 4)),
            (
                "composite tensor .*Scaled. of shape .4, 4.; make the tensor there as the saved "
                "one was made"
            ),
        ),
        (
            lambda: Code.zeros((8, 4)),
            "composite tensor .*Code. of the parts codes, scale, table; make",
        ),
    ],
)
def test_what_differs_from_the_stored_tensor_is_refused_by_name_before_anything_is_read(
    tmp_path, like, words
):
    shardckpt.save(tmp_path / "c", {"layer": {"w": scaled()}})
    leaf = like()
    before = (
        [getattr(leaf, key).clone() for key in leaf.__tensor_flatten__()[0]]
        if isinstance(leaf, Scaled)
        else []
    )
    with pytest.raises(StructureMismatchError, match=rf"'layer/w' .*{words}"):
        shardckpt.restore(tmp_path / "c", {"layer": {"w": leaf}})
    assert all(
        torch.equal(a, getattr(leaf, key))
        for a, key in zip(before, ("data_", "scale"), strict=False)
    )


def test_a_composite_tensor_in_place_of_a_stored_plain_one_is_refused(tmp_path):
    shardckpt.save(tmp_path / "c", {"w": torch.ones(8, 4)})
    with pytest.raises(
        StructureMismatchError,
        match=r"'w' is a tensor in the checkpoint, and in `like` a composite tensor",
    ):
        shardckpt.restore(tmp_path / "c", {"w": scaled()})


def test_a_context_that_is_not_plain_data_is_refused_by_name(tmp_path):
    with pytest.raises(
        LeafError,
        match=r"'w': the context\['block'\] of this composite tensor is a builtins.object, "
        r"which is not plain",
    ):
        shardckpt.save(tmp_path / "c", {"w": scaled(block=object())})
    with pytest.raises(LeafError, match=r"a builtins\.function"):
        shardckpt.save(tmp_path / "c", {"w": scaled(block={"f": lambda: 1})})


def test_a_module_with_quantized_parameters_resumes_also_on_the_meta_device(tmp_path):
    def made(seed):
        module = nn.Linear(4, 8)
        module.weight = nn.Parameter(scaled(seed), requires_grad=False)
        return module

    model = made(0)
    shardckpt.save(tmp_path / "c", shardckpt.train_state(model=model, step=1))
    fresh = made(1)
    held = fresh.weight
    shardckpt.restore(tmp_path / "c", shardckpt.train_state(model=fresh, step=0))
    assert fresh.weight is held
    assert same(fresh.weight, model.weight)
    assert torch.equal(fresh.bias, model.bias)
    empty = nn.Linear(4, 8, device="meta")
    empty.weight = nn.Parameter(
        Scaled(
            torch.empty(8, 4, dtype=torch.int8, device="meta"), torch.empty(8, 1, device="meta")
        ),
        False,
    )
    shardckpt.restore(tmp_path / "c", shardckpt.train_state(model=empty, step=0))
    assert isinstance(empty.weight, nn.Parameter)
    assert same(empty.weight, model.weight)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4, bias=False))


def test_states_of_an_8_bit_optimizer_resume_before_its_first_step(tmp_path):
    register_code()
    model = net()
    optimizer = CodedSGD(model.parameters())
    train(model, optimizer, 0, 3)
    shardckpt.save(
        tmp_path / "c", shardckpt.train_state(model=model, optimizer=optimizer, rng=False)
    )
    fresh = net()
    other = CodedSGD(fresh.parameters())
    shardckpt.restore(
        tmp_path / "c", shardckpt.train_state(model=fresh, optimizer=other, rng=False)
    )
    assert all(type(other.state[p]["momentum"]) is Code for p in fresh.parameters())
    assert train(fresh, other, 3, 6) == train(model, optimizer, 3, 6)


def test_a_class_that_is_not_registered_cannot_be_made_from_its_name_in_the_checkpoint(tmp_path):
    class Coded(Code):
        pass

    model = net()
    optimizer = torch.optim.SGD(model.parameters())
    for p in model.parameters():
        optimizer.state[p]["momentum"] = Coded.zeros(p.shape)
    shardckpt.save(
        tmp_path / "c", shardckpt.train_state(model=model, optimizer=optimizer, rng=False)
    )
    state = shardckpt.train_state(
        model=net(), optimizer=torch.optim.SGD(net().parameters()), rng=False
    )
    fresh = net()
    state = shardckpt.train_state(
        model=fresh, optimizer=torch.optim.SGD(fresh.parameters()), rng=False
    )
    with pytest.raises(
        StructureMismatchError,
        match=r"'optimizer/state/0.weight/momentum' is a composite tensor .*Coded.*register_tensor",
    ):
        shardckpt.restore(tmp_path / "c", state)


def test_a_name_of_another_registered_class_is_refused():
    register_code()
    with pytest.raises(
        OptionError,
        match=r"register_tensor\(Scaled\): the name 'tests.Code' belongs to composites.Code",
    ):
        shardckpt.register_tensor(
            Scaled, name="tests.Code", split=lambda t: ({}, None), make=lambda *_: None
        )
    with pytest.raises(OptionError, match="1 to 256 printable characters"):
        shardckpt.register_tensor(Scaled, name="", split=lambda t: ({}, None), make=lambda *_: None)


def test_a_split_function_that_fails_is_a_leaf_error_with_the_name_and_the_registration(tmp_path):
    class Odd(torch.Tensor):
        pass

    shardckpt.register_tensor(
        Odd, name="tests.Odd", split=lambda t: vars(t)["scale"], make=lambda *_: None
    )
    with pytest.raises(
        LeafError, match=r"'w': the split function of 'tests.Odd' failed \(KeyError: 'scale'\)"
    ):
        shardckpt.save(tmp_path / "c", {"w": torch.zeros(3).as_subclass(Odd)})


@pytest.mark.parametrize("parts", [[torch.zeros(3)], {0: torch.zeros(3)}], ids=["list", "key"])
def test_parts_without_names_are_a_leaf_error_with_the_name_and_the_registration(tmp_path, parts):
    class Unnamed(torch.Tensor):
        pass

    shardckpt.register_tensor(
        Unnamed,
        name=f"tests.Unnamed{type(parts).__name__}",
        split=lambda t: (parts, None),
        make=lambda *_: None,
    )
    message = r"'w': the split function of 'tests.Unnamed(list|dict)' returned .* as the parts"
    with pytest.raises(LeafError, match=message):
        shardckpt.save(tmp_path / "c", {"w": torch.zeros(3).as_subclass(Unnamed)})


def test_names_of_shared_parts_come_from_any_iterable():
    class Generated(torch.Tensor):
        pass

    registration = {"split": lambda t: ({}, None), "make": lambda *_: None}
    names = (name for name in ["table"])
    shardckpt.register_tensor(Generated, name="tests.Generated", shared=names, **registration)
    assert tensor_type(Generated).shared == {"table"}


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (5, {}, r"register_tensor\(5\): the first argument is a class"),
        (Scaled, {"split": 5}, r"\(Scaled, split=5\): give a function"),
        (Scaled, {"make": 7}, r"\(Scaled, make=7\): give a function"),
        (Scaled, {"shared": "lut"}, r"\(Scaled, shared='lut'\): give a list of names"),
        (Scaled, {"shared": [["lut"]]}, r"\(Scaled, shared=.*\): give a list of names"),
        (Scaled, {"shared": 3}, r"\(Scaled, shared=3\): give a list of names"),
        (Scaled, {"name": torch.zeros(9)}, r"not a Tensor of shape 9\."),
    ],
)
def test_what_cannot_be_registered_is_an_option_error(kind, arguments, message):
    given = {"name": "x", "split": vars, "make": vars} | arguments
    with pytest.raises(OptionError, match=message):
        shardckpt.register_tensor(kind, **given)


@pytest.mark.parametrize(
    "damage",
    [
        {"type": 1},
        {"type": ""},
        {"shape": [-1]},
        {"shape": "x"},
        {"parts": {}},
        {"parts": ["$tensor"]},
        {"context": "$tensor"},
        {"context": {"$composite": 1}},
        {"more": 1},
    ],
)
def test_a_damaged_description_is_refused(damage):
    from shardckpt.errors import FormatError
    from shardckpt.state import parse

    whole = {"type": "a.B", "shape": [2], "context": {"n": 1}, "parts": {"data": "$tensor"}}
    assert parse({"w": {"$composite": whole}}).children[0].composite.shape == (2,)
    with pytest.raises(FormatError, match="'w'"):
        parse({"w": {"$composite": {**whole, **damage}}})
