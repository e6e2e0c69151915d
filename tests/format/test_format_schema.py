"""The JSON Schema in docs/ holds for what is really saved, by one host and by several, and for
little else."""

import copy
import json
import math
import struct
from functools import cache

import jsonschema
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import DOCS, GOLDEN
from processes import Processes

import shardckpt
from shardckpt.errors import FormatError
from shardckpt.format.documents import seal
from shardckpt.format.record import Tombstone
from shardckpt.plan import chunks
from shardckpt.state import flatten, tensor_names, unflatten

SCHEMA = json.loads((DOCS / "format.schema.json").read_text())


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
        "more": [
            np.zeros((4, 8), ml_dtypes.bfloat16),
            np.zeros((2, 4), np.int8),
            np.zeros(3),
            np.array(1),
            np.zeros((0, 2)),
        ],
        "keys": {"": 1, "$": 2, 0: 3, 2**70: 4, None: 5, True: 6, "\ud800": 7},
        "containers": [{}, [], (), (1, [2, (3,)]), {"$tensor": {"a/b": 0}}],
        "numbers": [
            0,
            -(2**53),
            2**300,
            0.0,
            -0.0,
            1e-320,
            math.inf,
            struct.unpack(">d", bytes.fromhex("fff0000000000001"))[0],
            1j,
        ],
        "text": ["", "$tensor", "\udfff", "\n", b"", b"\0\xff\x10"],
        "numpy": [
            np.float32(1),
            np.str_("x"),
            np.bytes_(b"x"),
            np.datetime64("2024", "Y"),
            ml_dtypes.float8_e5m2(1),
        ],
        "torch": [torch.int8, torch.device("cpu"), torch.Size([1])],
        "own": shardckpt.PerProcess(
            {"generator": torch.get_rng_state(), "worker": [np.arange(3), 2**70]}
        ),
    }


def definition(path):
    """The schema's name for a file of a checkpoint; None for a file that is not a record."""
    if path.name == "checkpoint.json":
        return "checkpointFile"
    if path.suffix != ".json" or path.name in ("zarr.json", "sums.json", "fingerprint.json"):
        return None
    own = "replicasFile" if path.name == "replicas.json" else "valuesFile"
    kinds = {"records": "hostFile", "contents": "contentsFile"}
    return "contentsFile" if path.name == "contents.json" else kinds.get(path.parent.name, own)


def records(checkpoint):
    """All records of a checkpoint: what the schema calls them, and the documents."""
    paths = [
        (definition(path), path)
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file() and definition(path)
    ]
    return [(name, json.loads(path.read_bytes())) for name, path in paths]


@pytest.fixture(scope="module")
def three_hosts(tmp_path_factory):
    """Layout → a real checkpoint that three hosts have saved."""
    root = tmp_path_factory.mktemp("three")
    with Processes("golden_hosts") as processes:
        for layout in ("packed", "zarr"):
            assert processes.run("save", 3, root / layout, layout, None) == ["saved"] * 3
    return {layout: root / layout for layout in ("packed", "zarr")}


@pytest.fixture(
    params=[(1, "packed"), (1, "zarr"), (3, "packed"), (3, "zarr"), (1, "based")], ids=str
)
def saved(request, tmp_path, monkeypatch):
    """The records of a real checkpoint, each with what the schema calls it."""
    hosts, layout = request.param
    if hosts == 3:
        return records(request.getfixturevalue("three_hosts")[layout])
    monkeypatch.setattr(chunks, "LARGEST_COMMON_CHUNK", 64)
    mesh = shardckpt.Mesh((2, 2), ("x", "y"), [3, 1, 0, 2])
    shardings = {
        "w": shardckpt.Sharding(mesh, shardckpt.PartitionSpec(None, ("x", "y"))),
        "more/0": shardckpt.OpSharding.parse("{devices=[2,1,2]<=[4] last_tile_dim_replicate}"),
        "more/1": shardckpt.OpSharding.parse("{replicated}"),
        "more/2": shardckpt.Sharding(mesh, shardckpt.PartitionSpec()),
    }
    more = {"metadata": {"any": [1, {"json": None}]}, "compression": "zstd"}
    state = everything()
    if layout == "based":
        layout = "packed"
        shardckpt.save(tmp_path / "base", state, options=shardckpt.SaveOptions(shardings=shardings))
        state["tied"] = state["w"].copy()
        more |= {"base": tmp_path / "base", "skip": ("w", "tied")}
    shardckpt.save(
        tmp_path / "ckpt",
        state,
        options=shardckpt.SaveOptions(layout=layout, shardings=shardings, **more),
    )
    return records(tmp_path / "ckpt")


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_versions_with_differences_conform(tmp_path):
    with shardckpt.Publisher(tmp_path) as publisher:
        for step in range(3):
            publisher.publish(
                step,
                {**everything(), "w": np.arange(5 * 97, dtype=np.float32).reshape(5, 97) + step},
            )
            publisher.wait()
    for kind, document in records(tmp_path / "2"):
        assert errors(document, kind) == []
    commit = next(
        document for kind, document in records(tmp_path / "2") if kind == "checkpointFile"
    )
    assert [sorted(base) for base in commit["record"]["bases"]] == [
        ["compression", "contents", "layout", "url"]
    ] * 2
    for member in ("contents", "url"):
        del commit["record"]["bases"][0][member]
        assert errors(commit, "checkpointFile") != []


