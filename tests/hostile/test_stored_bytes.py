"""Chunks and files that are larger than they can be are refused before memory is taken for them."""

import os
from dataclasses import replace

import crc32c
import numpy as np
import pytest
from chunk_tables import decode_table, encode_table
from flip_bits import file_kinds
from forgery import MIB, Forgery, at_most, use_in_every_way
from numcodecs.zstd import Zstd

import shardckpt
from shardckpt import ShardckptError, errors
from shardckpt.format.stored_chunks import compress, decompress
from shardckpt.io import ocdbt


def store_first_chunk(forgery, frame):
    """Store bytes as the first chunk of "w", with a checksum and a chunk table that agree."""
    (forgery.attempt / "zarr" / "w" / "c" / "0" / "0").write_bytes(
        frame + crc32c.crc32c(frame).to_bytes(4, "little")
    )
    files, arrays = decode_table(forgery.table, "")
    length, crc = arrays["w"].length.copy(), arrays["w"].crc.copy()
    length[0], crc[0] = len(frame) + 4, crc32c.crc32c(frame)
    forgery.write(table=encode_table(files, {"w": replace(arrays["w"], length=length, crc=crc)}))


@pytest.fixture
def compressed(tmp_path):
    """A checkpoint of "w", whose chunks have 2,500 bytes before they are compressed."""
    return Forgery.of_one_host(
        tmp_path / "checkpoint", "zarr", "zstd", {"w": np.zeros((100, 100), np.uint8)}
    )


def test_a_frame_that_unpacks_to_more_than_its_chunk_is_refused_without_unpacking_it(compressed):
    for bomb in (Zstd().encode(bytes(300 * MIB)), Zstd().encode(bytes(60 * MIB)), b"", b"no frame"):
        store_first_chunk(compressed, bomb)
        with at_most(256 * MIB), pytest.raises(ShardckptError, match="w"):
            shardckpt.restore(compressed.url)


def test_a_frame_of_fewer_bytes_than_its_chunk_is_refused_and_its_other_elements_not_made_up(
    compressed,
):
    for short in (1, 10, 300, 2499):
        store_first_chunk(compressed, Zstd().encode(bytes(short)))
        with pytest.raises(errors.CorruptionError, match=r"w.*not a zstd frame of 2500 bytes"):
            shardckpt.restore(compressed.url)


@pytest.mark.parametrize("size", [1, 255, 256, 257, 65_791, 65_792, MIB])
def test_a_frame_unpacks_to_exactly_the_bytes_that_its_header_gives_in_any_width(size):
    contents = np.arange(size, dtype=np.uint8)
    frame = np.frombuffer(compress(contents), np.uint8)
    np.testing.assert_array_equal(decompress(frame, size, "w"), contents)
    for other in (size - 1, size + 1, size + 256, 2 * size):
        with pytest.raises(errors.CorruptionError, match=f"not a zstd frame of {other} bytes"):
            decompress(frame, other, "w")


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


@pytest.mark.long
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
