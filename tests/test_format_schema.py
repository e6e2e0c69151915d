"""The JSON Schema in docs/ holds for what is really saved, and for little else."""

import copy
import json
import math
import struct
from functools import cache
from pathlib import Path

import jsonschema
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardckpt
from shardckpt.errors import FormatError
from shardckpt.record import Tombstone, seal
from shardckpt.reshard import chunks
from shardckpt.tree import flatten, tensor_names, unflatten

SCHEMA = json.loads((Path(__file__).parents[1] / "docs" / "format.schema.json").read_text())


@cache
def validator(definition):
    return jsonschema.Draft202012Validator({**SCHEMA, "$ref": f"#/$defs/{definition}"})


def errors(document, definition):
    return [e.message for e in validator(definition).iter_errors(document)]


def conforms(document, definition):
    return validator(definition).is_valid(document)


def everything():
    """Every kind of leaf, of container, of key, of layout."""
    w = np.arange(5 * 97, dtype=np.float32).reshape(5, 97)
    return {
        "w": w,
        "tied": w,
        "more": [np.zeros((4, 8), ml_dtypes.bfloat16), np.zeros((2, 4), np.int8), np.zeros(3), np.array(1), np.zeros((0, 2))],
        "keys": {"": 1, "$": 2, 0: 3, 2**70: 4, None: 5, True: 6, "\ud800": 7},
        "containers": [{}, [], (), (1, [2, (3,)]), {"$tensor": {"a/b": 0}}],
        "numbers": [0, -(2**53), 2**300, 0.0, -0.0, 1e-320, math.inf, struct.unpack(">d", bytes.fromhex("fff0000000000001"))[0], 1j],
        "text": ["", "$tensor", "\udfff", "\n", b"", b"\0\xff\x10"],
        "numpy": [np.float32(1), np.str_("x"), np.bytes_(b"x"), np.datetime64("2024", "Y"), ml_dtypes.float8_e5m2(1)],
        "torch": [torch.int8, torch.device("cpu"), torch.Size([1])],
    }


@pytest.fixture(params=["packed", "zarr"])
def saved(request, tmp_path, monkeypatch):
    """The records of a real checkpoint: the commit record, and the host's."""
    monkeypatch.setattr(chunks, "LARGEST_COMMON_CHUNK", 64)
    mesh = shardckpt.Mesh((2, 2), ("x", "y"), [3, 1, 0, 2])
    shardings = {
        "w": shardckpt.Sharding(mesh, shardckpt.PartitionSpec(None, ("x", "y"))),
        "more/0": shardckpt.OpSharding.parse("{devices=[2,1,2]<=[4] last_tile_dim_replicate}"),
        "more/1": shardckpt.OpSharding.parse("{replicated}"),
        "more/2": shardckpt.Sharding(mesh, shardckpt.PartitionSpec()),
    }
    options = shardckpt.SaveOptions(layout=request.param, shardings=shardings, metadata={"any": [1, {"json": None}]}, compression="zstd")
    shardckpt.save(tmp_path / "ckpt", everything(), options=options)
    (host,) = (tmp_path / "ckpt").glob("*/records/*.json")
    return json.loads((tmp_path / "ckpt" / "checkpoint.json").read_bytes()), json.loads(host.read_bytes())


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_saved_checkpoints_conform(saved):
    commit, host = saved

    assert errors(commit, "checkpointFile") == []
    assert errors(host, "hostFile") == []
    assert errors(commit, "file") == errors(host, "file") == []
    assert "pieces" in commit["record"]["tensors"]["w"]
    assert {"chunks", "sharding"} <= commit["record"]["tensors"]["more/0"].keys()


def test_records_are_not_mistaken_for_each_other(saved):
    commit, host = saved

    assert not conforms(commit, "hostFile")
    assert not conforms(host, "checkpointFile")


def test_a_tombstone_conforms():
    assert errors(json.loads(seal(Tombstone("expired").to_json())), "checkpointFile") == []


def test_every_golden_checkpoint_conforms():
    files = [
        f for f in (Path(__file__).parent / "golden").glob("v1/**/*.json") if f.name == "checkpoint.json" or f.parent.name == "records"
    ]

    assert len(files) >= 4
    for file in files:
        assert errors(json.loads(file.read_bytes()), "checkpointFile" if file.name == "checkpoint.json" else "hostFile") == [], file


def members(document, path=()):
    """The paths of all members of objects that the schema names (the state's own names and the user's metadata are free)."""
    if isinstance(document, dict):
        for key, value in document.items():
            if key not in {"metadata", "tree"}:
                yield (*path, key)
                yield from members(value, (*path, key))
    elif isinstance(document, list):
        for i, value in enumerate(document):
            yield from members(value, (*path, i))


OPTIONAL = {"sharding", "devices", "w", "tied", "more/0", "more/1", "more/2", "more/3", "more/4"}
"""Members whose absence the schema cannot hold against a record."""


def test_a_record_that_lacks_a_member_does_not_conform(saved):
    for document, definition in zip(saved, ("checkpointFile", "hostFile"), strict=True):
        for *path, last in members(document):
            lacking = copy.deepcopy(document)
            parent = lacking
            for step in path:
                parent = parent[step]
            is_mesh = {"shape", "axes", "devices"} == parent.keys()
            del parent[last]
            if last not in OPTIONAL or is_mesh:
                assert not conforms(lacking, definition), (*path, last)


def test_a_member_of_another_type_does_not_conform(saved):
    for document, definition in zip(saved, ("checkpointFile", "hostFile"), strict=True):
        for *path, last in members(document):
            wrong = copy.deepcopy(document)
            parent = wrong
            for step in path:
                parent = parent[step]
            parent[last] = {"not": "this"} if not isinstance(parent[last], dict) else [1]
            assert not conforms(wrong, definition), (*path, last)


@pytest.mark.parametrize(
    "node",
    [
        *("$", "$x", "$tensors", {"$": 1}, {"$x": 1}, {"a": 1, "$tensor": 2}, {"$tied": 1}, {"$tied": "w", "x": 1}),
        *({"$int": "0x1"}, {"$int": 1}, {"$float": "7ff"}, {"$float": 1.0}, {"$complex": [1.0]}, {"$bytes": "a"}, {"$bytes": "a==="}),
        *({"$numpy": ["int8"]}, {"$numpy": ["int8", "f"]}, {"$torch.Size": [1.5]}, {"$torch.other": "x"}, {"$str": "0"}, {"$tuple": {}}),
        *({"$dict": [[1]]}, {"$dict": [[1.5, 1]]}, {"$dict": [[[], 1]]}, {"$dict": {}}, {"$leaf": ["name"]}, {"$leaf": [1, 1]}, ["$x"]),
    ],
    ids=str,
)
def test_what_is_no_node_of_a_tree_conforms_neither_to_the_schema_nor_to_the_reader(node):
    with pytest.raises(FormatError):
        unflatten(node, dict.fromkeys(tensor_names(node), 0))
    assert not conforms(node, "node")


keys = st.text() | st.integers() | st.booleans() | st.none()
small = st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.text(st.characters()) | st.binary()
states = st.recursive(
    small | st.just(np.zeros(1)),
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)


@given(states)
@settings(max_examples=100, deadline=None)
def test_the_tree_of_any_state_conforms(state):
    tree = json.loads(json.dumps(flatten(state, lambda leaf: isinstance(leaf, np.ndarray)).tree, allow_nan=False))

    assert errors(tree, "node") == []
