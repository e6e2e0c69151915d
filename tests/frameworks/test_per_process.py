"""Values that every process owns by itself: what can be one, that it comes back to the bit, and who
gets which."""

import copy
import json
import random
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import jsonschema
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from paths import DOCS

from shardckpt.errors import FormatError, LeafError, MismatchError, MissingExtraError
from shardckpt.frameworks.per_process import (
    LARGEST_VALUES,
    PerProcess,
    choose_value,
    decode_value,
    encode_value,
    encode_values,
)
from shardckpt.layout.dtypes import DTYPES
from shardckpt.layout.world import World
from shardckpt.state import flatten

SCHEMA = json.loads((DOCS / "format.schema.json").read_text())


def validate(document, definition):
    jsonschema.Draft202012Validator({**SCHEMA, "$ref": f"#/$defs/{definition}"}).validate(document)


def through_json(value, name="rng"):
    document = json.loads(json.dumps(encode_value(value, name), allow_nan=False))
    validate(document, "perProcessValue")
    return decode_value(document, name)


def same(one, other):
    """Equal in type and bits, all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return (
            one.dtype == other.dtype and one.shape == other.shape and same(bits(one), bits(other))
        )
    if isinstance(one, np.ndarray):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and one.tobytes() == other.tobytes()
        )
    return one == other


def bits(tensor):
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8).numpy()


# --- what a process owns ---


def test_the_state_of_pythons_generator_comes_back():
    random.seed(5)
    state = random.getstate()
    expected = random.random()
    random.setstate(through_json(state))
    assert random.random() == expected


def test_the_state_of_torchs_generator_comes_back():
    state = torch.get_rng_state()
    expected = torch.rand(3)
    restored = through_json(state)
    assert same(restored, state)
    torch.set_rng_state(restored)
    assert torch.equal(torch.rand(3), expected)


def test_the_state_of_numpys_global_generator_comes_back():
    state = np.random.get_state()  # noqa: NPY002 - programs still use it
    expected = np.random.rand()  # noqa: NPY002
    np.random.set_state(through_json(state))  # noqa: NPY002
    assert np.random.rand() == expected  # noqa: NPY002
    modern = np.random.get_state(legacy=False)  # noqa: NPY002
    assert same(through_json(modern), modern)


@pytest.mark.parametrize(
    "kind",
    [np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64],
)
def test_the_state_of_a_bit_generator_of_numpy_comes_back(kind):
    generator = np.random.Generator(kind(7))
    generator.integers(0, 5, dtype=np.uint8)
    state = generator.bit_generator.state
    expected = generator.random(4)
    again = np.random.Generator(kind())
    again.bit_generator.state = through_json(state)
    assert (again.random(4) == expected).all()


def test_the_state_of_a_data_loader_comes_back():
    state = {
        "_snapshot": {
            "_snapshot_step": 12,
            "_last_yielded_worker_id": np.int64(1),
            "_main_snapshot": {
                "_sampler_iter_state": None,
                "_num_workers": 2,
                "_base_seed": 2**63 + 1,
                "_iterator_finished": False,
            },
            "_worker_snapshots": {
                f"worker_{i}": {
                    "dataset_state": {"file": "s3://b/\ud800", "offset": 2**40, 3: (i, [])},
                    "rng": torch.get_rng_state(),
                }
                for i in range(2)
            },
        },
        "_steps_since_snapshot": 0,
        "shuffle": np.random.default_rng(0).permutation(1000),
        "buffer": [b"\0\xff", 1.5, float("inf"), 1j, np.float32(2)],
    }
    assert same(through_json(state, "loader"), state)


def test_a_value_may_be_one_leaf_and_the_state_itself():
    for value in (3, None, np.arange(3), {}, torch.ones(2, 2)):
        assert same(through_json(value, ""), value)


class Pair(NamedTuple):
    first: object
    second: object


@dataclass
class Config:
    w: object


def test_containers_of_other_classes_come_back_plain():
    assert same(
        through_json(Pair(Config(np.ones(1)), deque([2]))),
        {"first": {"w": np.ones(1)}, "second": [2]},
    )


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(sorted(DTYPES)).flatmap(
        lambda name: hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4).flatmap(
            lambda shape: st.tuples(
                st.just(DTYPES[name].numpy), st.just(shape), st.binary(min_size=64, max_size=64)
            )
        )
    )
)
def test_an_array_of_any_dtype_comes_back_to_the_bit(drawn):
    dtype, shape, pattern = drawn
    raw = np.resize(np.frombuffer(pattern, np.uint8), int(np.prod(shape)) * dtype.itemsize)
    array = ((raw & 1) if dtype == np.bool_ else raw).view(dtype).reshape(shape)
    back = through_json([array, array.T, array[::-1] if shape else array])
    assert same(back[0], array)
    assert same(back[1], np.ascontiguousarray(array.T).reshape(array.T.shape))
    assert back[0].flags.writeable
    back[0][...] = 0


TORCH_DTYPES = [
    *(
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    ),
    *(
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    ),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
]


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)], ids=str)
def test_a_torch_tensor_of_any_dtype_comes_back_to_the_bit(dtype, shape):
    tensor = torch.arange(6).to(torch.float32).to(dtype).reshape(2, 3)
    tensor = {(): tensor[1, 1], (0, 3): tensor[:0], (2, 3): tensor}[shape]
    assert same(through_json(tensor), tensor)
    assert same(
        through_json(tensor.mT if shape else tensor), tensor.mT.contiguous() if shape else tensor
    )


def test_parameters_and_lazy_views_come_back_as_plain_tensors():
    parameter = torch.nn.Parameter(torch.ones(2))
    conjugated = torch.tensor([1 + 2j]).conj()
    back = through_json([parameter, conjugated, conjugated.imag])
    assert same(back, [torch.ones(2), torch.tensor([1 - 2j]), torch.tensor([-2.0])])
    assert not back[0].requires_grad


@pytest.mark.parametrize("shape", [(3,), (1, 1), (0,)], ids=str)
def test_bools_with_other_bytes_come_back_as_bools(shape):
    bools = np.array([2, 3, 0], np.uint8).view(np.bool_)[: np.prod(shape)].reshape(shape)
    expected = np.array([True, True, False])[: bools.size].reshape(shape)
    assert same(through_json(bools), expected)
    assert same(through_json(torch.from_numpy(bools)), torch.from_numpy(expected.copy()))


def test_an_array_in_the_other_byte_order_comes_back_in_ours():
    assert same(through_json(np.arange(3, dtype=">i4")), np.arange(3, dtype=np.int32))


def test_the_trees_that_it_is_in_conform_to_the_schema():
    state = {"rng": PerProcess(1), "key": np.ones(2), "l": [PerProcess(2)]}
    tree = flatten(
        state, lambda leaf: isinstance(leaf, np.ndarray), meaning=lambda _leaf: "jax.key:rbg"
    ).tree
    validate(tree, "node")
    for node in ({"$per_process": 1}, {"$tensor": ""}, {"$tensor": 1}):
        with pytest.raises(jsonschema.ValidationError):
            validate([node], "node")


def test_an_array_that_is_there_twice_is_stored_once():
    array = np.ones(100)
    document = encode_value({"a": array, "b": array}, "rng")
    assert list(document["arrays"]) == ["rng/a"]
    back = decode_value(document, "rng")
    assert back["a"] is back["b"]


# --- what is refused ---


def test_one_inside_of_another_is_refused():
    for value in (PerProcess(1), [{"x": PerProcess(1)}]):
        with pytest.raises(LeafError, match="PerProcess inside of the PerProcess 'rng'"):
            encode_value(value, "rng")


@pytest.mark.parametrize(
    ("leaf", "words"),
    [
        ({1, 2}, "is a set"),
        (np.random.default_rng(), "numpy.random"),
        (np.array(["x"]), "dtype"),
        (np.array([None]), "dtype"),
        (np.ma.masked_array([1], [True]), "MaskedArray"),
        (torch.ones(2, device="meta"), "on meta"),
        (torch.ones(2).to_sparse(), "sparse"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_stored_is_refused_by_its_whole_name(leaf, words):
    with pytest.raises(LeafError, match="'loader/state/0'") as caught:
        encode_value({"state": [leaf]}, "loader")
    assert words in str(caught.value)


def test_more_than_the_limit_is_refused_with_name_size_and_what_to_do():
    half = np.zeros(LARGEST_VALUES // 8 * 3, np.uint8)
    encode_value(half, "loader")
    with pytest.raises(LeafError) as caught:
        encode_value([half, half.copy(), half.copy()], "loader")
    assert str(caught.value).startswith(
        "'loader' takes 96.0 MiB, and all PerProcess values of a process may take 64 MiB"
    )
    assert 'host_tensors="local"' in str(caught.value)
    encode_value([half, half, half], "loader")  # one array


def test_the_limit_is_for_all_values_of_a_process_together():
    half = np.zeros(LARGEST_VALUES // 8 * 3, np.uint8)
    assert list(encode_values({"a": half, "b": 1})) == ["a", "b"]
    with pytest.raises(LeafError, match="'c' takes 32"):
        encode_values({"a": half, "b": 1, "c": half})
    with pytest.raises(LeafError, match=r"'text' takes 64\.0 MiB"):
        encode_value("x" * LARGEST_VALUES, "text")


# --- documents that somebody else wrote ---

GOOD = {
    "tree": {"w": "$tensor", "step": 3},
    "arrays": {"rng/w": {"kind": "numpy", "dtype": "int16", "shape": [2, 1], "data": "AQACAA=="}},
}


def changed(**array):
    document = copy.deepcopy(GOOD)
    document["arrays"]["rng/w"].update(array)
    return document


def test_a_document_as_it_is_written():
    assert encode_value({"w": np.array([[1], [2]], np.int16), "step": 3}, "rng") == GOOD


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        {},
        {"tree": 1},
        {"arrays": {}},
        {**GOOD, "tree": {"w": "$what"}},
        {**GOOD, "tree": {}},
        {**GOOD, "tree": {"w": "$tensor", "x": "$tensor"}},
        {**GOOD, "tree": {"w": "$tensor", "x": {"$per_process": None}}},
        {**GOOD, "tree": {"w": {"$tensor": "jax.key:threefry2x32"}}},
        {**GOOD, "tree": {"w": {"$tied": "rng/w"}}},
        {**GOOD, "arrays": []},
        {**GOOD, "arrays": {}},
        {**GOOD, "arrays": {"w": GOOD["arrays"]["rng/w"]}},
        {**GOOD, "arrays": {"rng/w": 1}},
        {**GOOD, "arrays": {"rng/w": {}}},
        changed(kind="pickle"),
        changed(kind=None),
        changed(dtype="object"),
        changed(dtype="no such " * 10**5),
        changed(dtype=3),
        changed(shape=[4]),
        changed(shape=[-2, -1]),
        changed(shape=[2.0, 1]),
        changed(shape=[2**70]),
        changed(shape=[0, 2**61], dtype="int64", data=""),
        changed(shape=[1] * 100),
        changed(shape="2"),
        changed(data="AQACAA="),
        changed(data="AQAC\nAA=="),
        changed(data="é"),
        changed(data=[1, 2]),
        changed(data=""),
        changed(kind="torch", dtype="uint4", data="AQI="),
        changed(dtype="bool", data="AQI="),
    ],
    ids=lambda document: json.dumps(document)[-60:],
)
def test_a_malformed_document_is_a_format_error_that_names_the_value(document):
    with pytest.raises(FormatError, match="'rng") as caught:
        decode_value(document, "rng")
    assert len(str(caught.value)) < 1000


def test_a_document_deeper_than_any_value_is_a_format_error():
    tree = 1
    for _ in range(100_000):
        tree = [tree]
    with pytest.raises(FormatError):
        decode_value({"tree": tree, "arrays": {}}, "rng")
    while isinstance(tree, list):  # taken apart by hand: the interpreter would do it recursively
        tree = tree[0]


NODES = st.recursive(
    st.none()
    | st.integers(-2, 2**64)
    | st.text(max_size=3)
    | st.sampled_from(["$tensor", "numpy", "torch", "int8", "", "AA==", "rng/a"]),
    lambda nodes: (
        st.lists(nodes, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "$tied", "$tuple", "$tensor"]), nodes, max_size=2)
    ),
    max_leaves=6,
)
ARRAYS = st.dictionaries(
    st.sampled_from(["rng", "rng/a", "rng/0"]),
    st.fixed_dictionaries(
        {
            "kind": st.sampled_from(["numpy", "torch", "jax", "x"]),
            "dtype": st.sampled_from(["int8", "bool", "uint4", "float8_e4m3fn", "x"]),
            "shape": st.lists(st.integers(-1, 3), max_size=2)
            | st.lists(st.integers(0, 2**63), max_size=2),
            "data": st.sampled_from(["", "AA==", "AAE=", "A", "AAAA"]),
        }
    ),
    max_size=2,
)


@settings(max_examples=300, deadline=None)
@given(NODES, ARRAYS)
def test_whatever_json_says_it_is_a_value_or_a_format_error(tree, arrays):
    try:
        value = decode_value({"tree": tree, "arrays": arrays}, "rng")
    except (FormatError, MissingExtraError):
        return
    encode_value(value, "rng")


# --- who gets which ---


def test_as_many_processes_as_saved_get_their_own():
    values = {0: "a", 1: "b", 2: "c"}
    for choose in (None, lambda _values: "other"):
        got = [
            choose_value(values, PerProcess(None, choose), "rng", saved=3, world=World(i, 3))
            for i in range(3)
        ]
        assert got == ["a", "b", "c"]


def test_other_numbers_of_processes_get_what_they_choose():
    values = {2: "c", 0: "a"}
    assert choose_value(values, PerProcess(None, list), "rng", saved=3, world=World(1, 2)) == [
        "a",
        "c",
    ]
    assert (
        choose_value(
            values, PerProcess(None, lambda values: values[-1]), "rng", saved=3, world=World(1, 3)
        )
        == "c"
    )


@pytest.mark.parametrize(
    ("saved", "world", "words"),
    [
        (8, World(0, 4), "8 processes saved the checkpoint, and 4 restore it"),
        (1, World(1, 2), "1 process saved the checkpoint, and 2 restore it"),
        (2, World(1, 2), "process 1 saved none"),
    ],
)
def test_without_a_choice_the_error_says_how_to_make_one(saved, world, words):
    with pytest.raises(MismatchError) as caught:
        choose_value({0: 1}, PerProcess(None), "rng/torch", saved=saved, world=world)
    assert str(caught.value) == (
        f"'rng/torch' has one value per process; {words}. Say which one to restore, as in "
        "PerProcess(value, choose=lambda values: values[0]), or leave it out with only=."
    )


def test_bfloat16_of_numpy_stays_numpys():
    assert same(through_json(np.ones(2, ml_dtypes.bfloat16)), np.ones(2, ml_dtypes.bfloat16))
