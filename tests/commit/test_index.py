"""Reads of checkpoints by stock TensorStore and zarr-python, in both layouts."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import uuid
from functools import partial

import numpy as np
import pytest
import tensorstore as ts
import zarr

import shardckpt
from shardckpt.commit.index import dump_index, index_entries, merge_lanes, stock_spec, stock_url, write_plain_documents
from shardckpt.errors import CommitError, MissingDataError, StorageError
from shardckpt.format.zarr_arrays import array_json, chunk_key, encode_document
from shardckpt.io import store as store_module
from shardckpt.io.store import Store, shared_context
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


@pytest.fixture
def write(encoded_chunks):
    """Writes arrays as an attempt, dealing chunks out among two hosts; returns nothing."""

    def write(root, attempt, layout, arrays, leave_out=()):
        """`arrays`: path → (array, chunk shape); `leave_out`: keys that are not written."""
        store = Store.open(root).sub(attempt)
        writers = [PackedWriter(store, host, data_file_bytes=100) if layout == "packed" else PlainWriter(store) for host in range(2)]
        documents, total, count = {}, 0, 0
        for path, (array, chunks) in arrays.items():
            dtype = of_numpy(array.dtype)
            documents[path] = array_json(array.shape, dtype, chunks, None, {"shardckpt": {"name": path, "dtype": dtype.name}})
            for index, data in encoded_chunks(array.view(dtype.storage), chunks):
                key = f"{path}/{chunk_key(index)}"
                if key not in leave_out:
                    writers[count % 2].append([key], [data])
                    count, total = count + 1, total + len(data)
        for writer in writers:
            writer.finish()
        if layout == "packed":
            lanes = [lane for writer in writers for lane in writer.lanes]
            merge_lanes(store, lanes, partial(encoded, documents), expected_chunks=count, expected_bytes=total)
        else:
            write_plain_documents(store, documents)

    return write


def assert_stock_tensorstore_reads(location, layout, path, array, *, context=None):
    for spec in (stock_spec(location, "attempt", path, layout), stock_url(location, "attempt", path, layout)):
        # A fresh context has nothing cached; only what lies in this process's memory needs the shared one.
        opened = ts.open(spec, context=context or ts.Context(), open=True).result()
        assert opened.shape == array.shape
        found = opened.read().result()
        assert found.dtype == array.dtype
        assert found.tobytes() == array.tobytes()


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
    assert_stock_tensorstore_reads(Store.open(root).location, layout, "model/w", array, context=shared_context(Store.open(root).location))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["plain", "a b", "ünï", "100%", "%41", "q?x", "h#y", "a|b", "c:d", "a@b"])
def test_any_directory_name_opens_by_spec_and_by_url(tmp_path, write, random_array, layout, name):
    array = random_array((3, 3), np.int16)
    write(tmp_path / name, "attempt", layout, {f"model/%41 {name}": (array, (2, 2))})
    assert_stock_tensorstore_reads(Store.open(tmp_path / name).location, layout, f"model/%41 {name}", array)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("relocate", [shutil.move, shutil.copytree, os.symlink], ids=["moved", "copied", "linked"])
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
        ts.open(stock_spec(Store.open(tmp_path).location, "attempt", "w", layout), open=True).result().read().result()


@pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part")
def test_zarr_python_opens_the_plain_layout_by_its_consolidated_root(tmp_path, write, random_array):
    kinds = ["bool", "int8", "uint16", "int64", "float16", "float32", "float64", "complex64", "complex128"]
    arrays = {f"model/{kind}/{i}": random_array(p.values[0], kind, i) for kind, (i, p) in itertools.product(kinds, enumerate(SHAPES))}
    write(tmp_path, "attempt", "zarr", {path: (array, SHAPES[int(path[-1])].values[1]) for path, array in arrays.items()})
    # Only the root's document is left: members are found by consolidated metadata alone.
    for below in (tmp_path / "attempt" / "zarr" / "model").rglob("zarr.json"):
        below.unlink()
    group = zarr.open_group(tmp_path / "attempt" / "zarr", mode="r", use_consolidated=True)
    assert {path for path, member in group.members(max_depth=None) if isinstance(member, zarr.Array)} == set(arrays)
    for path, array in arrays.items():
        found = group[path]
        assert found.dtype == array.dtype
        assert np.asarray(found[...]).tobytes() == array.tobytes()
        assert found.attrs["shardckpt"] == {"name": path, "dtype": array.dtype.name}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_array_and_every_group_has_its_document(tmp_path, write, random_array, layout):
    write(tmp_path, "attempt", layout, {"model/layers.0/w": (random_array((3,), np.int8), (2,)), "step": (random_array((), np.int8), ())})
    place = Store.open(tmp_path).sub("attempt").location
    spec = {"driver": "ocdbt", "base": place.kvstore()} if layout == "packed" else place.join("zarr").kvstore()
    tree = ts.KvStore.open(spec).result()
    documents = {k.decode(): json.loads(tree[k]) for k in tree.list().result() if k.endswith(b"zarr.json")}
    kinds = {key: document["node_type"] for key, document in documents.items()}
    groups = ["zarr.json", "model/zarr.json", "model/layers.0/zarr.json"]
    assert kinds == {**dict.fromkeys(groups, "group"), "model/layers.0/w/zarr.json": "array", "step/zarr.json": "array"}


def test_the_merged_index_adds_a_manifest_and_one_directory(tmp_path, write, random_array):
    write(tmp_path, "attempt", "packed", {"w": (random_array((4, 4), np.float32), (2, 2))})
    assert sorted(p.name for p in (tmp_path / "attempt").iterdir()) == ["d", "hosts", "manifest.ocdbt"]


def test_a_state_without_arrays_has_an_index_all_the_same(store):
    merge_lanes(store, [], tuple, expected_chunks=0, expected_bytes=0)
    assert dump_index(store) == {}


def test_the_merged_index_refers_to_the_very_places_where_hosts_put_their_chunks(store):
    expected, lanes = {}, []
    for host in range(3):
        writer = PackedWriter(store, host, data_file_bytes=50, lane_keys=7)
        keys = [f"w/c/{i}/{host}" for i in range(20)]
        for i, key in enumerate(keys):
            writer.append([key], [bytes([i]) * (i + 1)])
        extents = writer.finish()
        columns = (extents.file.tolist(), extents.offset.tolist(), extents.length.tolist())
        expected |= {key: (extents.files[f], o, n) for key, f, o, n in zip(keys, *columns, strict=True)}
        lanes += writer.lanes
    documents = {"w": array_json((20, 3), DTYPES["uint8"], (1, 1))}
    merge_lanes(store, lanes, partial(encoded, documents), expected_chunks=60, expected_bytes=3 * 210)
    assert dump_index(store) == expected
    assert [key for key, _ in index_entries(store)] == sorted(expected)


def test_an_index_of_several_levels_is_walked_whole(store):
    # More than 8 MiB of keys do not fit one node.
    keys = [f"{i:0150d}/c/{i}" for i in range(60_000)]
    writer = PackedWriter(store, 0, lane_keys=25_000)
    for key in keys:
        writer.append([key], [b"x"])
    writer.finish()
    merge_lanes(store, writer.lanes, tuple, expected_chunks=len(keys), expected_bytes=len(keys))
    root = ts.ocdbt.dump(store.kvstore()).result()["versions"][-1]
    assert root["root_height"] > 0
    assert [key for key, _ in index_entries(store)] == keys


@pytest.mark.timeout(400)  # TensorStore merges indexes on a mount with the habits of NFS in seconds, or in minutes
def test_a_chunk_that_two_hosts_wrote_fails_the_commit(store):
    lanes = []
    for host in range(2):
        writer = PackedWriter(store, host)
        writer.append(["w/c/0"], [b"%d" % host])
        writer.finish()
        lanes += writer.lanes
    with pytest.raises(CommitError, match="two hosts wrote the same chunk"):
        merge_lanes(store, lanes, tuple, expected_chunks=2, expected_bytes=2)


@pytest.mark.timeout(400)  # TensorStore merges indexes on a mount with the habits of NFS in seconds, or in minutes
def test_a_lane_that_lacks_chunks_fails_the_commit(store):
    writer = PackedWriter(store, 0)
    writer.append(["w/c/0"], [b"1"])
    writer.finish()
    with pytest.raises(CommitError, match="wrote 2 chunks"):
        merge_lanes(store, writer.lanes, tuple, expected_chunks=2, expected_bytes=2)


@pytest.mark.timeout(400)  # TensorStore merges indexes on a mount with the habits of NFS in seconds, or in minutes
def test_large_documents_do_not_disturb_the_count(store):
    writer = PackedWriter(store, 0)
    writer.append(["w/c"], [b"12345"])
    writer.finish()
    document = array_json((), DTYPES["uint8"], (), None, {"shardckpt": "x" * (2 << 20)})
    merge_lanes(store, writer.lanes, partial(encoded, {"w": document}), expected_chunks=1, expected_bytes=5)
    assert dump_index(store)["w/c"] == ("hosts/00000/0/d/00000", 0, 5)


def test_an_attempt_without_an_index_says_so(store):
    with pytest.raises(MissingDataError, match=r"manifest\.ocdbt"):
        dump_index(store)


def test_an_index_that_is_written_again_because_keys_were_rotated_is_complete(tmp_path, monkeypatch):
    """The first write fails, in a process that has used a bucket with other keys."""
    monkeypatch.setattr(store_module, "_stamps", ["of earlier keys"])
    write, failed = Store.write, []

    def fails_once(store, key, data):
        if key == "d/leaf" and not failed:
            failed.append(key)
            raise StorageError("cannot write: access denied")
        write(store, key, data)

    monkeypatch.setattr(Store, "write", fails_once)
    shardckpt.save(tmp_path / "c", {"w": np.arange(12).reshape(3, 4)})
    assert failed
    assert shardckpt.open(tmp_path / "c").verify().damage == []
