"""Chunks suit the reader that nobody knows yet."""

import tracemalloc
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt.layout.box import Box, BoxArray
from shardckpt.plan.chunks import (
    LARGEST_CHUNK,
    LARGEST_COMMON_CHUNK,
    MOST_CHUNKS,
    MOST_PIECES,
    SMALLEST_PIECE,
    Chunking,
    chunk_shape,
    chunking,
    divisors,
    smallest_chunk,
)
from shardckpt.plan.pieces import Piece, grid_shape, overlaps


@st.composite
def tensors(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5000), min_size=1, max_size=4)))
    parts = tuple(draw(st.integers(1, min(n, 16))) for n in shape)
    return shape, draw(st.sampled_from([1, 2, 4, 8, 16])), parts


@given(tensors())
@settings(max_examples=200, deadline=None)
def test_no_chunk_crosses_a_border_between_shards(tensor):
    shape, itemsize, parts = tensor
    chunks = chunk_shape(shape, itemsize, parts)
    for n, p, c in zip(shape, parts, chunks, strict=True):
        tile = -(-n // p)
        assert 1 <= c <= tile
        if p > 1:
            assert tile % c == 0


@given(tensors())
@settings(max_examples=200, deadline=None)
def test_a_tensor_of_a_checkpoint_has_chunks_of_useful_size(tensor):
    shape, itemsize, parts = tensor
    chunks = chunk_shape(shape, itemsize, parts)
    tile_bytes = prod(-(-n // p) for n, p in zip(shape, parts, strict=True)) * itemsize
    size = prod(chunks) * itemsize
    # Only shards that are small themselves give small chunks.
    assert size >= min(16 << 10, tile_bytes)


@pytest.mark.parametrize(
    "shape",
    [(4096, 4096), (4096, 14336), (32000, 4096), (128256, 4096), (8192, 28672), (2048, 2048)],
)
@pytest.mark.parametrize("parts", [(1, 1), (8, 1), (1, 8), (4, 2), (2, 4), (2, 2)])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_splits_of_either_axis_by_2_4_and_8_fall_on_chunk_borders(shape, parts, itemsize):
    chunks = chunk_shape(shape, itemsize, parts)
    for n, c in zip(shape, chunks, strict=True):
        for split in (2, 4, 8):
            assert (n // split) % c == 0
    assert 64 << 10 <= prod(chunks) * itemsize <= LARGEST_CHUNK


def test_large_tensors_that_are_not_split_are_still_cut():
    assert prod(chunk_shape((1 << 30,), 4, (1,))) * 4 <= LARGEST_CHUNK
    assert prod(chunk_shape((64, 4096, 14336), 2, (8, 1, 2))) * 2 <= LARGEST_CHUNK


def test_a_prime_tile_is_cut_along_the_other_axis():
    rows, columns = chunk_shape((32003, 4096), 4, (8, 1))
    assert rows == 4001
    assert 4096 % columns == 0
    assert rows * columns * 4 <= LARGEST_CHUNK


def test_the_number_of_chunks_of_a_whole_checkpoint_is_bounded():
    # 405B parameters with two moments in float32, every tensor in 512 shards.
    shapes = [(16384, 53248)] * 378 + [(16384, 16384)] * 252 + [(128256, 16384)] * 2
    total = 3 * sum(prod(s) * 4 for s in shapes)
    smallest = smallest_chunk(total)
    chunks = 3 * sum(
        prod(grid_shape(s, chunk_shape(s, 4, (64, 8), smallest=smallest))) for s in shapes
    )
    assert chunks <= 1.5 * MOST_CHUNKS


@pytest.mark.parametrize("differences", [False, True])
@pytest.mark.parametrize(
    ("shape", "total"),
    [
        ((1024, 1024), 8 << 40),
        ((2048, 7168), 9 << 40),  # experts that are not stacked
        ((1 << 20,), 8 << 40),
        ((1000, 1000), 240 << 30),
        ((511, 1024), 240 << 30),
    ],
)
def test_the_number_of_chunks_of_many_medium_tensors_is_bounded(shape, total, differences):
    smallest = smallest_chunk(total, differences=differences)
    chunks = prod(
        grid_shape(shape, chunking(shape, 4, (1,) * len(shape), smallest=smallest).chunks)
    )
    tensors = total // (4 * prod(shape))
    assert chunks * tensors <= max(1.5 * MOST_CHUNKS, tensors)


def test_a_small_checkpoint_has_the_smallest_chunks():
    assert smallest_chunk(64 * 10**9) == smallest_chunk(0) == (64 << 10, 16 << 10)
    assert smallest_chunk(0, differences=True) == (128 << 10, 128 << 10)
    assert smallest_chunk(0, files=True) == (1 << 20, 1 << 20)


@given(st.lists(st.integers(1, 4000), min_size=1, max_size=3), st.sampled_from([1, 2, 4, 8]))
def test_where_each_chunk_is_a_file_none_is_cut_below_a_mebibyte(shape, itemsize):
    chunks = chunk_shape(
        tuple(shape), itemsize, (1,) * len(shape), smallest=smallest_chunk(0, files=True)
    )
    assert min(prod(shape) * itemsize, 1 << 20) <= prod(chunks) * itemsize


def test_scalars_and_empty_tensors_have_a_chunk_shape():
    assert chunk_shape((), 4, ()) == ()
    assert chunk_shape((0, 5), 4, (1, 1)) == (1, 5)


def rows_read(length, chosen, start, stop):
    """Rows of the chunks that rows `start` to `stop` touch, by the planner."""
    read = 0
    for begin in range(0, length, chosen.piece[0]):
        piece = Piece("w", (begin,), (min(chosen.piece[0], length - begin),), chosen.chunks[:1])
        read += (
            len(overlaps(piece, BoxArray.of([Box((start,), (stop,))], 1)).chunk) * piece.chunks[0]
        )
    return read


@pytest.mark.parametrize("rows", [32003, 50257, 65539, 100003])
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_uneven_vocabularies_are_read_with_little_waste_by_2_4_and_8_ways(rows, parts, itemsize):
    """Their tiles are of prime length, or nearly so: 4001, 25129, 12565, 6283, 16385, 12501, …"""
    chosen = chunking((rows, 4096), itemsize, (parts, 1))
    assert 4096 % (8 * chosen.chunks[1]) == 0
    for split in (1, 2, 4, 8):
        part = -(-rows // split)
        for start in range(0, rows, part):
            stop = min(start + part, rows)
            assert rows_read(rows, chosen, start, stop) <= 1.25 * (stop - start)


@pytest.mark.long
@given(tensors())
@settings(max_examples=200, deadline=None)
def test_pieces_are_whole_tiles_or_whole_dimensions_and_few(tensor):
    shape, itemsize, parts = tensor
    chosen = chunking(shape, itemsize, parts)
    for n, p, piece, side in zip(shape, parts, chosen.piece, chosen.chunks, strict=True):
        tile = -(-n // p)
        assert piece in (n, tile)
        assert 1 <= side <= tile
        assert piece != n or p == 1 or tile % side == 0
    pieces = prod(grid_shape(shape, chosen.piece))
    common = prod(chunk_shape(shape, itemsize, parts)) * itemsize
    assert (
        pieces == 1
        or common > LARGEST_COMMON_CHUNK
        or pieces <= min(MOST_PIECES, prod(shape) * itemsize // SMALLEST_PIECE)
    )


@pytest.mark.parametrize(
    "shape", [(4096, 4096), (4096, 14336), (32000, 4096), (128256, 4096), (8192, 28672)]
)
@pytest.mark.parametrize("parts", [(1, 1), (8, 1), (1, 8), (4, 2), (16, 4), (64, 1)])
def test_what_divides_evenly_is_stored_as_one_array(shape, parts):
    assert chunking(shape, 2, parts) == Chunking(shape, chunk_shape(shape, 2, parts))


def test_a_tile_of_prime_length_too_large_for_one_chunk_is_stored_in_as_many_pieces_as_it_takes():
    prime = 4_194_319
    chosen = chunking((512 * prime,), 4, (512,))
    assert chosen.piece == (prime,)
    assert chosen.chunks[0] * 4 <= LARGEST_CHUNK


@pytest.mark.parametrize(("itemsize", "most"), [(2, 50_000), (4, 80_000)])
@pytest.mark.parametrize("parts", [(8, 1), (2, 4), (8, 8), (16, 4)])
def test_the_chunks_of_llama_8b_are_some_hundred_kib_large(itemsize, most, parts):
    layer = [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(14336, 4096)] * 2 + [(4096, 14336)]
    shapes = [(128256, 4096)] * 2 + 32 * layer
    assert sum(prod(grid_shape(s, chunk_shape(s, itemsize, parts))) for s in shapes) <= most


def test_many_dimensions_and_unlucky_numbers_are_chosen_for_in_bounded_time_and_memory():
    assert (
        64 << 10
        <= prod(chunk_shape((720, 840, 900, 960), 2, (1, 1, 1, 1))) * 2
        <= 2 * LARGEST_CHUNK
    )
    assert chunk_shape((7,) * 9, 1, (1,) * 9) is not None


@given(
    st.one_of(
        st.integers(1, 1_000_000),
        st.builds(lambda a, b: a * b, st.integers(1, 65_535), st.integers(1, 8)),
    )
)
def test_the_divisors_of_a_number_below_2_to_the_32nd_are_all_of_them(n):
    assert list(divisors(n)) == (np.flatnonzero(n % np.arange(1, n + 1) == 0) + 1).tolist()


HOSTILE = [
    1 << 56,
    1 << 61,
    1 << 62,
    (1 << 61) - 1,
    4_294_967_311 * 1_073_741_827,
    65_537**3,
    897_612_484_786_617_600,
]
"""Powers of two, a prime, products of large primes, and the number below 2^60 with the most
divisors."""


@pytest.mark.parametrize("n", HOSTILE)
def test_numbers_of_any_size_have_few_divisors_that_are_compared(n):
    numbers = divisors(n)
    assert (numbers[-1], [d for d in numbers if n % d]) == (n, [])
    assert len(numbers) <= 2048
    assert list(numbers) == sorted(set(numbers))


@pytest.mark.parametrize("n", HOSTILE)
@pytest.mark.parametrize("parts", [1, 8])
def test_a_tensor_that_claims_any_size_is_planned_for_in_little_memory(n, parts):
    tracemalloc.start()
    try:
        chosen = chunking(
            (n * parts,) if n * parts < 1 << 63 else (n,),
            4,
            (parts,),
            smallest=smallest_chunk(4 * n),
        )
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    assert chosen.chunks[0] > 0
