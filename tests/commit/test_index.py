"""Reads of checkpoints by stock TensorStore and zarr-python, in both layouts."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import uuid

import numpy as np
import pytest
import tensorstore as ts
import zarr

from shardckpt.commit.index import (
    Chunks,
    index_values,
    write_index,
    write_plain_documents,
)
from shardckpt.commit.stock import stock_spec, stock_url
from shardckpt.errors import CommitError, MissingDataError
from shardckpt.format.zarr_arrays import array_json, chunk_key, encode_document
from shardckpt.io import ocdbt
from shardckpt.io.store import Store
from shardckpt.layout.dtypes import DTYPES, of_numpy
from shardckpt.writing.packed import PackedWriter
from shardckpt.writing.plain import PlainWriter

LAYOUTS = ["packed", "zarr"]
SHAPES = [
    pytest.param((5, 7), (2, 4), id="edges"),
    pytest.param((4, 4), (2, 2), id="even"),
    pytest.param((3,), (8,), id="one chunk larger than the array"),
    pytest.param((), (), id="scalar"),
    pytest.param((0, 3), (1, 3), id="zero size"),
]


def encoded(documents):
    return [(path, encode_document(document)) for path, document in documents.items()]


def placed(keys, extents):
    """The chunks that hosts put, by each host's keys and extents."""
    files, rows = [], []
    for host in extents:
        rows.append(
            np.stack(
                [host.file.astype(np.int64) + len(files), host.offset, host.length], axis=1
            ).astype(np.int64)
        )
        files += host.files
    return Chunks(
        [key.encode() for of_host in keys for key in of_host], files, np.concatenate(rows)
    )


@pytest.fixture
def write(encoded_chunks):
    """Writes arrays as an attempt, dealing chunks out among two hosts; returns nothing."""

    def write(root, attempt, layout, arrays, leave_out=()):
        """`arrays`: path → (array, chunk shape); `leave_out`: keys that are not written."""
        store = Store.open(root).sub(attempt)
        writers = [
            PackedWriter(store, host, data_file_bytes=100)
            if layout == "packed"
            else PlainWriter(store)
            for host in range(2)
        ]
        documents, keys = {}, ([], [])
        for path, (array, chunks) in arrays.items():
            dtype = of_numpy(array.dtype)
            documents[path] = array_json(
                array.shape, dtype, chunks, None, {"shardckpt": {"name": path, "dtype": dtype.name}}
            )
            for index, data in encoded_chunks(array.view(dtype.storage), chunks):
                key = f"{path}/{chunk_key(index)}"
                if key not in leave_out:
                    host = sum(map(len, keys)) % 2
                    writers[host].append([key], [data])
                    keys[host].append(key)
        extents = [writer.finish() for writer in writers]
        if layout == "packed":
            write_index(store, placed(keys, extents), encoded(documents), {})
        else:
            write_plain_documents(store, documents)

    return write


def assert_stock_tensorstore_reads(location, layout, path, array, *, context=None):
    for spec in (
        stock_spec(location, "attempt", path, layout),
        stock_url(location, "attempt", path, layout),
    ):
        # A fresh context has nothing cached; only what lies in this process's memory needs the
        # shared one.
        opened = ts.open(spec, context=context or ts.Context(), open=True).result()
        assert opened.shape == array.shape
        elements = opened.read().result()
        assert elements.dtype == array.dtype
        assert elements.tobytes() == array.tobytes()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("shape", "chunks"), SHAPES)
