"""The `like` made from a checkpoint: for any stored state, and any state that an object has now."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardckpt import frameworks
from shardckpt.errors import OptionError
from shardckpt.format.structure import TensorRecord
from shardckpt.layout.dtypes import of_numpy
from shardckpt.state import alias_map, flatten, match
from shardckpt.state.document import parse
from shardckpt.state.select import selector
from shardckpt.training.likeness import LEFT_OUT, StoredLeaves, mirror

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=3)
    | st.binary(max_size=3)
)
TENSORS = st.integers(0, 3).map(lambda n: torch.full((n + 1,), n + 0.5))
KEYS = st.text("ab/~", max_size=2) | st.integers(0, 3)
STATES = st.recursive(
    LEAVES | TENSORS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=8,
)


def flat_of(state):
    return flatten(state, frameworks.is_tensor, frameworks.identity, frameworks.meaning)


def stored_of(state, only=None):
    """The stored leaves and the tree of a checkpoint of the state, and the values of its tensors by
    name."""
    flat = flat_of(state)
    values = {name: flat.tensors[first] for name, first in alias_map(flat.tree).items()}
    values |= flat.tensors

    def record(name):
        return TensorRecord(
            name, tuple(values[name].shape), of_numpy(values[name].numpy().dtype), None, ()
        )

    return StoredLeaves(record, selector(only)), parse(flat.tree), values


def restored(stored, node, values, like):
    """As `restore` does: tensors of `like` are filled where they have memory."""
    matched = match(
        like, node, frameworks.is_tensor, only=stored.selects, meaning=frameworks.meaning
    )
    tensors = {}
    for name, places in matched.tensors.items():
        for place, leaf in places:
            assert tuple(leaf.shape) == tuple(values[name].shape)
            tensors[place] = values[name].clone() if leaf.is_meta else leaf.copy_(values[name])
    return matched.build(tensors)


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return (
            isinstance(b, dict) and list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
        )
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


@given(STATES, STATES)
def test_whatever_an_object_has_now_it_gets_what_is_stored(state, own):
    stored, node, values = stored_of(state)
    expected = flat_of(state).tree
    actual = restored(stored, node, values, mirror(stored, node, own))
    assert flat_of(actual).tree == expected
    assert {name: tensor.tolist() for name, tensor in flat_of(actual).tensors.items()} == {
        name: tensor.tolist() for name, tensor in flat_of(state).tensors.items()
    }


def test_an_empty_state_has_an_empty_likeness_where_jax_is_imported_too():
    """To JAX, None is a container without children. In a process of its own: other tests are
    without JAX."""
    program = (
        "import jax; from shardckpt.state.names import container_of; assert container_of(None, "
        "'x') is None"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=250)


@given(STATES)
def test_tensors_of_the_same_kind_at_the_same_place_are_filled_where_they_are(state):
    stored, node, values = stored_of(state)
    own = restored(stored, node, values, mirror(stored, node))
    before = {name: tensor.data_ptr() for name, tensor in flat_of(own).tensors.items()}
    filled = restored(
        stored,
        node,
        {name: value.clone() for name, value in values.items()},
        mirror(stored, node, own),
    )
    assert {name: tensor.data_ptr() for name, tensor in flat_of(filled).tensors.items()} == before
    assert equal(filled, own)


@pytest.mark.parametrize(
    ("own", "state"),
    [
        (Counter({1: 2}), Counter({3: 4, 5: 6})),
        (OrderedDict(a=1), OrderedDict(b=2, a=3)),
        (defaultdict(list, a=[1]), defaultdict(list, b=[2])),
        (deque([1], maxlen=5), deque([3, 4], maxlen=5)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_containers_keep_the_class_that_the_object_has(own, state):
    stored, node, values = stored_of(state)
    actual = restored(stored, node, values, mirror(stored, node, own))
    assert type(actual) is type(own)
    assert actual == state
    assert own != state


@pytest.mark.parametrize("value", [None, "text", b"bytes"])
def test_a_stored_value_that_is_not_a_number_takes_the_place_of_a_tensor(value):
    stored, node, _ = stored_of({"a": value, "b": 3})
    own = {"a": torch.tensor(7), "b": torch.tensor(7)}
    like = mirror(stored, node, own)
    assert like == {"a": None, "b": own["b"]}
    assert match(like, node, frameworks.is_tensor).build({"b": 3}) == {"a": value, "b": 3}


@pytest.mark.parametrize("value", [3, 2.5, 2**70])
def test_a_stored_number_always_meets_the_tensor(value):
    stored, node, _ = stored_of({"a": value})
    own = {"a": torch.tensor(7)}
    assert mirror(stored, node, own) == own


def test_what_is_not_asked_for_is_left_out():
    stored, node, _ = stored_of(
        {"a": {"b": 1, "c": torch.ones(2)}, "d": [1, 2], "e": {}}, only="a/b"
    )
    assert mirror(stored, node) == {"a": {"b": None}}
    nothing, node, _ = stored_of({"a": 1}, only="z")
    assert mirror(nothing, node) is LEFT_OUT


def test_a_part_of_a_list_cannot_be_asked_for():
    stored, node, _ = stored_of({"a": [1, 2]}, only="a/0")
    with pytest.raises(
        OptionError, match="selects a part of 'a', which can only be restored as a whole"
    ):
        mirror(stored, node)


def test_a_tensor_of_another_shape_or_dtype_is_not_filled():
    stored, node, values = stored_of({"w": torch.arange(4.0)})
    for own in (torch.zeros(3), torch.zeros(4, dtype=torch.float64), np.zeros(4), 7):
        like = mirror(stored, node, {"w": own})
        assert like["w"].is_meta if not isinstance(own, np.ndarray) else like["w"] is not own
        assert equal(restored(stored, node, values, like), {"w": torch.arange(4.0)})
