"""Batches are read ahead of the one that is being placed, where that is faster."""

import threading
from contextlib import closing

import pytest

from shardckpt.io.threads import read_ahead

SECONDS = 20.0


def clock_of(used):
    """A clock by which one second passes until it is asked again, in which so many of processor
    time are used."""
    moments = iter([(0.0, 0.0), (1.0, used)])
    return lambda: next(moments)


class Reading:
    """Reads batches, and knows which it has begun with."""

    def __init__(self):
        self.begun = []
        self.changed = threading.Condition()

    def __call__(self, batch):
        with self.changed:
            self.begun.append(batch)
            self.changed.notify_all()
        return -batch

    def begins_with(self, batch):
        with self.changed:
            return self.changed.wait_for(lambda: batch in self.begun, SECONDS)


def lent(batch, _alone):
    return -batch


@pytest.mark.parametrize("ahead", [1, 2, 4])
@pytest.mark.parametrize(("copies", "used"), [(False, 1.6), (True, 0.4)])
def test_the_next_batches_are_read_while_one_is_placed(copies, used, ahead):
    reading, placed = Reading(), []
    for batch, value in read_ahead(
        range(1, 8), lent, reading, ahead=ahead, copies=copies, now=clock_of(used)
    ):
        assert value == -batch
        assert reading.begins_with(min(batch + ahead, 7))
        placed.append(batch)
    assert placed == sorted(reading.begun) == list(range(1, 8))


def test_reading_that_keeps_the_processors_busy_takes_turns_with_copying():
    reading = Reading()
    for batch, _ in read_ahead([1, 2, 3], lent, reading, ahead=2, copies=True, now=clock_of(1.6)):
        assert reading.begun[-1] == batch
    assert reading.begun == [1, 2, 3]


def test_a_batch_without_room_waits_until_earlier_ones_are_placed():
    held, asked = [], []

    def lend(batch, alone):
        asked.append((batch, alone))
        if sum(held) + batch > 5 and not alone:
            return None
        assert sum(held) + batch <= 5 or not held, (
            "it must not wait for what only its caller can give back"
        )
        held.append(batch)
        return batch

    placed = []
    for batch, value in read_ahead(
        [2, 3, 5, 1, 9, 1], lend, lambda _batch: None, ahead=2, copies=False
    ):
        placed.append(value)
        held.remove(batch)
    assert placed == [2, 3, 5, 1, 9, 1]
    assert (3, False) in asked


def test_nothing_is_read_any_more_when_it_is_closed():
    reading = Reading()
    before = set(threading.enumerate())
    with closing(read_ahead([1, 2, 3, 4], lent, reading, ahead=2, copies=False)) as batches:
        next(batches)
    assert 4 not in reading.begun
    assert set(threading.enumerate()) <= before, (
        "threads of earlier tests may end meanwhile; none is new"
    )


def test_what_reading_raises_comes_when_its_batch_is_asked_for():
    def read(batch):
        if batch == 2:
            raise ValueError("damaged")

    batches = read_ahead([1, 2], lent, read, ahead=2, copies=False)
    assert next(batches) == (1, -1)
    with pytest.raises(ValueError, match="damaged"):
        next(batches)


def test_a_single_batch_is_read_by_the_calling_thread():
    threads = []
    assert list(
        read_ahead(
            [1], lent, lambda _: threads.append(threading.current_thread()), ahead=2, copies=True
        )
    ) == [(1, -1)]
    assert threads == [threading.current_thread()]


def test_there_may_be_nothing_to_read():
    assert list(read_ahead([], lent, Reading(), ahead=2, copies=True)) == []
