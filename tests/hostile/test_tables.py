"""A chunk table that claims more than there is is refused before memory is taken for it, and made
up for where others say more."""

import hashlib
import json
import struct

import numpy as np
import pytest
from chunk_tables import decode_table, encode_table
from forgery import MIB, TRUTH, at_most, table_reference

import shardckpt
from shardckpt import ShardckptError, errors
from shardckpt.format.table import ROW


def w_of(forgery):
    with at_most(256 * MIB):
        return shardckpt.restore(forgery.url, only="w")["w"]


@pytest.mark.parametrize(
    "change",
    [
        *({"size": n} for n in (0, 1, 2**30, 2**40, 2**62)),
        *({"header": n} for n in (0, 1, 11, 12, 2**30, 2**62)),
        {"size": 2**62, "header": 2**62},
        {"size": 2**30, "header": 2**30},
        {"sha256": "0" * 64},
        {"sha256": ""},
    ],
    ids=str,
)
def test_a_reference_that_lies_about_a_table_is_refused_and_the_host_s_own_is_as_good(
    forgery, change
):
    forgery.write(commit={**forgery.commit, "table": {**forgery.commit["table"], **change}})
    np.testing.assert_array_equal(w_of(forgery), TRUTH["w"])
    with at_most(256 * MIB):
        report = shardckpt.open(forgery.url).verify()
    assert [damage.file for damage in report.damage] == [f"{forgery.attempt.name}/table"]

    host = forgery.hosts[0]
    forgery.write(host={**host, "table": {**host["table"], **change}}, of_all=False)
    with pytest.raises(errors.FormatError):
        w_of(forgery)


def claiming(forgery, **counts):
    """The table of all, with other counts in its header and a digest, of blocks of zeros, for every
    block of them."""
    begin = 12 + struct.unpack("<I", forgery.table[8:12])[0]
    header = json.loads(forgery.table[12:begin])
    header["arrays"] = [[path, counts.get(path, n)] for path, n in header["arrays"]]
    text = json.dumps(header).encode()
    blocks = -(-sum(n for _, n in header["arrays"]) // header["block"])
    zeros = hashlib.sha256(bytes(header["block"] * ROW.itemsize)).digest()[:16]
    return forgery.table[:8] + struct.pack("<I", len(text)) + text + zeros * blocks, sum(
        n for _, n in header["arrays"]
    )


@pytest.mark.parametrize("holes", [False, True])
def test_a_table_of_millions_of_chunks_that_are_not_there_is_refused_before_they_are_planned(
    forgery, holes
):
    """Its header is small, and its rows are missing, or holes in the file that pass their
    digests."""
    commit = json.loads(json.dumps(forgery.commit))
    commit["tensors"]["w"] = {**commit["tensors"]["w"], "shape": [6000, 6000], "chunks": [1, 1]}
    header, rows = claiming(forgery, w=6000 * 6000)
    commit["table"] = {
        **table_reference("table", header),
        "size": len(header) + rows * ROW.itemsize,
    }
    forgery.write(commit=commit)
    with (forgery.attempt / "table").open("wb") as file:
        file.write(header)
        file.truncate(commit["table"]["size"] if holes else len(header))
    checkpoint = shardckpt.open(forgery.url)
    with at_most(384 * MIB):
        for box in (None, shardckpt.Box((5, 5), (6, 6)), shardckpt.Box((0, 5), (6000, 6))):
            with pytest.raises(errors.MissingDataError, match="w"):
                checkpoint.read("w", box)
        np.testing.assert_array_equal(
            shardckpt.restore(forgery.url, only="pair/**")["pair"][0], TRUTH["pair"][0]
        )


def test_chunks_that_share_bytes_or_lie_behind_the_end_are_refused(forgery):
    files, arrays = decode_table(forgery.table, "")
    w = arrays["w"]
    for offset in (np.zeros(len(w)), np.full(len(w), 2**62), np.full(len(w), 2**40)):
        table = encode_table(
            files, {**arrays, "w": type(w)(w.chunk, w.file, offset.astype("<u8"), w.length, w.crc)}
        )
        forgery.write(table=table)
        with pytest.raises(ShardckptError, match="w"):
            w_of(forgery)
        assert not shardckpt.open(forgery.url).verify().ok


def test_an_array_twice_or_of_another_tensor_s_length_is_made_up_for_by_the_host_s_own(forgery):
    begin = 12 + struct.unpack("<I", forgery.table[8:12])[0]
    document = json.loads(forgery.table[12:begin])
    twice = {**document, "arrays": [*document["arrays"][:-1], document["arrays"][0]]}
    (first, n), (second, m), *rest = document["arrays"]
    shifted = {**document, "arrays": [[first, n + 1], [second, m - 1], *rest]}
    for header in (twice, shifted):
        text = json.dumps(header).encode()
        forgery.write(
            table=forgery.table[:8] + struct.pack("<I", len(text)) + text + forgery.table[begin:]
        )
        np.testing.assert_array_equal(w_of(forgery), TRUTH["w"])
        assert not shardckpt.open(forgery.url).verify().ok
