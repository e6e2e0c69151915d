"""Laying a `like` beside a stored tree: what goes where, what is refused, and what is built."""

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import InitVar, dataclass, field
from typing import NamedTuple

import numpy as np
import pytest
from counting import steps

from shardckpt.errors import LeafError, NamesMismatchError, StructureMismatchError
from shardckpt.state import flatten, leaves, match
from shardckpt.state.mismatches import names_mismatch
from shardckpt.state.select import selector


class Stored:
    """A tensor as it comes out of a checkpoint."""

    def __init__(self, name):
        self.name = name

    def __repr__(self):
        return f"Stored({self.name!r})"


class Nothing(NamedTuple):
    pass


def is_tensor(value):
    return isinstance(value, np.ndarray | Stored)


def T():
    return np.zeros(1)


def restored(like, state, **options):
    """The whole way: `state` saved, `like` filled from it. Restored tensors say which stored one
    they are."""
    matched = match(like, flatten(state, is_tensor, identity=id).tree, is_tensor, **options)
    values = {
        name: Stored(stored) for stored, places in matched.tensors.items() for name, _ in places
    }
    return matched.build(values)


def text(state):
    return repr(state)


# --- what goes where ---


def test_tensors_and_leaves_come_from_the_checkpoint_and_containers_from_like():
    state = {"w": T(), "opt": [T(), 0.5, None], "step": 9}
    like = OrderedDict(step=0, opt=(T(), 0.1, "unused"), w=T())
    back = restored(like, state)
    assert text(back) == text(OrderedDict(step=9, opt=(Stored("opt/0"), 0.5, None), w=Stored("w")))


def test_like_itself_stays_as_it_is():
    state, like = {"a": [1, T()]}, {"a": [2, T()]}
    before = copy.copy(like["a"])
    back = restored(like, state)
    assert like["a"] == before
    assert back["a"] is not like["a"]


def test_each_stored_tensor_says_which_leaves_want_it():
    shared, other = T(), T()
    tree = flatten({"a": shared, "b": shared, "c": other}, is_tensor, identity=id).tree
    like = {"a": T(), "b": T(), "c": T()}
    matched = match(like, tree, is_tensor)
    assert matched.tensors == {"a": [("a", like["a"]), ("b", like["b"])], "c": [("c", like["c"])]}
    only = match({"b": like["b"]}, tree, is_tensor, only=selector("b"))
    assert only.tensors == {"a": [("b", like["b"])]}


def test_keys_are_paired_with_their_types():
    state = {0: T(), "0": 1, True + 1: 2}
    assert text(restored({"0": 5, 2: 5, 0: T()}, state)) == text({"0": 1, 2: 2, 0: Stored("0~")})
    with pytest.raises(NamesMismatchError, match=r"'0' \(there it is a key of another type\)"):
        restored({"0": 1}, {0: 1})
    with pytest.raises(NamesMismatchError, match=r"'True'.*'1'"):
        restored({True: 1}, {1: 1})


def test_a_stored_text_matches_the_key_that_a_format_wrote_as_that_text():
    state = {"0": T(), "-1": 1, "True": 2, "None": 3}
    assert text(restored({0: T(), -1: 5, True: 6, None: 7}, state)) == text(
        {0: Stored("0"), -1: 1, True: 2, None: 3}
    )
    assert restored({0: 5, "0": 6}, {"0": 1}, strict=False) == {0: 5, "0": 1}
    assert restored({0: 5}, {0: 1, "0": 2}, strict=False) == {0: 1}
    with pytest.raises(NamesMismatchError, match=r"'00'"):
        restored({0: 1}, {"00": 1})
    assert restored({10**5000: 1}, {10**5000: 2}) == {10**5000: 2}


@pytest.mark.parametrize("empty", [{}, [], (), Nothing()], ids=repr)
@pytest.mark.parametrize("stored", [{}, [], (), None], ids=repr)
def test_an_empty_container_matches_any_empty_one_and_none(empty, stored):
    back = restored({"a": empty, "b": 1}, {"a": stored, "b": 2})
    assert back == {"a": empty, "b": 2}
    assert type(back["a"]) is type(empty)


def test_a_stored_leaf_wins_whatever_its_type():
    assert restored([0, None, "x", np.float32(1)], [np.int8(3), b"y", None, 1.5]) == [
        np.int8(3),
        b"y",
        None,
        1.5,
    ]


def test_a_state_may_be_one_leaf():
    assert restored(0, 5) == 5
    assert restored(T(), T()).name == ""


# --- containers of like ---