def test_stock_tensorstore_reads_every_dtype(tmp_path, write, random_array, layout, shape, chunks):
    arrays = {f"model/{name}": random_array(shape, dtype.numpy) for name, dtype in DTYPES.items()}
    write(tmp_path, "attempt", layout, {path: (array, chunks) for path, array in arrays.items()})
    for path, array in arrays.items():
        stored = array.view(of_numpy(array.dtype).storage)
        assert_stock_tensorstore_reads(Store.open(tmp_path).location, layout, path, stored)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stock_tensorstore_reads_from_memory(write, random_array, layout):
    array = random_array((5, 7), np.float32)
    root = f"memory://{uuid.uuid4().hex}/ünï 100%25"
    write(root, "attempt", layout, {"model/w": (array, (2, 4))})
    assert_stock_tensorstore_reads(
        Store.open(root).location, layout, "model/w", array, context=Store.open(root).context()
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "name", ["plain", "a b", "ünï", "100%", "%41", "q?x", "h#y", "a|b", "c:d", "a@b"]
)
def test_any_directory_name_opens_by_spec_and_by_url(tmp_path, write, random_array, layout, name):
    array = random_array((3, 3), np.int16)
    write(tmp_path / name, "attempt", layout, {f"model/%41 {name}": (array, (2, 2))})
    assert_stock_tensorstore_reads(
        Store.open(tmp_path / name).location, layout, f"model/%41 {name}", array
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "relocate", [shutil.move, shutil.copytree, os.symlink], ids=["moved", "copied", "linked"]
)
def test_a_checkpoint_still_opens_elsewhere(tmp_path, write, random_array, layout, relocate):
    array = random_array((5, 7), np.float32)
    write(tmp_path / "here", "attempt", layout, {"w": (array, (2, 4))})
    relocate(str(tmp_path / "here"), str(tmp_path / "there"))
    assert_stock_tensorstore_reads(Store.open(tmp_path / "there").location, layout, "w", array)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_missing_chunk_is_an_error_for_stock_tensorstore(tmp_path, write, random_array, layout):
    array = random_array((4, 4), np.float32)
    write(tmp_path, "attempt", layout, {"w": (array, (2, 2))}, leave_out={"w/c/1/0"})
    spec = stock_spec(Store.open(tmp_path).location, "attempt", "w", layout)
    opened = ts.open(spec, open=True).result()
    assert opened[:2].read().result().tobytes() == array[:2].tobytes()
    with pytest.raises(ValueError, match="NOT_FOUND"):
        opened.read().result()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_flipped_bit_is_an_error_for_stock_tensorstore(tmp_path, write, random_array, layout):
    write(tmp_path, "attempt", layout, {"w": (random_array((4, 4), np.float32), (4, 4))})
    name = "hosts/00000/0/d/00000" if layout == "packed" else "zarr/w/c/0/0"
    stored = bytearray((tmp_path / "attempt" / name).read_bytes())
    stored[17] ^= 4
    (tmp_path / "attempt" / name).write_bytes(stored)
    with pytest.raises(ValueError, match="Digest mismatch"):
        ts.open(
            stock_spec(Store.open(tmp_path).location, "attempt", "w", layout), open=True
        ).result().read().result()


@pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part")
def test_zarr_python_opens_the_plain_layout_by_its_consolidated_root(tmp_path, write, random_array):
    kinds = [
        "bool",
        "int8",
        "uint16",
        "int64",
        "float16",
        "float32",
        "float64",
        "complex64",
        "complex128",
    ]
    arrays = {
        f"model/{kind}/{i}": random_array(p.values[0], kind, i)
        for kind, (i, p) in itertools.product(kinds, enumerate(SHAPES))
    }
    write(
        tmp_path,
        "attempt",
        "zarr",
        {path: (array, SHAPES[int(path[-1])].values[1]) for path, array in arrays.items()},
    )
    # Only the root's document is left: members are found by consolidated metadata alone.
    for below in (tmp_path / "attempt" / "zarr" / "model").rglob("zarr.json"):
        below.unlink()
    group = zarr.open_group(tmp_path / "attempt" / "zarr", mode="r", use_consolidated=True)
    assert {
        path for path, member in group.members(max_depth=None) if isinstance(member, zarr.Array)
    } == set(arrays)
    for path, array in arrays.items():
        opened = group[path]
        assert opened.dtype == array.dtype
        assert np.asarray(opened[...]).tobytes() == array.tobytes()
        assert opened.attrs["shardckpt"] == {"name": path, "dtype": array.dtype.name}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_array_and_every_group_has_its_document(tmp_path, write, random_array, layout):
    write(
        tmp_path,
        "attempt",
        layout,
        {
            "model/layers.0/w": (random_array((3,), np.int8), (2,)),
            "step": (random_array((), np.int8), ()),
        },
    )
    place = Store.open(tmp_path).sub("attempt").location
    spec = (
        {"driver": "ocdbt", "base": place.kvstore()}
        if layout == "packed"
        else place.join("zarr").kvstore()
    )
    tree = ts.KvStore.open(spec).result()
    documents = {
        k.decode(): json.loads(tree[k]) for k in tree.list().result() if k.endswith(b"zarr.json")
    }
    kinds = {key: document["node_type"] for key, document in documents.items()}
    groups = ["zarr.json", "model/zarr.json", "model/layers.0/zarr.json"]
    assert kinds == {
        **dict.fromkeys(groups, "group"),
        "model/layers.0/w/zarr.json": "array",
        "step/zarr.json": "array",
    }


def test_the_merged_index_adds_a_manifest_and_one_directory(tmp_path, write, random_array):
    write(tmp_path, "attempt", "packed", {"w": (random_array((4, 4), np.float32), (2, 2))})
    assert sorted(p.name for p in (tmp_path / "attempt").iterdir()) == [
        "d",
        "hosts",
        "manifest.ocdbt",
    ]


def entries(attempt):
    """The values of an index that are in files."""
    return [(key, value) for key, value in index_values(attempt) if not isinstance(value, bytes)]


NONE = Chunks([], [], np.empty((0, 3), np.int64))


def test_a_state_without_arrays_has_an_index_all_the_same(store):
    write_index(store, NONE, [], {})
    assert dict(entries(store)) == {}


