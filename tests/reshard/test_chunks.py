"""Chunks suit the reader that nobody knows yet."""

from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt.reshard.chunks import LARGEST_CHUNK, MOST_CHUNKS, chunk_shape, grid_shape, smallest_chunk


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


@pytest.mark.parametrize("shape", [(4096, 4096), (4096, 14336), (32000, 4096), (128256, 4096), (8192, 28672), (2048, 2048)])
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
    chunks = 3 * sum(prod(grid_shape(s, chunk_shape(s, 4, (64, 8), smallest=smallest))) for s in shapes)
    assert chunks <= 1.5 * MOST_CHUNKS


def test_scalars_and_empty_tensors_have_a_chunk_shape():
    assert chunk_shape((), 4, ()) == ()
    assert chunk_shape((0, 5), 4, (1, 1)) == (1, 5)
