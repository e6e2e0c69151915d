"""One batch is read ahead of the one that is being placed, where that is faster."""

import threading
from contextlib import closing

import pytest

from shardckpt.io.threads import read_ahead

SECONDS = 20.0


def clock_of(used):
    """A clock by which one second passes until it is asked again, in which so many of processor time are used."""
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


@pytest.mark.parametrize(("copies", "used"), [(False, 1.6), (True, 0.4)])
def test_the_next_batch_is_read_while_one_is_placed(copies, used):
    reading = Reading()
    for batch, result in read_ahead([1, 2, 3], reading, copies=copies, now=clock_of(used)):
        assert result == -batch
        assert batch == 3 or reading.begins_with(batch + 1)
    assert reading.begun == [1, 2, 3]


def test_reading_that_keeps_the_processors_busy_takes_turns_with_copying():
    reading = Reading()
    for batch, _ in read_ahead([1, 2, 3], reading, copies=True, now=clock_of(1.6)):
        assert reading.begun[-1] == batch
    assert reading.begun == [1, 2, 3]


def test_nothing_is_read_any_more_when_it_is_closed():
    reading = Reading()
    before = set(threading.enumerate())
    with closing(read_ahead([1, 2, 3], reading, copies=False)) as batches:
        next(batches)
    assert 3 not in reading.begun
    assert set(threading.enumerate()) <= before, "threads of earlier tests may end meanwhile; none is new"


def test_what_reading_raises_comes_when_its_batch_is_asked_for():
    def read(batch):
        if batch == 2:
            raise ValueError("damaged")

    batches = read_ahead([1, 2], read, copies=False)
    assert next(batches) == (1, None)
    with pytest.raises(ValueError, match="damaged"):
        next(batches)


def test_there_may_be_nothing_to_read():
    assert list(read_ahead([], Reading(), copies=True)) == []
