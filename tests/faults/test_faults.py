"""Saves to and restores from object stores, by a real TensorStore, while the storage fails in every
way that it can."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from itertools import product

import numpy as np
import pytest
import zarr
from fault_saver import save_value
from faults import NOT_LISTINGS, TORTURE, TRANSIENT, Rule, make_state, patience_of, random_rules
from paths import CHILDREN
from placeholders import put_placeholder

import shardckpt
from shardckpt.errors import CorruptionError, NotFoundError, StorageError
from shardckpt.io.failures import PROBE
from shardckpt.io.store import Store

pytestmark = pytest.mark.slow

CHILD = CHILDREN / "fault_saver.py"
STATE, OTHER = make_state(0), make_state(1)
LAYOUTS = ["packed", "zarr"]
RECORD = "*/checkpoint.json"
DATA_FILE = "*/hosts/00000/0/d/00001"
ON_ONE_STORE = pytest.mark.parametrize("bucket", ["gs"], indirect=True)
"""For what does not depend on the store's protocol."""


def on_each_store(names, *, gs, s3):
    """Run a test on both stores, on each with its own values of these parameters."""
    cases = [
        (store, *(case if isinstance(case, tuple) else (case,)))
        for store, of_store in (("gs", gs), ("s3", s3))
        for case in of_store
    ]
    return pytest.mark.parametrize(("bucket", *names), cases, indirect=["bucket"])


# --- faults that pass -----------------------------------------------------------------------------


@on_each_store(
    ["fault", "layout"], gs=product(TRANSIENT, LAYOUTS), s3=product(TRANSIENT, ["packed"])
)
def test_a_save_survives_failures_of_every_kind_of_request(cloud, fault, layout):
    url = cloud.place()
    times = {"upload": 3, "read": 2}  # a process that saves alone sends no others
    with cloud.breaking(
        *(Rule(**TRANSIENT[fault], kinds=(kind,), times=n) for kind, n in times.items())
    ):
        assert cloud.attempt_save(url, STATE, layout=layout) is None
        assert cloud.injected() == sum(times.values())
    cloud.assert_whole(url, STATE)


@on_each_store(
    ["fault", "layout", "step"],
    gs=product(TRANSIENT, LAYOUTS, [1]) if TORTURE else [("lost answer", "packed", 3)],
    s3=product(TRANSIENT, ["packed"], [1]) if TORTURE else [("lost answer", "packed", 6)],
)
def test_a_save_survives_that_any_one_request_fails(cloud, fault, layout, step):
    for _ in cloud.each_request(TRANSIENT[fault], step=step, at_least=20):
        url = cloud.place()
        assert cloud.attempt_save(url, STATE, layout=layout) is None
        cloud.assert_whole(url, STATE)


@ON_ONE_STORE
@pytest.mark.parametrize("fault", TRANSIENT if TORTURE else ["lost answer"])
def test_a_save_that_replaces_survives_that_any_one_request_fails(cloud, fault):
    url = cloud.place()
    shardckpt.save(url, OTHER)
    for k in cloud.each_request(TRANSIENT[fault], step=1 if TORTURE else 5):
        state = make_state(k)
        assert cloud.attempt_save(url, state, overwrite=True) is None
        cloud.assert_whole(url, state)
    assert len({key.partition("/")[0] for key in cloud.keys(url)}) == 2, (
        "something of those that were replaced is left"
    )


@pytest.mark.parametrize("fault", TRANSIENT)
def test_a_restore_survives_that_any_one_request_fails(cloud, fault):
    url = cloud.place()
    shardckpt.save(url, STATE)
    for _ in cloud.each_request(TRANSIENT[fault], at_least=4):
        assert cloud.attempt_restore(url, STATE)


@on_each_store(
    ["overwrite", "times"], gs=product([False, True], [1, 3]), s3=product([False, True], [1])
)
def test_a_commit_whose_answer_is_lost_is_not_taken_for_somebody_else_s(cloud, overwrite, times):
    url = cloud.place()
    if overwrite:
        shardckpt.save(url, OTHER)
    else:
        put_placeholder(url)
    with cloud.breaking(Rule("lost-answer", kinds=("upload",), objects=RECORD, times=times)):
        assert cloud.attempt_save(url, STATE, overwrite=overwrite) is None
        exchanges = cloud.proxy.traffic.exchanges(cloud.name_of(url, "checkpoint.json"))
    assert [e.status for e in exchanges if e.operation.kind == "upload"] == [None] * times + [412]
    cloud.assert_whole(url, STATE)


