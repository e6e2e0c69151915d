"""Indexes for other tools are compared with the data that was written, though our own readers never
look at them."""

import json
import shutil
from pathlib import Path

import flip_bits
import numpy as np
import pytest
import tensorstore as ts
from flip_bits import same, state_of_host
from noticed import damage_of

import shardckpt
from shardckpt import SaveOptions


def test_an_index_that_points_elsewhere_is_reported(checkpoint_of):
    """The merged index of another checkpoint whose chunks lie elsewhere: whole, with good
    checksums, and wrong here."""
    checkpoint, truth = checkpoint_of("packed")
    attempt = shardckpt.open(checkpoint).record.attempt
    shardckpt.save(
        checkpoint.parent / "other",
        {**state_of_host(0, 0, 1), "aaa": np.arange(5)},
        options=flip_bits.options("packed"),
    )
    other = checkpoint.parent / "other" / shardckpt.open(checkpoint.parent / "other").record.attempt
    # Those of the merged index are behind the lane's own.
    for nodes in other.glob("hosts/*/0/d/tree"):
        shutil.copy(nodes, checkpoint / attempt / nodes.relative_to(other))
    shutil.copy(other / "manifest.ocdbt", checkpoint / attempt / "manifest.ocdbt")
    assert same(truth, shardckpt.restore(checkpoint))
    assert damage_of(checkpoint) == {
        f"{attempt}/manifest.ocdbt",
        f"{attempt}/hosts/00000/0/manifest.ocdbt",
    }


def test_a_small_tensor_that_the_index_has_otherwise_is_reported(checkpoint_of, stale):
    """The merged index of a checkpoint that is the same but for its elements, which lies elsewhere
    in the same places."""
    checkpoint, truth = checkpoint_of("packed", 3)
    attempt = shardckpt.open(checkpoint).record.attempt
    other = stale["packed", 3] / shardckpt.open(stale["packed", 3]).record.attempt
    shutil.rmtree(checkpoint / attempt / "d")
    shutil.copytree(other / "d", checkpoint / attempt / "d")
    shutil.copy(other / "manifest.ocdbt", checkpoint / attempt / "manifest.ocdbt")
    assert same(truth, shardckpt.restore(checkpoint))
    reasons = [damage.reason for damage in shardckpt.open(checkpoint).verify().damage]
    assert "dtypes/float64/c/0/0 in the index is missing or not what was written" in reasons
    assert damage_of(checkpoint) == {f"{attempt}/manifest.ocdbt"}


def test_bytes_behind_the_nodes_of_an_index_mislead_nobody_and_behind_a_manifest_are_reported(
    checkpoint_of,
):
    checkpoint, _ = checkpoint_of("packed")

    def lengthen(path):
        path.write_bytes(path.read_bytes() + b"more")

    nodes = [*checkpoint.rglob("d/tree")]
    assert nodes
    for node in nodes:
        lengthen(node)
    opened = shardckpt.open(checkpoint)
    assert opened.verify().ok
    name = opened.names()[0]
    array = ts.open(opened.stock_spec(name), open=True).result()
    assert array.read().result().tobytes() == opened.read(name).tobytes()
    for manifest in checkpoint.rglob("manifest.ocdbt"):
        lengthen(manifest)
    assert damage_of(checkpoint) == {
        str(path.relative_to(checkpoint)) for path in checkpoint.rglob("manifest.ocdbt")
    }


def test_documents_too_large_for_a_node_of_the_index_are_compared_too(tmp_path):
    """Long names of axes make a zarr.json of more than a mebibyte, which OCDBT keeps outside its
    nodes, without a checksum."""
    names = tuple("x" * 20_000 + str(i) for i in range(30))
    sharding = shardckpt.Sharding(shardckpt.Mesh((1,) * 30, names), shardckpt.PartitionSpec(names))
    shardckpt.save(
        tmp_path / "c",
        {"w": np.arange(12).reshape(3, 4)},
        options=SaveOptions(shardings={"w": sharding}),
    )
    assert shardckpt.open(tmp_path / "c").verify().damage == []
    (document,) = [p for p in (tmp_path / "c").glob("*/d/*") if p.stat().st_size > 1 << 20]
    document.write_bytes(document.read_bytes().replace(b"x17", b"x18"))
    assert [Path(file).name for file in damage_of(tmp_path / "c")] == ["manifest.ocdbt"]


@pytest.mark.parametrize(
    "change", [{"shape": [7]}, {"data_type": "uint64"}, {"fill_value": 1}, {"codecs": []}]
)
def test_a_zarr_document_that_says_something_else_is_reported(tmp_path, change):
    shardckpt.save(tmp_path / "c", {"w": np.arange(6)}, options=SaveOptions(layout="zarr"))
    (document,) = (tmp_path / "c").glob("*/zarr/w/zarr.json")
    document.write_text(json.dumps({**json.loads(document.read_text()), **change}))
    assert damage_of(tmp_path / "c") == {str(document.relative_to(tmp_path / "c"))}
    np.testing.assert_array_equal(shardckpt.restore(tmp_path / "c")["w"], np.arange(6))
