"""The chunk table says where every chunk is, and refuses to say it wrongly."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt.errors import FormatError
from shardckpt.io.table import OWN_OBJECT, ArrayChunks, Table, decode_table, encode_table, merge_tables


def rows(*chunks, file=0):
    n = len(chunks)
    return ArrayChunks(
        np.array(chunks, np.uint64),
        np.full(n, file, np.uint32),
        np.arange(n, dtype=np.uint64) * 100,
        np.full(n, 100, np.uint32),
        np.arange(n, dtype=np.uint32) + 7,
    )


def test_a_table_comes_back_as_it_was():
    arrays = {"model/w": rows(0, 2, 5), "b": rows(0, file=OWN_OBJECT), "empty": rows()}
    files, found = decode_table(encode_table(["hosts/00000/0/d/00000"], arrays), "here")
    assert files == ["hosts/00000/0/d/00000"]
    assert list(found) == list(arrays)
    for path, expected in arrays.items():
        for column in ("chunk", "file", "offset", "length", "crc"):
            np.testing.assert_array_equal(getattr(found[path], column), getattr(expected, column))


def test_chunks_are_found_by_position():
    table = rows(0, 2, 5)
    assert table.find(np.array([5, 1, 0])).tolist() == [2, -1, 0]
    assert rows().find(np.array([0])).tolist() == [-1]
    assert (table.row(5), table.row(3), table.row(6)) == (2, -1, -1)


def test_tables_of_several_hosts_become_one():
    table = merge_tables([Table.of(["a"], {"w": rows(0, 2)}), Table.of(["b"], {"w": rows(1), "v": rows(0)})])
    assert table.files == ["a", "b"]
    merged = table.arrays()
    assert merged["w"].chunk.tolist() == [0, 1, 2]
    assert merged["w"].file.tolist() == [0, 1, 0]


def test_a_chunk_of_two_hosts_is_refused():
    with pytest.raises(FormatError, match="two hosts wrote the same chunk"):
        merge_tables([Table.of(["a"], {"w": rows(0, 2)}), Table.of(["b"], {"w": rows(2)})])


@pytest.mark.parametrize(
    ("table", "why"),
    [
        (b"", "not a chunk table"),
        (encode_table([], {"w": rows(0)}), "refers to a file"),
        (encode_table(["../x"], {"w": rows(0)}), "outside the attempt"),
        (encode_table(["/x"], {"w": rows(0)}), "outside the attempt"),
        (encode_table(["x"], {"w": rows(0)})[:-1], "1 chunks need"),
        (encode_table(["x"], {"w": rows(1, 0)}), "not in grid order"),
        (encode_table(["x"], {"w": rows(1, 1)}), "not in grid order"),
        (encode_table(["x"], {"w": rows(0)}).replace(b'["w",1]', b'["w",9]'), "9 chunks need"),
        (encode_table(["x"], {"w": rows(0)}).replace(b'["w",1]', b'[["",1'), "header is unreadable"),
    ],
)
def test_a_table_that_lies_is_refused(table, why):
    with pytest.raises(FormatError, match=why):
        decode_table(table, "here")


@given(st.binary(max_size=200), st.integers(0, 300))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_a_table_or_a_format_error(garbage, at):
    table = bytearray(encode_table(["x"], {"w": rows(0, 1, 2)}))
    table[at : at + len(garbage)] = garbage
    try:
        decode_table(bytes(table), "here")
    except FormatError:
        return