class Pair(NamedTuple):
    first: object
    second: object


@dataclass
class Config:
    w: object
    lr: float
    doubled: float = field(init=False)
    start: InitVar[int] = 0

    def __post_init__(self, start):
        self.doubled = self.lr * 2 + start


@dataclass(frozen=True, slots=True)
class Frozen:
    w: object
    lr: float


@pytest.mark.parametrize(
    ("like", "stored", "expected"),
    [
        (OrderedDict(b=1, a=T()), OrderedDict(a=T(), b=2), OrderedDict(b=2, a=Stored("a"))),
        (Counter("a"), Counter("aa"), Counter("aa")),
        (deque([0, 0], maxlen=5), [1, 2], deque([1, 2], maxlen=5)),
        (Pair(T(), 0), Pair(T(), 5), Pair(Stored("first"), 5)),
        (Pair(T(), 0), {"first": T(), "second": 5}, Pair(Stored("first"), 5)),
        (Frozen(T(), 0.0), Frozen(T(), 0.5), Frozen(Stored("w"), 0.5)),
        ([0, 0], (1, 2), [1, 2]),
        ((0, 0), [1, 2], (1, 2)),
        ({}, {}, {}),
        ([], (), []),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_container_has_the_class_of_like_and_the_values_of_the_checkpoint(like, stored, expected):
    back = restored(like, stored)
    assert type(back) is type(like)
    assert text(back) == text(expected)


def test_a_defaultdict_keeps_its_factory():
    back = restored(defaultdict(list, a=0), {"a": 1})
    assert back == {"a": 1}
    assert back["new"] == []


def test_an_ordered_dict_keeps_what_was_set_on_it():
    like = OrderedDict(w=T())
    like._metadata = {"": {"version": 2}}
    assert restored(like, {"w": T()})._metadata == {"": {"version": 2}}


def test_a_dataclass_gets_its_stored_fields_and_no_second_initialisation():
    like = Config(T(), 0.0, start=5)
    like.extra = "kept"
    saved = Config(T(), 1.0)
    saved.doubled = 77.0
    back = restored(like, saved)
    assert (back.lr, back.doubled, back.w.name, back.extra) == (1.0, 77.0, "w", "kept")
    assert like.lr == 0.0


def test_a_node_of_torch_is_rebuilt_by_its_registration():
    from torch.utils import _pytree as pytree

    class Node:
        def __init__(self, children, constant):
            self.children, self.constant = children, constant

    pytree.register_pytree_node(
        Node,
        lambda node: (node.children, node.constant),
        lambda children, constant: Node(list(children), constant),
    )
    back = restored({"n": Node([T(), 1], print)}, {"n": Node([T(), 2], len)})
    assert (text(back["n"].children), back["n"].constant) == ("[Stored('n/0'), 2]", print)


def test_a_node_of_jax_is_rebuilt_by_its_registration_and_keeps_its_constants():
    from jax import tree_util

    @dataclass
    class TrainState:
        params: dict
        step: int
        apply: object

    tree_util.register_dataclass(TrainState, data_fields=["params", "step"], meta_fields=["apply"])
    back = restored(TrainState({"w": T()}, 0, print), TrainState({"w": T()}, 8, len))
    assert text(back) == text(TrainState({"w": Stored("params/w")}, 8, print))
    assert text(
        restored(TrainState({"w": T()}, 0, print), {"params": {"w": T()}, "step": 8})
    ) == text(back)


def test_a_registered_leaf_in_like_is_replaced_as_a_whole(monkeypatch):
    monkeypatch.setattr(leaves, "_BY_TYPE", {})
    monkeypatch.setattr(leaves, "_BY_NAME", {})
    leaves.register_leaf(
        Frozen,
        name="Frozen",
        encode=lambda value: [value.w, value.lr],
        decode=lambda pair: Frozen(*pair),
    )
    assert restored([Frozen(0, 0.0)], [Frozen(None, 0.5)]) == [Frozen(None, 0.5)]
    with pytest.raises(
        StructureMismatchError, match="'0' is a leaf of type Frozen in the checkpoint"
    ):
        restored([T()], [Frozen(1, 2.0)])


# --- names that only one side has ---


def test_names_that_one_side_lacks_are_listed_with_the_nearest_of_the_other():
    state = {"model": {"layers.0.wieght": T(), "bias": T()}, "extra": [1, 2]}
    like = {"model": {"layers.0.weight": T(), "bias": T()}, "rng": b""}
    with pytest.raises(NamesMismatchError) as caught:
        restored(like, state)
    message = str(caught.value)
    assert (
        "2 names are in `like` but not in the checkpoint: 'model/layers.0.weight' (did you mean "
        "'model/layers.0.wieght'?), 'rng'" in message
    )
    assert (
        "3 names are in the checkpoint but not in `like`: 'model/layers.0.wieght' (did you mean "
        "'model/layers.0.weight'?)" in message
    )
    assert "'extra/0', 'extra/1'. " in message
    assert "strict=False" in message


def test_a_long_list_of_names_is_cut_short():
    with pytest.raises(NamesMismatchError) as caught:
        restored({}, {f"w{i}": T() for i in range(100_000)})
    assert "100000 names are in the checkpoint but not in `like`" in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_names_that_all_differ_by_a_prefix_are_compared_with_a_few_of_the_others_each():
    kinds = "attn.q.weight", "attn.k.weight", "mlp.up.weight", "mlp.down.weight", "norm.weight"
    stored = [f"model.layers.{i}.{kind}" for i in range(1000) for kind in kinds]
    like = [f"module.{name}" for name in stored]
    error = names_mismatch(like, stored, "Change `like`.")
    for name in stored[:10]:
        assert f"'module.{name}' (did you mean '{name}'?)" in str(error)
        assert f"'{name}' (did you mean 'module.{name}'?)" in str(error)
    assert steps(lambda: names_mismatch(like, stored, "Change `like`.")) < 30 * len(stored)


def test_sequences_of_other_lengths_miss_names_or_have_too_many():
    with pytest.raises(NamesMismatchError, match=r"'a/1' .*not in|not in.*'a/1'"):
        restored({"a": [1, 2]}, {"a": [1]})
    with pytest.raises(NamesMismatchError, match=r"not in `like`: 'a/1/x'"):
        restored({"a": (1,)}, {"a": [1, {"x": 2}]})


def test_without_strict_what_is_missing_keeps_its_value_and_what_is_unexpected_is_ignored():
    mine, odd = T(), {1, 2}
    like = {"w": T(), "new": {"w": mine, "n": 3, "odd": odd, "keys": {1.5: 2}}, "l": [0, 0]}
    tree = flatten({"w": T(), "old": {"w": T()}, "l": [1]}, is_tensor).tree
    matched = match(like, tree, is_tensor, strict=False)
    assert matched.missing == ["new/w", "new/n", "new/odd", "new/keys", "l/1"]
    assert matched.unexpected == ["old/w"]
    assert list(matched.tensors) == ["w"]
    back = matched.build({"w": Stored("w")})
    assert back["new"]["w"] is mine
    assert back["new"]["odd"] is odd
    assert back["l"] == [1, 0]


# --- a choice of names ---


def test_outside_a_choice_like_keeps_its_values_whatever_they_are():
    mine, odd = T(), [{1}, {1.5: 2}]
    like = {"w": T(), "other": mine, "step": 0, "odd": odd, "missing": 1, "l": [0, 0]}
    state = {"w": T(), "other": 5, "step": 9, "odd": [{"x": 1}, {}], "unexpected": T(), "l": [1, 2]}
    back = restored(like, state, only=selector(["w", "l/1"]))
    assert text(back["w"]) == "Stored('w')"
    assert back["other"] is mine
    assert back["odd"] == odd
    assert (back["step"], back["missing"], back["l"]) == (0, 1, [0, 2])


def test_a_choice_is_asked_once_about_a_leaf():
    asked = []
    state = {"a": T(), "b": 5, "c": [T()]}
    restored(state, state, only=lambda name: bool(asked.append(name)))
    assert sorted(name for name in asked if name in ("a", "b", "c/0")) == ["a", "b", "c/0"]


def test_inside_a_choice_missing_and_unexpected_names_are_still_errors():
    with pytest.raises(
        NamesMismatchError, match=r"^1 name is in `like` but not in the checkpoint: 'a/x'\."
    ):
        restored({"a": {"x": 1}, "b": {"x": 1}}, {"a": {}, "c": 1}, only=selector("a/**"))
    with pytest.raises(
        NamesMismatchError, match=r"^1 name is in the checkpoint but not in `like`: 'a/x'\."
    ):
        restored({"a": {}, "c": 1}, {"a": {"x": 1}, "b": 2}, only=selector("a/**"))


def test_a_choice_inside_a_leaf_that_ought_to_be_a_container_is_missing():
    with pytest.raises(NamesMismatchError, match="'a/x'"):
        restored({"a": {"x": 1}}, {"a": 1}, only=selector("a/x"))


# --- other kinds at one place ---


@pytest.mark.parametrize("value", [None, "x", np.datetime64("2024")], ids=repr)
def test_a_leaf_where_a_tensor_is_stored_says_what_to_pass(value):
    with pytest.raises(StructureMismatchError) as caught:
        restored({"opt": {"m": value}}, {"opt": {"m": T()}})
    assert str(caught.value).startswith("'opt/m' is a tensor in the checkpoint, and in `like` ")
    assert "pass a tensor, an ndarray or a shardckpt.Target there" in str(caught.value)


@pytest.mark.parametrize(
    ("like", "stored", "words"),
    [
        (T(), 3, "'a' is a leaf of type int in the checkpoint, and in `like` a tensor (ndarray)"),
        (T(), {"x": 1}, "'a' is a dict of 1 items in the checkpoint, and in `like` a tensor"),
        (T(), {}, "'a' is a dict of 0 items in the checkpoint, and in `like` a tensor"),
        (
            {"x": 1},
            3,
            "'a' is a leaf of type int in the checkpoint, and in `like` a dict of 1 items",
        ),
        ([T()], T(), "'a' is a tensor in the checkpoint, and in `like` a list of 1 items"),
        (None, {"x": T()}, "'a' is a dict of 1 items in the checkpoint, and in `like` None"),
        (3, [1], "'a' is a list of 1 items in the checkpoint, and in `like` a leaf of type int"),
        ([1], {"0": 1}, "'a' is a dict of 1 items in the checkpoint, and in `like` a list"),
        ({0: 1}, (1,), "'a' is a tuple of 1 items in the checkpoint, and in `like` a dict"),
        (Pair(1, 2), (1, 2), "'a' is a tuple of 2 items in the checkpoint, and in `like` a Pair"),
    ],
    ids=lambda value: repr(value)[:30],
)
@pytest.mark.parametrize("strict", [True, False])
def test_another_kind_at_one_place_is_named_with_both_kinds(like, stored, words, strict):
    with pytest.raises(StructureMismatchError) as caught:
        restored({"a": like}, {"a": stored}, strict=strict)
    assert str(caught.value).startswith(words)


def test_a_value_in_like_that_no_state_can_have_is_a_leaf_error():
    with pytest.raises(LeafError, match="'a' is a set"):
        restored({"a": {1}}, {"a": 1})
    with pytest.raises(LeafError, match="'a' has a key of type float"):
        restored({"a": {1.5: 1}}, {"a": {}})


@pytest.mark.parametrize("state", [{"a": {}}, {}])
def test_a_like_that_contains_itself_is_a_leaf_error(state):
    like = {}
    like["a"] = like
    with pytest.raises(LeafError, match="200 containers"):
        restored(like, state)
    for depth in range(199):
        state = {"a": state} if depth else {"a": {}}
    with pytest.raises(LeafError, match="200 containers"):
        restored(like, state)


@pytest.mark.parametrize("empty", [{}, [], (), {"deep": []}], ids=repr)
def test_an_empty_container_that_only_one_side_has_is_a_name_too(empty):
    name = "extra/deep" if empty == {"deep": []} else "extra"
    state = {"a": 1}
    with pytest.raises(NamesMismatchError, match=f"in `like` but not in the checkpoint: '{name}'"):
        restored({**state, "extra": empty}, state)
    with pytest.raises(NamesMismatchError, match=f"in the checkpoint but not in `like`: '{name}'"):
        restored(state, {**state, "extra": empty})
    assert restored({**state, "extra": empty}, state, strict=False) == {**state, "extra": empty}
    assert restored(state, {**state, "extra": empty}, strict=False) == state
    assert restored({**state, "extra": empty}, state, only=selector("a")) == {
        **state,
        "extra": empty,
    }
    assert restored({**state, "extra": empty}, {**state, "extra": empty}) == {
        **state,
        "extra": empty,
    }


def test_a_part_of_a_checkpoint_is_matched_if_all_of_like_is_there():
    state = {"a": 1, "b": [2, {"c": 3}]}
    assert restored({"b": [0, {}]}, state, strict="like") == {"b": [2, {}]}
    with pytest.raises(
        NamesMismatchError,
        match=r"^1 name is in `like` but not in the checkpoint: 'x'\. Change `like`, "
        r"map names with rename=, choose",
    ):
        restored({"a": 0, "x": 0}, state, strict="like")
    with pytest.raises(
        NamesMismatchError, match=r'or strict="like" if `like` is to be a part of the checkpoint'
    ):
        restored({"a": 0}, state)