@ON_ONE_STORE
@pytest.mark.parametrize("fault", ["429", "reset"])
def test_a_bucket_that_is_down_for_a_while_is_waited_for(cloud, fault):
    url = cloud.place()
    with (
        patience_of("60"),
        ThreadPoolExecutor(1) as pool,
        cloud.breaking(Rule(**TRANSIENT[fault], times=None)),
    ):
        saving = pool.submit(shardckpt.save, url, STATE)
        while cloud.injected() < 2:
            assert not saving.done()
        cloud.proxy.rules.clear()
        saving.result()
    cloud.assert_whole(url, STATE)


@ON_ONE_STORE
def test_a_limit_on_how_often_one_object_is_written_is_waited_out(cloud):
    url = cloud.place()
    # The service allows one write per second.
    with patience_of("2"), cloud.breaking(Rule("rate", seconds=0.3, times=None)):
        shardckpt.save(url, STATE)
    cloud.assert_whole(url, STATE)


# --- faults that stay -----------------------------------------------------------------------------

REFUSED = {
    "503": {"fault": "status", "status": 503},
    "403": {"fault": "status", "status": 403},
    "reset": {"fault": "reset"},
}


@on_each_store(
    ["key", "fault"],
    gs=product(
        [
            "hosts/00000/0/d/00001",
            "hosts/00000/table",
            "records/00000.json",
            "manifest.ocdbt",
            "checkpoint.json",
        ],
        REFUSED,
    ),
    s3=product(["hosts/00000/0/d/00001", "records/00000.json", "checkpoint.json"], ["403", "503"]),
)
def test_a_save_fails_with_the_url_of_the_object_that_cannot_be_written(cloud, key, fault):
    url = cloud.place()
    with cloud.breaking(Rule(**REFUSED[fault], kinds=("upload",), objects=f"*/{key}", times=None)):
        error = cloud.attempt_save(url, STATE)
    assert isinstance(error, StorageError)
    assert url in str(error)
    assert key in str(error)
    # Else a record vouches for the attempt, or may come to, and somebody else may commit it.
    if key.startswith("hosts/"):
        assert cloud.keys(url) == [], "something of the attempt is left"
    with pytest.raises(NotFoundError):
        shardckpt.open(url)
    shardckpt.save(url, STATE)
    cloud.assert_whole(url, STATE)


@ON_ONE_STORE
def test_a_replacement_that_fails_leaves_what_was_there(cloud):
    url = cloud.place()
    shardckpt.save(url, OTHER)
    for pattern in (RECORD, DATA_FILE):
        with cloud.breaking(Rule("status", kinds=("upload",), objects=pattern, times=None)):
            assert isinstance(cloud.attempt_save(url, STATE, overwrite=True), StorageError)
        cloud.assert_whole(url, OTHER)


@ON_ONE_STORE
@pytest.mark.parametrize("begins_with", [0, 5])
def test_a_save_into_a_bucket_that_goes_down_fails_in_time_and_says_where(cloud, begins_with):
    url = cloud.place()
    with cloud.breaking(
        Rule("reset", kinds=() if TORTURE else NOT_LISTINGS, skip=begins_with, times=None)
    ):
        error = cloud.attempt_save(url, STATE)
    assert isinstance(error, StorageError)
    assert url in str(error)
    assert cloud.committed(url, STATE) is None


@ON_ONE_STORE
def test_a_commit_that_is_neither_confirmed_nor_denied_is_left_as_it_is(cloud):
    url = cloud.place()
    put_placeholder(url)
    # After the look for a record.
    outage = Rule("reset", kinds=NOT_LISTINGS, objects=RECORD, skip=1, times=None)
    with cloud.breaking(Rule("lost-answer", kinds=("upload",), objects=RECORD), outage):
        assert isinstance(cloud.attempt_save(url, STATE), StorageError)
    assert cloud.committed(url, STATE) is STATE, "what may be committed is not removed"


@ON_ONE_STORE
@pytest.mark.parametrize("fault", [*REFUSED, "truncated"])
def test_a_restore_fails_with_the_url_of_the_object_that_cannot_be_read(cloud, fault):
    url = cloud.place()
    shardckpt.save(url, STATE)
    for key in ("checkpoint.json", "table", "hosts/00000/0/d/00001"):
        rule = Rule(**(REFUSED | TRANSIENT)[fault], objects=f"*/{key}", times=None)
        with cloud.breaking(rule), pytest.raises(StorageError) as failed:
            shardckpt.restore(url)
        assert url in str(failed.value)
        assert key in str(failed.value)
    cloud.assert_whole(url, STATE)


KEYS = [
    "checkpoint.json",
    "records/00000.json",
    "table",
    "contents.json",
    "hosts/00000/0/d/00001",
    "manifest.ocdbt",
]


