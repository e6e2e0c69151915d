"""The chunk table says where every chunk is, and refuses to say it wrongly."""

import struct
from dataclasses import replace

import numpy as np
import pytest
from chunk_tables import decode_table, encode_table
from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt.commit.table_reading import merge_tables
from shardckpt.errors import FormatError
from shardckpt.format.documents import TableReference
from shardckpt.format.table import OWN_OBJECT, ArrayChunks, Table, TableHeader


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
    files, decoded = decode_table(encode_table(["hosts/00000/0/d/00000"], arrays), "here")
    assert files == ["hosts/00000/0/d/00000"]
    assert list(decoded) == list(arrays)
    for path, expected in arrays.items():
        for column in ("chunk", "file", "offset", "length", "crc"):
            np.testing.assert_array_equal(getattr(decoded[path], column), getattr(expected, column))


def test_chunks_are_found_by_position():
    table = Table.of(["x"], {"w": rows(0, 2, 5), "whole": rows(0, 1), "none": rows()})
    array, chunks = np.array(
        [[0, 5], [0, 1], [0, 0], [0, 6], [1, 1], [1, 2], [2, 0], [3, 0], [1, 0], [0, -1]]
    ).T
    assert table.find(["w", "whole", "none", "unknown"], array, chunks).tolist() == [
        2,
        -1,
        0,
        -1,
        4,
        -1,
        -1,
        -1,
        3,
        -1,
    ]


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from("abc"), st.sets(st.integers(0, 9))),
    st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 10))),
)
def test_searched_rows_are_those_of_a_search_one_by_one(held, searched):
    table = Table.of(["x"], {path: rows(*sorted(chunks)) for path, chunks in held.items()})
    places = {
        chunk: row
        for row, chunk in enumerate((path, chunk) for path in held for chunk in sorted(held[path]))
    }
    array, chunks = np.array(searched, np.int64).reshape(-1, 2).T
    assert table.find("abc", array, chunks).tolist() == [
        places.get(("abc"[i], chunk), -1) for i, chunk in searched
    ]


def test_tables_of_several_hosts_become_one():
    table = merge_tables(
        [Table.of(["a"], {"w": rows(0, 2)}), Table.of(["b"], {"w": rows(1), "v": rows(0)})]
    )
    assert table.files == ["a", "b"]
    merged = dict(table.arrays())
    assert merged["w"].chunk.tolist() == [0, 1, 2]
    assert merged["w"].file.tolist() == [0, 1, 0]


def test_a_chunk_of_two_hosts_is_refused():
    with pytest.raises(FormatError, match="two hosts wrote the same chunk"):
        merge_tables([Table.of(["a"], {"w": rows(0, 2)}), Table.of(["b"], {"w": rows(2)})])


def flipped(at):
    table = bytearray(encode_table(["x"], {"w": rows(0)}))
    table[at] ^= 1
    return bytes(table)


def with_json(old, new):
    """A table of one chunk whose JSON says something else."""
    table = encode_table(["x"], {"w": rows(0)})
    end = 12 + struct.unpack("<I", table[8:12])[0]
    text = table[12:end].replace(old, new)
    return table[:8] + struct.pack("<I", len(text)) + text + table[end:]


def with_count(n):
    return with_json(b'["w",1]', b'["w",%d]' % n)


def with_block(n):
    return with_json(b'"block":128', b'"block":' + n)


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
        (with_count(-1), "invalid file name, or an array twice"),
        (with_json(b"1]]", b"1.0]]"), "invalid file name, or an array twice"),
        (with_count(10**40), "invalid file name, or an array twice"),
        (with_count(2**62), "4611686018427387904 chunks need a header of"),
        (with_count(10**5), "100000 chunks need a header of"),
        *(
            (with_block(n), "1 to 4096 rows per block")
            for n in (b"0", b"-1", b"4097", b"true", b"1.5", b'"1"', b"null")
        ),
        (flipped(-1), "block 0 of the chunk table is damaged"),
        (flipped(-29), "block 0 of the chunk table is damaged"),  # of its digest
        (
            encode_table(["x"], {"w": rows(0)}).replace(b'["w",1]', b'[["",1'),
            "header is unreadable",
        ),
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


def test_the_first_of_several_damaged_blocks_is_named():
    table = bytearray(encode_table(["x"], {"w": rows(*range(1000))}))
    for row in (700, 300):
        table[len(table) - 28 * (1000 - row)] ^= 1
    with pytest.raises(FormatError, match="here: block 2 of the chunk table"):
        decode_table(bytes(table), "here")


def test_a_header_is_what_a_record_refers_to_and_no_shorter():
    """Else its end, the digests, would be vouched for by nobody."""
    table = Table.of(["x"], {"w": rows(*range(300))})
    data = table.encode()
    header = len(data) - table.body_bytes
    assert TableHeader.vouched(data, TableReference.of("table", data, header), "here").counts == {
        "w": 300
    }
    for nbytes in (12, header - 16, header + 28):
        with pytest.raises(
            FormatError, match=r"here: (a chunk table for 300 chunks has|the chunk table's header)"
        ):
            TableHeader.vouched(data, TableReference.of("table", data, nbytes), "here")
    with pytest.raises(FormatError, match=f"300 chunks has {len(data)} bytes"):
        TableHeader.vouched(
            data, replace(TableReference.of("table", data, header), size=len(data) + 28), "here"
        )
