"""A mesh knows which device stands where, whatever the devices are called."""

import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.errors import FormatError, ShardingError
from shardckpt.layout.mesh import MAX_DEVICES, Mesh


@st.composite
def meshes(draw):
    shape = draw(st.lists(st.integers(1, 4), max_size=4))
    ids = draw(st.one_of(st.none(), st.permutations(range(7, 7 + int(np.prod(shape))))))
    return Mesh(shape, [f"axis {i}" for i in range(len(shape))], ids)


def test_ids_stand_in_row_major_order():
    mesh = Mesh((2, 3), ("x", "y"), [5, 4, 3, 2, 1, 0])
    assert mesh.devices.tolist() == [[5, 4, 3], [2, 1, 0]]
    assert Mesh((2, 3), ("x", "y"), np.array([[5, 4, 3], [2, 1, 0]])) == mesh


def test_ids_may_start_anywhere():
    mesh = Mesh((2,), ("x",), [2048, 7])
    assert mesh.device_ids.tolist() == [2048, 7]
    assert not mesh.is_arange


def test_the_mesh_keeps_its_own_ids():
    ids = np.array([1, 0])
    mesh = Mesh((2,), ("x",), ids)
    ids[0] = 9
    assert mesh.device_ids.tolist() == [1, 0]
    with pytest.raises(ValueError, match="read-only"):
        mesh.device_ids[0] = 9


def test_axes_without_names_are_numbered():
    assert Mesh((2, 3), None).axis_sizes == {"0": 2, "1": 3}


def test_equality_is_of_shape_names_and_ids():
    mesh = Mesh((2, 2), ("x", "y"))
    assert mesh == Mesh([2, 2], ["x", "y"], [0, 1, 2, 3])
    assert hash(mesh) == hash(Mesh((2, 2), ("x", "y"), [0, 1, 2, 3]))
    for other in (
        Mesh((4, 1), ("x", "y")),
        Mesh((2, 2), ("x", "z")),
        Mesh((2, 2), ("x", "y"), [0, 1, 3, 2]),
        "mesh",
    ):
        assert mesh != other


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((0, 2), ("x", "y")), "at least 1 .* found 0"),
        (((2, True), ("x", "y")), "expected integers, found True"),
        (((2.0,), ("x",)), "expected integers, found 2.0"),
        ((2, ("x",)), "sequence of integers"),
        (((2, 2), ("x",)), "1 axis names"),
        (((2,), 5), "axis_names is 5; give a tuple"),
        (((2, 2), ("x", "x")), "'x' is used more than once"),
        (((2, 2), "xy"), "single string 'xy'"),
        (((2,), ("",)), "not empty"),
        (((2,), ("\ud800",)), r"'\\ud800' is not Unicode text"),
        (((4,), ("x",), [0, 1, 2]), "3 device ids for shape \\(4,\\), which has 4"),
        (((4,), ("x",), [0, 1, 2, 3, 4]), "5 device ids"),
        (((2,), ("x",), []), "0 device ids"),
        (((4,), ("x",), [0, 1, 2, 2]), "device id 2 stands at more than one"),
        (((2,), ("x",), [-1, 0]), "-1 is negative"),
        (((2,), ("x",), [0.0, 1.0]), "must be integers"),
        (((2,), ("x",), [0, 2**63]), "below 2\\*\\*63"),
        (((2,), ("x",), [0, 2**64]), "must be integers"),
        (((2, 2), ("x", "y"), [[0, 1, 2, 3]]), "have shape \\(1, 4\\)"),
        (((2, 2), ("x", "y"), [[0, 1], [2]]), "must be integers"),
        (((MAX_DEVICES + 1,), ("x",)), "at most 1048576"),
        (((10**5000,), ("x",)), "below 2\\*\\*62"),
        (((1,) * 33, None), "33 axes"),
    ],
)
def test_what_cannot_be_a_mesh_is_refused_with_the_values(arguments, message):
    with pytest.raises(ShardingError, match=message):
        Mesh(*arguments)


@given(meshes())
def test_json_brings_the_same_mesh_back(mesh):
    assert Mesh.from_json(json.loads(json.dumps(mesh.to_json()))) == mesh


_PICKLED = """
import pickle, sys
from shardckpt.layout.hybrid_mesh import HybridMesh
from shardckpt.layout.mesh import Mesh
from shardckpt.layout.tile_assignment import TileAssignment

values = [
    Mesh((2, 2), ("x", "y"), [3, 2, 1, 0]),
    HybridMesh((1, 4), (2, 1), ("data", "model")),
    TileAssignment((4,), [3, 1, 0, 2]),
]
assert len({*values}) == 3
pickle.dump(values, sys.stdout.buffer)
"""


def test_a_pickle_from_another_process_is_equal_and_hashes_alike():
    pickles = [
        subprocess.check_output(
            [sys.executable, "-c", _PICKLED], env=os.environ | {"PYTHONHASHSEED": seed}
        )
        for seed in ("1", "2")
    ]
    first, second = map(pickle.loads, pickles)
    assert first == second
    assert [*map(hash, first)] == [*map(hash, second)]
    mine = Mesh((2, 2), ("x", "y"), [3, 2, 1, 0])
    assert mine == first[0]
    assert hash(mine) == hash(first[0])


def test_json_writes_no_ids_where_they_count_from_zero():
    assert Mesh((512, 200), ("x", "y")).to_json() == {
        "shape": [512, 200],
        "axes": ["x", "y"],
        "devices": None,
    }


@pytest.mark.parametrize(
    "doc",
    [
        None,
        [],
        {},
        {"shape": [2], "axes": ["x"]},
        {"shape": [2], "axes": ["x"], "devices": None, "more": 1},
        {"shape": 2, "axes": ["x"], "devices": None},
        {"shape": [True], "axes": ["x"], "devices": None},
        {"shape": [2.0], "axes": ["x"], "devices": None},
        {"shape": [2], "axes": [1], "devices": None},
        {"shape": [2], "axes": "x", "devices": None},
        {"shape": [2], "axes": ["x"], "devices": [0, True]},
        {"shape": [2], "axes": ["x"], "devices": [0, "1"]},
        {"shape": [2], "axes": ["x"], "devices": {"0": 1}},
        {"shape": [2], "axes": ["x"], "devices": [0, 0]},
        {"shape": [2], "axes": ["x"], "devices": [0, 10**30]},
        {"shape": [10**9, 10**9], "axes": ["x", "y"], "devices": None},
        {"shape": [10**4000, 10**4000], "axes": ["x", "y"], "devices": None},
        {"shape": [1] * 10000, "axes": ["x"] * 10000, "devices": None},
    ],
)
def test_json_that_is_no_mesh_is_a_format_error_with_a_short_message(doc):
    with pytest.raises(FormatError) as caught:
        Mesh.from_json(doc)
    assert len(str(caught.value)) < 500
