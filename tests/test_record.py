"""Records: sealed, read back as they were, refused when they are not."""

import json

import numpy as np
import pytest

from shardckpt import Mesh, OpSharding, PartitionSpec, Sharding, dtypes
from shardckpt.errors import FormatError, VersionError
from shardckpt.names import array_path, piece_path
from shardckpt.record import (
    CheckpointRecord,
    FileReference,
    HostRecord,
    Structure,
    TensorRecord,
    Tombstone,
    open_envelope,
    parse_checkpoint,
    seal,
)
from shardckpt.reshard.plan import Piece


def tensor(name, shape, layout=None, *, pieces=None, dtype="float32"):
    whole = (Piece(array_path(name), (0,) * len(shape), shape, tuple(max(1, n) for n in shape)),)
    return TensorRecord(name, shape, dtypes.by_name(dtype), layout, pieces or whole)


MESH = Mesh((4, 2), ("data", "model"), [3, 1, 2, 0, 7, 5, 6, 4])
STRUCTURE = Structure(
    {"a": "$tensor", "b": "$tensor", "c": "$tensor", "d": "$tensor", "e": "$tensor", "n": 3},
    {
        t.name: t
        for t in [
            tensor("a", (8, 4), Sharding(MESH, PartitionSpec("data", "model"))),
            tensor("b", (8,), OpSharding.parse("{devices=[2,4]<=[8] last_tile_dim_replicate}"), dtype="bfloat16"),
            tensor("c", (8,), OpSharding.replicated(8)),
            tensor("d", (), None, dtype="uint4"),
            tensor("e", (7,), None, pieces=(Piece(piece_path("e", 0), (0,), (4,), (4,)), Piece(piece_path("e", 1), (4,), (3,), (2,)))),
        ]
    },
)
TABLE = FileReference("hosts/00000/table", 10, "0" * 64)
HOST = HostRecord("attempt-1", 0, "packed", None, TABLE, ("hosts/00000/0",), 5, 1000, STRUCTURE, {"step": 1})
TOTALS = {"tensors": 5, "bytes": 1, "stored_bytes": 2, "chunks": 3}
RECORD = CheckpointRecord(
    "attempt-1",
    "2030-01-01T00:00:00+00:00",
    "shardckpt 1",
    "zarr",
    "zstd",
    (FileReference("records/00000.json", 7, "f" * 64),),
    STRUCTURE,
    {"x": [1]},
    TOTALS,
)


def reread(record):
    return open_envelope(seal(record.to_json()), "here")


def test_records_come_back_as_they_were():
    assert HostRecord.from_json(reread(HOST), "here") == HOST
    assert parse_checkpoint(seal(RECORD.to_json()), "here") == RECORD
    assert parse_checkpoint(seal(Tombstone("deleted").to_json()), "here") == Tombstone("deleted")


def test_equal_meshes_and_shardings_are_written_once():
    layout = Sharding(MESH, PartitionSpec("data"))
    tensors = {name: tensor(name, (8,), layout) for name in "abc"}
    doc = Structure(dict.fromkeys("abc", "$tensor"), tensors).to_json()
    assert len(doc["meshes"]) == len(doc["shardings"]) == 1
    assert [t["sharding"] for t in doc["tensors"].values()] == [0, 0, 0]


def test_every_bit_of_a_record_counts():
    data = seal(RECORD.to_json())
    rng = np.random.default_rng(0)
    for bit in rng.integers(0, 8 * len(data), 500):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << (bit % 8)
        try:
            found = parse_checkpoint(bytes(damaged), "here")
        except FormatError:
            continue
        # The version outside the digest may claim another minor; nothing else may change unnoticed.
        assert found == RECORD


@pytest.mark.parametrize("data", [b"", b"{}", b'{"format":"other"}', b"\x00" * 100, b"[" * 10_000])
def test_what_is_no_record_is_refused(data):
    with pytest.raises(FormatError, match="here: not a shardckpt record"):
        open_envelope(data, "here")


def test_a_newer_major_version_is_refused_by_name_and_a_newer_minor_is_read():
    data = seal(RECORD.to_json())
    with pytest.raises(VersionError, match=r"here: format version 2\.0 is newer than this shardckpt reads \(1\.0\); upgrade"):
        open_envelope(data.replace(b'"version":[1,0]', b'"version":[2,0]'), "here")
    assert parse_checkpoint(data.replace(b'"version":[1,0]', b'"version":[1,7]'), "here") == RECORD


def test_members_that_a_newer_minor_version_adds_are_ignored():
    doc = {**RECORD.to_json(), "new": 1}
    for list_of in ("meshes", "shardings", "hosts"):
        doc[list_of] = [{**entry, "new": 1} for entry in doc[list_of]]
    doc["tensors"] = {name: {**entry, "new": 1} for name, entry in doc["tensors"].items()}
    assert parse_checkpoint(seal(doc), "here") == RECORD


def test_an_object_with_a_key_twice_is_refused():
    body = json.dumps(RECORD.to_json(), separators=(",", ":"))
    import hashlib

    doubled = ('{"attempt":"x",' + body[1:]).encode()
    data = (
        b'{"format":"shardckpt","version":[1,0],"sha256":"'
        + hashlib.sha256(doubled).hexdigest().encode()
        + b'","record":'
        + doubled
        + b"}\n"
    )
    with pytest.raises(FormatError, match="same key twice"):
        open_envelope(data, "here")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"attempt": "../x"}, "not a plain directory name"),
        ({"attempt": "."}, "not a plain directory name"),
        ({"layout": "other"}, "'layout' is 'other'"),
        ({"compression": False}, "'compression' is False"),
        ({"hosts": [{"key": "/etc/passwd", "size": 1, "sha256": "0"}]}, "outside the attempt"),
        ({"hosts": [{"key": "a/../../x", "size": 1, "sha256": "0"}]}, "outside the attempt"),
        ({"hosts": 3}, "'hosts' is a int"),
        ({"tensors": {}}, "disagree"),
        ({"metadata": []}, "'metadata' is a list"),
        ({"totals": {"tensors": -1}}, "out of range"),
    ],
)
def test_a_record_that_lies_is_refused(change, why):
    with pytest.raises(FormatError, match=why):
        parse_checkpoint(seal({**RECORD.to_json(), **change}), "here")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"shape": [-1, 4]}, "'shape'"),
        ({"shape": [1 << 40, 1 << 40]}, "more elements than can be addressed"),
        ({"shape": [True, 4]}, "'shape'"),
        ({"shape": [1] * 40}, "'shape'"),
        ({"chunks": [0, 4]}, "'chunks'"),
        ({"chunks": [4]}, "differ in rank"),
        ({"dtype": "object"}, "object"),
        ({"sharding": 99}, "entry 99"),
        ({"pieces": []}, "hold 0 elements of 32"),
        ({"pieces": [{"start": [0, 0], "shape": [8, 4], "chunks": [8, 4]}] * 2}, "hold 64 elements of 32"),
    ],
)
def test_a_tensor_that_cannot_be_is_refused_by_name(change, why):
    doc = RECORD.to_json()
    doc["tensors"] = {**doc["tensors"], "a": {**doc["tensors"]["a"], **change}}
    with pytest.raises(FormatError, match=why) as raised:
        parse_checkpoint(seal(doc), "here")
    assert "here" in str(raised.value) or "a" in str(raised.value)
