"""Values that every process owns by itself, and tensors that mean something, in documents and in
`like`."""

import json

import numpy as np
import pytest

from shardckpt.errors import LeafError, NamesMismatchError, OptionError, StructureMismatchError
from shardckpt.state import (
    PerProcess,
    flatten,
    iter_leaves,
    leaf_names,
    leaves,
    match,
    meanings,
    per_process_names,
    stored_names,
    tensor_names,
    unflatten,
)
from shardckpt.state.select import selector


class Key:
    """A tensor that means something."""

    def __init__(self, meaning="key:a"):
        self.meaning = meaning


class Anything:
    """A tensor leaf that does not say what it means."""

    meaning = ...


def is_tensor(value):
    return isinstance(value, np.ndarray | Key | Anything)


def meaning(value):
    return getattr(value, "meaning", None)


def T():
    return np.zeros(1)


def tree_of(state):
    return flatten(state, is_tensor, id, meaning).tree


# --- PerProcess in a state ---


def test_its_value_is_collected_and_not_looked_into():
    value = {"anything": {1, 2}}
    flat = flatten({"rng": [PerProcess(value), PerProcess(None)], "w": T()}, is_tensor)
    assert (
        json.dumps(flat.tree)
        == '{"rng": [{"$per_process": null}, {"$per_process": null}], "w": "$tensor"}'
    )
    assert list(flat.per_process) == ["rng/0", "rng/1"]
    assert flat.per_process["rng/0"] is value
    assert list(flat.tensors) == ["w"]


def test_it_is_a_leaf_of_its_own_kind_for_people():
    tree = tree_of({"w": T(), "rng": PerProcess(1)})
    assert list(iter_leaves(tree)) == [("w", "tensor", ""), ("rng", "per process", "")]
    assert leaf_names(tree) == per_process_names(tree) == ["rng"]
    assert per_process_names(tree, selector("w")) == []


def test_without_like_it_is_what_the_caller_has_for_it():
    tree = tree_of({"w": T(), "rng": PerProcess(1), "l": [PerProcess(2), 3]})
    assert unflatten(tree, {"w": 0, "rng": [1, 2], "l/0": [3, 4]}) == {
        "w": 0,
        "rng": [1, 2],
        "l": [[3, 4], 3],
    }
    assert unflatten(tree, {"rng": [1, 2]}, selector("rng")) == {"rng": [1, 2]}


def test_a_registered_leaf_holds_none(monkeypatch):
    monkeypatch.setattr(leaves, "_BY_TYPE", {})
    monkeypatch.setattr(leaves, "_BY_NAME", {})
    leaves.register_leaf(Key, name="Key", encode=lambda key: [PerProcess(key.meaning)], decode=Key)
    with pytest.raises(LeafError, match=r"'a'.* returned a PerProcess"):
        flatten({"a": Key()}, lambda _value: False)


def test_choose_is_a_function():
    with pytest.raises(OptionError, match="choose"):
        PerProcess(1, choose=0)


# --- PerProcess in `like` ---


def test_it_takes_the_value_that_it_is_given_and_keeps_its_choose():
    def first(values):
        return values[0]

    like = {"rng": PerProcess("mine", first), "w": T()}
    matched = match(like, tree_of({"w": T(), "rng": PerProcess("saved")}), is_tensor)
    assert matched.per_process == {"rng": like["rng"]}
    back = matched.build({"w": 5, "rng": "saved"})
    assert (back["rng"].value, back["rng"].choose, back["w"]) == ("saved", first, 5)
    assert like["rng"].value == "mine"


def test_a_restored_state_is_a_state_again():
    state = {"rng": [PerProcess((1, 2))], "w": T()}
    flat = flatten(state, is_tensor)
    back = match(state, flat.tree, is_tensor).build({**flat.tensors, **flat.per_process})
    again = flatten(back, is_tensor)
    assert (again.tree, again.per_process) == (flat.tree, flat.per_process)


@pytest.mark.parametrize("value", [3, None, T(), {"a": 1}, {}, [1]], ids=repr)
def test_a_leaf_of_another_kind_in_like_does_not_take_a_per_process_value(value):
    with pytest.raises(StructureMismatchError) as caught:
        match({"rng": value}, tree_of({"rng": PerProcess(1)}), is_tensor)
    assert str(caught.value).startswith(
        "'rng' is a value of each process's own in the checkpoint, and in `like` "
    )
    assert "wrap it there: shardckpt.PerProcess(…)" in str(caught.value)


@pytest.mark.parametrize("stored", [3, None, T(), {"a": 1}, {}, [1]], ids=repr)
def test_it_takes_nothing_else(stored):
    with pytest.raises(
        StructureMismatchError,
        match=r"'rng' is .* in the checkpoint, and in `like` a shardckpt\.PerProcess; ",
    ):
        match({"rng": PerProcess(1)}, tree_of({"rng": stored}), is_tensor)


