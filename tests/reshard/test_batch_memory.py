"""The memory that batches of a reshard or an export share."""

from __future__ import annotations

from shardckpt.reshard.assembling import BatchMemory

SMALL = 64


def test_what_is_given_back_is_used_next() -> None:
    memory = BatchMemory()
    first = memory.take(SMALL, SMALL, None)
    second = memory.take(SMALL, SMALL, first)
    assert first is not None
    assert second is not None
    memory.give_back(first)
    assert memory.take(SMALL, SMALL, second) == first


def test_a_batch_never_has_the_place_of_the_one_before() -> None:
    memory = BatchMemory()
    for nbytes in (SMALL, 10 * SMALL):
        last = memory.take(nbytes, SMALL, None)
        assert last is not None
        memory.give_back(last)
        for following in (SMALL, 10 * SMALL):
            place = memory.take(following, SMALL, last)
            assert place is not None
            assert place.half != last.half or not set(place.parts) & set(last.parts)
            memory.give_back(place)


def test_a_large_batch_waits_until_half_of_the_memory_is_free() -> None:
    memory = BatchMemory()
    places = [memory.take(SMALL, SMALL, None) for _ in range(4)]
    assert None not in places
    assert memory.take(SMALL, SMALL, None) is None
    memory.give_back(places[0])  # type: ignore[arg-type]
    assert memory.take(2 * SMALL, SMALL, None) is None
    memory.give_back(places[1])  # type: ignore[arg-type]
    assert memory.take(2 * SMALL, SMALL, None) is not None
