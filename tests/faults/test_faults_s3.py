"""Faults that S3 alone has: two answers that only it gives, and a request that it may do twice."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from faults import Rule, make_state

from shardckpt.commit import publish as commit
from shardckpt.io.store import Store
from shardckpt.runs.collecting import collect_place as collect

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("bucket", ["s3"], indirect=True)]

STATE = make_state()
RECORD = "*/checkpoint.json"
REQUEST_TIMEOUT, CONFLICT = 400, 409
"""The codes of RequestTimeout, and of two conditional writes of one object at once."""


@pytest.mark.parametrize("status", [REQUEST_TIMEOUT, CONFLICT])
def test_a_save_survives_an_upload_s_answer_that_asks_for_another_try(cloud, status):
    url = cloud.place()
    with cloud.breaking(Rule("status", status=status, kinds=("upload",), times=2)):
        assert cloud.attempt_save(url, STATE) is None
        assert cloud.injected() == 2
    cloud.assert_whole(url, STATE)


@pytest.mark.parametrize("put", ["placeholder", "fence"])
def test_a_tombstone_that_goes_before_its_writer_has_an_answer_does_not_come_back(cloud, put):
    """The answer to its creation is lost, so it is tried again; and in between somebody removes
    it."""
    store = Store.open(cloud.place())
    if put == "fence":  # what a version has begun that put no placeholder there
        store.write("20260101T000000-00000000/small", b"")

    def create():
        if put == "fence":
            assert collect(store, grace=0)[0].outcome == "removed"
        else:
            assert commit.hold_place(
                store, commit.read_prior(store, overwrite=False), overwrite=False
            ).holds

    slow = [
        Rule("latency", seconds=5, kinds=("upload",), objects=RECORD, skip=1),
        Rule("latency", seconds=0.3, kinds=("delete",), objects=RECORD, skip=1),
    ]
    with (
        ThreadPoolExecutor(1) as pool,
        cloud.breaking(*slow, Rule("lost-answer", kinds=("upload",), objects=RECORD)),
    ):
        creating = pool.submit(create)
        while not (first := store.read_versioned(commit.RECORD)[0]):
            time.sleep(0.01)
        store.delete(commit.RECORD)
        while not creating.done() and (second := store.read_versioned(commit.RECORD)[0]) is None:
            time.sleep(0.01)
        creating.result()
        # It may have come and been answered since the last look.
        second = second or store.read_versioned(commit.RECORD)[0]
    assert second is not None
    assert first != second
