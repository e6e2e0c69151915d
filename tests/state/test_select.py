"""A part of a state is the document of what is left, and all names stay what they are."""

import numpy as np
import pytest

from shardckpt.errors import NamesMismatchError
from shardckpt.state import flatten, select, tensor_names, unflatten
from shardckpt.state.select import selector


def document(state):
    return flatten(state, lambda leaf: isinstance(leaf, np.ndarray), id, lambda _leaf: None).tree


def state():
    w = np.zeros(2)
    return {
        "model": {"w": w, "head": w, 3: np.zeros(1)},
        "list": [np.zeros(1), 5, (np.zeros(1), None)],
        "empty": {},
        "lr": 0.1,
    }


def test_all_of_a_state_is_the_state():
    tree = document(state())
    assert select(tree, lambda _name: True) == (tree, {name: name for name in tensor_names(tree)})


def test_nothing_of_a_state_is_empty():
    assert select(document(state()), lambda _name: False) == ({}, {})


def test_a_part_is_what_restore_makes_of_the_whole_with_the_same_names():
    whole = document(state())
    for only in (
        "model/**",
        ["list/2/*", "lr"],
        "list/[02]*",
        "model/head",
        "empty",
        "**/3",
        ["model/head", "model/3"],
    ):
        selects = selector(only)
        part, stored = select(whole, selects)
        values = {name: f"value of {name}" for name in tensor_names(whole)}
        assert unflatten(part, {name: values[old] for name, old in stored.items()}) == unflatten(
            whole, values, selects
        )
        assert list(stored) == tensor_names(part)


def test_a_tied_name_whose_first_is_left_out_is_the_tensor_itself():
    part, stored = select(document(state()), selector("model/head"))
    assert part == {"model": {"head": "$tensor"}}
    assert stored == {"model/head": "model/w"}


def test_a_part_in_which_a_key_would_have_another_name_is_refused():
    """The document has no names: without the key "0", the key 0 beside it is called 0."""
    whole = document({"a": {"0": np.zeros(1), 0: {"w": np.zeros(1)}, "b": np.zeros(1)}})
    for only in ("a/0~/w", ["a/0~/w", "a/b"], "a/0~/**"):
        with pytest.raises(NamesMismatchError, match=r"'a/0~' would be called 'a/0' without"):
            select(whole, selector(only))
    for only in ("a/0", "a/**", ["a/0", "a/0~/w"], "a/b"):
        part, stored = select(whole, selector(only))
        assert list(stored) == tensor_names(part)
