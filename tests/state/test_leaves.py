"""Leaves that are not tensors: everything comes back as it was, to the bit, and nothing else is
believed."""

import enum
import json
import math
import struct
import subprocess
import sys
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardckpt.errors import FormatError, LeafError, MissingExtraError, OptionError
from shardckpt.layout.dtypes import DTYPES
from shardckpt.state import leaves

NAN_BITS = (
    st.integers(0, 2**52 - 1)
    .filter(bool)
    .map(lambda payload: struct.unpack(">d", struct.pack(">Q", (0x7FF << 52) | payload))[0])
)
FLOATS = st.one_of(
    st.floats(), NAN_BITS, st.sampled_from([0.0, -0.0, 1.0, 1e22, 5e-324, math.inf, -math.inf])
)
TEXTS = st.one_of(
    st.text(),
    st.text(st.characters(categories=["Cs", "Lu"])),
    st.sampled_from(["$tensor", "$", "$$x", "\ud83d\ude00", "😀", "\0"]),
)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    FLOATS,
    st.builds(complex, FLOATS, FLOATS),
    TEXTS,
    st.binary(),
)


def bits(value):
    """Key that is equal for equal leaves: type and bits."""
    if isinstance(value, np.generic):
        return type(value), str(value) if isinstance(value, np.str_) else (
            str(value.dtype),
            value.tobytes(),
        )
    if isinstance(value, float):
        return float, struct.pack(">d", value)
    if isinstance(value, complex):
        return complex, struct.pack(">dd", value.real, value.imag)
    return type(value), value


def through_json(value):
    text = json.dumps(leaves.encode(value, "x"), allow_nan=False)
    text.encode()  # no lone surrogates
    return leaves.decode(json.loads(text), "x")


@pytest.mark.long
@settings(max_examples=500, deadline=None)
@given(VALUES)
@example(-0.0)
@example(2**53)
@example(-(2**53) + 1)
def test_a_leaf_comes_back_with_its_type_and_its_bits(value):
    assert leaves.is_small(value)
    assert bits(through_json(value)) == bits(value)


def test_an_integer_of_a_million_digits_comes_back_in_bounded_time():
    value = -(7**400_000)
    assert through_json(value) == value


@pytest.mark.parametrize("name", DTYPES)
def test_a_scalar_of_every_dtype_comes_back(name):
    for value in (
        np.array([0, 1], DTYPES[name].numpy)
        if name not in {"int1", "float8_e8m0fnu"}
        else np.ones(1, DTYPES[name].numpy)
    ):
        assert isinstance(value, np.generic)
        assert bits(through_json(value)) == bits(value)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(
        [
            "float16",
            "float32",
            "float64",
            "bfloat16",
            "complex64",
            "complex128",
            "float8_e5m2",
            "float8_e4m3fn",
        ]
    ),
    st.binary(min_size=16, max_size=16),
)
def test_a_scalar_keeps_the_payload_of_a_nan(name, data):
    dtype = DTYPES[name].numpy
    value = np.frombuffer(data[: dtype.itemsize], dtype)[0]
    assert bits(through_json(value)) == bits(value)


@pytest.mark.parametrize(
    "value",
    [
        np.datetime64("2024-02-29T12:00:00", "ns"),
        np.datetime64("NaT", "s"),
        np.timedelta64(-5, "D"),
        np.datetime64("2000", "25s"),
        np.str_("a\ud800\0"),
        np.bytes_(b"\0a\0"),
        np.float64("nan"),
    ],
    ids=repr,
)
def test_a_numpy_scalar_that_is_no_number_comes_back_too(value):
    assert bits(through_json(value)) == bits(value)


@pytest.mark.parametrize(
    "value",
    [np.longdouble(1), np.clongdouble(1), np.void(b"ab"), np.zeros(1, [("a", "i4")])[0]],
    ids=lambda v: type(v).__name__,
)
def test_a_numpy_scalar_that_cannot_be_stored_is_refused_by_name_and_dtype(value):
    with pytest.raises(LeafError, match=r"'opt/x' is a numpy scalar: dtype .* cannot be stored"):
        leaves.encode(value, "opt/x")


def test_what_json_has_stands_for_itself():
    assert [leaves.encode(value, "x") for value in (None, True, 3, 0.5, "é")] == [
        None,
        True,
        3,
        0.5,
        "é",
    ]


class Color(enum.IntEnum):
    RED = 1


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    "value",
    [Color.RED, Text("a"), {1}, [1], object(), Fraction(1, 2), bytearray(b"a"), np.zeros(2)],
    ids=lambda v: type(v).__name__,
)
def test_nothing_else_is_a_small_leaf(value):
    assert not leaves.is_small(value)


# --- torch's ---


