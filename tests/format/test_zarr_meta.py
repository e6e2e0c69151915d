"""The zarr v3 documents, against TensorStore and zarr-python."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
import tensorstore as ts
import zarr
import zarr.storage
from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt import Mesh, PartitionSpec, SaveOptions, Sharding, frameworks
from shardckpt.format.structure import Structure
from shardckpt.format.zarr_arrays import (
    array_json,
    chunk_key,
    encode_document,
    encoded_documents,
    group_json,
    parent_groups,
    zarr_documents,
)
from shardckpt.layout.dtypes import DTYPES
from shardckpt.layout.world import World
from shardckpt.writing.tensor_storage import tensor_records

NUMPY = [d for d in DTYPES.values() if d.storage.type.__module__ == "numpy"]


def as_tensorstore_writes_it(document):
    """The document after TensorStore has created an array by it."""
    array = ts.open(
        {"driver": "zarr3", "kvstore": {"driver": "memory"}, "metadata": document}, create=True
    ).result()
    return array, json.loads(array.kvstore.read("zarr.json").result().value)


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_tensorstore_creates_the_very_array_that_the_document_describes(dtype, compression):
    document = array_json((5, 0, 3), dtype, (2, 1, 3), compression, {"shardckpt": {"name": "ünï"}})
    array, written = as_tensorstore_writes_it(document)
    assert array.dtype.numpy_dtype == dtype.storage
    assert array.shape == (5, 0, 3)
    assert array.chunk_layout.read_chunk.shape == (2, 1, 3)
    # It leaves out what is the default anyway.
    expected = {**document, "chunk_key_encoding": {"name": "default"}}
    del expected["storage_transformers"]
    assert written == expected


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("dtype", NUMPY, ids=str)
def test_zarr_python_writes_the_same_document(dtype, compression):
    memory = zarr.storage.MemoryStore()
    codecs = (
        [zarr.codecs.ZstdCodec(level=1), zarr.codecs.Crc32cCodec()]
        if compression
        else [zarr.codecs.Crc32cCodec()]
    )
    zarr.create_array(
        memory,
        shape=(5, 3),
        chunks=(2, 3),
        dtype=dtype.storage,
        compressors=codecs,
        attributes={"a": 1},
    )
    stored = json.loads(memory._store_dict["zarr.json"].to_bytes())
    assert stored == array_json((5, 3), dtype, (2, 3), compression, {"a": 1})


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_documents_are_strict_json(dtype):
    document = array_json((), dtype, ())
    assert json.loads(json.dumps(document, allow_nan=False)) == document


def test_consolidated_metadata_is_what_zarr_python_writes(tmp_path):
    root = zarr.open_group(tmp_path, mode="w", zarr_format=3, attributes={"who": "me"})
    root.create_array(
        "model/w", shape=(4, 4), chunks=(2, 2), dtype="f4", compressors=[zarr.codecs.Crc32cCodec()]
    )
    root.create_array("step", shape=(), dtype="i8", compressors=[zarr.codecs.Crc32cCodec()])
    with warnings.catch_warnings():
        # zarr-python warns that the specification does not have it yet.
        warnings.simplefilter("ignore")
        zarr.consolidate_metadata(tmp_path)
    expected = json.loads((tmp_path / "zarr.json").read_text())
    members = {
        "step": array_json((), DTYPES["int64"], ()),
        "model/w": array_json((4, 4), DTYPES["float32"], (2, 2)),
        "model": group_json(),
    }
    ours = group_json({"who": "me"}, members)
    # zarr-python says of each group below that it has no consolidated metadata of its own.
    del expected["consolidated_metadata"]["metadata"]["model"]["consolidated_metadata"]
    assert ours == expected
    assert list(ours["consolidated_metadata"]["metadata"]) == ["model", "model/w", "step"]


@pytest.mark.parametrize(("shape", "chunks"), [((), ()), ((3,), (2,)), ((4, 3, 25), (2, 3, 2))])
def test_chunk_keys_are_tensorstores(shape, chunks):
    array, _ = as_tensorstore_writes_it(array_json(shape, DTYPES["uint8"], chunks))
    array.write(np.ones(shape, np.uint8)).result()
    grid = np.ndindex(*(-(-n // c) for n, c in zip(shape, chunks, strict=True)))
    assert {k.decode() for k in array.kvstore.list().result()} == {
        "zarr.json",
        *map(chunk_key, grid),
    }


@given(st.lists(st.lists(st.sampled_from("ab"), min_size=1, max_size=4).map("/".join)))
def test_every_array_has_all_its_groups_and_no_more(paths):
    groups = parent_groups(paths)
    assert groups == sorted(
        {p.rpartition("/")[0] for p in [*paths, *(g for g in groups if g)]} | {""}
    )


@given(
    st.dictionaries(
        st.text(st.sampled_from('a"\\ä€\u2028\x01{}b'), min_size=1, max_size=6),
        st.sampled_from([(), (4,), (3, 5), (2, 0), (300, 200)]),
        max_size=6,
    ),
    st.sampled_from([None, "zstd"]),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_documents_that_are_encoded_by_their_form_are_those_that_are_encoded_alone(
    shapes, compression, sharded
):
    state = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    rows = Sharding(Mesh((2,), ("x",)), PartitionSpec("x"))
    shardings = {"*": rows} if sharded and any(len(shape) for shape in shapes.values()) else {}
    sources = frameworks.sources(
        {name: value for name, value in state.items() if value.ndim or not sharded}
    )
    records = tensor_records(sources, SaveOptions(shardings=shardings if sources else {}), World())
    structure = Structure({}, records)
    alone = {
        path: encode_document(document) for path, document in zarr_documents(structure, compression)
    }
    assert dict(encoded_documents(structure, compression)) == alone
    assert all(
        json.loads(document)["attributes"]["shardckpt"]["name"] in records
        for document in alone.values()
    )
