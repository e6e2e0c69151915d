"""Requests of a process begin evenly, and those of many processes evenly among each other."""

from __future__ import annotations

import itertools
import uuid

import numpy as np
import pytest
from emulators import environment
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.io.buckets import cloud
from shardckpt.io.buckets.rate_limit import ALONE, RateLimiter, RequestShare
from shardckpt.io.store import Store

shares = st.integers(1, 50).flatmap(
    lambda n: st.builds(RequestShare, st.integers(0, n - 1), st.just(n))
)


class Clock:
    """Time passes only while somebody sleeps."""

    def __init__(self, now=0.0, wall=0.0):
        self.now, self.ahead = now, wall - now

    def __call__(self):
        return self.now

    def wall(self):
        return self.now + self.ahead

    def sleep(self, seconds):
        self.now += seconds

    def limiter(self, rate, share):
        return RateLimiter(rate, share, clock=self, wall=self.wall, sleep=self.sleep)


@given(
    st.floats(0.01, 1000),
    shares,
    st.floats(0, 1e9),
    st.lists(st.floats(0, 100), min_size=1, max_size=30),
)
def test_requests_begin_no_faster_than_the_share_and_no_slower(rate, share, wall, idle):
    clock, apart = Clock(wall=wall), share.processes / rate
    limiter = clock.limiter(rate, share)
    began = []
    for seconds in idle:
        clock.sleep(seconds)
        came = clock.now
        limiter.wait()
        soonest = max(came, began[-1] + apart if began else 0)
        assert (
            soonest * (1 - 1e-6)
            <= clock.now
            <= soonest + (apart if share != ALONE else 0) + 1e-6 * apart
        )
        began.append(clock.now)
    assert all(b - a >= apart * (1 - 1e-6) for a, b in itertools.pairwise(began))


@given(st.integers(2, 40), st.integers(1, 5), st.floats(0, 1e9))
def test_processes_that_start_together_begin_their_requests_one_after_another(
    processes, requests, wall
):
    """However long they have been up: it is the clock on the wall that they have in common."""
    began = []
    for process in range(processes):
        clock = Clock(now=1000.0 * process, wall=wall)
        limiter = clock.limiter(100.0, RequestShare(process, processes))
        for _ in range(requests):
            limiter.wait()
            began.append(clock.wall())
    gaps = np.diff(sorted(began))
    np.testing.assert_allclose(gaps, 0.01, atol=1e-5)


@given(shares, st.floats(-0.5, 0.5))
def test_a_clock_that_is_wrong_makes_nobody_wait_longer(share, error):
    clock = Clock(wall=1.7e9 + error)
    clock.limiter(10.0, share).wait()
    assert clock.now <= share.processes / 10.0


@pytest.fixture
def paced():
    """Paces are made anew, before and after."""
    cloud._limiter.cache_clear()
    yield
    cloud._limiter.cache_clear()


def test_each_process_of_a_job_has_its_share_of_what_a_bucket_bears(paced):
    for kind, rate in cloud.BUCKET.items():
        assert cloud._limiter(kind, RequestShare(7, 4096))._apart == 4096 / rate
        assert cloud._limiter(kind, ALONE)._apart == 1 / rate


def test_a_rate_that_is_set_is_this_process_s_whatever_its_share(paced):
    with environment({"SHARDCKPT_WRITES_PER_SECOND": "5"}):
        assert cloud._limiter("write", RequestShare(7, 4096)) is cloud._limiter("write", ALONE)
        assert cloud._limiter("write", ALONE)._apart == 0.2


def test_a_store_s_share_holds_below_it_too(cloud_store, monkeypatch):
    asked = []
    monkeypatch.setattr(cloud, "wait_for_rate", lambda kind, share: asked.append((kind, share)))
    store = cloud_store.among(2, 3).sub(uuid.uuid4().hex)
    store.write("a", b"x")
    store.read("a")
    store.delete("a")
    assert asked == [(kind, RequestShare(2, 3)) for kind in ("write", "read", "write")]


def test_nothing_is_paced_on_a_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(cloud, "wait_for_rate", None)
    store = Store.open(tmp_path).among(2, 3)
    store.write("a", b"x")
    assert store.read("a") == b"x"
