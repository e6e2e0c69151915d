"""The tree of all processes together: what each has is in it, and what they disagree about is an
error naming both."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt.errors import CommitError, FormatError
from shardckpt.state import (
    PerProcess,
    alias_map,
    flatten,
    leaves,
    meanings,
    tensor_names,
    unflatten,
    union,
)


class T:
    """A tensor; equal ones are tied."""

    def __init__(self, identity=None, meaning=None):
        self.identity, self.meaning = identity, meaning


def tree_of(state):
    return flatten(
        state,
        lambda value: isinstance(value, T),
        lambda value: value.identity,
        lambda value: value.meaning,
    ).tree


def written(tree):
    return json.dumps(tree, separators=(",", ":"), allow_nan=False)


def together(states):
    """The union over processes, of which number i has the i-th state; documents that are equal are
    given once."""
    processes = {}
    for process, state in enumerate(states):
        processes.setdefault(written(tree_of(state)), []).append(process)
    return union([(holders, json.loads(document)) for document, holders in processes.items()])


def refused(states):
    with pytest.raises(CommitError) as caught:
        together(states)
    message = str(caught.value)
    assert message.endswith("Nothing was published.")
    return message


# --- what is in it ---


def test_equal_documents_are_the_union():
    state = {"w": T(), 0: [1, (T(), {})], "rng": PerProcess(1), "\ud800": None}
    assert written(together([state] * 3)) == written(tree_of(state))
    assert written(union([([0], tree_of(state)), ([1], tree_of(state))])) == written(tree_of(state))


def test_pipeline_stages_add_their_keys_after_those_of_the_lowest_process():
    first = {"model": {"embed": T(), "norm": T()}, "step": 3}
    last = {"model": {"head": T(), "norm": T()}, "loss": 0.5, "step": 3}
    assert written(together([first, first, last])) == written(
        tree_of({"model": {"embed": T(), "norm": T(), "head": T()}, "step": 3, "loss": 0.5})
    )


def test_keys_keep_their_types():
    tree = together(
        [{"opt": {0: T(), 2**70: 1}}, {"opt": {1: T(), None: 2, "\ud800": 3, "$tensor": 4}}]
    )
    assert unflatten(tree, {"opt/0": "a", "opt/1": "b"}) == {
        "opt": {0: "a", 2**70: 1, 1: "b", None: 2, "\ud800": 3, "$tensor": 4}
    }


def test_dicts_in_lists_are_merged_and_so_are_those_without_keys():
    assert together([[{"a": 1}, ({},)], [{"b": 2}, ({"c": 3},)]]) == [
        {"a": 1, "b": 2},
        {"$tuple": [{"c": 3}]},
    ]


def test_a_process_without_a_state_adds_nothing():
    assert together([{}, {"w": T()}]) == together([{"w": T()}, {}]) == {"w": "$tensor"}


def test_registered_leaves_are_one_where_they_are_equal(monkeypatch):
    monkeypatch.setattr(leaves, "_BY_TYPE", {})
    monkeypatch.setattr(leaves, "_BY_NAME", {})
    leaves.register_leaf(
        PerProcessTest,
        name="Test",
        encode=lambda test: {"x": [test.x]},
        decode=lambda doc: PerProcessTest(doc["x"][0]),
    )
    assert together([[PerProcessTest(1), {}], [PerProcessTest(1), {"a": 1}]]) == [
        {"$leaf": ["Test", {"x": [1]}]},
        {"a": 1},
    ]
    message = refused([{"a": PerProcessTest(1)}, {"a": PerProcessTest(True)}])
    assert (
        """'a' is a Test of {"x": [1]} on process 0 """
        'and a Test of {"x": [true]} on process 1; make it equal' in message
    )


class PerProcessTest:
    def __init__(self, x):
        self.x = x


# --- properties ---

KEYS = st.one_of(st.text("ab~/$é", max_size=2), st.integers(2, 4), st.none(), st.booleans())
"""Of which no two have one name."""
ATOMS = st.one_of(
    st.builds(T),
    st.builds(T, meaning=st.just("m")),
    st.builds(PerProcess, st.integers()),
    st.none(),
    st.integers(0, 2),
    st.floats(),
    st.text(max_size=2),
    st.just({}),
    st.lists(st.builds(T), max_size=2),
    st.tuples(st.integers(0, 1), st.builds(T)),
)
STATES = st.recursive(
    ATOMS, lambda inner: st.dictionaries(KEYS, inner, min_size=1, max_size=4), max_leaves=12
).filter(lambda state: isinstance(state, dict))
PROCESSES = 3


def shares(data, state):
    """Each process's part of a state: every leaf is on one process at least, and often on
    several."""
    if type(state) is not dict or not state:
        holders = data.draw(st.sets(st.integers(0, PROCESSES - 1), min_size=1))
        return dict.fromkeys(holders, state)
    parts = {}
    for key, child in state.items():
        for process, part in shares(data, child).items():
            parts.setdefault(process, {})[key] = part
    return parts


def unordered(tree):
    """The document with every dict in an order of its own."""
    if isinstance(tree, list):
        return [unordered(node) for node in tree]
    if isinstance(tree, dict) and "$dict" in tree:
        return {
            "$dict": sorted(
                ([key, unordered(node)] for key, node in tree["$dict"]),
                key=lambda pair: written(pair[0]),
            )
        }
    return {key: unordered(tree[key]) for key in sorted(tree)} if isinstance(tree, dict) else tree


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(STATES, st.data())
def test_the_parts_of_a_state_together_are_the_state(state, data):
    parts = shares(data, state)
    tree = together([parts.get(process, {}) for process in range(PROCESSES)])
    assert written(unordered(tree)) == written(unordered(tree_of(state)))
    assert set(tensor_names(tree)) == set(tensor_names(tree_of(state)))


@settings(max_examples=100, deadline=None)
@given(STATES, st.data())
def test_what_is_in_the_union_already_changes_nothing(state, data):
    parts = shares(data, state)
    documents = [tree_of(part) for part in parts.values()]
    tree = union([([i], document) for i, document in enumerate(documents)])
    assert written(
        union([([0], tree), *(([i + 1], document) for i, document in enumerate(documents))])
    ) == written(tree)
    assert written(union([([0], tree), ([1], tree)])) == written(tree)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from("abcdef"), st.just(1)), min_size=1, max_size=4))
def test_keys_come_in_the_order_in_which_they_are_met(states):
    assert list(together(states)) == list(dict.fromkeys(key for state in states for key in state))


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(STATES, st.lists(st.integers(0, 1), max_size=20), st.data())
def test_ties_that_all_who_see_both_names_agree_about_are_in_the_union(state, identities, data):
    flat = flatten(state, lambda value: isinstance(value, T))
    for tensor, identity in zip(flat.tensors.values(), identities, strict=False):
        tensor.identity, tensor.meaning = identity, None
    whole = tree_of(state)
    ties = alias_map(whole)
    # One process has everything, the other an arbitrary part in which nobody's first name is
    # lacking.
    part = shares(data, state).get(0, {})
    seen = tree_of(part)
    if set(alias_map(seen)) != set(ties) & {*tensor_names(seen), *alias_map(seen)}:
        with pytest.raises(CommitError):
            together([state, part])
        return
    for states in ([state, part], [part, state]):
        tree = together(states)
        assert alias_map(tree) == ties
        assert set(tensor_names(tree)) == set(tensor_names(whole))
        unflatten(json.loads(written(tree)), {**flat.tensors, **flat.per_process})


# --- ties ---


def test_a_tie_that_only_one_process_sees_is_a_tie_for_all():
    assert together([{"embed": T(1), "head": T(1)}, {"embed": T(1)}]) == {
        "embed": "$tensor",
        "head": {"$tied": "embed"},
    }
    assert together([{"embed": T(1)}, {"embed": T(1), "head": T(1)}]) == {
        "embed": "$tensor",
        "head": {"$tied": "embed"},
    }


def test_two_names_that_no_process_sees_together_are_two_tensors():
    assert together([{"embed": T(1)}, {"head": T(1)}]) == {"embed": "$tensor", "head": "$tensor"}


def test_a_tied_name_may_come_before_its_tensor_where_processes_order_their_containers_otherwise():
    tree = together([{"b": {"x": 1}, "a": {}}, {"a": {"w": T(1)}, "b": {"w": T(1)}}])
    assert written(tree) == '{"b":{"x":1,"w":{"$tied":"a/w"}},"a":{"w":"$tensor"}}'
    assert unflatten(tree, {"a/w": 7}) == {"b": {"x": 1, "w": 7}, "a": {"w": 7}}


def test_a_tie_that_another_process_contradicts_is_refused():
    message = refused([{"embed": T(1), "head": T(1)}] * 2 + [{"head": T(1)}])
    assert (
        "'head' is the same tensor as 'embed' on processes 0-1 and a tensor of its own on "
        "process 2; " in message
    )
    assert "let it be one tensor to all processes that have it" in message
    message = refused([{"embed": T(1), "head": T(1)}, {"embed": T(1), "head": T(2)}])
    assert (
        "'head' is the same tensor as 'embed' on process 0 and a tensor of its own on process 1"
        in message
    )
    message = refused([{"a": T(1), "c": T(1)}, {"b": T(1), "c": T(1)}])
    assert (
        "'c' is the same tensor as 'a' on process 0 and the same tensor as 'b' on process 1"
        in message
    )


def test_tensors_of_one_name_have_one_meaning():
    assert meanings(together([{"k": T(None, "key")}, {"k": T(None, "key"), "x": T()}])) == {
        "k": "key"
    }
    message = refused([{"k": T(None, "key")}, {"k": T()}])
    assert (
        "'k' is a tensor of its own that means 'key' on process 0 and a tensor of its own on "
        "process 1" in message
    )


# --- disagreement ---


def test_unequal_small_leaves_name_the_leaf_both_values_and_the_processes():
    states = [{"opt": {"lr": 0.1}}] * 7
    states[4] = {"opt": {"lr": 0.2}}
    assert refused(states) == (
        "'opt/lr' is 0.1 (float) on processes 0-3, 5-6 and 0.2 (float) on process 4; make it "
        "equal on all processes, or, where it differs on purpose, wrap it in "
        "shardckpt.PerProcess or name it in train_state(local=…). Nothing was published."
    )
    assert (
        "'opt/lr' is 0.1 (float) on process 0 and 0.2 (float) on process 1 (and something else "
        "on processes 2-3)" in refused([{"opt": {"lr": lr}} for lr in (0.1, 0.2, 0.3, 0.4)])
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        (None, "None"),
        (b"", ""),
        (np.float32(1), 1.0),
        ("x" * 100 + "a", "x" * 100 + "b"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_leaves_that_only_python_takes_for_equal_are_not(one, other):
    assert refused([{"a": one}, {"a": other}]).startswith("'a' is ")
    assert together([{"a": one}, {"a": one, "b": 1}])["a"] == tree_of(one)


def test_not_a_number_is_equal_to_itself():
    assert together([{"a": float("nan")}, {"a": float("nan"), "b": 1}])["a"] == {
        "$float": "7ff8000000000000"
    }


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (
            T(),
            3,
            (
                "'a' is a tensor of its own on process 0 and 3 (int) on process 1; store things of "
                "one kind under one name"
            ),
        ),
        (T(), {}, "'a' is a tensor of its own on process 0 and a dict of 0 items on process 1"),
        (None, [1], "'a' is None on process 0 and a list of 1 items on process 1"),
        (PerProcess(1), 1, "'a' is a shardckpt.PerProcess on process 0 and 1 (int) on process 1"),
        (
            [1],
            [1, 2],
            (
                "'a' is a list of 1 items on process 0 and a list of 2 items on process 1; make it "
                "of one kind and length"
            ),
        ),
        ((), [], "'a' is a tuple of 0 items on process 0 and a list of 0 items on process 1"),
        ({0: 1}, [1], "'a' is a dict of 1 items on process 0 and a list of 1 items on process 1"),
    ],
    ids=lambda value: repr(value)[:20] if not isinstance(value, str) else "",
)
def test_things_of_another_kind_are_named_with_both_kinds(one, other, words):
    assert words in refused([{"a": one}, {"a": other}])
    assert refused([{"a": other}, {"a": one}]).startswith("'a' is ")


def test_keys_of_one_name_are_refused_because_their_tensors_were_written_under_it():
    message = refused([{"opt": {0: T()}}, {"opt": {"0": T()}}])
    assert message.startswith(
        "'opt' has the key 0 on process 0 and '0' on process 1, which cannot be told apart; use "
        "keys of one type."
    )
    assert "'opt' has the key 0 on process" in refused(
        [{"opt": {0: T(), "0": T()}}, {"opt": {0: T()}}]
    )
    assert together([{0: T(), "0": 1}, {"0": 1, 0: T(), "x": 2}]) == {
        "$dict": [[0, "$tensor"], ["0", 1], ["x", 2]]
    }


def test_keys_that_are_one_to_a_dict_are_refused():
    assert "The state itself has the key 1 on process 0 and True on process 1" in refused(
        [{1: 1}, {True: 1}]
    )


def test_a_message_is_short_whatever_it_is_about():
    one, other = ["y" * 10**5], {"$tuple" * 10**5: 2**10**5}
    for a, b in [(one, other), (one[0], other["$tuple" * 10**5]), (one[0] + "a", one[0] + "b")]:
        with pytest.raises(CommitError) as caught:
            union(
                [
                    (range(0, 1000, 2), tree_of({"x" * 10**5: a})),
                    (range(1, 1000, 2), tree_of({"x" * 10**5: b})),
                ]
            )
        assert len(str(caught.value)) < 1500


def test_each_of_several_documents_has_to_be_valid():
    with pytest.raises(FormatError):
        union([([0], {"a": 1}), ([1], {"a": {"$what": 1}})])


def test_documents_whose_keys_are_in_another_order_are_the_same_value():
    def leaf(**content):
        return {"s": {"$leaf": ["Schedule", content]}}

    assert union([([0], leaf(a=1, b=2)), ([1], leaf(b=2, a=1))]) == leaf(a=1, b=2)

    def tensor(context, **parts):
        described = {"type": "Coded", "shape": [2], "context": context, "parts": parts}
        return {"w": {"$composite": described}}

    one = tensor({"k": 1, "l": 2}, data="$tensor", scale="$tensor")
    other = tensor({"l": 2, "k": 1}, scale="$tensor", data="$tensor")
    assert union([([0], one), ([1], other)]) == one
