"""Host buffers stay inside their budget and are used again."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interrupting import interrupted

from shardckpt.io import buffers, files
from shardckpt.io.buffers import BufferPool, KeptBuffers, round_up


@given(st.lists(st.integers(0, 9000), max_size=40))
@settings(max_examples=100, deadline=None)
def test_no_more_than_the_limit_exists_unless_one_lease_is_larger(requests):
    pool = BufferPool(4096)
    for nbytes in requests:
        with pool.take(nbytes):
            pass
    assert pool.high_water <= max([pool.limit, *map(round_up, requests)])


@given(
    st.lists(
        st.tuples(st.integers(0, 2000), st.integers(0, 2000), st.integers(0, 5000)),
        min_size=1,
        max_size=20,
    )
)
@settings(max_examples=20, deadline=None)
def test_threads_that_share_a_pool_stay_inside_its_limit(requests):
    pool = BufferPool(4096)

    def use(request):
        nbytes, beside, most = request
        with pool.take(nbytes, most=most, beside=beside) as lease:
            lease.array((lease.nbytes,), np.uint8)[...] = 1
            lease.release(beside // 2)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(use, requests))
    assert pool.high_water <= pool.limit
    assert pool.take_at_once(pool.limit) is not None  # all was given back


def test_ctrl_c_that_keeps_a_lease_from_its_user_leaves_nothing_leased():
    for at in count():
        pool = BufferPool(1 << 20)
        outcome = interrupted(
            at,
            buffers.__file__,
            lambda _code: False,
            lambda pool=pool: pool.take(1 << 20),
            lambda pool=pool: pool.take_at_once(1 << 20) is not None,
        )
        if outcome is None:
            break
        assert outcome, f"interrupt {at}"
    assert at > 20


@pytest.mark.parametrize(
    "write",
    [
        lambda fd: files.write_all(fd, b"abc"),
        lambda fd: buffers.gather_write(fd, 0, [memoryview(b"abc"), memoryview(b"")]),
    ],
)
def test_a_file_system_that_accepts_no_bytes_and_gives_no_reason_is_an_error(
    tmp_path, monkeypatch, write
):
    monkeypatch.setattr(os, "write", lambda *_: 0)
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with (tmp_path / "f").open("wb") as file, pytest.raises(OSError, match="accepts no bytes"):
        write(file.fileno())


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
    thread.join(60)
    assert got.is_set()
    assert pool.high_water <= 1000


def test_a_request_larger_than_the_limit_is_let_through_alone():
    pool = BufferPool(1000)
    with pool.take(5000) as lease:
        assert lease.array((5000,), np.uint8).nbytes == 5000
    with pool.take(10):
        pass
    assert pool.high_water == round_up(5000)


def test_a_pool_with_a_lower_limit_frees_what_is_too_much_and_keeps_the_rest():
    pool = BufferPool(4096)
    with pool.take(1024), pool.take(2048):
        pass
    pool.resize(2048)
    assert len(pool.kept) == 1
    with pool.take(1024):
        assert pool.take_at_once(2048) is None
    pool.resize(4096)
    with pool.take(1024):
        assert pool.take_at_once(2048) is not None


def test_a_request_that_may_not_wait_gets_nothing_if_there_is_no_room():
    pool = BufferPool(1000)
    with pool.take(800):
        assert pool.take_at_once(800) is None
    with pool.take_at_once(800):
        pass


def test_what_others_allocate_beside_a_lease_counts_as_lent():
    pool = BufferPool(1024)
    with pool.take(640):
        pass
    with pool.take(64, beside=448) as lease:
        assert pool.kept == []
        assert pool.take_at_once(576) is None
        lease.release(192)
        with pool.take_at_once(704):
            assert pool.take_at_once(1) is None
    with pool.take_at_once(1024):
        assert pool.high_water == 1024


def test_a_request_may_say_what_it_would_rather_have():
    pool = BufferPool(1024)
    with pool.take(128, most=4096, beside=256) as all_there_is:
        assert all_there_is.nbytes == 768
    pool.clear()
    with pool.take(128, most=512) as what_it_wants, pool.take(128, most=4096) as the_rest:
        assert (what_it_wants.nbytes, the_rest.nbytes) == (512, 512)
    assert pool.high_water <= 1024


def test_a_request_that_is_too_large_beside_what_is_counted_waits_until_nothing_is():
    pool = BufferPool(1000)
    counted = pool.take(0, beside=900)
    assert pool.take_at_once(500) is None
    assert pool.take_at_once(5000) is None
    counted.give_back()
    with pool.take_at_once(5000):
        assert pool.take_at_once(64) is None


def test_requests_are_served_in_the_order_in_which_they_come():
    """Else a large one might wait for ever while small ones come and go."""
    pool = BufferPool(1024)
    small, served = pool.take(512), []

    def use(nbytes):
        with pool.take(nbytes):
            served.append(nbytes)

    with ThreadPoolExecutor(2) as threads:
        large = threads.submit(use, 1024)
        wait_until(lambda: len(pool._waiting) == 1)
        assert pool.take_at_once(64) is None
        later = threads.submit(use, 64)
        wait_until(lambda: len(pool._waiting) == 2)
        small.give_back()
        large.result(60)
        later.result(60)
    assert served == [1024, 64]


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_buffers_that_are_kept_can_be_freed():
    pool = BufferPool(1000)
    with pool.take(100):
        pool.clear()
    assert len(pool.kept) == 1
    pool.clear()
    assert pool.kept == []


def test_kept_buffers_are_used_again_and_further_ones_go():
    kept = KeptBuffers(300)
    first, second = kept.take(100), kept.take(100)
    assert first is not second
    kept.give_back(first)
    assert kept.take(100) is first
    kept.give_back(first)
    assert kept.take(50).nbytes == 50
    assert kept.take(100) is not first, (
        "buffers of other sizes are not counted in anybody's limit, so they went"
    )
    for buffer in (first, second, np.empty(150, np.uint8)):
        kept.give_back(buffer)
    assert kept.take(100) is first
    assert kept.take(100) is second, "the third went, because 350 bytes are too many"
    kept.clear()
    assert kept.take(150) is not buffer
