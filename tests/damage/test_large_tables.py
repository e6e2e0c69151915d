"""A chunk table that is larger than any file that is read as a whole is read in parts, and is not
damage by itself."""

import os

import numpy as np
import pytest

import shardckpt
from shardckpt import Mesh, SaveOptions, Sharding
from shardckpt import PartitionSpec as P
from shardckpt.commit import assemble, table_reading
from shardckpt.format.table import ROW
from shardckpt.io import files
from shardckpt.io.store import Store
from shardckpt.reading.reader import ReadStats

CHUNKS = 1 << 11
STATE = {"w": np.arange(CHUNKS * 2, dtype=np.float32)}


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """A checkpoint whose tables no file may have the size of that is read as a whole."""
    options = SaveOptions(shardings={"w": Sharding(Mesh((CHUNKS,), ("x",)), P("x"))})
    shardckpt.save(tmp_path / "c", STATE, options=options)
    (table,) = (tmp_path / "c").glob("*/table")
    monkeypatch.setattr(table_reading, "PART_BLOCKS", 2)
    for module in (files, assemble, table_reading):
        monkeypatch.setattr(module, "LARGEST_WHOLE", table.stat().st_size - 1)
    return tmp_path / "c", table


def damaged_files(checkpoint):
    return [damage.file for damage in shardckpt.open(checkpoint).verify().damage]


def test_a_checkpoint_with_a_large_table_is_sound(checkpoint):
    path, _ = checkpoint
    assert damaged_files(path) == []
    np.testing.assert_array_equal(shardckpt.restore(path)["w"], STATE["w"])


@pytest.mark.parametrize("spoil", ["last row", "header", "longer", "shorter"])
def test_damage_to_it_is_noticed_and_the_hosts_own_say_the_same(checkpoint, spoil):
    path, table = checkpoint
    data = bytearray(table.read_bytes())
    if spoil in {"last row", "header"}:
        data[{"last row": -1, "header": 40}[spoil]] ^= 1
        table.write_bytes(data)
    else:
        os.truncate(table, len(data) + (1 if spoil == "longer" else -1))
    assert damaged_files(path) == [str(table.relative_to(path))]
    np.testing.assert_array_equal(shardckpt.restore(path)["w"], STATE["w"])


def test_one_that_only_claims_its_rows_is_refused_at_the_first_that_is_not_there(checkpoint):
    path, table = checkpoint
    record = shardckpt.open(path).record
    os.truncate(table, record.table.header)
    os.truncate(table, record.table.size)  # all of it a hole
    stats = ReadStats()
    with pytest.raises(shardckpt.errors.FormatError, match="block 0"):
        table_reading.read_table(Store.open(table.parent), record.table, stats.count_index)
    assert stats.index_bytes == record.table.header + 2 * 128 * ROW.itemsize
