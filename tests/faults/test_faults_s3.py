"""Saves to and restores from S3, by a real TensorStore, while the storage fails: what differs from Cloud Storage."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from emulators import s3_emulator
from faults import TORTURE, TRANSIENT, Rule, faulty_cloud, make_state, random_rules
from placeholders import put_placeholder

import shardckpt
from shardckpt.commit import publish as commit
from shardckpt.commit.collect import collect
from shardckpt.errors import AlreadyExistsError, NotFoundError, StorageError
from shardckpt.io.store import Store
from shardckpt.writing import packed

pytestmark = pytest.mark.slow

STATE, OTHER = make_state(0), make_state(1)
RECORD = "*/checkpoint.json"
OF_UPLOADS = {
    "request timeout": {"fault": "status", "status": 400},  # S3's RequestTimeout
    "conflict": {"fault": "status", "status": 409},  # two conditional writes of one object at once
}


@pytest.fixture(scope="module")
def bucket():
    with s3_emulator("faults-s3") as emulator, faulty_cloud(emulator) as cloud:
        yield cloud


@pytest.fixture
def cloud(bucket, monkeypatch):
    """A bucket behind the proxy; a small state has several data files."""
    monkeypatch.setattr(packed, "OBJECT_BYTES", 40_000)
    return bucket


@pytest.mark.parametrize("fault", TRANSIENT | OF_UPLOADS)
def test_a_save_survives_failures_of_every_kind_of_request(cloud, fault):
    url = cloud.place()
    kinds = ("upload",) if fault in OF_UPLOADS else ("upload", "read", "stat")
    with cloud.breaking(*(Rule(**(TRANSIENT | OF_UPLOADS)[fault], kinds=(kind,), times=2) for kind in kinds)):
        assert cloud.attempt_save(url, STATE) is None
        assert cloud.injected() == 2 * len(kinds)
    cloud.assert_whole(url, STATE)


@pytest.mark.parametrize("fault", TRANSIENT if TORTURE else ["lost answer"])
def test_a_save_survives_that_any_one_request_fails(cloud, fault):
    for _ in cloud.each_request(TRANSIENT[fault], step=1 if TORTURE else 6, at_least=20):
        url = cloud.place()
        assert cloud.attempt_save(url, STATE) is None
        cloud.assert_whole(url, STATE)


@pytest.mark.parametrize("fault", TRANSIENT)
def test_a_restore_survives_that_any_one_request_fails(cloud, fault):
    url = cloud.place()
    shardckpt.save(url, STATE)
    for _ in cloud.each_request(TRANSIENT[fault], at_least=4):
        assert cloud.attempt_restore(url, STATE)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_commit_whose_answer_is_lost_is_not_taken_for_somebody_else_s(cloud, overwrite):
    url = cloud.place()
    if overwrite:
        shardckpt.save(url, OTHER)
    else:
        put_placeholder(url)
    with cloud.breaking(Rule("lost-answer", kinds=("upload",), objects=RECORD)):
        assert cloud.attempt_save(url, STATE, overwrite=overwrite) is None
        exchanges = cloud.proxy.traffic.exchanges(cloud.name_of(url, "checkpoint.json"))
    assert [e.status for e in exchanges if e.operation.kind == "upload"][:2] == [None, 412]
    cloud.assert_whole(url, STATE)


@pytest.mark.parametrize("put", ["placeholder", "fence"])
def test_a_tombstone_that_goes_before_its_writer_has_an_answer_does_not_come_back(cloud, put):
    """The answer to its creation is lost, so it is tried again; and in between somebody removes it."""
    store = Store.open(cloud.place())
    if put == "fence":  # what a version has begun that put no placeholder there
        store.write("20260101T000000-00000000/small", b"")

    def create():
        if put == "fence":
            assert collect(store, grace=0)[0].outcome == "removed"
        else:
            assert commit.hold_place(store, commit.read_prior(store, overwrite=False), overwrite=False).holds

    slow = [
        Rule("latency", seconds=1, kinds=("upload",), objects=RECORD, skip=1),
        Rule("latency", seconds=0.3, kinds=("delete",), objects=RECORD, skip=1),
    ]
    with ThreadPoolExecutor(1) as pool, cloud.breaking(*slow, Rule("lost-answer", kinds=("upload",), objects=RECORD)):
        creating = pool.submit(create)
        while not (first := store.read_versioned(commit.RECORD)[0]):
            time.sleep(0.01)
        store.delete(commit.RECORD)
        while not creating.done() and (second := store.read_versioned(commit.RECORD)[0]) is None:
            time.sleep(0.01)
        creating.result()
    assert second is not None
    assert first != second


@pytest.mark.parametrize("lost_answers", [0, 2, 4])
def test_of_many_that_save_at_one_place_exactly_one_commits(cloud, lost_answers):
    url = cloud.place()
    slow = Rule("latency", seconds=0.3, kinds=("upload", "stat"), objects=RECORD, times=None)
    lost = Rule("lost-answer", kinds=("upload",), objects=RECORD, times=lost_answers)
    states = [make_state(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool, cloud.breaking(slow, lost):
        errors = list(pool.map(cloud.attempt_save, [url] * 4, states))
    (winner,) = (state for state, error in zip(states, errors, strict=True) if error is None)
    assert sum(isinstance(error, AlreadyExistsError) for error in errors) == 3
    cloud.assert_whole(url, winner)


@pytest.mark.parametrize("status", [403, 503])
@pytest.mark.parametrize("key", ["hosts/00000/0/d/00001", "records/00000.json", "checkpoint.json"])
def test_a_save_fails_with_the_url_of_the_object_that_cannot_be_written(cloud, key, status):
    url = cloud.place()
    with cloud.breaking(Rule("status", status=status, kinds=("upload",), objects=f"*/{key}", times=None)):
        error = cloud.attempt_save(url, STATE)
    assert isinstance(error, StorageError)
    assert url in str(error)
    assert key in str(error)
    with pytest.raises(NotFoundError):
        shardckpt.open(url)
    shardckpt.save(url, STATE)
    cloud.assert_whole(url, STATE)


@pytest.mark.parametrize("seed", range(300 if TORTURE else 4))
def test_whatever_fails_a_checkpoint_is_whole_or_not_there(cloud, seed):
    url = cloud.place()
    with cloud.breaking(*random_rules(2 * seed)):
        error = cloud.attempt_save(url, STATE)
    found = cloud.committed(url, STATE)
    assert found is STATE or error is not None
    if found is not None:
        with cloud.breaking(*random_rules(2 * seed + 1)):
            cloud.attempt_restore(url, found)