def test_names_that_one_side_lacks_are_mismatches():
    with pytest.raises(NamesMismatchError, match="in `like` but not in the checkpoint: 'rng'"):
        match({"rng": PerProcess({"a": 1})}, {}, is_tensor)
    with pytest.raises(NamesMismatchError, match="in the checkpoint but not in `like`: 'rng'"):
        match({}, tree_of({"rng": PerProcess(1)}), is_tensor)
    mine = PerProcess(1)
    matched = match(
        {"step": 1, "rng": mine},
        tree_of({"step": 1, "loader": PerProcess(2)}),
        is_tensor,
        strict=False,
    )
    assert (matched.missing, matched.unexpected, matched.per_process) == (["rng"], ["loader"], {})
    assert matched.build({})["rng"] is mine


def test_outside_a_choice_it_stays_as_it_is():
    mine = PerProcess(1)
    matched = match(
        {"rng": mine, "w": T()}, tree_of({"rng": 5, "w": T()}), is_tensor, only=selector("w")
    )
    assert matched.build({"w": 2}) == {"rng": mine, "w": 2}
    matched = match(
        {"rng": T(), "w": T()},
        tree_of({"rng": PerProcess(1), "w": T()}),
        is_tensor,
        only=selector("w"),
    )
    assert matched.per_process == {}


# --- what tensors mean ---


def test_a_meaning_is_written_beside_the_tensor():
    shared = Key("key:a")
    tree = tree_of({"k": shared, "w": T(), "l": [shared, Key("key:b")]})
    assert (
        json.dumps(tree)
        == '{"k": {"$tensor": "key:a"}, "w": "$tensor", "l": [{"$tied": "k"}, {"$tensor": '
        '"key:b"}]}'
    )
    assert meanings(tree) == {"k": "key:a", "l/0": "key:a", "l/1": "key:b"}
    assert list(iter_leaves(tree))[:2] == [("k", "tensor", "key:a"), ("w", "tensor", "")]


def test_readers_that_know_of_no_meaning_see_a_tensor():
    tree = tree_of({"k": Key()})
    assert tensor_names(tree) == stored_names(tree) == ["k"]
    assert unflatten(tree, {"k": 5}) == {"k": 5}
    assert match({"k": T()}, tree, is_tensor).build({"k": 5}) == {"k": 5}


def test_a_dict_whose_key_reads_like_one_is_a_dict():
    state = {"$tensor": "key:a"}
    assert unflatten(json.loads(json.dumps(tree_of(state))), {}) == state


@pytest.mark.parametrize("text", ["", "\n", "x" * 257, "\ud800"], ids=repr)
def test_a_meaning_is_a_short_printable_text(text):
    with pytest.raises(LeafError, match="'k' has the meaning"):
        tree_of({"k": Key(text)})


def test_a_leaf_takes_only_what_means_the_same():
    tree = tree_of({"k": Key("key:a"), "w": T()})
    like = {"k": Key("key:a"), "w": T()}
    assert list(match(like, tree, is_tensor, meaning=meaning).tensors) == ["k", "w"]
    with pytest.raises(StructureMismatchError) as caught:
        match({"k": Key("key:b"), "w": T()}, tree, is_tensor, meaning=meaning)
    assert str(caught.value) == (
        "'k' holds 'key:a' in the checkpoint, and in `like` 'key:b' (Key); pass a tensor of the "
        "same meaning there, or a shardckpt.Target."
    )
    with pytest.raises(
        StructureMismatchError,
        match=r"'k' holds 'key:a' in the checkpoint, and in `like` plain numbers \(ndarray\)",
    ):
        match({"k": T(), "w": T()}, tree, is_tensor, meaning=meaning)
    with pytest.raises(
        StructureMismatchError,
        match=r"'w' holds plain numbers in the checkpoint, and in `like` 'key:a'",
    ):
        match({"k": Key(), "w": Key()}, tree, is_tensor, meaning=meaning)


def test_a_tied_name_means_what_its_tensor_means():
    shared = Key("key:a")
    tree = tree_of({"a": shared, "b": shared})
    match({"b": Key("key:a")}, tree, is_tensor, only=selector("b"), meaning=meaning)
    with pytest.raises(StructureMismatchError, match="'b' holds 'key:a'"):
        match({"b": T()}, tree, is_tensor, only=selector("b"), meaning=meaning)


def test_a_leaf_that_does_not_say_takes_anything_and_so_does_one_that_is_not_asked_for():
    tree = tree_of({"k": Key(), "w": T()})
    assert list(
        match({"k": Anything(), "w": Anything()}, tree, is_tensor, meaning=meaning).tensors
    ) == ["k", "w"]
    assert list(
        match({"k": T(), "w": T()}, tree, is_tensor, only=selector("w"), meaning=meaning).tensors
    ) == ["w"]
