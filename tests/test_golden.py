"""Every checkpoint format that was ever released is read for ever: `tools/make_golden.py` wrote these checkpoints."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts
import zarr

import shardckpt
from shardckpt.names import array_path

GOLDEN = Path(__file__).parent / "golden"
sys.path.insert(0, str(GOLDEN))

from golden_facts import Interval, facts, layout_facts

CHECKPOINTS = sorted(path.parent for path in GOLDEN.glob("v*/*/checkpoint.json"))
LARGEST_BYTES = 200 << 10

pytestmark = pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda path: f"{path.parent.name}-{path.name}")


@pytest.fixture(autouse=True)
def interval():
    """The registered leaf type that the checkpoints hold."""
    shardckpt.register_leaf(Interval, name="golden.Interval", encode=lambda i: [i.low, i.high], decode=lambda pair: Interval(*pair))


def expected(path):
    return json.loads((path.parent / "expected.json").read_text())


def equal(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def test_the_state_is_restored_to_the_last_bit(path):
    assert facts(shardckpt.restore(path)) == expected(path)["state"]


def test_metadata_and_layouts_are_what_was_given(path):
    checkpoint = shardckpt.open(path)

    assert checkpoint.metadata == expected(path)["metadata"]
    for name, layout in expected(path)["layouts"].items():
        info = checkpoint.info(name)
        assert layout_facts(info.layout, info.shape) == layout
    assert {name for name in checkpoint.names() if checkpoint.info(name).layout} == expected(path)["layouts"].keys()


def test_tied_tensors_are_known_by_both_names(path):
    checkpoint = shardckpt.open(path)

    assert checkpoint.info("tied/first").tied_names == ("tied/second",)
    assert checkpoint.info("tied/second").tied_names == ("tied/first",)


def test_every_box_is_the_part_of_the_whole(path):
    checkpoint = shardckpt.open(path)

    for name in ("sharded/even", "sharded/uneven", "sharded/pieces", "shapes/many chunks"):
        whole = checkpoint.read(name)
        box = shardckpt.Box(tuple(n // 3 for n in whole.shape), tuple(n - n // 4 for n in whole.shape))
        assert equal(checkpoint.read(name, box), np.ascontiguousarray(whole[box.slices]))


def test_it_verifies(path):
    report = shardckpt.open(path).verify()

    assert report.damage == []
    assert report.chunks > len(shardckpt.open(path).names())


def test_zarr_python_reads_the_same(path):
    checkpoint = shardckpt.open(path)
    group = zarr.open_group(checkpoint.zarr_store(), mode="r")

    for name in checkpoint.names():
        if name not in {"tied/second", "sharded/pieces"}:
            assert equal(group[array_path(name)][...], checkpoint.read(name).view(checkpoint.info(name).dtype.storage)), name


def test_stock_tensorstore_reads_the_same(path):
    checkpoint = shardckpt.open(path)

    for name in checkpoint.names():
        if name != "sharded/pieces":
            array = ts.open(checkpoint.stock_spec(name)).result().read().result()
            assert equal(array, checkpoint.read(name).view(checkpoint.info(name).dtype.storage)), name


def test_it_is_small_enough_to_stay_in_the_repository(path):
    assert sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) <= LARGEST_BYTES
