"""An OCDBT database written by hand, read by TensorStore."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise, takewhile

import crc32c
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt.io import ocdbt
from shardckpt.io.ocdbt import Version, leaf_node, manifest, read_manifest, read_node, varints

numbers = st.one_of(
    st.integers(0, 300),
    st.integers(0, 2**62),
    st.sampled_from([2**k + d for k in range(1, 62) for d in (-1, 0)]),
)
places = st.tuples(st.integers(0, 2), numbers, st.integers(1, 2**40))


def read_leb128(data):
    values, value, shift = [], 0, 0
    for byte in data:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            values.append(value)
            value, shift = 0, 0
    assert shift == 0
    return values


@given(st.lists(numbers))
def test_varints_are_leb128(values):
    assert read_leb128(varints(values)) == values


@pytest.mark.parametrize(
    ("value", "encoded"),
    [(0, "00"), (127, "7f"), (128, "8001"), (16384, "808001"), (2**63 - 1, "ff" * 8 + "7f")],
)
def test_varints_have_no_needless_bytes(value, encoded):
    assert varints([value]).hex() == encoded


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.binary(min_size=1, max_size=12).map(lambda key: key.replace(b"\0", b"\1")),
        places,
        min_size=1,
        max_size=40,
    )
)
def test_tensorstore_reads_every_key_and_place(entries):
    files = ["d/00000", "d/00001", "d/other"]
    keys = sorted(entries)
    node = leaf_node(keys, files, *zip(*(entries[k] for k in keys), strict=True))
    context = ts.Context()
    base = ts.KvStore.open({"driver": "memory"}, context=context).result()
    base.write("d/tree", node).result()
    base.write(
        "manifest.ocdbt",
        manifest("d/tree", len(node), len(keys), sum(e[2] for e in entries.values())),
    ).result()

    root = ts.ocdbt.dump(base).result()["versions"][-1]["root"]
    assert root["statistics"]["num_keys"] == len(keys)
    entries_read = ts.ocdbt.dump(base, root["location"]).result()["entries"]
    assert {e["key"]: e["indirect_value"] for e in entries_read} == {
        k: f"value::{files[f]}:{o}:{n}" for k, (f, o, n) in entries.items()
    }
    assert (
        ts.KvStore.open({"driver": "ocdbt", "base": "memory://"}, context=context)
        .result()
        .list()
        .result()
        == keys
    )


texts = st.binary(min_size=1, max_size=12).map(lambda key: key.replace(b"\0", b"\1"))


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(texts, st.one_of(places, st.binary(max_size=3000)), min_size=1, max_size=40))
def test_tensorstore_reads_values_in_the_node_beside_those_in_files(entries):
    files, keys = ["d/00000", "d/00001", "d/other"], sorted(entries)
    inside = [
        value if isinstance(value, bytes) else None for value in map(entries.__getitem__, keys)
    ]
    rows = [
        (0, 0, 0) if isinstance(value, bytes) else value for value in map(entries.__getitem__, keys)
    ]
    node = leaf_node(keys, files, *zip(*rows, strict=True), inside)
    context = ts.Context()
    base = ts.KvStore.open({"driver": "memory"}, context=context).result()
    base.write("d/leaf", node).result()
    outside = sum(n for _, _, n in rows)
    base.write("manifest.ocdbt", manifest("d/leaf", len(node), len(keys), outside)).result()

    database = ts.KvStore.open({"driver": "ocdbt", "base": "memory://"}, context=context).result()
    assert database.list().result() == keys
    for key, value in zip(keys, inside, strict=True):
        assert value is None or database.read(key).result().value == value
    values = dict(ocdbt.read_node(node).values)
    assert values == {
        key: (files[f], o, n)
        for key, (f, o, n), value in zip(keys, rows, inside, strict=True)
        if value is None
    }
    root = ts.ocdbt.dump(base).result()["versions"][-1]["root"]
    for entry in ts.ocdbt.dump(base, root["location"]).result()["entries"]:
        assert ("indirect_value" in entry) == (entries[entry["key"]].__class__ is tuple)


def test_a_damaged_leaf_is_refused_by_tensorstore():
    node = bytearray(leaf_node([b"a", b"ab"], ["d/0"], [0, 0], [0, 5], [5, 5]))
    base = ts.KvStore.open({"driver": "memory"}).result()
    base.write("manifest.ocdbt", manifest("d/tree", len(node), 2, 10)).result()
    for i in range(len(node)):
        node[i] ^= 1
        base.write("d/tree", bytes(node)).result()
        with pytest.raises(ValueError, match=r"Error|mismatch|DATA_LOSS|Expected"):
            ts.ocdbt.dump(base, f"btreenode::d/tree:0:{len(node)}").result()
        node[i] ^= 1


@given(
    st.sets(
        st.binary(min_size=1, max_size=9).filter(lambda key: 0 not in key), min_size=1, max_size=30
    ),
    st.sampled_from([1, 40]),
)
def test_shared_prefixes_are_as_long_as_keys_agree(keys, at_a_time):
    ordered = sorted(keys)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ocdbt, "_COMPARED_BYTES", at_a_time)
        lengths = ocdbt.shared_prefixes(ordered)
    agree = [
        takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
        for a, b in pairwise(ordered)
    ]
    assert lengths.tolist() == [len([*pairs]) for pairs in agree]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.lists(st.binary(min_size=1, max_size=9), min_size=1, max_size=5), min_size=1, max_size=20
    ),
    st.sampled_from([None, {"id": "zstd"}]),
)
def test_versions_are_what_tensorstore_says(commits, compression):
    spec = {
        "driver": "ocdbt",
        "base": "memory://",
        "config": {"compression": compression, "max_inline_value_bytes": 2},
    }
    database = ts.KvStore.open(spec, context=ts.Context()).result()
    for keys in commits:
        with ts.Transaction() as together:
            for pending in [database.with_transaction(together).write(key, key) for key in keys]:
                pending.result()
    encoded = database.base.read("manifest.ocdbt").result().value
    roots = [version["root"] for version in ts.ocdbt.dump(database.base).result()["versions"]]
    versions = read_manifest(encoded)
    assert [counted(version) for version in versions] == [root["statistics"] for root in roots]
    assert [located("btreenode", version.node) for version in versions] == [
        root.get("location") for root in roots
    ]


def counted(version):
    return {
        name: getattr(version, name)
        for name in ("num_keys", "num_tree_bytes", "num_indirect_value_bytes")
    }


def located(kind, place):
    return None if place is None else f"{kind}::{place[0]}:{place[1]}:{place[2]}"


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(st.binary(min_size=1, max_size=9), st.integers(0, 40), min_size=1, max_size=60),
    st.sampled_from([None, {"id": "zstd"}]),
    st.sampled_from([200, 8 << 20]),
)
def test_every_node_is_read_as_tensorstore_reads_it(values, compression, node_bytes):
    config = {
        "compression": compression,
        "max_inline_value_bytes": 20,
        "max_decoded_node_bytes": node_bytes,
    }
    database = ts.KvStore.open(
        {"driver": "ocdbt", "base": "memory://", "config": config}, context=ts.Context()
    ).result()
    with ts.Transaction() as together:
        for pending in [
            database.with_transaction(together).write(key, b"v" * n) for key, n in values.items()
        ]:
            pending.result()
    (*_, version) = read_manifest(database.base.read("manifest.ocdbt").result().value)
    nodes = [version.node]
    while nodes:
        place = nodes.pop()
        dumped = ts.ocdbt.dump(database.base, located("btreenode", place)).result()
        node = read_node(
            database.base.read(place[0]).result().value[place[1] : place[1] + place[2]]
        )
        nodes += [child for _, child in node.children]
        if dumped["height"]:
            assert [(key, located("btreenode", child)) for key, child in node.children] == [
                (entry["subtree_common_prefix"], entry["location"]) for entry in dumped["entries"]
            ]
        else:
            assert [(key, located("value", value)) for key, value in node.values] == [
                (entry["key"], entry["indirect_value"])
                for entry in dumped["entries"]
                if "indirect_value" in entry
            ]


def test_a_damaged_node_is_refused():
    encoded = bytearray(leaf_node([b"a", b"ab"], ["d/0"], [0, 0], [0, 5], [5, 5]))
    assert list(read_node(bytes(encoded)).values) == [(b"a", ("d/0", 0, 5)), (b"ab", ("d/0", 5, 5))]
    for i in range(len(encoded)):
        encoded[i] ^= 1
        with pytest.raises(ValueError, match=r"not such a file|checksum"):
            read_node(bytes(encoded))
        encoded[i] ^= 1


@given(st.binary(max_size=60))
def test_a_node_that_makes_no_sense_is_refused_whatever_its_checksum(body):
    with suppress(ValueError):  # some bodies are nodes
        list(read_node(ocdbt._frame(ocdbt._NODE_MAGIC, body)).values)


def zstd_frame(blocks, size=None):
    """A frame of blocks of equal bytes, each given by the number of bytes."""
    last = len(blocks) - 1
    return b"".join(
        [
            b"\x28\xb5\x2f\xfd",
            b"\0\x58" if size is None else b"\xe0" + size.to_bytes(8, "little"),
            *(
                (n << 3 | 2 | (i == last)).to_bytes(3, "little") + b"\0"
                for i, n in enumerate(blocks)
            ),
        ]
    )


@pytest.mark.parametrize(
    "frame",
    [
        zstd_frame([1 << 17] * 8000),
        zstd_frame([1 << 17] * 8000, 8000 << 17),
        zstd_frame([9], 10**15),
    ],
    ids=["without a size", "with its size", "with another size"],
)
def test_a_small_node_that_is_large_in_memory_is_refused(frame):
    body = b"\0" + bytes([ocdbt._ZSTD]) + frame
    head = ocdbt._NODE_MAGIC.to_bytes(4, "big") + (16 + len(body)).to_bytes(8, "little") + body
    with pytest.raises(ValueError, match="bytes in memory, at most"):
        read_node(head + crc32c.crc32c(head).to_bytes(4, "little"))


def test_keys_of_a_small_node_that_are_large_in_memory_are_refused():
    n = 30_000
    body = b"".join(
        [
            b"\0\0",  # a leaf, without files
            *(varints([n]), varints(range(n - 1)), varints([1] * n), b"k" * n),
            *(varints([0] * n), bytes(n)),
        ]
    )
    with pytest.raises(ValueError, match="bytes in memory, at most"):
        read_node(ocdbt._frame(ocdbt._NODE_MAGIC, body, compress=True))


def test_a_node_of_more_keys_than_tensorstore_accepts_is_refused():
    body = b"\0\0" + varints([1 << 24]) + bytes(4 << 24)
    with pytest.raises(ValueError, match="a column has 16777215 numbers"):
        read_node(ocdbt._frame(ocdbt._NODE_MAGIC, body, compress=True))


def test_a_damaged_manifest_is_refused():
    encoded = bytearray(manifest("d/tree", 100, 2, 10))
    assert read_manifest(bytes(encoded)) == [Version(("d/tree", 0, 100), 2, 100, 10)]
    for i in range(len(encoded)):
        encoded[i] ^= 1
        with pytest.raises(ValueError, match=r"not such a file|checksum"):
            read_manifest(bytes(encoded))
        encoded[i] ^= 1
    with pytest.raises(ValueError, match="not such a file"):
        read_manifest(b"")


def test_a_manifest_without_versions_is_refused():
    body = bytes(ocdbt._unframe(ocdbt._MANIFEST_MAGIC, manifest("d/tree", 100, 2, 10)))
    config = body[: body.index(b"\1\6\0d/tree")]  # then come its files and versions: none
    with pytest.raises(ValueError, match="it has no version"):
        read_manifest(ocdbt._frame(ocdbt._MANIFEST_MAGIC, config + bytes(9)))
