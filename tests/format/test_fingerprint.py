"""Sums of blocks: the same for any cut of a tensor into boxes, and different for any other
elements."""

from __future__ import annotations

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt.errors import FormatError
from shardckpt.format import fingerprint
from shardckpt.format.fingerprint import (
    BLOCK_BYTES,
    Fingerprint,
    StateSums,
    add,
    crc_with_chunks,
    digest,
    multiply,
    no_sums,
)

DTYPES = (np.uint8, np.uint16, np.float32, np.complex128)


def sums_of(array):
    sums = no_sums(array.nbytes)
    add(sums, array.shape, (0,) * array.ndim, array)
    return sums


def naive(array):
    """By the definition, bit by bit of nothing but the checksum: each block, filled up with zeros
    at its end."""
    data = array.tobytes()
    blocks = [
        data[at : at + BLOCK_BYTES].ljust(BLOCK_BYTES, b"\0")
        for at in range(0, len(data), BLOCK_BYTES)
    ]
    return [crc32c(block, 0xFFFFFFFF) ^ 0xFFFFFFFF for block in blocks]


@st.composite
def cuts(draw):
    """An array, and boxes that have each of its elements once."""
    shape = draw(
        st.lists(st.integers(0, 9), max_size=4).filter(
            lambda shape: np.prod(shape, dtype=int) < 2000
        )
    )
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    rng = np.random.default_rng(draw(st.integers(0, 9)))
    array = (
        rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]
        if shape
        else np.array(rng.integers(9), dtype)
    )
    boxes = [tuple((0, n) for n in shape)]
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, len(boxes) - 1))
        sides = [d for d, (a, b) in enumerate(boxes[at]) if b - a > 1]
        if sides:
            d = draw(st.sampled_from(sides))
            a, b = boxes[at][d]
            middle = draw(st.integers(a + 1, b - 1))
            box = boxes.pop(at)
            boxes += [(*box[:d], part, *box[d + 1 :]) for part in ((a, middle), (middle, b))]
    return array, boxes


@settings(deadline=None, max_examples=300)
@given(cuts(), st.randoms(use_true_random=False), st.sampled_from([1, 40, 1024]))
def test_the_sums_of_any_cut_are_those_of_the_whole(cut, random, dense):
    array, boxes = cut
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fingerprint, "BLOCK_BYTES", 96)
        patch.setattr(fingerprint, "_AT_A_TIME", 64)
        patch.setattr(fingerprint, "_DENSE_BYTES", dense)
        whole, parts = sums_of(array), no_sums(array.nbytes)
        random.shuffle(boxes)
        for box in boxes:
            part = array[tuple(slice(a, b) for a, b in box)]
            if random.random() < 0.3 and part.ndim:
                part = np.asfortranarray(part)
            start = [a for a, _ in box]
            sums = fingerprint.sums_of_run(array.shape, start, part)
            by_itself = no_sums(array.nbytes)
            add(by_itself, array.shape, start, part)
            if sums is not None:
                fingerprint._add_run_sums(by_itself, *sums)
                assert not by_itself.any()
            add(parts, array.shape, start, part)
        assert parts.tolist() == whole.tolist()
        assert array.size == 0 or fingerprint.sums_of_run(array.shape, [0] * array.ndim, array)


