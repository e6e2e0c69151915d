"""Taking a state apart: what is stored how, under which name, and what is refused."""

import enum
import json
import re
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pytest
import torch

from shardckpt.errors import DtypeError, FormatError, LeafError
from shardckpt.state import (
    alias_map,
    flatten,
    iter_leaves,
    leaf_names,
    leaves,
    parse,
    tensor_names,
    unflatten,
)

W = np.zeros(1)


def is_tensor(value):
    return isinstance(value, np.ndarray)


def tree_of(state):
    return flatten(state, is_tensor).tree


def through_json(state):
    flat = flatten(state, is_tensor)
    return unflatten(json.loads(json.dumps(flat.tree, allow_nan=False)), flat.tensors)


# --- the document ---


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({}, "{}"),
        ([], "[]"),
        ((), '{"$tuple":[]}'),
        (W, '"$tensor"'),
        (None, "null"),
        (
            {"model": {"w": W}, "step": 3, "lr": 0.5, "betas": (0.9, 1.0)},
            '{"model":{"w":"$tensor"},"step":3,"lr":0.5,"betas":{"$tuple":[0.9,1.0]}}',
        ),
        (
            {0: {"m": W}, "0": None, True + 1: []},
            '{"$dict":[[0,{"m":"$tensor"}],["0",null],[2,[]]]}',
        ),
        ({True: 1, None: 2}, '{"$dict":[[true,1],[null,2]]}'),
        ({"$tuple": ["$tensor"]}, '{"$$tuple":["$$tensor"]}'),
        ({"\ud800": "\ud800"}, '{"$dict":[[{"$str":"eda080"},{"$str":"eda080"}]]}'),
        (
            {2**60: float("inf")},
            '{"$dict":[[{"$int":"1000000000000000"},{"$float":"7ff0000000000000"}]]}',
        ),
        ([W, [W]], '["$tensor",["$tensor"]]'),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_a_state_and_its_document(state, text):
    assert json.dumps(tree_of(state), separators=(",", ":")) == text


def test_tensors_are_named_by_their_path_in_the_order_of_the_containers():
    state = {"b": [W, {"x/y": W}], "a": {0: W, "0": W, "": W}, "rest": 1}
    assert list(flatten(state, is_tensor).tensors) == ["b/0", "b/1/x~1y", "a/0~", "a/0", "a/~e"]
    assert leaf_names(tree_of(state)) == ["rest"]


def test_a_state_may_be_one_tensor():
    flat = flatten(W, is_tensor)
    assert list(flat.tensors) == tensor_names(flat.tree) == [""]
    assert unflatten(flat.tree, flat.tensors) is W


def test_the_caller_decides_what_a_tensor_is():
    flat = flatten({"a": [1, 2]}, lambda value: isinstance(value, list))
    assert flat.tensors == {"a": [1, 2]}


def test_the_document_grows_with_the_leaves_and_not_with_the_tensors_size():
    small, large = tree_of([np.zeros(1)] * 1000), tree_of([np.zeros(100_000)] * 1000)
    assert json.dumps(small) == json.dumps(large)


# --- containers that come back plain ---


class Pair(NamedTuple):
    first: object
    second: object


@dataclass
class Config:
    lr: float
    w: np.ndarray
    seen: int = field(default=7, init=False)


