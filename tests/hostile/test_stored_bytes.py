"""Chunks and files that are larger than they can be are refused before memory is taken for them."""

import os

import crc32c
import numpy as np
import pytest
from chunk_tables import decode_table, encode_table
from flip_bits import file_kinds
from forgery import MIB, Forgery, at_most, use_in_every_way
from numcodecs.zstd import Zstd

import shardckpt
from shardckpt import ShardckptError, errors
from shardckpt.io import ocdbt


def test_a_frame_that_unpacks_to_more_than_its_chunk_is_refused_without_unpacking_it(tmp_path):
    forgery = Forgery.of_one_host(
        tmp_path / "checkpoint", "zarr", "zstd", {"w": np.zeros((100, 100), np.uint8)}
    )
    for bomb in (Zstd().encode(bytes(300 * MIB)), Zstd().encode(bytes(10)), b"", b"no frame"):
        stored = bomb + crc32c.crc32c(bomb).to_bytes(4, "little")
        (forgery.attempt / "zarr" / "w" / "c" / "0" / "0").write_bytes(stored)
        files, arrays = decode_table(forgery.table, "")
        columns = {
            **{n: getattr(arrays["w"], n) for n in ("chunk", "file", "offset")},
            "length": np.array([len(stored)]),
            "crc": np.array([crc32c.crc32c(bomb)]),
        }
        forgery.write(table=encode_table(files, {"w": type(arrays["w"])(**columns)}))
        with at_most(256 * MIB), pytest.raises(ShardckptError, match="w"):
            shardckpt.restore(forgery.url)


def test_a_table_that_gives_a_chunk_gigabytes_is_refused_before_they_are_allocated(forgery):
    files, arrays = decode_table(forgery.table, "")
    changed = {
        path: type(rows)(
            rows.chunk, rows.file, rows.offset, np.full(len(rows), 2**32 - 1, np.uint32), rows.crc
        )
        for path, rows in arrays.items()
    }
    forgery.write(table=encode_table(files, changed))
    with at_most(512 * MIB):
        with pytest.raises(errors.FormatError, match=r"says 4294967295 bytes in .*, not \d+"):
            shardckpt.restore(forgery.url)
        damaged = {d.tensor for d in shardckpt.open(forgery.url).verify().damage}
    assert damaged >= {"w", "pair/0", "pair/1/0", "scalar"}


@pytest.mark.parametrize("layout", ["packed", "zarr"])
def test_a_file_of_any_kind_that_is_a_terabyte_of_holes_is_not_read(of_three_hosts, layout):
    """TensorStore is not asked for such a file: without memory, it ends the process."""
    forgery = of_three_hosts(layout)
    for kind, paths in file_kinds(forgery.url, layout).items():
        path = paths[-1]
        before = path.read_bytes()
        os.truncate(path, 1 << 40)
        with at_most(512 * MIB):
            restored = use_in_every_way(forgery.url)
        assert (restored is None) == (kind in ("host record", "values", "commit record")), kind
        path.write_bytes(before)


@pytest.mark.parametrize("kind", ["host record", "contents", "a host's chunk table"])
def test_an_attempt_with_a_terabyte_of_holes_is_not_committed(of_three_hosts, kind):
    forgery = of_three_hosts()
    path = file_kinds(forgery.url, "packed")[kind][-1]
    forgery.unpublish()
    os.truncate(path, 1 << 40)
    with at_most(512 * MIB):
        assert [outcome.state for outcome in shardckpt.commit(forgery.url)] == ["refused"]


def test_an_index_whose_node_is_a_terabyte_of_holes_is_not_read_either(forgery):
    node = forgery.attempt / "d" / "hole"
    node.parent.mkdir()
    node.touch()
    os.truncate(node, 1 << 40)
    (forgery.attempt / "manifest.ocdbt").write_bytes(ocdbt.manifest("d/hole", 1 << 40, 1, 10))
    with at_most(512 * MIB):
        (damage,) = shardckpt.open(forgery.url).verify().damage
    assert damage.file == f"{forgery.attempt.name}/manifest.ocdbt"