@ON_ONE_STORE
@pytest.mark.parametrize(
    ("key", "fault", "layout"),
    [(key, "status", "packed") for key in KEYS]
    + [("hosts/00000/0/d/00001", "reset", "packed"), ("w/c/0/0", "status", "zarr")],
)
def test_verify_reports_an_object_that_the_bucket_always_fails_for_as_damaged(
    cloud, key, fault, layout
):
    url = cloud.place()
    shardckpt.save(url, STATE, options=shardckpt.SaveOptions(layout=layout))
    checkpoint = shardckpt.open(url)
    fails = Rule(fault, kinds=("read", "stat"), objects=f"*/{key}", times=None)
    with cloud.breaking(fails):
        report = checkpoint.verify()
    assert {key in damage.file or key in damage.reason for damage in report.damage} == {True}
    assert report.chunks
    assert checkpoint.verify().ok


@ON_ONE_STORE
@pytest.mark.parametrize(
    ("rule", "why"),
    [
        (Rule("status", kinds=("read", "stat"), times=None), "attempts failed"),
        (
            Rule("status", status=403, kinds=("read", "stat"), objects="*/d/00001", times=None),
            "permission",
        ),
    ],
    ids=["no answer", "denied"],
)
def test_verify_of_a_bucket_that_does_not_answer_or_denies_permission_ends_with_an_error(
    cloud, rule, why
):
    url = cloud.place()
    shardckpt.save(url, STATE)
    checkpoint = shardckpt.open(url)
    with cloud.breaking(rule), pytest.raises(StorageError, match=why):
        checkpoint.verify()
    assert checkpoint.verify().ok


@ON_ONE_STORE
@pytest.mark.parametrize("objects", [["*"], ["*/d/*", f"*/{PROBE}"]], ids=["all", "after opening"])
def test_verify_ends_with_an_error_if_the_bucket_of_a_base_does_not_answer(cloud, objects):
    base, url = cloud.place(), cloud.place()
    shardckpt.save(base, STATE)
    shardckpt.save(url, STATE, options=shardckpt.SaveOptions(base=base), skip="w")
    checkpoint = shardckpt.open(url)
    bucket = base.split("/")[2]
    rules = [Rule("status", objects=f"{bucket}/{pattern}", times=None) for pattern in objects]
    with cloud.breaking(*rules), pytest.raises(StorageError, match="attempts failed"):
        checkpoint.verify()
    assert checkpoint.verify().ok


@ON_ONE_STORE
def test_verify_of_another_format_in_a_bucket_that_does_not_answer_ends_with_an_error(
    cloud, tmp_path
):
    zarr.open_group(tmp_path, mode="w").create_array("a", data=STATE["w"])
    url = cloud.place()
    for file in (f for f in tmp_path.rglob("*") if f.is_file()):
        Store.open(url).write(file.relative_to(tmp_path).as_posix(), file.read_bytes())
    checkpoint = shardckpt.open(url)
    outage = Rule("status", kinds=("read", "stat"), times=None)
    with cloud.breaking(outage), pytest.raises(StorageError, match=r"a/(zarr\.json|c/)"):
        checkpoint.verify()
    assert checkpoint.verify().complete


@ON_ONE_STORE
def test_an_answer_that_claims_to_be_all_and_is_not_is_never_taken_for_data(cloud):
    url = cloud.place()
    shardckpt.save(url, STATE)
    for _ in cloud.each_request({"fault": "shorten"}, at_least=4):
        assert cloud.attempt_restore(url, STATE) or cloud.injected() == 1


@ON_ONE_STORE
def test_the_error_names_an_object_that_is_gone(cloud):
    url = cloud.place()
    shardckpt.save(url, STATE)
    gone = Rule("status", status=404, objects=DATA_FILE, times=None)
    with (
        cloud.breaking(gone),
        pytest.raises(CorruptionError, match=r"hosts/00000/0/d/00001 is missing"),
    ):
        shardckpt.restore(url)


# --- faults of all kinds --------------------------------------------------------------------------


@on_each_store(["seed"], gs=range(1000 if TORTURE else 15), s3=range(300 if TORTURE else 4))
def test_a_checkpoint_is_whole_or_absent_whatever_fails(cloud, seed):
    url, layout = cloud.place(), LAYOUTS[seed % 2]
    with cloud.breaking(*random_rules(3 * seed)):
        error = cloud.attempt_save(url, OTHER, layout=layout)
    before = cloud.committed(url, OTHER)
    assert before is not None or error is not None

    with cloud.breaking(*random_rules(3 * seed + 1)):
        error = cloud.attempt_save(url, STATE, layout=layout, overwrite=True)
    after = cloud.committed(url, OTHER, STATE)
    assert after is STATE or error is not None
    assert after is not None or before is None, "what was there is gone"

    if after is not None:
        with cloud.breaking(*random_rules(3 * seed + 2)):
            cloud.attempt_restore(url, after)


