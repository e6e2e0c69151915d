"""Saves and restores by several processes at once while their object store fails.

Whatever fails, a checkpoint is whole or not there, no process waits for ever, and none returns from
a save that is not committed.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from fault_hosts import own, state
from faults import NOT_LISTINGS, TORTURE, TRANSIENT, FaultProxy, Rule, faulty_cloud, random_rules
from placeholders import put_placeholder
from processes import Processes

import shardckpt
from shardckpt import errors
from shardckpt.runs import collecting

pytestmark = pytest.mark.slow

RECORD = "*/checkpoint.json"
LAYOUTS = ["packed", "zarr"]
ON_ONE_STORE = pytest.mark.parametrize("job", ["gs", "s3"] if TORTURE else ["gs"], indirect=True)
"""For behaviour that does not depend on the store's protocol, as tests by one process on both of
them show."""


class Job:
    """Processes that save and restore through the proxy."""

    def __init__(self, cloud, processes):
        self.cloud = cloud
        self.run = processes.run

    def save(self, url, seed=1, processes=2, **options):
        """Outcome of each process: `saved`, or the error's class and message."""
        answers = self.run("save", processes, url, seed, options)
        assert all(
            answer == "saved" or issubclass(getattr(errors, answer["error"]), errors.ShardckptError)
            for answer in answers
        ), answers
        return answers

    def committed(self, url, *seeds, processes=2):
        """The one of these states that the checkpoint there holds, None if there is no checkpoint;
        it is complete."""
        states = [
            {**state(seed), "own": [own(process, seed) for process in range(processes)]}
            for seed in seeds
        ]
        state_there = self.cloud.committed(url, *states)
        return None if state_there is None else state_there["step"]


@pytest.fixture(scope="module", params=["gs", "s3"])
def job(request):
    server = request.getfixturevalue("gcs_server" if request.param == "gs" else "s3_server")
    server = replace(server, bucket=server.new_bucket("faults-hosts"))
    with faulty_cloud(server) as cloud, Processes("fault_hosts") as processes:
        yield Job(cloud, processes)


@pytest.fixture
def cloud(job):
    yield job.cloud
    job.cloud.proxy.land()


def outage(fault, objects="*", **when):
    return Rule(**fault, kinds=("upload",), objects=objects, times=None, **when)


# --- faults that pass -----------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "fault"), list(zip(LAYOUTS * 4, TRANSIENT, strict=True)))
def test_a_save_survives_failures_of_every_kind_of_request(cloud, job, fault, layout):
    url = cloud.place()
    rules = [
        Rule(**TRANSIENT[fault], kinds=(kind,), times=n)
        for kind, n in {"upload": 4, "read": 4, "stat": 1}.items()
    ]
    with cloud.breaking(*rules, Rule(**TRANSIENT[fault], kinds=("upload",), objects=RECORD)):
        assert job.save(url, layout=layout) == ["saved"] * 2
        assert cloud.injected() == 10
    with cloud.breaking(Rule(**TRANSIENT[fault], times=4, kinds=NOT_LISTINGS)):
        assert job.run("restore", 2, url) == [1, 1]
        assert cloud.injected() == 4
    assert job.committed(url, 1)


@pytest.mark.parametrize("fault", ["429", "reset"])
@ON_ONE_STORE
def test_a_bucket_that_is_down_for_a_while_is_waited_for_by_all(cloud, job, fault):
    url = cloud.place()
    with ThreadPoolExecutor(1) as pool, cloud.breaking(Rule(**TRANSIENT[fault], times=None)):
        saving = pool.submit(job.run, "save_patiently", 2, url, 1)
        while cloud.injected() < 4:
            assert not saving.done()
        cloud.proxy.rules.clear()
        assert saving.result() == ["saved"] * 2
    assert job.committed(url, 1)


@ON_ONE_STORE
def test_a_slow_bucket_is_as_good_as_any(cloud, job):
    url = cloud.place()
    slow = (
        Rule("bandwidth", bytes_per_second=2e6, times=None),
        Rule("latency", seconds=0.01, times=None),
    )
    with cloud.breaking(*slow):
        assert job.save(url) == ["saved"] * 2
        assert job.run("restore", 2, url) == [1, 1]


