"""What docs/format.md says is so: its reader reads real checkpoints, and its snippets run as they stand."""

import re
from pathlib import Path

import numpy as np
import pytest

import shardckpt
from shardckpt.dtypes import DTYPES
from shardckpt.names import array_path
from shardckpt.reshard import chunks

DOCS = Path(__file__).parents[1] / "docs"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", (DOCS / "format.md").read_text(), re.DOTALL | re.MULTILINE)
*SNIPPETS, READER = BLOCKS
ODD_KEYS = ["a/b", "~", "é", "zarr.json", "..", "__x", "x" * 400, 7, "7", None, "c"]


@pytest.fixture(params=[("packed", None), ("packed", "zstd"), ("zarr", None)], ids=str)
def checkpoint(request, tmp_path, monkeypatch):
    """One with names, shapes and dtypes of every kind, and a tensor in pieces."""
    monkeypatch.setattr(chunks, "LARGEST_COMMON_CHUNK", 64)
    layout, compression = request.param
    state = {
        "keys": {key: np.arange(i, dtype=np.int16) for i, key in enumerate(ODD_KEYS)},
        "shapes": {"scalar": np.array(1.5), "empty": np.zeros((3, 0)), "many": np.arange(600_000, dtype=np.int32).reshape(600, 1000)},
        "dtypes": {
            name: np.arange(-3, 3, dtype=np.float32).astype(d.numpy).reshape(2, 3) for name, d in DTYPES.items() if "uint" not in name
        },
        "pieces": np.arange(5 * 97, dtype=np.float32).reshape(5, 97),
    }
    layouts = {"pieces": shardckpt.Sharding(shardckpt.Mesh((4,), ("x",)), shardckpt.PartitionSpec(None, "x"))}
    shardckpt.save(tmp_path / "ckpt", state, options=shardckpt.SaveOptions(layout=layout, compression=compression, shardings=layouts))
    return shardckpt.open(tmp_path / "ckpt")


def equal(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")
def test_the_reader_in_the_description_reads_every_tensor(checkpoint):
    names = {}
    exec(compile(READER, "format.md", "exec"), names)

    for name in checkpoint.names():
        assert equal(names["read"](str(checkpoint.location), name), checkpoint.read(name)), name
    assert len(checkpoint.record.structure.tensors["pieces"].pieces) == 4


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("snippet", SNIPPETS)
def test_the_snippets_for_stock_tools_give_the_values(checkpoint, snippet):
    path = str(checkpoint.location)
    for name in ("shapes/many", "shapes/scalar", "dtypes/bfloat16", "keys/~0"):
        given = {"path": path, "attempt": checkpoint.record.attempt, "layout": checkpoint.record.layout, "array_path": array_path(name)}
        exec(compile(snippet, "format.md", "exec"), given)
        if "values" in given:
            assert equal(given["values"], checkpoint.read(name)), name


def test_there_are_snippets_for_tensorstore_and_for_zarr_python():
    assert [("tensorstore" in s, "zarr_store" in s) for s in SNIPPETS] == [(True, False), (False, True), (False, False)]
