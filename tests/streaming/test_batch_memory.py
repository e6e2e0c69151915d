"""The memory that batches of a reshard or an export share."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.streaming.batches import BatchMemory

SMALL = 64
SIZES = st.sampled_from([1, SMALL, SMALL + 1, 10 * SMALL])


@given(st.lists(SIZES, min_size=2, max_size=20))
def test_a_batch_never_has_the_place_of_the_one_before(sizes: list[int]) -> None:
    memory = BatchMemory()
    places = [memory.next(nbytes, SMALL) for nbytes in sizes]
    assert not any(one.meets(other) for one, other in pairwise(places))


@given(st.lists(SIZES, min_size=2, max_size=20))
def test_places_that_do_not_meet_share_no_byte(sizes: list[int]) -> None:
    memory, held = BatchMemory(), []
    for nbytes in sizes:
        place = memory.next(nbytes, SMALL)
        held = [(other, raw) for other, raw in held if not other.meets(place)]
        raw = memory.at(place, nbytes, SMALL)[:nbytes]
        assert len(raw) == nbytes
        assert not any(np.shares_memory(raw, other) for _, other in held)
        held.append((place, raw))


def test_small_batches_have_the_four_parts_in_turn() -> None:
    memory = BatchMemory()
    places = [memory.next(SMALL, SMALL) for _ in range(5)]
    assert len({(place.half, place.parts.start) for place in places[:4]}) == 4
    assert places[4] == places[0]
