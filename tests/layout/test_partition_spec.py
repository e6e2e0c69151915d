"""A partition spec says which axes cut each dimension, and refuses what cannot be said."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.errors import FormatError, ShardingError
from shardckpt.layout.mesh import Mesh
from shardckpt.layout.partition_spec import PartitionSpec

MESH = Mesh((2, 2, 2), ("data", "fsdp", "tensor"))


@st.composite
def specs(draw):
    axes = draw(st.permutations(["data", "fsdp", "tensor", 3, 4, "ü/~"]))
    parts, begin = [], 0
    for _ in range(draw(st.integers(0, 4))):
        count = draw(st.integers(0, 2))
        parts.append(tuple(axes[begin : begin + count]))
        begin += count
    return PartitionSpec(*parts)


def test_entries_are_names_indices_tuples_and_none():
    spec = PartitionSpec("data", None, ("fsdp", 2))
    assert spec.axes == (("data",), (), ("fsdp", 2))
    assert list(spec) == ["data", None, ("fsdp", 2)]
    assert (len(spec), spec[2]) == (3, ("fsdp", 2))


def test_a_tuple_of_one_is_its_axis_and_an_empty_one_is_none():
    assert PartitionSpec(("data",), ()) == PartitionSpec("data", None)


def test_the_order_in_a_tuple_means_something():
    assert PartitionSpec(("data", "fsdp")) != PartitionSpec(("fsdp", "data"))


def test_indices_are_replaced_by_the_names_of_a_mesh():
    assert PartitionSpec(2, None, (0, "fsdp")).named(MESH) == PartitionSpec(
        "tensor", None, ("data", "fsdp")
    )


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (("data", "data"), "axis 'data' appears more than once"),
        ((("data", "fsdp"), "fsdp"), "axis 'fsdp' appears more than once"),
        (((0, 0),), "axis 0 appears more than once"),
        (
            ((("data", "fsdp"), "tensor"),),
            r"entry 0 holds \('data', 'fsdp'\) inside a tuple; tuples cannot be nested",
        ),
        ((None, 1.0), "entry 1 holds 1.0"),
        ((True,), "entry 0 holds True"),
        ((-1,), "entry 0 holds -1"),
        (("",), "entry 0 holds ''"),
        ((object,), "entry 0 holds <class 'object'>"),
        ((None,) * 33, "33 entries"),
        ((tuple(range(33)),), "33 axes"),
    ],
)
def test_what_cannot_be_a_spec_is_refused_by_name(parts, message):
    with pytest.raises(ShardingError, match=message):
        PartitionSpec(*parts)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (("model",), "no axis 'model'; its axes are 'data', 'fsdp', 'tensor'"),
        ((None, (0, 3)), "no axis 3"),
        ((10**5000,), "no axis"),
        (("data", 0), "axis 'data' appears more than once"),
    ],
)
def test_what_a_mesh_does_not_have_is_refused_by_name(parts, message):
    with pytest.raises(ShardingError, match=message):
        PartitionSpec(*parts).named(MESH)


@given(specs())
def test_json_brings_the_same_spec_back(spec):
    assert PartitionSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


@pytest.mark.parametrize(
    "doc",
    [
        None,
        "data",
        {},
        [[["data"]]],
        [True],
        [1.5],
        ["a", "a"],
        [{}],
        [None] * 33,
        [[0] * 100_000],
        [-1],
    ],
)
def test_json_that_is_no_spec_is_a_format_error(doc):
    with pytest.raises(FormatError):
        PartitionSpec.from_json(doc)
