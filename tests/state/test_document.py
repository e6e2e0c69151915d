"""Reading tree documents: parts of them, and hostile ones."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt.errors import FormatError, MissingExtraError
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
from shardckpt.state.document import of_process, parse, write
from shardckpt.state.moving import ends_by_place, moved_tree

TREE = {
    "model": {"w": "$tensor", "layers": ["$tensor", {"$tuple": ["$tensor", 3]}], "buffers": {}},
    "opt": {"$dict": [[0, {"m": "$tensor"}], [1, {"$tuple": []}]]},
    "head": {"$tied": "model/w"},
    "epoch": 7,
}


class Everything(dict):
    """A stand-in for tensors: each is its own name."""

    def __missing__(self, name):
        return name

    def __contains__(self, _name):
        return True


def test_names_come_in_tree_order():
    assert tensor_names(TREE) == ["model/w", "model/layers/0", "model/layers/1/0", "opt/0/m"]
    assert leaf_names(TREE) == ["model/layers/1/1", "epoch"]
    assert alias_map(TREE) == {"head": "model/w"}
    assert [(name, kind) for name, kind, _ in iter_leaves(TREE)][-2:] == [
        ("head", "tied"),
        ("epoch", "int"),
    ]


def test_a_tied_name_may_come_before_the_tensor():
    tree = {"head": {"$tied": "embed"}, "embed": "$tensor"}
    assert alias_map(tree) == {"head": "embed"}
    assert tensor_names(tree) == ["embed"]
    assert unflatten(tree, {"embed": 5}) == {"head": 5, "embed": 5}


# --- a choice of names ---


@pytest.mark.parametrize(
    ("chosen", "state"),
    [
        (["epoch"], {"epoch": 7}),
        (["opt/0/m"], {"opt": {0: {"m": "opt/0/m"}}}),
        (["opt/1"], {"opt": {1: ()}}),
        (["model/buffers"], {"model": {"buffers": {}}}),
        (["model/layers/1/1"], {"model": {"layers": {1: {1: 3}}}}),
        (
            ["model/layers/0", "model/layers/1/0"],
            {"model": {"layers": ["model/layers/0", {0: "model/layers/1/0"}]}},
        ),
        (
            ["model/layers/1/0", "model/layers/1/1"],
            {"model": {"layers": {1: ("model/layers/1/0", 3)}}},
        ),
        (["head"], {"head": "model/w"}),
        ([], {}),
    ],
    ids=str,
)
def test_a_choice_leaves_out_the_rest_and_a_list_without_all_its_items_becomes_a_dict(
    chosen, state
):
    back = unflatten(TREE, Everything(), chosen.__contains__)
    assert back == state
    assert flatten(back, lambda _value: False).tree == flatten(state, lambda _value: False).tree


def test_without_a_choice_everything_is_there_empty_containers_too():
    assert unflatten(TREE, Everything()) == {
        "model": {
            "w": "model/w",
            "layers": ["model/layers/0", ("model/layers/1/0", 3)],
            "buffers": {},
        },
        "opt": {0: {"m": "opt/0/m"}, 1: ()},
        "head": "model/w",
        "epoch": 7,
    }


def test_a_tied_name_needs_the_tensor_that_is_stored():
    assert stored_names(TREE, ["head"].__contains__) == ["model/w"]
    assert stored_names(TREE, ["head", "model/w"].__contains__) == ["model/w"]
    assert stored_names(TREE) == tensor_names(TREE)


# --- hostile documents ---


@pytest.mark.parametrize(
    ("tree", "name"),
    [
        ({"a": {"$what": []}}, "'a'"),
        ({"a": "$what"}, "'a'"),
        ({"a": {"$tensor": ""}}, "'a'"),
        ({"a": {"$tensor": "\n"}}, "'a'"),
        ({"a": {"$tensor": "x" * 257}}, "'a'"),
        ({"a": {"$tensor": None}}, "'a'"),
        ({"a": {"$per_process": 1}}, "'a'"),
        ({"a": {"$leaf": ["x", {"$per_process": None}]}}, "'a'"),
        ({"a": {"$leaf": ["x", {"$tensor": "y"}]}}, "'a'"),
        ({"$a": 1, "b": 2}, "The state itself"),
        ({"a": {"$tuple": {}}}, "'a'"),
        ({"a": {"$tuple": "xy"}}, "'a'"),
        ({"a": {"$dict": {}}}, "'a'"),
        ({"a": {"$dict": [1]}}, "'a'"),
        ({"a": {"$dict": [[1]]}}, "'a'"),
        ({"a": {"$dict": ["ab"]}}, "'a'"),
        ({"a": {"$dict": [[[], 1]]}}, "'a'"),
        ({"a": {"$dict": [[1.0, 1]]}}, "'a'"),
        ({"a": {"$dict": [[{"$bytes": ""}, 1]]}}, "'a'"),
        ({"a": {"$dict": [[{"$str": "ff"}, 1]]}}, "'a'"),
        ({"a": {"$dict": [["$x", 1]]}}, "'a'"),
        ({"a": {"$dict": [[2**70, 1]]}}, "'a'"),
        ({"a": {"$dict": [["k", 1], ["k", 2]]}}, "'a'.*twice"),
        ({"a": {"$dict": [[1, 1], [True, 2]]}}, "'a'.*twice"),
        ({"a": {"$dict": [[{"$str": "6b"}, 1], ["k", 2]]}}, "'a'.*twice"),
        ({"a": {"$dict": [[{"$int": "5"}, 1], [5, 2]]}}, "'a'.*twice"),
        ({"a": {"$tied": "b"}}, "'a'"),
        ({"a": {"$tied": "b"}, "b": {"$per_process": None}}, "'a'"),
        ({"a": {"$tied": "a"}}, "'a'"),
        ({"b": 1, "a": {"$tied": "b"}}, "'a'"),
        ({"b": "$tensor", "c": {"$tied": "b"}, "a": {"$tied": "c"}}, "'a'"),
        ({"a": {"$tied": 3}}, "'a'"),
        ({"a": {"$leaf": "x"}}, "'a'"),
        ({"a": {"$leaf": ["x"]}}, "'a'"),
        ({"a": {"$leaf": [1, 2]}}, "'a'"),
        ({"a": {"$leaf": ["x", "$tensor"]}}, "'a'"),
        ({"b": "$tensor", "a": {"$leaf": ["x", {"$tied": "b"}]}}, "'a'"),
        ({"a": object()}, "'a'"),
        ({"a": (1, 2)}, "'a'"),
        ({1: 2}, "The state itself"),
        ({None: 2}, "The state itself"),
    ],
    ids=lambda value: type(value).__name__ + repr(value).split(" at 0x")[0][:50],
)
def test_what_no_state_is_written_as_is_a_format_error_naming_the_place(tree, name):
    for read in (
        tensor_names,
        leaf_names,
        alias_map,
        stored_names,
        lambda tree: list(iter_leaves(tree)),
        lambda tree: unflatten(tree, Everything()),
    ):
        with pytest.raises(FormatError, match=name):
            read(tree)
    with pytest.raises(FormatError, match=name):
        match({}, tree, lambda _value: False)


@pytest.mark.parametrize(
    "leaf",
    [
        {"$int": "zz"},
        {"$float": 1},
        {"$bytes": "é"},
        2**60,
        float("nan"),
        {"$numpy": ["object", ""]},
    ],
    ids=repr,
)
def test_a_leaf_that_is_none_is_refused_where_its_value_is_wanted(leaf):
    tree = {"a": [leaf]}
    for read in (
        lambda tree: list(iter_leaves(tree)),
        lambda tree: unflatten(tree, {}),
        lambda tree: match({"a": [0]}, tree, lambda _value: False),
    ):
        with pytest.raises(FormatError, match="'a/0'"):
            read(tree)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: [x],
        lambda x: {"a": x},
        lambda x: {"$tuple": [x]},
        lambda x: {"$dict": [[0, x]]},
        lambda x: {"$leaf": ["x", x]},
    ],
)
def test_a_document_deeper_than_any_state_is_refused_before_the_stack_ends(wrap):
    tree = 1
    for _ in range(100_000):
        tree = wrap(tree)
    for read in (
        tensor_names,
        lambda tree: unflatten(tree, {}),
        lambda tree: match([], tree, lambda _value: False),
    ):
        with pytest.raises(FormatError):
            read(tree)
    # Taken apart by hand: the interpreter would do it recursively.
    while isinstance(tree, list | dict) and tree:
        tree = next(iter(tree.values())) if isinstance(tree, dict) else tree[-1]


def test_a_tensor_that_the_checkpoint_does_not_have_is_a_format_error():
    with pytest.raises(FormatError, match="'opt/0/m'"):
        unflatten(TREE, dict.fromkeys(["model/w", "model/layers/0", "model/layers/1/0"]))


def test_a_message_about_a_hostile_document_is_short():
    with pytest.raises(FormatError) as caught:
        tensor_names({"x" * 10**6: {"$" + "y" * 10**6: []}})
    assert len(str(caught.value)) < 1000


SNIPPETS = st.sampled_from(
    [
        "$tensor",
        "$tied",
        "$per_process",
        "$tuple",
        "$dict",
        "$leaf",
        "$int",
        "$torch.Size",
        "$$x",
        "$",
        "a",
        "",
        "0",
    ]
)
NODES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), SNIPPETS, st.text(max_size=3)),
    lambda nodes: st.one_of(
        st.lists(nodes, max_size=3),
        st.dictionaries(SNIPPETS, nodes, max_size=3),
        st.lists(st.tuples(nodes, nodes).map(list), max_size=3).map(lambda pairs: {"$dict": pairs}),
        nodes.map(lambda node: {"$tuple": [node]}),
    ),
    max_leaves=8,
)


@pytest.mark.long
@settings(max_examples=500, deadline=None)
@given(NODES)
def test_whatever_json_says_it_is_a_state_or_a_format_error(tree):
    try:
        state = unflatten(tree, Everything())
        list(iter_leaves(tree))
    except (FormatError, MissingExtraError):
        return
    again = flatten(state, lambda _value: False)
    json.dumps(again.tree, allow_nan=False)


def test_a_place_of_5000_digits_in_a_list_is_a_text_key():
    root = parse({"a": ["$tensor", "$tensor"]})
    first, last = ends_by_place(root).values()
    digits = "1" * 5000
    moved = moved_tree(root, [("a/0", first), (f"a/{digits}", last)])
    assert write(moved) == {"a": {"$dict": [[0, "$tensor"], [digits, "$tensor"]]}}


def test_a_list_without_the_values_of_other_processes_keeps_its_indices():
    tree = parse({"a": [{"$local": {"0": "$tensor"}}, "$tensor"], "b": {"$tuple": [1, 2]}})
    values = {"a/0/0": "A", "a/1": "B"}
    assert unflatten(of_process(tree, 0), values) == {"a": ["A", "B"], "b": (1, 2)}
    assert unflatten(of_process(tree, 1), values) == {"a": {1: "B"}, "b": (1, 2)}


def test_a_list_or_tuple_without_its_last_items_does_not_become_a_shorter_one():
    mine = {"$local": {"0": "$tensor"}}
    tree = parse({"a": ["$tensor", mine], "b": {"$tuple": ["$tensor", mine]}, "c": [mine], "d": []})
    values = {"a/0": "A", "b/0": "B"}
    assert unflatten(of_process(tree, 1), values) == {"a": {0: "A"}, "b": {0: "B"}, "d": []}