def test_a_commit_whose_answer_is_lost_is_known_to_all(cloud, job):
    url = cloud.place()
    put_placeholder(url)
    with cloud.breaking(Rule("lost-answer", kinds=("upload",), objects=RECORD)):
        assert job.save(url, processes=3) == ["saved"] * 3
        tries = [
            e
            for e in cloud.proxy.traffic.exchanges(cloud.name_of(url, "checkpoint.json"))
            if e.operation.kind == "upload"
        ]
    assert [e.status for e in tries][:2] == [None, 412]
    assert job.committed(url, 1, processes=3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_host_that_does_not_know_whether_its_record_is_there_removes_nothing(cloud, job, layout):
    url = cloud.place()
    with cloud.breaking(
        Rule("lost-answer", kinds=("upload",), objects="*/records/00001.json", times=None)
    ):
        answers = job.save(url, layout=layout)
    assert answers[0] == "saved", "the record is there, and that is all that the committer needs"
    assert answers[1]["error"] == "StorageError"
    assert job.committed(url, 1)


# --- faults that stay -----------------------------------------------------------------------------

FOR_GOOD = {
    "403": {"fault": "status", "status": 403},
    "404": {"fault": "status", "status": 404},
    "503": {"fault": "status", "status": 503},
    "reset": {"fault": "reset"},
}


@pytest.mark.parametrize(
    ("key", "culprit", "fault"),
    [
        ("hosts/00001/0/d/00001", 1, "403"),
        ("hosts/00001/0/d/00001", 1, "reset"),
        ("records/00001.json", 1, "404"),
        ("records/00001.json", 1, "503"),
        ("records/00000.json", 0, "403"),
        ("records/00000.json", 0, "503"),
    ],
)
@ON_ONE_STORE
def test_an_object_that_may_not_be_written_is_named_and_the_other_processes_are_told(
    cloud, job, key, culprit, fault
):
    url = cloud.place()
    with cloud.breaking(outage(FOR_GOOD[fault], f"*/{key}")):
        answers = job.save(url)
    assert answers[culprit]["error"] == "StorageError"
    assert answers[1 - culprit]["error"] == "CommitError"
    for answer in answers:
        assert url in answer["message"]
        assert key in answer["message"]
    assert job.committed(url, 1) is None
    assert job.save(url) == ["saved"] * 2, "a second try meets what the first has left"


@pytest.mark.parametrize(
    ("fault", "overwrite"),
    [("403", False), ("404", True), ("503", True), ("reset", False), ("412", False), ("412", True)],
)
@ON_ONE_STORE
def test_a_commit_that_is_refused_for_good_is_known_to_all(cloud, job, fault, overwrite):
    url = cloud.place()
    if overwrite:
        assert job.save(url, 1) == ["saved"] * 2
    else:
        put_placeholder(url)
    refusing = FOR_GOOD.get(fault, {"fault": "status", "status": 412})
    with cloud.breaking(outage(refusing, RECORD)):
        answers = job.save(url, 2, overwrite=overwrite)
    assert [answer["error"] for answer in answers] == ["StorageError", "CommitError"]
    assert all(f"{url}/checkpoint.json" in answer["message"] for answer in answers)
    assert job.committed(url, 1, 2) == (1 if overwrite else None)


@pytest.mark.parametrize("requests_before", [0, 10, 25, 40])
@ON_ONE_STORE
def test_when_a_bucket_goes_down_for_good_nobody_waits_for_ever(cloud, job, requests_before):
    url = cloud.place()
    with cloud.breaking(Rule("reset", kinds=NOT_LISTINGS, skip=requests_before, times=None)):
        answers = job.save(url, 1, commit_timeout=2)
    assert "saved" not in answers
    assert all(url in answer["message"] for answer in answers)
    assert job.committed(url, 1) is None


@pytest.mark.parametrize("fault", [*FOR_GOOD, "truncated"])
@ON_ONE_STORE
def test_an_object_that_may_not_be_read_is_named(cloud, job, fault):
    url = cloud.place()
    assert job.save(url) == ["saved"] * 2
    for key in ("checkpoint.json", "hosts/00001/0/d/00001"):
        with cloud.breaking(
            Rule(
                **(FOR_GOOD | TRANSIENT)[fault],
                kinds=("read", "stat"),
                objects=f"*/{key}",
                times=None,
            )
        ):
            for answer in job.run("restore", 2, url):
                missing = {"checkpoint.json": "UncommittedError"}.get(key, "MissingDataError")
                assert answer["error"] == (missing if fault == "404" else "StorageError")
                assert url in answer["message"]
                assert key in answer["message"] or fault == "404"
    assert job.run("restore", 2, url) == [1, 1]


# --- writes that land late ------------------------------------------------------------------------


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_commit_that_lands_after_all_have_given_up_finds_what_every_host_wrote(
    cloud, job, overwrite
):
    url = cloud.place()
    if overwrite:
        assert job.save(url, 1) == ["saved"] * 2
    else:
        put_placeholder(url)
    late = Rule("late", kinds=("upload",), objects=RECORD)
    with cloud.breaking(late, outage(FOR_GOOD["503"], RECORD)):
        answers = job.save(url, 2, overwrite=overwrite)
    assert [answer["error"] for answer in answers] == ["StorageError", "CommitError"]
    assert cloud.proxy.land() == [200]
    assert job.committed(url, 1, 2) == 2


@pytest.mark.parametrize("collected", [False, True])
def test_a_host_s_record_that_lands_late_completes_the_attempt_unless_it_was_collected(
    cloud, job, collected
):
    url = cloud.place()
    late = Rule("late", kinds=("upload",), objects="*/records/00001.json")
    with cloud.breaking(late, outage(FOR_GOOD["503"], late.objects)):
        assert "saved" not in job.save(url)
    if collected:
        assert [one.outcome for one in collecting.collect(url, grace=0)] == ["removed"]
    assert cloud.proxy.land() == [200]
    (outcome,) = shardckpt.commit(url)
    assert outcome.state == ("incomplete" if collected else "committed"), outcome
    assert job.committed(url, 1) == (None if collected else 1)


# --- faults of all kinds --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(300 if TORTURE else 3))
def test_a_checkpoint_is_whole_or_absent_whatever_fails_and_each_process_says_which(
    cloud, job, seed
):
    url, processes, layout = cloud.place(), 2 + seed % 2, LAYOUTS[seed % 2]
    there = None
    for step, overwrite in ((1, False), (2, True)):
        with cloud.breaking(*random_rules(3 * seed + step)):
            answers = job.save(
                url, step, processes, layout=layout, overwrite=overwrite, commit_timeout=5
            )
        before, there = there, job.committed(url, 1, 2, processes=processes)
        assert there in (before, step), "what was there is gone"
        assert there == step or "saved" not in answers
    if there is not None:
        with cloud.breaking(*random_rules(3 * seed)):
            answers_of_restore = job.run("restore", processes, url)
        assert all(
            answer == there or hasattr(errors, answer["error"]) for answer in answers_of_restore
        ), answers_of_restore


# --- races ----------------------------------------------------------------------------------------

ROUNDS = 20
TOGETHER = Rule("together", kinds=("upload",), objects=RECORD, times=None)
"""Both have looked, have seen nothing, and want to be first."""


@pytest.mark.timeout(300)  # where much else is running
def test_exactly_one_of_two_commits_at_once_wins_and_both_know(cloud, job, record_property):
    urls = [cloud.place() for _ in range(ROUNDS)]
    for url in urls:
        put_placeholder(url)
    with cloud.breaking(
        TOGETHER,
        Rule("lost-answer", kinds=("upload",), objects=RECORD, times=None, probability=0.2),
    ):
        outcomes = list(zip(*job.run("race", 2, urls, timeout=200), strict=True))
        refusals = cloud.proxy.traffic.summary()["statuses"]["412"]
    record_property(
        "won by the first, by the second",
        [sum(both[i] == "saved" for both in outcomes) for i in (0, 1)],
    )
    assert {tuple(sorted(both)) for both in outcomes} == {("AlreadyExistsError", "saved")}
    assert refusals >= ROUNDS, "in each of them both have tried"
    for url, both in zip(urls, outcomes, strict=True):
        assert shardckpt.restore(url)["winner"] == both.index("saved")


def test_without_preconditions_both_would_win(gcs_server, record_property):
    """Proof that the test above can fail: processes that send no conditions are both told that they
    have saved."""
    server = replace(gcs_server, bucket=gcs_server.new_bucket("faults-lax"))
    with (
        FaultProxy(server.endpoint, enforces=False) as lax,
        Processes("fault_hosts", env=server.env(lax.url)) as processes,
    ):
        lax.rules.add(TOGETHER)
        outcomes = zip(
            *processes.run("race", 2, [server.url(str(i)) for i in range(5)], False), strict=True
        )
        both = sum(outcome == ("saved", "saved") for outcome in outcomes)
    record_property("both won", both)
    assert both == 5