@pytest.mark.long
def test_saved_checkpoints_conform(saved):
    kinds = {kind for kind, _ in saved}
    for kind, document in saved:
        assert errors(document, kind) == []
        assert errors(document, "file") == []
        assert [other for other in kinds if conforms(document, other)] == [kind], (
            "it is mistaken for another record"
        )
    own = {"valuesFile"} if len(saved) < 5 else {"valuesFile", "replicasFile"}
    assert kinds == {"checkpointFile", "hostFile", "contentsFile"} | own


@pytest.mark.long
def test_saved_checkpoints_have_all_that_the_schema_knows(saved):
    """Else that they conform would mean little."""
    text = json.dumps([document["record"] for _, document in saved])
    several = ["small_table", "partial", "placements"] if len(saved) > 4 else ["devices", "spec"]
    for member in (
        "sharding",
        "mesh",
        "op_sharding",
        "pieces",
        "chunks",
        "table",
        "contents",
        "values",
        "lanes",
        "prior",
        *several,
    ):
        assert f'"{member}": ' in text, member


def test_tombstones_conform():
    for tombstone in (
        Tombstone("expired"),
        Tombstone("collected", "1f2e3d4c"),
        Tombstone("begun", "1f2e3d4c", begun=True),
    ):
        assert errors(json.loads(seal(tombstone.to_json())), "checkpointFile") == []
    assert not conforms(json.loads(seal({"tombstone": 1})), "checkpointFile")


def test_a_fence_conforms(saved):
    commit = next(document for kind, document in saved if kind == "checkpointFile")
    assert (
        errors({**commit, "record": {**commit["record"], "fence": "1f2e3d4c"}}, "checkpointFile")
        == []
    )


def test_every_golden_checkpoint_conforms():
    golden = [
        record for path in (GOLDEN).glob("v*/*/*") if path.is_dir() for record in records(path)
    ]

    assert len(golden) >= 4 * 4
    for kind, document in golden:
        assert errors(document, kind) == []


FREE = {"metadata", "tree"}
"""Members in which the schema, or these tests, say nothing of members."""
IN_BASES = {"bases", "base", "base_name"}
OPTIONAL = {
    "checkpointFile": {"sharding", "table", "small_table", *IN_BASES},
    "hostFile": {"replicas"},
    "contentsFile": {"sharding", "partial", "samples", *IN_BASES},
    "valuesFile": set(),
    "replicasFile": set(),
}
"""Members whose absence the schema cannot hold against a record."""
NAMED = [("tensors",), ("small",), ("samples",), ("arrays",), ("digests",)]
"""Members whose own members are called by names."""


def one_of_each(saved):
    """A record of each kind, as hosts' differ little; with an empty tree, which takes long to look
    at."""
    documents = copy.deepcopy(dict(saved))
    for document in (
        documents["checkpointFile"]["record"],
        documents["contentsFile"]["record"]["structure"],
    ):
        document["tree"] = {}
    return documents.items()


def members(document, path=()):
    """The paths of all members of objects."""
    if isinstance(document, dict):
        for key, value in document.items():
            if key not in FREE:
                yield (*path, key)
                yield from members(value, (*path, key))
    elif isinstance(document, list):
        for i, value in enumerate(document):
            yield from members(value, (*path, i))


def changed(document, path, change):
    """A copy in which `change` has been done to the object that has the last of the path."""
    document = copy.deepcopy(document)
    parent = document
    for step in path[:-1]:
        parent = parent[step]
    change(parent, path[-1])
    return document, parent