def test_torch_leaves_come_back():
    import torch

    values = [
        torch.float8_e4m3fn,
        torch.bfloat16,
        torch.int64,
        torch.device("cpu"),
        torch.device("cuda:3"),
        torch.device("meta"),
        torch.Size([2, 0, 3]),
        torch.Size(),
    ]
    for value in values:
        assert leaves.is_small(value)
        back = through_json(value)
        assert (type(back), back) == (type(value), value)


def test_every_dtype_of_torch_comes_back():
    import torch

    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert {through_json(value) for value in dtypes} == dtypes


TORCH_NODES = [{"$torch.dtype": "float32"}, {"$torch.device": "cuda:0"}, {"$torch.Size": [2, 3]}]


@pytest.mark.parametrize("node", TORCH_NODES)
def test_a_torch_leaf_without_torch_says_what_to_install(monkeypatch, node):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError, match=r"'opt/kind' is a leaf of torch's: install torch"):
        leaves.decode(node, "opt/kind")


@pytest.mark.parametrize(
    ("node", "shown"), list(zip(TORCH_NODES, ["float32", "cuda:0", "(2, 3)"], strict=True))
)
def test_a_torch_leaf_can_be_looked_at_without_torch(monkeypatch, node, shown):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert leaves.describe(node, "x") == (next(iter(node))[1:], shown)


def test_coding_leaves_imports_no_framework():
    code = """
import sys
from shardckpt import state as states
from shardckpt.state import leaves
state = {"a": [1, 2.5, "x", b"y", None], "b": (3 + 1j,)}
assert states.unflatten(states.flatten(state, lambda value: False).tree, {}) == state
assert not leaves.is_small(object())
print({"torch", "jax", "tensorstore", "zarr"} & set(sys.modules))
"""
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "set()\n"
    )


# --- hostile input ---


@pytest.mark.parametrize(
    "node",
    [
        2**53,
        -(10**400),
        math.nan,
        math.inf,
        "$tensor",
        "$",
        [],
        {},
        {"$int": "1", "$float": "2"},
        {"$what": 1},
        {"int": "1"},
        {"$int": 5},
        {"$int": ""},
        {"$int": "0x1f"},
        {"$int": "1_0"},
        {"$int": " 1"},
        {"$int": "١"},
        {"$float": "nan"},
        {"$float": "7ff8"},
        {"$float": 1.0},
        {"$float": "7FF8000000000000"},
        {"$complex": [1.0]},
        {"$complex": [1.0, 2]},
        {"$complex": [1.0, None]},
        {"$complex": "12"},
        {"$complex": [{"$complex": [1.0, 1.0]}, 1.0]},
        {"$str": "zz"},
        {"$str": "ff"},
        {"$str": ["61"]},
        {"$bytes": "a"},
        {"$bytes": "é"},
        {"$bytes": "ab==\n"},
        {"$bytes": [1]},
        {"$numpy": "float32"},
        {"$numpy": ["float32"]},
        {"$numpy": ["float32", "00"]},
        {"$numpy": ["float32", "0000803f0000803f"]},
        {"$numpy": ["object", "0000000000000000"]},
        {"$numpy": ["bool", "02"]},
        {"$numpy": ["f4", "0000803f"]},
        {"$numpy": ["datetime64[fortnight]", "00" * 8]},
        {"$numpy": ["datetime64[0s]", "00" * 8]},
        {"$numpy": ["datetime64[s]", "00" * 16]},
        {"$numpy": ["datetime64[s]", ""]},
        {"$numpy": ["str", "ff"]},
        {"$numpy": [["str"], "61"]},
        {"$torch.dtype": "load"},
        {"$torch.dtype": "nn"},
        {"$torch.dtype": "__class__"},
        {"$torch.dtype": 3},
        {"$torch.device": "nowhere"},
        {"$torch.device": "cuda:x"},
        {"$torch.device": "cpu:300"},
        {"$torch.device": "cuda:00"},
        {"$torch.device": None},
        {"$torch.Size": [1, "2"]},
        {"$torch.Size": [True]},
        {"$torch.Size": [2**63]},
        {"$torch.Size": 3},
    ],
    ids=lambda node: repr(node)[:40],
)
def test_anything_that_no_leaf_is_written_as_is_a_format_error(node):
    with pytest.raises(FormatError, match="'opt/x'"):
        leaves.decode(node, "opt/x")


JSON_NODES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6)),
    lambda nodes: st.one_of(
        st.lists(nodes, max_size=3),
        st.dictionaries(
            st.one_of(st.sampled_from(sorted(leaves.TAGS)), st.text(max_size=3)), nodes, max_size=2
        ),
    ),
    max_leaves=6,
)


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        JSON_NODES,
        st.builds(
            lambda tag, content: {tag: content}, st.sampled_from(sorted(leaves.TAGS)), JSON_NODES
        ),
    )
)
def test_whatever_json_says_it_is_a_leaf_or_a_format_error(node):
    for read in (leaves.decode, leaves.describe):
        try:
            read(node, "x")
        except (FormatError, MissingExtraError):
            continue


