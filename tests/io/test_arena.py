"""Memory that somebody keeps: cut from blocks, disjoint, aligned."""

from itertools import pairwise

import ml_dtypes
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt.io.buffers import BLOCK, Arena

DTYPES = ("uint8", "float32", "complex128", ml_dtypes.bfloat16)


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 9), max_size=3).map(tuple), st.sampled_from(DTYPES)),
        max_size=30,
    )
)
def test_arrays_of_an_arena_share_no_byte_and_are_aligned(shapes):
    arena = Arena()
    arrays = [arena.array(shape, dtype) for shape, dtype in shapes]
    assert [(a.shape, a.dtype) for a in arrays] == [
        (shape, np.dtype(dtype)) for shape, dtype in shapes
    ]
    assert not any(a.ctypes.data % 64 for a in arrays if a.size)
    ranges = sorted((a.ctypes.data, a.ctypes.data + a.nbytes) for a in arrays if a.size)
    assert all(one[1] <= other[0] for one, other in pairwise(ranges))


def test_small_arrays_come_from_one_block_and_a_large_one_has_its_own():
    arena = Arena()
    first, large, second = (arena.array((n,), "uint8") for n in (100, BLOCK, 100))
    assert second.ctypes.data - first.ctypes.data == 128
    assert large.nbytes == BLOCK
    assert not large.ctypes.data % (2 << 20)


def test_an_array_that_the_rest_of_a_block_does_not_hold_begins_another_one():
    arena = Arena()
    arrays = [arena.array((BLOCK // 3,), "uint8") for _ in range(4)]
    apart = [b.ctypes.data - a.ctypes.data for a, b in pairwise(arrays)]
    assert apart[0] < BLOCK // 2
    assert not 0 <= apart[2] < BLOCK // 3