@pytest.mark.parametrize(
    ("state", "plain"),
    [
        (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (defaultdict(list, {0: [1]}), {0: [1]}),
        (Counter("aab"), {"a": 2, "b": 1}),
        (deque([1, 2], maxlen=3), [1, 2]),
        (Pair(1, [2]), {"first": 1, "second": [2]}),
        (Config(0.1, W), {"lr": 0.1, "w": W, "seen": 7}),
        ([Pair(None, Config(1.0, W))], [{"first": None, "second": {"lr": 1.0, "w": W, "seen": 7}}]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_container_of_a_known_class_comes_back_as_a_plain_one(state, plain):
    back = through_json(state)
    assert back == plain
    assert type(back) is type(plain)


def test_a_dict_keeps_its_order_and_the_types_of_its_keys():
    back = through_json({"b": 1, 3: 2, None: 3, True: 4, "3": 5})
    assert [(type(key), key) for key in back] == [
        (str, "b"),
        (int, 3),
        (type(None), None),
        (bool, True),
        (str, "3"),
    ]


def test_a_node_registered_with_torch_is_stored_by_its_keys():
    from torch.utils import _pytree as pytree

    class Keyed:
        def __init__(self, w, b):
            self.w, self.b = w, b

    class Counted(Keyed):
        pass

    pytree.register_pytree_node(
        Keyed,
        lambda node: ([node.w, node.b], "context"),
        lambda children, _context: Keyed(*children),
        flatten_with_keys_fn=lambda node: (
            [(pytree.GetAttrKey("w"), node.w), (pytree.MappingKey("b"), node.b)],
            "context",
        ),
    )
    pytree.register_pytree_node(
        Counted,
        lambda node: ([node.w, node.b], None),
        lambda children, _context: Counted(*children),
    )
    assert through_json([Keyed(W, 1), Counted(W, 2)]) == [{"w": W, "b": 1}, [W, 2]]


def test_a_node_registered_with_jax_is_stored_by_its_keys():
    from jax import tree_util

    @tree_util.register_pytree_with_keys_class
    @dataclass
    class Keyed:
        params: dict
        none: None
        apply: object

        def tree_flatten_with_keys(self):
            return (
                (tree_util.GetAttrKey("params"), self.params),
                (tree_util.DictKey(5), self.none),
            ), self.apply

        @classmethod
        def tree_unflatten(cls, apply, children):
            return cls(*children, apply)

    @tree_util.register_pytree_node_class
    class Counted(list):
        def tree_flatten(self):
            return tuple(self), None

        @classmethod
        def tree_unflatten(cls, _, children):
            return cls(children)

    assert through_json(
        {"a": Keyed({"w": W}, None, print), "b": Counted([1, W]), "c": Counted()}
    ) == {
        "a": {"params": {"w": W}, 5: None},
        "b": [1, W],
        "c": {},
    }


def test_a_node_that_gives_two_children_one_key_is_refused():
    from torch.utils import _pytree as pytree

    class Twice:
        pass

    key = pytree.MappingKey("k")
    pytree.register_pytree_node(
        Twice,
        lambda _: ([1, 2], None),
        lambda *_: Twice(),
        flatten_with_keys_fn=lambda _: ([(key, 1), (key, 2)], None),
    )
    with pytest.raises(LeafError, match=r"'a' .*same key"):
        tree_of({"a": Twice()})


@pytest.mark.parametrize(
    ("base", "content", "advice"),
    [
        (dict, {"w": W}, r"Convert it with dict\(…\)"),
        (list, [W], r"Convert it with list\(…\)"),
        (tuple, [W], r"Convert it with tuple\(…\)"),
        (float, 0.5, r"Convert it with float\(…\)"),
        (str, "text", r"Convert it with str\(…\)"),
        (set, {1}, r"store sorted\(…\) of it"),
        (deque, [W], "call shardckpt.register_leaf"),
    ],
)
def test_a_dataclass_that_has_contents_beside_its_fields_is_refused(base, content, advice):
    kind = dataclass(type("Kind", (base,), {"__annotations__": {"rate": float}, "rate": 0.1}))
    value = kind.__new__(kind, content)
    if base in (dict, list, set, deque):
        base.__init__(value, content)
    with pytest.raises(LeafError, match=rf"'a' is a .*Kind, which cannot be stored.*{advice}"):
        tree_of({"a": value})


def test_a_torch_module_that_is_a_dataclass_is_refused_as_any_module():
    @dataclass(eq=False)
    class Net(torch.nn.Module):
        width: int = 4

        def __post_init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(self.width, 1)

    with pytest.raises(LeafError, match=r"'a' is a .*Net, .* Store its state_dict\(\)"):
        tree_of({"a": Net()})


def test_a_dataclass_that_is_a_registered_dict_is_stored_by_its_keys():
    from torch.utils import _pytree as pytree

    @dataclass
    class Output(OrderedDict):  # as in transformers
        w: object

        def __post_init__(self):
            self["w"] = self.w

    pytree.register_pytree_node(
        Output,
        lambda node: (list(node.values()), None),
        lambda children, _context: Output(*children),
        flatten_with_keys_fn=lambda node: (
            [(pytree.MappingKey(key), child) for key, child in node.items()],
            None,
        ),
    )
    assert through_json(Output(W)) == {"w": W}


def test_frameworks_are_looked_for_and_not_imported():
    code = """
import sys
from dataclasses import make_dataclass
from shardckpt.state import flatten, match
state = [make_dataclass("Point", ["x"])(1)]
match(state, flatten(state, lambda value: False).tree, lambda value: False)
print({"torch", "jax", "tensorstore", "zarr"} & set(sys.modules))
"""
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "set()\n"
    )


# --- tied tensors ---


def test_a_tied_tensor_is_stored_under_its_first_name():
    state = {"embed": {"w": W}, "layers": [np.ones(1)], "head": {"w": W}}
    flat = flatten(state, is_tensor, identity=id)
    assert list(flat.tensors) == ["embed/w", "layers/0"]
    assert alias_map(flat.tree) == {"head/w": "embed/w"}
    assert flat.tree["head"] == {"w": {"$tied": "embed/w"}}
    back = unflatten(flat.tree, {name: tensor.copy() for name, tensor in flat.tensors.items()})
    assert back["head"]["w"] is back["embed"]["w"]
    assert list(iter_leaves(flat.tree))[-1] == ("head/w", "tied", "embed/w")


def test_tensors_without_an_identity_are_never_tied():
    assert alias_map(flatten([W, W], is_tensor, identity=lambda _tensor: None).tree) == {}
    assert alias_map(flatten([W, W], is_tensor).tree) == {}


# --- registered leaves ---


@pytest.fixture
def schedule(monkeypatch):
    """A registered class whose encoded form holds another registered leaf."""
    monkeypatch.setattr(leaves, "_BY_TYPE", {})
    monkeypatch.setattr(leaves, "_BY_NAME", {})

    @dataclass
    class Schedule:
        state: dict

    leaves.register_leaf(
        Fraction,
        name="Fraction",
        encode=lambda value: value.as_integer_ratio(),
        decode=lambda pair: Fraction(*pair),
    )
    leaves.register_leaf(
        Schedule, name="Schedule", encode=lambda value: value.state, decode=Schedule
    )
    return Schedule


def test_a_registered_leaf_is_one_leaf_and_comes_back(schedule):
    state = {"s": schedule({"a": [1, (b"x", None)], 0: Fraction(2, 3)}), "t": Fraction(1)}
    assert through_json(state) == state
    assert leaf_names(tree_of(state)) == ["s", "t"]
    assert list(iter_leaves(tree_of(state))) == [("s", "Schedule", ""), ("t", "Fraction", "")]


def test_an_encode_function_that_fails_is_a_leaf_error_with_the_name_and_the_registration(schedule):
    def fail(_value):
        raise KeyError("lr")

    leaves.register_leaf(schedule, name="Schedule", encode=fail, decode=schedule)
    words = r"'opt/s': the encode function registered as 'Schedule' failed \(KeyError: 'lr'\)"
    with pytest.raises(LeafError, match=words) as raised:
        tree_of({"opt": {"s": schedule({})}})
    assert isinstance(raised.value.__cause__, KeyError)


def test_what_is_local_is_not_asked_inside_a_registered_leaf_but_of_the_leaf_itself(schedule):
    state = {"sampler": schedule({"seed": 3}), "seed": 4}

    def walk(local):
        return flatten(state, is_tensor, local=local, process=1).tree

    alone = walk(lambda name: name.endswith("seed"))
    assert alone == {"sampler": tree_of(state)["sampler"], "seed": {"$local": {"1": 4}}}
    parse(alone)
    parse(walk(lambda name: name == "sampler"))


def test_a_registered_leaf_that_nobody_registered_here_names_what_to_register(
    schedule, monkeypatch
):
    tree = tree_of({"opt": {"s": schedule({})}})
    monkeypatch.setattr(leaves, "_BY_NAME", {})
    with pytest.raises(FormatError, match=r"'opt/s' .*register_leaf\(…, name='Schedule'\)"):
        unflatten(tree, {})
    assert leaf_names(tree) == ["opt/s"]


def test_a_registered_leaf_that_holds_a_tensor_is_refused(schedule):
    with pytest.raises(LeafError, match=r"'s'.*encode.*ndarray"):
        tree_of({"s": schedule({"w": W})})


def test_a_registered_leaf_that_encodes_as_itself_is_refused(schedule):
    endless = schedule({})
    endless.state = endless
    with pytest.raises(LeafError, match=r"'s' .*contains itself"):
        tree_of({"s": endless})


def test_a_decode_function_that_fails_is_a_format_error_naming_the_leaf(schedule):
    with pytest.raises(FormatError, match=r"'s'.*'Fraction' failed.*ZeroDivisionError"):
        unflatten({"s": {"$leaf": ["Fraction", {"$tuple": [1, 0]}]}}, {})


def test_what_a_decode_function_raises_on_purpose_stays(schedule):
    def refuse(_tree):
        raise DtypeError("no")

    leaves.register_leaf(schedule, name="Schedule", encode=vars, decode=refuse)
    with pytest.raises(DtypeError, match="no"):
        unflatten({"$leaf": ["Schedule", None]}, {})


# --- refusals ---


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Settings(dict):
    pass


class WithState:
    def state_dict(self):
        return {}


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        ({1, 2}, "sorted"),
        (frozenset(), "sorted"),
        (object(), "register_leaf"),
        (
            WithState(),
            "Store its state_dict(), or make the state with shardckpt.train_state(model=…)",
        ),
        (torch.nn.Linear(2, 2), "shardckpt.train_state(model=…)"),
        (WithState, "Leave functions and classes out"),
        (Color.RED, "Store its value, or its name."),
        (Level.LOW, "Store its value, or its name."),
        (Settings(), "dict(…)"),
        (print, "functions"),
        (Config, "functions"),
        (Pair, "functions"),
        (iter([]), "register_leaf"),
        (range(3), "Store list(…) of it."),
        (bytearray(b"a"), "Store bytes(…) of it."),
        (memoryview(b"a"), "Store bytes(…) of it."),
        (Fraction(1, 2), "register_leaf"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_cannot_be_stored_is_named_with_its_type_and_what_to_do(value, advice):
    with pytest.raises(LeafError) as caught:
        tree_of({"opt": [{"x": value}]})
    message = str(caught.value)
    assert message.startswith(("'opt/0/x' is a ", "'opt/0/x' is an object"))
    assert type(value).__qualname__ in message
    assert advice in message


def test_a_state_that_is_itself_no_state_says_so():
    with pytest.raises(LeafError, match=r"^The state itself is a set"):
        tree_of({1})


@pytest.mark.parametrize("key", [1.5, (1, 2), b"a", np.int64(1), Level.LOW, np.str_("a")], ids=repr)
def test_a_key_of_another_type_is_refused_with_the_name_of_its_dict(key):
    with pytest.raises(
        LeafError, match=f"'opt/state' has a key of type {re.escape(type(key).__qualname__)}"
    ):
        tree_of({"opt": {"state": {key: 1}}})


def test_a_container_that_contains_itself_is_refused():
    loop = {"a": []}
    loop["a"].append(loop)
    with pytest.raises(LeafError, match="'a/0' is a dict that contains itself"):
        tree_of(loop)


def test_a_container_may_be_in_two_places():
    shared = [1, W]
    assert through_json([shared, {"x": shared}]) == [shared, {"x": shared}]


def nested(depth, wrap):
    state = 1
    for _ in range(depth):
        state = wrap(state)
    return state


@pytest.mark.parametrize(
    "wrap",
    [lambda x: [x], lambda x: (x,), lambda x: {0: x}, lambda x: Pair(x, 1), lambda x: Config(x, 1)],
)
def test_two_hundred_containers_deep_is_deep_enough(wrap):
    state = nested(200, wrap)
    flat = flatten(state, is_tensor)
    assert flatten(through_json(state), is_tensor).tree == flat.tree
    with pytest.raises(LeafError, match="more than 200 containers"):
        tree_of(wrap(state))


def test_a_registered_leaf_that_never_ends_is_refused(schedule):
    leaves.register_leaf(schedule, name="Schedule", encode=lambda _: schedule({}), decode=schedule)
    with pytest.raises(LeafError, match="more than 200 containers"):
        tree_of({"s": schedule({})})