def test_a_message_about_a_hostile_leaf_is_short():
    node = {"$int": "x" * 10**6}
    for _ in range(500):
        node = {"$numpy": [node]}
    with pytest.raises(FormatError) as caught:
        leaves.decode(node, "n" * 10**6)
    assert len(str(caught.value)) < 600


# --- showing ---


@pytest.mark.parametrize(
    ("value", "kind", "shown"),
    [
        (None, "None", "None"),
        (True, "bool", "True"),
        (10**30, "int", hex(10**30)),
        (1.5, "float", "1.5"),
        ("a" * 1000, "str", "'" + "a" * 58 + "…"),
        (b"ab", "bytes", "b'ab'"),
        (np.float32(2), "numpy.float32", "2.0"),
        (ml_dtypes.bfloat16(2), "numpy.bfloat16", "2"),
        (np.str_("é"), "numpy.str", "é"),
        (np.datetime64("2024-01-01", "D"), "numpy.datetime64[D]", "2024-01-01"),
    ],
)
def test_a_leaf_is_shown_on_a_few_characters(value, kind, shown):
    assert leaves.describe(leaves.encode(value, "x"), "x") == (kind, shown)


# --- the register ---


class Schedule:
    def __init__(self, values):
        self.values = values


@pytest.fixture
def empty_register(monkeypatch):
    monkeypatch.setattr(leaves, "_BY_TYPE", {})
    monkeypatch.setattr(leaves, "_BY_NAME", {})


@pytest.mark.usefixtures("empty_register")
def test_a_registered_type_is_found_by_type_and_by_name():
    leaves.register_leaf(
        Schedule, name="tests.Schedule", encode=vars, decode=lambda tree: Schedule(**tree)
    )
    assert leaves.leaf_type(Schedule([1])) is leaves.leaf_type_named("tests.Schedule", "x")
    assert leaves.leaf_type(object()) is None


@pytest.mark.usefixtures("empty_register")
@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (5, {}, r"register_leaf\(5\): the first argument is a class"),
        (int | str, {}, r"register_leaf\(int | str\): the first argument is a class"),
        (Schedule, {"encode": 5}, r"\(Schedule, encode=5\): give a function"),
        (Schedule, {"decode": None}, r"\(Schedule, decode=None\): give a function"),
        (Schedule, {"name": np.zeros(9)}, r"not a ndarray of shape 9\."),
    ],
)
def test_what_cannot_be_registered_is_an_option_error(kind, arguments, message):
    given = {"name": "x", "encode": vars, "decode": Schedule} | arguments
    with pytest.raises(OptionError, match=message):
        leaves.register_leaf(kind, **given)


@pytest.mark.usefixtures("empty_register")
def test_a_subclass_needs_a_registration_of_its_own():
    leaves.register_leaf(Schedule, name="tests.Schedule", encode=vars, decode=Schedule)
    assert leaves.leaf_type(type("Other", (Schedule,), {})(1)) is None


@pytest.mark.usefixtures("empty_register")
def test_registering_again_replaces_and_so_does_the_same_class_defined_anew():
    leaves.register_leaf(Schedule, name="old", encode=vars, decode=Schedule)
    leaves.register_leaf(Schedule, name="new", encode=vars, decode=Schedule)
    again = type("Schedule", (), {"__module__": Schedule.__module__})
    leaves.register_leaf(again, name="new", encode=vars, decode=again)
    assert leaves.leaf_type_named("new", "x").type is again
    with pytest.raises(FormatError, match=r"'opt/s' .*register_leaf\(…, name='old'\)"):
        leaves.leaf_type_named("old", "opt/s")


@pytest.mark.usefixtures("empty_register")
def test_a_name_belongs_to_one_type():
    leaves.register_leaf(Schedule, name="s", encode=vars, decode=Schedule)
    with pytest.raises(OptionError, match=r"belongs to .*Schedule"):
        leaves.register_leaf(Fraction, name="s", encode=vars, decode=Schedule)


@pytest.mark.parametrize(
    "type_",
    [
        int,
        str,
        type(None),
        dict,
        list,
        tuple,
        bytes,
        complex,
        np.float32,
        np.generic,
        ml_dtypes.bfloat16,
    ],
)
def test_a_type_that_every_state_may_hold_cannot_be_registered(type_):
    with pytest.raises(OptionError, match="already"):
        leaves.register_leaf(type_, name="x", encode=vars, decode=type_)


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_registered_name_is_a_text(name):
    with pytest.raises(OptionError, match="name="):
        leaves.register_leaf(Schedule, name=name, encode=vars, decode=Schedule)