def test_the_merged_index_refers_to_the_very_places_where_hosts_put_their_chunks(store):
    keys, extents, expected = [], [], {}
    for host in range(3):
        writer = PackedWriter(store, host, data_file_bytes=50, lane_keys=7)
        keys.append([f"w/c/{i}/{host}" for i in range(20)])
        for i, key in enumerate(keys[-1]):
            writer.append([key], [bytes([i]) * (i + 1)])
        extents.append(writer.finish())
        columns = (
            extents[-1].file.tolist(),
            extents[-1].offset.tolist(),
            extents[-1].length.tolist(),
        )
        expected |= {
            key: (extents[-1].files[f], o, n)
            for key, f, o, n in zip(keys[-1], *columns, strict=True)
        }
    write_index(
        store,
        placed(keys, extents),
        encoded({"w": array_json((20, 3), DTYPES["uint8"], (1, 1))}),
        {},
    )
    assert dict(entries(store)) == expected
    assert [key for key, _ in entries(store)] == sorted(expected)


@pytest.mark.parametrize("leaves", ["of few keys", "of few bytes"])
def test_an_index_of_several_leaves_is_what_one_leaf_is(
    tmp_path, monkeypatch, random_array, leaves
):
    """To our reader and to TensorStore, which finds values in files and values in the index."""
    contents = []
    for name in ("one", "many"):
        if name == "many":
            monkeypatch.setattr(ocdbt, "LEAF_KEYS" if leaves == "of few keys" else "LEAF_BYTES", 7)
        store = Store.open(tmp_path / name)
        writer = PackedWriter(store, 0)
        keys = [f"{array}/c/{i}" for array in ("b", "a", "model.b/1", "z") for i in range(12)]
        for i, key in enumerate(keys):
            writer.append([key], [b"%d" % i])
        extents = writer.finish()
        documents = {
            path: array_json((12,), DTYPES["uint8"], (1,))
            for path in ("a", "b", "model.b/1", "z", "small")
        }
        write_index(
            store,
            placed([keys], [extents]),
            encoded(documents),
            {"small/c/0": b"inside", "small/c/1": b""},
        )
        database = ts.KvStore.open({"driver": "ocdbt", "base": store.kvstore().spec()}).result()
        root = ts.ocdbt.dump(store.kvstore()).result()["versions"][-1]
        assert root["root_height"] == (name == "many")
        values = {key: database.read(key).result().value for key in database.list().result()}
        assert root["root"]["statistics"]["num_keys"] == len(values)
        assert root["root"]["statistics"]["num_tree_bytes"] == len(store.read("d/leaf"))
        assert sorted(database.list(ts.KvStore.KeyRange("a/", "a0")).result()) == sorted(
            key for key in values if key.startswith(b"a/")
        )
        contents.append(
            (
                values,
                dict(entries(store)),
                root["root"]["statistics"]["num_indirect_value_bytes"],
            )
        )
    assert contents[0] == contents[1]
    assert {key.encode(): b"%d" % i for i, key in enumerate(keys)}.items() <= contents[0][0].items()


@pytest.mark.long
def test_an_index_of_tens_of_thousands_of_keys_is_walked_whole(store):
    keys = [f"{i:0150d}/c/{i}" for i in range(60_000)]
    writer = PackedWriter(store, 0, lane_keys=25_000)
    for key in keys:
        writer.append([key], [b"x"])
    write_index(store, placed([keys], [writer.finish()]), [], {})
    assert [key for key, _ in entries(store)] == keys


def test_a_key_of_two_arrays_fails_the_commit(store):
    with pytest.raises(
        CommitError, match="w/c/0 is a chunk or document of two arrays; nothing was published"
    ):
        write_index(
            store,
            NONE._replace(keys=[b"w/c/0"], files=["d/0"], rows=np.array([[0, 0, 1]])),
            [],
            {"w/c/0": b"1"},
        )
    assert store.list() == []


def test_a_document_that_is_too_large_for_a_node_is_beside_it(store):
    writer = PackedWriter(store, 0)
    writer.append(["w/c"], [b"12345"])
    extents = writer.finish()
    documents = {
        name: array_json((), DTYPES["uint8"], (), None, {"shardckpt": name * (2 << 20)})
        for name in ("w", "v", "x")
    }
    documents["u"] = array_json((), DTYPES["uint8"], ())
    write_index(store, placed([["w/c"]], [extents]), encoded(documents), {})
    assert dict(entries(store))["w/c"] == ("hosts/00000/0/d/00000", 0, 5)
    database = ts.KvStore.open(
        {"driver": "ocdbt", "base": store.kvstore().spec()}, context=store.context()
    ).result()
    for path, data in encoded(documents):
        assert database.read(f"{path}/zarr.json").result().value == data


def test_an_attempt_without_an_index_says_so(store):
    with pytest.raises(MissingDataError, match=r"manifest\.ocdbt"):
        dict(entries(store))
