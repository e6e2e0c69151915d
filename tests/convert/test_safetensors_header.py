"""Headers of safetensors files are read or refused as by the reference implementation, which is the
oracle."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from safetensors import SafetensorError, deserialize

from shardckpt.convert.formats.safetensors.header import _DTYPES, header_bytes, parse_header
from shardckpt.errors import DtypeError, FormatError

if TYPE_CHECKING:
    from collections.abc import Mapping

PAIR = {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}


def header(doc: object) -> bytes:
    return doc if isinstance(doc, bytes) else json.dumps(doc).encode()


def file(doc: object, data: bytes = bytes(8)) -> bytes:
    raw = header(doc)
    return len(raw).to_bytes(8, "little") + raw + data


def ours(content: bytes) -> Mapping[str, Any]:
    """Our reading of a file: dtype, shape and bytes by name."""
    nbytes = header_bytes(content[:8], "file")
    if 8 + nbytes > len(content):
        raise FormatError("it is cut off")
    parsed = parse_header(content[8 : 8 + nbytes], "file")
    if parsed.nbytes != len(content):
        raise FormatError("it is longer or shorter")
    return {
        name: (t.dtype.name, list(t.shape), content[t.start : t.stop])
        for name, t in parsed.tensors.items()
    }


def theirs(content: bytes) -> Mapping[str, Any]:
    return {
        name: (_DTYPES[t["dtype"]], t["shape"], bytes(t["data"]))
        for name, t in deserialize(content)
    }


@pytest.mark.parametrize("dtype", sorted(_DTYPES))
def test_every_dtype_of_whole_bytes_is_known(dtype: str) -> None:
    for itemsize in (1, 2, 4, 8):
        content = file({"w": {"dtype": dtype, "shape": [8 // itemsize], "data_offsets": [0, 8]}})
        try:
            expected = theirs(content)
        except SafetensorError:
            continue
        assert ours(content) == expected
        return
    raise AssertionError(f"{dtype} has no itemsize")


@pytest.mark.parametrize(
    "doc",
    [
        {"w": PAIR},
        {"w": {**PAIR, "more": 1}},
        b" " + header({"w": PAIR}) + b"   \n",
        {"__metadata__": {"a": "b"}, "w": PAIR},
        {"__metadata__": None, "w": PAIR},
        {
            "b": {**PAIR, "shape": [1], "data_offsets": [4, 8]},
            "a": {**PAIR, "shape": [1], "data_offsets": [0, 4]},
        },
        {"w": PAIR, "none": {**PAIR, "shape": [0, 5], "data_offsets": [8, 8]}},
        {
            "none": {**PAIR, "shape": [0, 5], "data_offsets": [0, 0]},
            "w": PAIR,
            "": {**PAIR, "shape": [2, 0], "data_offsets": [8, 8]},
        },
        {"é/~ $": PAIR},
    ],
)
def test_what_the_reference_reads_is_read(doc: object) -> None:
    assert ours(file(doc)) == theirs(file(doc))


@pytest.mark.parametrize(
    ("doc", "why"),
    [
        (b"[]", "found a list"),
        (b"7 ", "found a int"),
        (b"{ ", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"\\ud800":' + header(PAIR) + b"}", "not JSON"),
        (b"[" * 100_000, "too deep"),
        ({"w": {**PAIR, "shape": [float("nan")]}}, "NaN is not JSON"),
        ({"w": ["F32", [1, 2], [0, 8]]}, "'w': .* does not give dtype, shape and data_offsets"),
        ({"w": {"dtype": "F32", "shape": [1, 2]}}, "'w': .* does not give"),
        ({"w": {**PAIR, "dtype": "f32"}}, "'w': its dtype 'f32' is none of"),
        ({"w": {**PAIR, "dtype": ["F32"]}}, "'w': its dtype"),
        ({"w": {**PAIR, "shape": [2.0]}}, "'w': its shape"),
        ({"w": {**PAIR, "shape": [True, 2]}}, "'w': its shape"),
        ({"w": {**PAIR, "shape": [-1, -2]}}, "'w': its shape"),
        ({"w": {**PAIR, "shape": 2}}, "'w': its shape"),
        ({"w": {**PAIR, "shape": [1] * 40}}, "'w': its shape"),
        (
            {"w": {**PAIR, "shape": [1 << 40, 1 << 40, 0]}},
            "'w': .* more bytes than can be addressed",
        ),
        ({"w": {**PAIR, "data_offsets": [0, 8, 8]}}, "'w': its data_offsets"),
        ({"w": {**PAIR, "data_offsets": [8, 0]}}, "'w': its data_offsets .* 8 bytes of F32"),
        ({"w": {**PAIR, "data_offsets": [0, 12]}}, "'w': its data_offsets .* 8 bytes of F32"),
        (
            {"w": {**PAIR, "data_offsets": [4, 12]}},
            "'w': it begins at byte .*, and the tensor before it ends at byte",
        ),
        ({"a": PAIR, "w": PAIR}, "'w': it begins"),
        ({"w": PAIR, "none": {**PAIR, "shape": [0], "data_offsets": [4, 4]}}, "it begins"),
        ({"__metadata__": {"a": 1}, "w": PAIR}, "__metadata__"),
        ({"__metadata__": ["a"], "w": PAIR}, "__metadata__"),
    ],
)
def test_what_cannot_be_is_refused_by_name_as_by_the_reference(doc: object, why: str) -> None:
    with pytest.raises(FormatError, match=f"file: .*{why}"):
        ours(file(doc))
    if "does not give" not in why and "addressed" not in why and "40" not in str(doc):
        with pytest.raises(SafetensorError):
            deserialize(file(doc))


def test_a_key_that_comes_twice_is_refused_since_readers_differ() -> None:
    entry = header(PAIR)
    with pytest.raises(FormatError, match="the key 'w' comes twice"):
        ours(file(b'{"w":' + entry + b',"w":' + entry + b"}"))
    with pytest.raises(FormatError, match="the key 'dtype' comes twice"):
        ours(file(b'{"w":{"dtype":"F32",' + entry[1:] + b"}"))


def test_elements_that_share_bytes_are_refused_by_name() -> None:
    with pytest.raises(DtypeError, match="'w' has dtype F4, with several elements per byte"):
        ours(file({"w": {"dtype": "F4", "shape": [16], "data_offsets": [0, 8]}}))


@pytest.mark.parametrize(
    "length", [b"", bytes(7), bytes(8), (100_000_001).to_bytes(8, "little"), b"\xff" * 8]
)
def test_a_length_that_no_header_has_is_refused_before_memory_is_taken(length: bytes) -> None:
    with pytest.raises(FormatError, match="not a safetensors file"):
        header_bytes(length, "file")


def test_with_any_bit_of_the_header_flipped_it_is_refused_or_read_as_the_reference_reads_it() -> (
    None
):
    doc = {
        "__metadata__": {"format": "pt"},
        "layer.0": {"dtype": "BF16", "shape": [3, 4], "data_offsets": [0, 24]},
        "bias": {"dtype": "I8", "shape": [11], "data_offsets": [24, 35]},
        "step": {"dtype": "I64", "shape": [], "data_offsets": [35, 43]},
        "none": {"dtype": "F32", "shape": [0, 7], "data_offsets": [43, 43]},
    }
    content = file(doc, bytes(range(43)))
    read = refused = 0
    for position in range(len(content) - 43):
        for bit in range(8):
            flipped = bytearray(content)
            flipped[position] ^= 1 << bit
            try:
                tensors = ours(bytes(flipped))
            except FormatError:
                refused += 1
            else:
                assert tensors == theirs(bytes(flipped)), f"bit {bit} of byte {position}"
                read += 1
    assert refused > 1000
    assert read > 100, "names and metadata may be any text"