@pytest.mark.parametrize(
    "nbytes", [0, 1, 3, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES + 12345]
)
def test_a_sum_is_the_remainder_of_its_block(nbytes):
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    assert sums_of(data).tolist() == naive(data)
    if nbytes > 10:
        halves = no_sums(nbytes)
        for a, b in ((0, nbytes // 3), (nbytes // 3, nbytes)):
            add(halves, (nbytes,), (a,), data[a:b])
        assert halves.tolist() == naive(data)


def test_columns_of_a_large_matrix_add_up():
    matrix = np.random.default_rng(0).standard_normal((5000, 1200), np.float32)  # 24 MB: two blocks
    for width in (1, 7, 300, 1200):
        sums = no_sums(matrix.nbytes)
        for a in range(0, 1200, width) if width > 1 else (0, 1):
            stop = a + width if width > 1 or a == 0 else 1200
            add(sums, matrix.shape, (0, a), matrix[:, a:stop])
        assert sums.tolist() == sums_of(matrix).tolist()


@settings(deadline=None)
@given(st.data())
def test_a_changed_bit_a_swap_another_dtype_and_another_shape_are_seen(data):
    array = np.random.default_rng(data.draw(st.integers(0, 9))).integers(0, 256, (64, 32), np.uint8)
    digests = {digest("uint8", array.shape, sums_of(array))}
    flipped = array.copy()
    flipped.reshape(-1)[data.draw(st.integers(0, array.size - 1))] ^= 1 << data.draw(
        st.integers(0, 7)
    )
    digests.add(digest("uint8", array.shape, sums_of(flipped)))
    size = data.draw(st.integers(1, 512))
    one, other = data.draw(st.integers(0, 512 - size)), data.draw(st.integers(512, 2048 - size))
    swapped = array.reshape(-1).copy()
    swapped[one : one + size], swapped[other : other + size] = (
        swapped[other : other + size].copy(),
        swapped[one : one + size].copy(),
    )
    same = np.array_equal(swapped, array.reshape(-1))
    digests.add(digest("uint8", array.shape, sums_of(swapped.reshape(64, 32))))
    digests.add(digest("int8", array.shape, sums_of(array)))
    digests.add(digest("uint8", (32, 64), sums_of(array)))
    assert len(digests) == (4 if same else 5)


def test_two_whole_blocks_that_changed_places_are_seen():
    data = np.random.default_rng(0).integers(0, 256, 2 * BLOCK_BYTES, np.uint8)
    assert sums_of(data).tolist() != sums_of(np.roll(data, BLOCK_BYTES)).tolist()


def test_products_are_those_of_shifting_bit_by_bit():
    one, power = np.array([1 << 31], np.uint32), np.array([1 << 31], np.uint32)
    x = np.array([1 << 30], np.uint32)
    for n in range(1, 200):
        power = multiply(power, x)
        # x^(8k+39) of a message of one bit.
        bits = crc32c(bytes([0x01]) + bytes(n // 8), 0xFFFFFFFF) ^ 0xFFFFFFFF
        if n % 8 == 0:
            shifted = multiply(
                np.array([crc32c(b"\x01", 0xFFFFFFFF) ^ 0xFFFFFFFF], np.uint32), power
            )
            assert int(shifted[0]) == bits
    assert multiply(one, x).tolist() == x.tolist()


@settings(max_examples=100, deadline=None)
@given(
    st.binary(max_size=40), st.lists(st.tuples(st.integers(0, 99), st.integers(1, 9)), max_size=4)
)
def test_the_crc32c_of_stored_chunks_follows_from_their_lengths(before, groups):
    rng = np.random.default_rng(len(before))
    data, crc = before, crc32c(before)
    for length, count in groups:
        for _ in range(count):
            elements = rng.bytes(length)
            data += elements + crc32c(elements).to_bytes(4, "little")
        crc = crc_with_chunks(crc, length + 4, count)
    assert crc == crc32c(data)


def test_fingerprints_name_what_differs():
    one, other = (
        Fingerprint({"a": "1", "b": "2", "c": "3"}),
        Fingerprint({"b": "2", "c": "4", "d": "1"}),
    )
    assert one.differing(other) == other.differing(one) == ["a", "c", "d"]
    assert one.total != other.total
    assert one.total == Fingerprint({"c": "3", "b": "2", "a": "1"}).total


def test_sums_that_do_not_fit_a_huge_shape_are_refused_without_memory_for_them():
    with pytest.raises(FormatError, match="x has 0 sums, which do not fit"):
        StateSums.from_json({"x": ["float32", [1 << 50, 1 << 10], ""]}, "sums")