@pytest.mark.long
def test_a_record_that_lacks_a_member_does_not_conform(saved):
    for kind, document in one_of_each(saved):
        for path in members(document):
            lacking, parent = changed(document, path, lambda parent, last: parent.pop(last))
            a_name = (
                path[-2:-1] in NAMED
                or (kind == "valuesFile" and path[:-1] == ("record", "values"))
                or (kind == "replicasFile" and len(path) > 2)
            )
            optional = (
                path[-1] in OPTIONAL[kind] and not (path[-1] == "base" and "base_name" in parent)
            ) or (path[-1] == "devices" and "shape" not in parent)
            assert conforms(lacking, kind) == (a_name or optional), (kind, path)


@pytest.mark.long
def test_a_member_of_another_type_does_not_conform(saved):
    def replace(parent, last):
        parent[last] = {"not": "this"} if not isinstance(parent[last], dict) else [1]

    for kind, document in one_of_each(saved):
        for path in members(document):
            assert not conforms(changed(document, path, replace)[0], kind), (kind, path)


@pytest.mark.parametrize(
    "sharding",
    [
        *(
            {},
            {"mesh": 0},
            {"mesh": 0, "spec": []},
            {"spec": [], "op_sharding": "{replicated}"},
            {"mesh": 0, "op_sharding": "{replicated}"},
        ),
        *(
            {"mesh": 0, "placements": ["P"]},
            {"mesh": 0, "placements": ["S(-1)"]},
            {"placements": ["R"]},
            {"mesh": 0, "placements": [0]},
        ),
        {"mesh": 0, "placements": ["R"], "op_sharding": "{replicated}"},
        {"mesh": 0, "spec": [], "op_sharding": "{replicated}", "devices": 4},
        {"op_sharding": "replicated"},
    ],
    ids=str,
)
def test_what_is_no_sharding_does_not_conform(sharding):
    assert not conforms(sharding, "sharding")


def test_a_commit_record_that_lacks_pieces_does_not_conform(saved):
    """A host's contents may: the others have them."""
    commit = next(document for kind, document in saved if kind == "checkpointFile")
    name, tensor = next((n, t) for n, t in commit["record"]["tensors"].items() if "pieces" in t)
    for change in ({"partial": True}, {"pieces": []}):
        tensors = {**commit["record"]["tensors"], name: {**tensor, **change}}
        assert not conforms(
            {**commit, "record": {**commit["record"], "tensors": tensors}}, "checkpointFile"
        )


@pytest.mark.parametrize(
    "node",
    [
        *(
            "$",
            "$x",
            "$tensors",
            {"$": 1},
            {"$x": 1},
            {"a": 1, "$tensor": 2},
            {"$tied": 1},
            {"$tied": "w", "x": 1},
        ),
        *(
            {"$int": "0x1"},
            {"$int": 1},
            {"$float": "7ff"},
            {"$float": 1.0},
            {"$complex": [1.0]},
            {"$bytes": "a"},
            {"$bytes": "a==="},
        ),
        *(
            {"$numpy": ["int8"]},
            {"$numpy": ["int8", "f"]},
            {"$torch.Size": [1.5]},
            {"$torch.other": "x"},
            {"$str": "0"},
            {"$tuple": {}},
        ),
        *(
            {"$local": {}},
            {"$local": {"01": 1}},
            {"$local": {"a": 1}},
            {"$local": 1},
            {"$composite": {}},
            {"$composite": 1},
        ),
        {"$composite": {"type": "", "shape": [], "context": 1, "parts": {"a": "$tensor"}}},
        {"$composite": {"type": "a", "shape": [-1], "context": 1, "parts": {"a": "$tensor"}}},
        {"$composite": {"type": "a", "shape": [], "context": 1, "parts": {}}},
        {
            "$composite": {
                "type": "a",
                "shape": [],
                "context": 1,
                "parts": {"a": "$tensor"},
                "more": 1,
            }
        },
        *(
            {"$dict": [[1]]},
            {"$dict": [[1.5, 1]]},
            {"$dict": [[[], 1]]},
            {"$dict": {}},
            {"$leaf": ["name"]},
            {"$leaf": [1, 1]},
            ["$x"],
        ),
    ],
    ids=str,
)
def test_an_invalid_tree_node_is_refused_by_the_schema_and_by_the_reader(node):
    with pytest.raises(FormatError):
        unflatten(node, dict.fromkeys(tensor_names(node), 0))
    assert not conforms(node, "node")


keys = st.text() | st.integers() | st.booleans() | st.none()
small = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters())
    | st.binary()
)
states = st.recursive(
    small | st.just(np.zeros(1)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=8,
)


@given(states)
@settings(max_examples=100, deadline=None)
def test_the_tree_of_any_state_conforms(state):
    tree = json.loads(
        json.dumps(flatten(state, lambda leaf: isinstance(leaf, np.ndarray)).tree, allow_nan=False)
    )

    assert errors(tree, "node") == []
