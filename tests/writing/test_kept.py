"""Differences of many chunks at a time, which the extension finds where it is there: the same bytes
as one by one in numpy."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.format.differences import apply, difference, whole
from shardckpt.format.stored_chunks import chunks_in_place, lay_out_all
from shardckpt.format.zarr_arrays import CHECKSUM_BYTES, room_for
from shardckpt.io.buffers import BLOCK
from shardckpt.writing.kept import KeptChunks
from shardckpt.writing.save import _CHUNK_COPIES


@given(
    seed=st.integers(0, 1 << 32),
    itemsize=st.sampled_from([1, 2, 4, 8, 16]),
    chunks=st.integers(1, 12),
    elements=st.integers(1, 3000),
)
def test_many_chunks_are_stored_as_each_of_them_would_be(seed, itemsize, chunks, elements):
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, (chunks, elements * itemsize), np.uint8)
    new = old.copy()
    for row, share in zip(new, rng.choice([0, 0.001, 0.02, 0.4, 1], chunks), strict=True):
        differ = rng.random(elements) < share
        row.reshape(elements, itemsize)[differ, rng.integers(itemsize)] ^= rng.integers(
            1, 256, int(differ.sum()), np.uint8
        )
    keys, paths = [f"w/c/{i}" for i in range(chunks)], ["w"] * chunks
    kept = KeptChunks()
    kept.begin("first", ())
    unknown = rng.random(chunks) < 0.2  # this process has not written them
    kept.keep(
        [key for key, is_unknown in zip(keys, unknown, strict=True) if not is_unknown],
        old[~unknown],
    )
    kept.begin("second", {"w"})
    expected = [
        (whole(after), elements) if is_unknown else difference(before.copy(), after, itemsize)
        for before, after, is_unknown in zip(old, new, unknown, strict=True)
    ]
    stored, changed = kept.differences(keys, paths, new, itemsize)
    assert stored == [data for data, _ in expected]
    assert changed == itemsize * sum(count for _, count in expected)
    for before, after, data in zip(old, new, stored, strict=True):
        apply(np.frombuffer(data, np.uint8), before, itemsize, "w")
        np.testing.assert_array_equal(before, after)
    kept.begin("third", {"w"})
    assert kept.differences(keys, paths, new, itemsize) == ([b""] * chunks, 0)


@given(
    seed=st.integers(0, 1 << 32),
    kind=st.sampled_from(["u1", "f2", "f4", "c8"]),
    grid=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 30)), max_size=3),
    blocks=st.integers(1, 3),
    transposed=st.booleans(),
)
def test_chunks_are_compared_in_place_as_if_they_were_laid_out(
    seed, kind, grid, blocks, transposed
):
    rng = np.random.default_rng(seed)
    shape, chunk = tuple(n * side for n, side in grid), tuple(side for _, side in grid)
    old = [rng.integers(0, 9, shape).astype(kind) for _ in range(blocks)]
    new = [np.where(rng.random(shape) < 0.1, block + 1, block).astype(kind) for block in old]
    if transposed and shape:
        new = [np.asfortranarray(block) for block in new]
    count = blocks * int(np.prod([n for n, _ in grid], dtype=int))
    results = []
    for in_place in (True, False):
        kept, keys = KeptChunks(), [f"w/c/{i}" for i in range(count)]
        rows = np.empty((count, room_for(chunk, old[0].itemsize)), np.uint8)
        lay_out_all(old, chunk, rows)
        kept.begin("first", ())
        kept.keep(keys, rows[:, :-CHECKSUM_BYTES])
        kept.begin("second", {"w"})
        lay_out_all(new, chunk, rows)
        chunks = chunks_in_place(new, chunk) if in_place else [*rows[:, :-CHECKSUM_BYTES]]
        results.append(kept.differences(keys, ["w"] * count, chunks, old[0].itemsize))
        kept.begin("third", {"w"})
        again = kept.differences(keys, ["w"] * count, chunks, old[0].itemsize)
        assert again == ([b""] * count, 0)
    assert results[0] == results[1]


def test_memory_of_chunks_that_are_gone_is_freed_when_it_is_more_than_that_of_the_others():
    kept, rows = KeptChunks(), np.random.default_rng(0).integers(0, 256, (6, 1000), np.uint8)
    keys = [f"w/c/{i}" for i in range(6)]
    kept.begin("first", ())
    kept.keep(keys, rows)
    for attempt, present in (("second", 4), ("third", 3), ("fourth", 2), ("fifth", 2)):
        before = kept._chunks["w/c/0"]
        kept.begin(attempt, {"w"})
        # Unused chunks: 2, 3, 4; in use: 4, 3, 2.
        assert np.shares_memory(before, kept._chunks["w/c/0"]) == (attempt != "fifth")
        rows[:present, 5] += 1
        stored, changed = kept.differences(keys[:present], ["w"] * present, rows[:present], 1)
        assert changed == present
        assert all(len(chunk) < 500 for chunk in stored)


def test_chunks_that_share_their_memory_with_none_cause_no_copies_when_they_are_gone():
    kept, row = KeptChunks(), np.zeros(1000, np.uint8)
    kept.begin("first", ())
    kept.keep(["v/c/0"], np.empty((1, BLOCK // 2 + 1), np.uint8))
    kept.keep(["w/c/0"], row[np.newaxis])
    for attempt in ("second", "third"):
        before = kept._chunks["w/c/0"]
        kept.begin(attempt, {"w"})
        kept.differences(["w/c/0"], ["w"], [row], 1)
    assert kept._chunks.keys() == {"w/c/0"}
    assert kept._chunks["w/c/0"] is before


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
def test_a_chunk_that_has_changed_wholly_takes_the_memory_that_is_counted(itemsize):
    rng = np.random.default_rng(0)
    old, new = rng.integers(0, 256, (2, 1, 4 << 20), np.uint8)
    kept = KeptChunks()
    kept.begin("first", ())
    kept.keep(["w/c/0"], old)
    kept.begin("second", {"w"})
    tracemalloc.start()
    try:
        stored, _ = kept.differences(["w/c/0"], ["w"], new, itemsize)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert stored == [whole(new[0])]
    assert most < _CHUNK_COPIES["difference"] * new.nbytes
