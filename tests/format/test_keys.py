"""Chunk keys name one chunk of one array, whatever arrays are called."""

import pytest

from shardckpt.format.zarr_arrays import chunk_object_key, split_chunk_key
from shardckpt.plan.pieces import Piece

ARRAYS = [
    Piece("w", (0, 0), (5, 4), (2, 2)),
    Piece("s", (), (), ()),
    Piece("a/c/b", (), (), ()),
    Piece("a/c/0", (0,), (3,), (1,)),
]
PIECES = {piece.path: piece for piece in ARRAYS}


def test_keys_come_back_as_the_chunks_they_name():
    for piece in PIECES.values():
        for position in range(piece.num_chunks):
            assert split_chunk_key(chunk_object_key(piece, position), PIECES) == (piece, position)


@pytest.mark.parametrize(
    "key",
    [
        "w/c/3/0",
        "s/c/",
        "w/c/0",
        "w/c/0/-1",
        "w/c/0/²",
        "w",
        "x/c/0/0",
        "s/c/0",
        "",
        "c",
        "w/c/0/0/0",
    ],
)
def test_keys_of_no_chunk_name_nothing(key):
    assert split_chunk_key(key, PIECES) is None
