"""Host buffers stay inside their budget and are used again."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt.io.budget import BufferPool, round_up


@given(st.lists(st.integers(0, 9000), max_size=40))
@settings(max_examples=100, deadline=None)
def test_no_more_than_the_limit_exists_unless_one_lease_is_larger(requests):
    pool = BufferPool(4096)
    for nbytes in requests:
        with pool.take(nbytes):
            pass
    assert pool.high_water <= max([pool.limit, *map(round_up, requests)])


@given(st.lists(st.integers(0, 2000), min_size=1, max_size=20))
@settings(max_examples=20, deadline=None)
def test_threads_that_share_a_pool_stay_inside_its_limit(requests):
    pool = BufferPool(4096)

    def use(nbytes):
        with pool.take(nbytes) as lease:
            lease.array((nbytes,), np.uint8)[...] = 1

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(use, requests))
    assert pool.high_water <= pool.limit


def test_a_buffer_that_was_given_back_is_used_again():
    pool = BufferPool(1 << 20)
    with pool.take(1000) as first:
        address = first.array((1000,), np.uint8).ctypes.data
    with pool.take(900) as second:
        assert second.array((900,), np.uint8).ctypes.data == address
    assert pool.high_water == round_up(1000)


def test_arrays_of_one_lease_do_not_share_memory_and_are_aligned():
    with BufferPool(1 << 20).take(round_up(12) + round_up(8)) as lease:
        a, b = lease.array((3,), np.float32), lease.array((), np.float64)
        a[...], b[...] = 1, 2
        assert a.tolist() == [1, 1, 1]
        assert b.tolist() == 2
        assert a.ctypes.data % 64 == b.ctypes.data % 64 == 0


def test_a_request_waits_until_there_is_room():
    pool = BufferPool(1000)
    first = pool.take(800)
    got = threading.Event()

    def second():
        with pool.take(800):
            got.set()

    thread = threading.Thread(target=second)
    thread.start()
    assert not got.is_set()
    first.give_back()
    thread.join(10)
    assert got.is_set()
    assert pool.high_water <= 1000


def test_a_request_larger_than_the_limit_is_let_through_alone():
    pool = BufferPool(1000)
    with pool.take(5000) as lease:
        assert lease.array((5000,), np.uint8).nbytes == 5000
    with pool.take(10):
        pass
    assert pool.high_water == round_up(5000)


def test_who_gives_up_waiting_gets_nothing():
    pool = BufferPool(1000)
    given_up = threading.Event()
    with pool.take(800):
        assert pool.take_unless(800, lambda: True) is None
        waiting = ThreadPoolExecutor(1).submit(pool.take_unless, 800, given_up.is_set)
        given_up.set()
        pool.wake()
        assert waiting.result(10) is None
    with pool.take(800):
        pass


def test_what_others_allocate_counts_as_lent():
    pool = BufferPool(1000)
    with pool.take(600):
        pass
    pool.reserve(500)
    assert pool.kept == []
    assert pool.high_water <= 1000
    with pool.take(400):
        assert pool.take_unless(200, lambda: True) is None
    pool.release(500)
    with pool.take(1000 // 64 * 64):
        assert pool.high_water <= 1000


def test_a_request_larger_than_what_is_reserved_leaves_goes_alone():
    pool = BufferPool(1000)
    pool.reserve(900)
    with pool.take(500):
        assert pool.take_unless(64, lambda: True) is None


def test_buffers_that_are_kept_can_be_freed():
    pool = BufferPool(1000)
    with pool.take(100):
        pool.clear()
    assert len(pool.kept) == 1
    pool.clear()
    assert pool.kept == []
