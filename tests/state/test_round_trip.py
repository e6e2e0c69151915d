"""Every state is the same after it was taken apart and put together again."""

import json
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt.state import (
    alias_map,
    flatten,
    iter_leaves,
    leaf_names,
    match,
    stored_names,
    tensor_names,
    unflatten,
)


class Pair(NamedTuple):
    first: object
    second: object


@dataclass(frozen=True, slots=True)
class Point:
    x: object
    y: object


def is_tensor(value):
    return isinstance(value, np.ndarray)


ARRAYS = st.integers(0, 3).map(np.zeros)
LEAVES = st.one_of(
    ARRAYS,
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(), max_size=5),
    st.binary(max_size=5),
    st.floats(width=32).map(np.float32),
)
KEYS = st.one_of(
    st.text(st.characters(), max_size=3),
    st.sampled_from(["0", "1", "~", "a/b", "$tensor", "True", ""]),
    st.integers(0, 3),
    st.booleans(),
    st.none(),
)


def plain(states):
    return st.one_of(
        st.lists(states, max_size=3),
        st.lists(states, max_size=3).map(tuple),
        st.dictionaries(KEYS, states, max_size=4),
    )


def of_any_class(states):
    dicts = st.dictionaries(KEYS, states, max_size=3)
    return st.one_of(
        plain(states),
        dicts.map(OrderedDict),
        dicts.map(lambda items: defaultdict(list, items)),
        dicts.map(_counter),
        st.lists(states, max_size=3).map(lambda items: deque(items, maxlen=5)),
        st.builds(Pair, states, states),
        st.builds(Point, states, states),
    )


def _counter(items):
    counter = Counter()
    for key, value in items.items():  # update() would add
        counter[key] = value
    return counter


PLAIN = st.recursive(LEAVES, plain, max_leaves=12)
STATES = st.recursive(LEAVES, of_any_class, max_leaves=12)


def same(one, other):
    """Equal in type, order and bits; arrays are the same object."""
    if type(one) is not type(other):
        return False
    if is_tensor(one):
        return one is other
    if isinstance(one, dict):
        return list(map(_typed, one)) == list(map(_typed, other)) and all(
            map(same, one.values(), other.values())
        )
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Point):
        return same(one.x, other.x) and same(one.y, other.y)
    if isinstance(one, float | complex):
        return struct.pack("dd", one.real, one.imag) == struct.pack("dd", other.real, other.imag)
    return one.tobytes() == other.tobytes() if isinstance(one, np.generic) else one == other


def _typed(key):
    return type(key), key


def written(tree):
    return json.dumps(tree, separators=(",", ":"), allow_nan=False)


@settings(max_examples=300, deadline=None)
@given(PLAIN)
def test_a_plain_state_comes_back_from_its_document_as_json(state):
    flat = flatten(state, is_tensor)
    text = written(flat.tree)
    text.encode()
    back = unflatten(json.loads(text), flat.tensors)
    assert same(back, state)
    assert written(flatten(back, is_tensor).tree) == text


@settings(max_examples=200, deadline=None)
@given(STATES)
def test_any_state_becomes_a_plain_one_that_stays_as_it_is(state):
    flat = flatten(state, is_tensor)
    back = unflatten(flat.tree, flat.tensors)
    again = flatten(back, is_tensor)
    assert written(again.tree) == written(flat.tree)
    assert list(again.tensors) == list(flat.tensors)
    assert same(unflatten(again.tree, again.tensors), back)


@settings(max_examples=300, deadline=None)
@given(STATES)
def test_a_state_as_its_own_like_comes_back_with_its_containers(state):
    flat = flatten(state, is_tensor)
    matched = match(state, json.loads(written(flat.tree)), is_tensor)
    assert list(matched.tensors) == list(flat.tensors)
    values = {name: leaf for places in matched.tensors.values() for name, leaf in places}
    assert same(matched.build(values), state)


@settings(max_examples=200, deadline=None)
@given(STATES)
def test_every_leaf_has_one_name_and_one_line(state):
    flat = flatten(state, is_tensor)
    lines = list(iter_leaves(flat.tree))
    tensors, small = tensor_names(flat.tree), leaf_names(flat.tree)
    assert tensors == list(flat.tensors)
    assert sorted(name for name, _, _ in lines) == sorted(tensors + small)
    assert len(set(tensors + small)) == len(lines)


@settings(max_examples=200, deadline=None)
@given(STATES, st.lists(ARRAYS, min_size=1, max_size=2))
def test_tied_tensors_are_stored_once_and_come_back_as_one_object(state, shared):
    state = {"a": state, "b": [shared, state], "c": shared}
    flat = flatten(state, is_tensor, identity=id)
    assert len({id(tensor) for tensor in flat.tensors.values()}) == len(flat.tensors)
    aliases = alias_map(flat.tree)
    assert set(aliases.values()) <= set(flat.tensors)
    back = unflatten(json.loads(written(flat.tree)), flat.tensors)
    assert back["c"][0] is back["b"][0][0] is shared[0]
    matched = match(state, flat.tree, is_tensor)
    names_matched = [name for names in matched.tensors.values() for name, _ in names]
    assert sorted(names_matched) == sorted([*flat.tensors, *aliases])


@settings(max_examples=200, deadline=None)
@given(STATES, st.data())
def test_a_choice_of_names_brings_back_these_leaves_and_no_others(state, data):
    flat = flatten(state, is_tensor, identity=id)
    every = [name for name, _, _ in iter_leaves(flat.tree)]
    chosen = set(data.draw(st.lists(st.sampled_from(every), unique=True)) if every else [])
    needed = stored_names(flat.tree, chosen.__contains__)
    back = unflatten(flat.tree, {name: flat.tensors[name] for name in needed}, chosen.__contains__)
    expected = [leaf for name, leaf in leaves_by_name(state) if name in chosen]
    assert all(map(same, [leaf for _, leaf in leaves_by_name(back)], expected))


def leaves_by_name(state):
    """A second opinion about names: each leaf has a document of its own to be told apart by, a
    counter in its place."""
    leaves = []

    def count(value):
        if is_tensor(value) or not isinstance(value, dict | list | tuple | deque | Point):
            leaves.append(value)
            return True
        return False

    return list(zip(flatten(state, count).tensors, leaves, strict=True))