# --- many savers ----------------------------------------------------------------------------------


class Savers:
    """Two processes with four threads each, all of which save at one place at once."""

    number = 8

    def __init__(self, stack):
        # Silence of the storage is waited out for a second.
        environment = os.environ | {
            "SHARDCKPT_RETRY_SECONDS": "60",
            "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "1",
        }
        self.processes = []
        for first in (0, 4):
            command = [sys.executable, str(CHILD), str(first), "4"]
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            self.processes.append(process)
        assert [process.stdout.readline() for process in self.processes] == ["ready\n"] * 2

    def save(self, url):
        """Outcome of each thread's save: `saved`, or the error's class."""
        for process in self.processes:
            process.stdin.write(f"{url}\n")
            process.stdin.flush()
        return [
            outcome
            for process in self.processes
            for outcome in json.loads(process.stdout.readline())
        ]


class Threads:
    """Four threads of this process, which do the same: two processes more would be most of what the
    tests of S3 take."""

    number = 4

    def save(self, url):
        with ThreadPoolExecutor(self.number) as pool:
            return list(pool.map(save_value, [url] * self.number, range(self.number)))


@pytest.fixture(scope="module")
def started_savers():
    with ExitStack() as stack:
        yield cache(lambda: Savers(stack))


@pytest.fixture
def savers(cloud, started_savers):
    return started_savers() if cloud.emulator.scheme == "gs" else Threads()


@on_each_store(["lost_answers"], gs=[0, 2, 8] * (10 if TORTURE else 1), s3=[0, 2, 4])
def test_exactly_one_of_many_saves_at_one_place_commits(cloud, savers, lost_answers):
    url = cloud.place()
    # All of them look, see nothing, and want to be first.
    slow = Rule("latency", seconds=0.3, kinds=("upload",), objects=RECORD, times=None)
    with cloud.breaking(
        slow, Rule("lost-answer", kinds=("upload",), objects=RECORD, times=lost_answers)
    ):
        outcomes = savers.save(url)
    assert sorted(outcomes) == ["AlreadyExistsError"] * (savers.number - 1) + ["saved"]
    cloud.assert_whole(url, {"w": np.full(1000, outcomes.index("saved"))})
    assert len({key.partition("/")[0] for key in cloud.keys(url)}) == 2, (
        "something of the losers is left"
    )


@ON_ONE_STORE
def test_a_storage_that_falls_silent_is_asked_again(cloud, savers):
    url = cloud.place()
    with cloud.breaking(Rule("latency", seconds=3600, kinds=("upload",), objects=RECORD)):
        assert savers.save(url).count("saved") == 1


# --- what it costs --------------------------------------------------------------------------------


@ON_ONE_STORE
@pytest.mark.parametrize(("mebibytes", "memory_limit"), [(64, "1GiB"), (4, "40MiB")])
def test_an_upload_that_is_cut_off_is_sent_again_and_nothing_else_is(
    bucket, mebibytes, memory_limit, record_property
):
    state = {"w": np.ones(33 << 20, np.float32)}  # 132 MiB
    url, half = bucket.place(), mebibytes << 19
    with bucket.breaking(Rule("reset", kinds=("upload",), objects=DATA_FILE, after_bytes=half)):
        shardckpt.save(url, state, options=shardckpt.SaveOptions(memory_limit=memory_limit))
        # A connection that ends before anything is sent on it costs nothing.
        data = [
            e
            for e in bucket.proxy.traffic.exchanges(bucket.name_of(url))
            if "/d/0" in e.operation.name and e.bytes_up
        ]
    assert max(e.bytes_up for e in data) <= (mebibytes << 20) + 4096, "the size of a data file"
    assert [e.bytes_up for e in data if e.status != 200] == [half]
    assert [
        name[-5:] for name, tries in Counter(e.operation.name for e in data).items() if tries > 1
    ] == ["00001"]
    record_property("resent", half / state["w"].nbytes)


@ON_ONE_STORE
def test_a_restore_asks_once_for_what_lies_together(bucket, record_property):
    state = {f"w{i}": np.full(16 << 18, i, np.float32) for i in range(4)}
    url = bucket.place()
    shardckpt.save(url, state)
    with bucket.breaking():
        restored = shardckpt.restore(url)
        counts = bucket.proxy.traffic.summary(bucket.name_of(url))
    record_property("restoring", counts["kinds"])
    assert all(np.array_equal(restored[name], state[name]) for name in state)
    assert counts["requests"] <= 4 + 16
    assert counts["bytes_down"] < 1.01 * (64 << 20)
