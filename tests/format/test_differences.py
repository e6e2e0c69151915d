"""Chunks stored as differences: any two chunks, and damaged ones."""

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.errors import CorruptionError
from shardckpt.format.differences import apply, changes, difference, needs_older, whole
from shardckpt.format.stored_chunks import compress

ITEMSIZES = st.sampled_from([1, 2, 4, 8, 16])


@st.composite
def pairs(draw):
    """An earlier and a later chunk, of which some elements differ, and the bytes of an element."""
    itemsize, count = draw(ITEMSIZES), draw(st.integers(1, 3000))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    old = rng.integers(0, 256, count * itemsize, np.uint8)
    new = old.copy()
    n = min(count, draw(st.sampled_from([0, 1, 2, count // 50, count // 4, count])))
    rows = rng.choice(count, n, replace=False)
    new.reshape(-1, itemsize)[rows, draw(st.integers(0, itemsize - 1))] ^= rng.integers(
        1, 256, n, np.uint8
    )
    return old, new, itemsize


@given(pairs())
def test_a_difference_turns_the_old_chunk_into_the_new_one_and_names_just_what_changed(pair):
    old, new, itemsize = pair
    kept, target = old.copy(), new.copy()
    encoded, count = difference(old, new, itemsize)
    stored = np.frombuffer(encoded, np.uint8)
    np.testing.assert_array_equal(new, target)
    np.testing.assert_array_equal(old, target)
    assert len(stored) <= 1 + len(new)
    assert count == (kept != target).reshape(-1, itemsize).any(axis=1).sum()
    assert needs_older(stored) == (len(stored) == 0 or stored[0] == 1)
    if len(stored) and stored[0] == 1:
        assert 2 * len(stored) <= len(new)
        position, growth, crc = changes(stored, len(new) // itemsize, itemsize, "w")
        differ = (kept != target).reshape(-1, itemsize).any(axis=1)
        np.testing.assert_array_equal(position, np.flatnonzero(differ))
        number = f"u{min(itemsize, 8)}"
        np.testing.assert_array_equal(
            growth.reshape(-1),
            (target.view(number) - kept.view(number)).reshape(len(differ), -1)[differ].reshape(-1),
        )
        assert crc == crc32c(target.tobytes())
    if not len(stored):
        np.testing.assert_array_equal(kept, target)
    apply(stored, kept, itemsize, "w")
    np.testing.assert_array_equal(kept, target)


def test_a_chunk_of_which_much_changed_is_stored_as_a_whole():
    rng = np.random.default_rng(0)
    old, new = rng.integers(0, 256, (2, 5000), np.uint8)
    assert difference(old, new, 4)[0] == whole(new)


def test_gaps_of_255_and_more_are_found_again():
    for gap in (253, 254, 255, 256, 257, 510, 511, 70_000):
        old = np.zeros(200_000, np.uint8)
        new = old.copy()
        new[[0, 1 + gap, 3 + 2 * gap]] = 7
        stored = np.frombuffer(difference(old.copy(), new, 1)[0], np.uint8)
        apply(stored, old, 1, "w")
        np.testing.assert_array_equal(old, new)


def test_a_difference_that_is_applied_to_other_elements_is_refused():
    old, new = np.zeros(1000, np.uint8), np.zeros(1000, np.uint8)
    new[5] = 1
    stored = np.frombuffer(difference(old, new, 2)[0], np.uint8)
    with pytest.raises(CorruptionError, match="its base is another one"):
        apply(stored, np.ones(1000, np.uint8), 2, "w")


@pytest.mark.parametrize("contents", [3, 0], ids=["fewer bytes", "none"])
def test_a_difference_whose_frame_has_fewer_bytes_than_its_changes_need_is_refused(contents):
    old, new = np.zeros(1000, np.uint8), np.zeros(1000, np.uint8)
    new[[5, 70, 900]] = 1
    head = difference(old, new, 2)[0][:13]
    stored = np.frombuffer(head + compress(np.zeros(contents, np.uint8)), np.uint8)
    with pytest.raises(CorruptionError, match="not a zstd frame of"):
        changes(stored, 500, 2, "w")


@given(st.data())
def test_damaged_differences_are_refused_or_change_nothing(data):
    old, new, itemsize = data.draw(pairs())
    stored = bytearray(difference(old.copy(), new, itemsize)[0])
    if not stored:
        return
    for at in data.draw(st.lists(st.integers(0, len(stored) - 1), min_size=1, max_size=3)):
        stored[at] ^= data.draw(st.integers(1, 255))
    del stored[data.draw(st.integers(1, len(stored))) :]
    elements = old.copy()
    try:
        apply(np.frombuffer(bytes(stored), np.uint8), elements, itemsize, "w")
    except CorruptionError:
        return
    if stored[0] == 1:  # a whole chunk has no checksum of its own
        np.testing.assert_array_equal(elements, new)
