"""Records: sealed, read back as they were, refused when they are not."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest

from shardckpt import Mesh, PartitionSpec, Sharding
from shardckpt.errors import FormatError, VersionError
from shardckpt.format.documents import FileReference, TableReference, open_envelope, seal
from shardckpt.format.record import (
    CheckpointRecord,
    HostFiles,
    HostRecord,
    Tombstone,
    parse_checkpoint,
)
from shardckpt.format.structure import Structure, TensorRecord
from shardckpt.layout import dtypes
from shardckpt.plan.pieces import Piece
from shardckpt.state.names import array_path

MESH = Mesh((4, 2), ("data", "model"), [3, 1, 2, 0, 7, 5, 6, 4])
A = TensorRecord(
    "a",
    (8, 4),
    dtypes.by_name("float32"),
    Sharding(MESH, PartitionSpec("data", "model")),
    (Piece(array_path("a"), (0, 0), (8, 4), (2, 2)),),
)
STRUCTURE = Structure({"a": "$tensor", "n": 3}, {"a": A})


def reference(key):
    return FileReference.of(key, key.encode())


def table_reference(key):
    return TableReference.of(key, key.encode(), 3)


FILES = HostFiles(
    table_reference("hosts/00002/table"),
    ("hosts/00002/0", "hosts/00002/1"),
    reference("contents/x.json"),
    None,
)
HOST = HostRecord("attempt-1", 2, 3, "f" * 64, "packed", None, FILES, 5, 1000)
TOTALS = {"tensors": 1, "bytes": 1, "stored_bytes": 2, "chunks": 3}
RECORD = CheckpointRecord(
    "attempt-1",
    "2030-01-01T00:00:00+00:00",
    "shardckpt 1",
    "zarr",
    "zstd",
    (reference("records/00000.json"), reference("records/00001.json")),
    STRUCTURE,
    {"x": [1]},
    TOTALS,
    table_reference("table"),
    table_reference("hosts/small/table"),
    "1f2e3d4c",
)


def reread(record):
    return open_envelope(seal(record.to_json()), "here")


def test_records_come_back_as_they_were():
    assert parse_checkpoint(seal(RECORD.to_json()), "here") == RECORD
    for host in (
        HOST,
        replace(
            HOST,
            prior=None,
            files=replace(FILES, lanes=(), values=reference("hosts/00002/values.json")),
        ),
    ):
        assert HostRecord.from_json(reread(host), "here") == host
        assert HostFiles.from_json(reread(host), "here") == host.files


def test_a_record_without_what_is_optional_comes_back_without():
    bare = replace(RECORD, table=None, small_table=None, fence=None)
    parsed = parse_checkpoint(seal(bare.to_json()), "here")
    assert parsed == bare
    assert (parsed.table, parsed.small_table, parsed.fence) == (None, None, None)


def test_a_fence_makes_another_version_of_the_same_record():
    other = replace(RECORD, fence="another")
    assert other == RECORD
    assert seal(other.to_json()) != seal(RECORD.to_json())


def test_tombstones_come_back_and_no_two_of_them_are_the_same_bytes():
    for tombstone in (
        Tombstone("deleted"),
        Tombstone("collected", "1f2e3d4c"),
        Tombstone("begun", "1f2e3d4c", begun=True),
    ):
        assert parse_checkpoint(seal(tombstone.to_json()), "here") == tombstone
    assert parse_checkpoint(seal({"tombstone": "by an early version"}), "here") == Tombstone(
        "by an early version"
    )
    assert seal(Tombstone("x", "1").to_json()) != seal(Tombstone("x", "2").to_json())


def test_a_reference_vouches_for_every_byte_of_a_file():
    file = FileReference.of("table", b"12345")
    file.check(b"12345", "here")
    for other in (b"", b"1234", b"123456", b"12346"):
        with pytest.raises(
            FormatError, match="here: not the file that the checkpoint's record names"
        ):
            file.check(other, "here")


def test_a_reference_vouches_for_every_byte_of_a_table_s_header():
    """And the header for the rest."""
    table = TableReference.of("table", b"12345", 2)
    assert (table.size, table.header) == (5, 2)
    table.check(b"12", "here")
    for other in (b"", b"1", b"13", b"123", b"12345"):
        with pytest.raises(
            FormatError, match="here: not the file that the checkpoint's record names"
        ):
            table.check(other, "here")


def test_every_bit_of_a_record_counts():
    data = seal(RECORD.to_json())
    rng = np.random.default_rng(0)
    for bit in rng.integers(0, 8 * len(data), 500):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << (bit % 8)
        try:
            parsed = parse_checkpoint(bytes(damaged), "here")
        except FormatError:
            continue
        # The version outside the digest may claim another minor; nothing else may change unnoticed.
        assert parsed == RECORD


@pytest.mark.parametrize("data", [b"", b"{}", b'{"format":"other"}', b"\x00" * 100, b"[" * 10_000])
def test_what_is_no_record_is_refused(data):
    with pytest.raises(FormatError, match="here: not a shardckpt record"):
        open_envelope(data, "here")


def test_a_newer_major_version_is_refused_by_name_and_a_newer_minor_is_read():
    data = seal(RECORD.to_json())
    with pytest.raises(
        VersionError,
        match=r"here: format version 7\.0 is newer than this shardckpt reads \(6\.0\); upgrade",
    ):
        open_envelope(data.replace(b'"version":[1,0]', b'"version":[7,0]'), "here")
    assert parse_checkpoint(data.replace(b'"version":[1,0]', b'"version":[1,7]'), "here") == RECORD


def test_members_that_a_newer_minor_version_adds_are_ignored():
    doc = {**RECORD.to_json(), "new": 1}
    doc["hosts"] = [{**entry, "new": 1} for entry in doc["hosts"]]
    assert parse_checkpoint(seal(doc), "here") == RECORD
    assert HostRecord.from_json({**HOST.to_json(), "new": 1}, "here") == HOST


def test_an_object_with_a_key_twice_is_refused():
    body = json.dumps(RECORD.to_json(), separators=(",", ":"))
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
        ({"hosts": ["records/00000.json"]}, "'host' is a str, an object is expected"),
        ({"table": {"key": "table", "size": -1, "header": 1, "sha256": "0"}}, "out of range"),
        ({"table": {"key": "table", "size": 1, "header": 2**70, "sha256": "0"}}, "out of range"),
        ({"table": {"key": "table", "size": 1, "sha256": "0"}}, "'header' is missing"),
        (
            {"table": {"key": "../table", "size": 1, "header": 1, "sha256": "0"}},
            "outside the attempt",
        ),
        ({"small_table": []}, "'small_table' is a list"),
        ({"fence": 1}, "'fence' is a int"),
        ({"tensors": {}}, "disagree"),
        ({"metadata": []}, "'metadata' is a list"),
        ({"totals": {"tensors": -1}}, "out of range"),
    ],
)
def test_a_commit_record_that_lies_is_refused(change, why):
    with pytest.raises(FormatError, match=why):
        parse_checkpoint(seal({**RECORD.to_json(), **change}), "here")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"attempt": "a/b"}, "not a plain directory name"),
        ({"host": -1}, "out of range"),
        ({"host": "2"}, "a whole number is expected"),
        ({"hosts": 2**63}, "out of range"),
        ({"hosts": 2**21}, "from 1 to 1048576"),
        ({"hosts": 0}, "from 1 to 1048576"),
        ({"hosts": True}, "a whole number is expected"),
        ({"prior": 1}, "'prior' is a int"),
        ({"layout": None}, "'layout' is None"),
        ({"lanes": ["hosts/../../x"]}, "outside the attempt"),
        ({"lanes": "hosts/00000/0"}, "'lanes' is a str"),
        ({"table": None}, "'table' is a NoneType"),
        (
            {"contents": {"key": "/contents/x.json", "size": 1, "sha256": "0"}},
            "outside the attempt",
        ),
        ({"values": {"size": 1, "sha256": "0"}}, "'key' is missing"),
        ({"chunks": 1.0}, "a whole number is expected"),
        ({"stored_bytes": None}, "a whole number is expected"),
    ],
)
def test_a_host_record_that_lies_is_refused(change, why):
    with pytest.raises(FormatError, match=why):
        HostRecord.from_json({**HOST.to_json(), **change}, "here")


@pytest.mark.parametrize("member", sorted(HOST.to_json()))
def test_a_host_record_that_lacks_a_member_is_refused(member):
    doc = HOST.to_json()
    del doc[member]
    with pytest.raises(FormatError, match=f"here: '{member}' is missing"):
        HostRecord.from_json(doc, "here")


def test_a_sealed_record_is_its_json_form_in_the_envelope():
    assert RECORD.seal() == seal(RECORD.to_json(), RECORD.version)
    assert RECORD.seal() == RECORD.seal()
