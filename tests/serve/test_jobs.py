"""Jobs: what they do, who may start them, and how they end whatever happens to their processes."""

import fcntl
import json
import os
import signal
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from job_services import operated
from safetensors.numpy import load_file, save_file
from serve_kills import ServiceProcess
from serving import save_run, state

import shardckpt
from shardckpt.errors import OptionError, StorageError
from shardckpt.reading.naming.mapping_file import PRESETS
from shardckpt.serve.access.identity import Identity
from shardckpt.serve.jobs import database, journal, runner
from shardckpt.serve.jobs.journal import Journal
from shardckpt.serve.jobs.operations import OPERATIONS
from shardckpt.serve.options import ServeOptions
from shardckpt.serve.roots import Roots
from shardckpt.serve.service import Service


@pytest.fixture
def impatient(monkeypatch):
    """Jobs are started again without long pauses."""
    monkeypatch.setattr(runner, "_PAUSES", (0.1, 0.1))


class Evil:
    """An object whose unpickling makes a directory."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def frozen(lab, number):
    """Stop the process of a job for good as soon as there is one; return its process id."""
    lock = lab.root.parent / "state" / "jobs" / f"{number}.lock"
    lab.service.wait_until(lambda: lock.exists() and lock.read_text())
    pid = int(lock.read_text())
    os.kill(pid, signal.SIGSTOP)
    return pid


def same(a, b):
    actual, expected = shardckpt.restore(a), shardckpt.restore(b)
    assert actual.keys() == expected.keys()
    for name in expected["model"]:
        np.testing.assert_array_equal(actual["model"][name], expected["model"][name])


@pytest.mark.long
def test_each_operation_does_what_the_library_does(lab):
    source = {"checkpoint": "lab/llama/10"}
    assert lab.done("verify", **source)["ok"]
    linked = lab.done("copy", **source, to="lab/copies/10")
    assert (
        linked["stored_bytes"],
        ["damage to one damages both" in one for one in linked["notices"]],
    ) == (0, [True])
    same(lab.root / "copies" / "10", lab.root / "llama" / "10")
    result = lab.done(
        "reshard", **source, to="lab/wide/10", mesh="x=2", rule=["**/embed.weight=(x,)"]
    )
    assert (result["url"], "hard links" in str(result["notices"])) == ("lab/wide/10", False)
    assert (
        str(shardckpt.open(lab.root / "wide" / "10").info("model/embed.weight").layout.spec)
        == "PartitionSpec('x')"
    )
    same(lab.root / "wide" / "10", lab.root / "llama" / "10")
    lab.done("export", **source, to="lab/exported", include=["model/**"], strip_prefix="model.")
    expected = {name: value for name, value in state(10)["model"].items() if value is not None}
    for name, value in load_file(lab.root / "exported" / "model.safetensors").items():
        np.testing.assert_array_equal(value, expected[name])
    lab.done("import", **{"from": "lab/exported"}, to="lab/imported/10", into="model")
    np.testing.assert_array_equal(
        shardckpt.restore(lab.root / "imported" / "10")["model"]["head"], state(10)["model"]["head"]
    )

    lab.done("pin", checkpoint="lab/copies/10")
    lab.done("tag", checkpoint="lab/copies/10", tag="best")
    lab.service.wait_until(lambda: lab.ask("/v1/checkpoints?tag=best").json["checkpoints"])
    refused = lab.run("delete", checkpoint="lab/copies/10")
    assert refused["state"] == "failed"
    assert refused["error"]["code"] == "option"
    assert "lab/copies/10 is pinned and tagged best" in refused["error"]["message"]
    assert lab.done("unpin", checkpoint="lab/copies/10") == {"pinned": False, "was_pinned": True}
    assert lab.done("untag", checkpoint="lab/copies/10", tag="best")["was_tagged"]
    assert lab.done("delete", checkpoint="lab/copies/10", reason="a test") == {
        "deleted": True,
        "left": [],
    }
    assert not (lab.root / "copies" / "10").exists()
    lab.service.wait_until(lambda: lab.ask("/v1/checkpoints/lab/copies/10").status == 404)
    jobs = lab.ask("/v1/jobs?subject=lab/copies/10").json["jobs"]
    assert [one["operation"] for one in jobs] == [
        "delete",
        "untag",
        "unpin",
        "delete",
        "tag",
        "pin",
        "copy",
    ]
    assert [one["number"] for one in lab.ask("/v1/jobs?limit=2").json["jobs"]] == [
        jobs[0]["number"],
        jobs[1]["number"],
    ]


@pytest.mark.long
def test_versions_of_a_publisher_are_folded_by_a_job(lab):
    with shardckpt.Publisher(lab.root / "policy", catch_up=None) as publisher:
        for step in range(12):
            publisher.publish(step, {"w": np.arange(1000.0) + step // 11})
            publisher.wait()
    assert lab.post("fold", scope="read", run="lab/policy").status == 403
    assert [one["step"] for one in lab.done("fold", run="lab/policy")["folded"]] == [3, 6, 9]
    assert lab.done("fold", run="lab/policy") == {"most": 8, "folded": []}
    assert (shardckpt.restore(lab.root / "policy" / "11")["w"] == np.arange(1000.0) + 1).all()
    assert (
        "3 differences are too few" in lab.run("fold", run="lab/policy", most=3)["error"]["message"]
    )


def test_scopes_say_who_may_start_what(lab):
    pin = {"checkpoint": "lab/llama/20"}
    assert lab.post("pin", scope="read", **pin).json["code"] == "http-403"
    assert lab.post("unpin", scope="operate", **pin).status == 403
    assert lab.post("delete", scope="operate", **pin).status == 403
    assert lab.post("copy", scope="operate", **pin, to="lab/llama/10", overwrite=True).status == 403
    accepted = lab.post("verify", scope="operate", **pin)
    assert accepted.status == 202
    assert accepted.headers["location"] == f"/v1/jobs/{accepted.json['number']}"
    assert accepted.json["who"] == "the-operate"
    assert lab.ask(f"/v1/jobs/{accepted.json['number']}", scope="read").status == 200
    assert lab.ask(f"/v1/jobs/{accepted.json['number']}/cancel", "POST", scope="read").status == 403
    assert (
        lab.service.ask(
            "/v1/jobs/verify", "POST", json.dumps(pin), Content_Type="application/json"
        ).status
        == 401
    )


def test_no_request_can_bring_a_regular_expression(lab):
    """Some need time exponential in their length; patterns of names and mappings that come with
    shardckpt do not."""
    brought = [parameter for operation in OPERATIONS.values() for parameter in operation.parameters]
    assert not {parameter.name for parameter in brought} & {"rename", "rename_file"}
    assert {parameter.choices for parameter in brought if parameter.name == "mapping"} == {PRESETS}
    assert all(parameter.choices for parameter in brought if parameter.name == "ties")


def test_without_tokens_or_state_nothing_can_be_changed(service, tmp_path, runs):
    body = json.dumps({"checkpoint": "lab/llama/10"})
    reply = service.ask("/v1/jobs/pin", "POST", body, Content_Type="application/json")
    assert (reply.status, reply.json["code"]) == (403, "http-403")
    assert "--state" in reply.json["detail"]
    with pytest.raises(OptionError, match="need --state"):
        ServeOptions(roots=(f"lab={runs}",), scrub=3600.0)


@pytest.mark.long
def test_a_key_makes_a_request_that_is_sent_twice_one_job(lab):
    arguments = {"checkpoint": "lab/llama/20", "to": "lab/keyed/20"}
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda _: lab.post("copy", key="once", **arguments), range(8)))
    assert sorted(one.status for one in replies) == [200] * 7 + [202]
    assert len({one.json["number"] for one in replies}) == 1
    assert lab.wait(replies[0].json["number"])["state"] == "done"
    assert lab.post("copy", key="once", **arguments).status == 200
    other = lab.post("copy", key="once", **arguments | {"to": "lab/keyed/21"})
    assert (other.status, other.json["code"]) == (400, "option")
    assert (
        lab.post("copy", "operate", key="once", **arguments | {"to": "lab/keyed/22"}).status == 202
    )
    delete = {"checkpoint": "lab/keyed/20"}
    first = lab.post("delete", key="gone", **delete).json["number"]
    assert lab.wait(first)["state"] == "done"
    assert lab.post("delete", key="gone", **delete).json["number"] == first


@pytest.mark.long
def test_places_outside_of_the_roots_are_refused(lab, tmp_path):
    (lab.root / "out").symlink_to(tmp_path)
    torch.save(Evil(str(tmp_path / "harm")), lab.root / "pickled.pt")
    save_file({"w": np.ones(3)}, tmp_path / "secret.safetensors")
    (lab.root / "linked").mkdir()
    (lab.root / "linked" / "model.safetensors").symlink_to(tmp_path / "secret.safetensors")
    for to in (
        "lab/../x",
        "lab/out/x",
        "other/x",
        "/etc",
        "lab",
        "lab/",
        "lab/llama/10/x",
        "lab/llama/10/x/y",
        "lab/a\0b",
        "../x",
    ):
        reply = lab.post("copy", checkpoint="lab/llama/10", to=to)
        assert reply.status in (400, 404), (to, reply)
        assert str(tmp_path) not in reply.json["detail"]
    for source in ("lab/out/secret.safetensors", "lab/../x", "lab/linked/model.safetensors"):
        assert lab.post("import", **{"from": source}, to="lab/stolen/1").status == 404
    for source in ("lab/linked", "lab/pickled.pt"):
        job = lab.run("import", **{"from": source}, to="lab/stolen/1")
        assert job["state"] == "failed"
        assert str(tmp_path) not in job["error"]["message"]
    assert not (lab.root / "stolen").exists()
    assert list(tmp_path.iterdir()) == [tmp_path / "secret.safetensors"]


@pytest.mark.parametrize(
    ("operation", "arguments", "status"),
    [
        ("nothing", {}, 404),
        ("pin", {}, 400),
        ("pin", {"checkpoint": 3}, 400),
        ("pin", {"checkpoint": "lab/llama/10", "other": 1}, 400),
        ("copy", {"checkpoint": "lab/llama/10", "to": "lab/x/1", "overwrite": "yes"}, 400),
        ("reshard", {"checkpoint": "lab/llama/10", "to": "lab/x/1", "rule": "a=(b)"}, 400),
        ("export", {"checkpoint": "lab/llama/10", "to": "lab/x", "mapping": "/etc/passwd"}, 400),
    ],
)
def test_bad_requests_are_told_what_is_wrong(lab, operation, arguments, status):
    reply = lab.post(operation, **arguments)
    assert reply.status == status
    assert len(reply.json["detail"]) > 10


def test_bodies_are_json_objects(lab):
    for body, kind, status in (
        (b"[1]", None, 400),
        (b"{", None, 400),
        (b"[" * 5000, None, 400),
        (b"{}", "text/plain", 415),
        (b"", None, 400),
    ):
        headers = {
            "Authorization": f"Bearer {lab.tokens['admin']}",
            "Content-Type": kind or "application/json",
        }
        assert lab.service.ask("/v1/jobs/pin", "POST", body, **headers).status == status
    assert lab.post("pin", checkpoint="x" * 70_000).status == 413


def test_a_job_that_waits_or_runs_can_be_cancelled(lab):
    first = lab.post("verify", checkpoint="lab/llama/10").json["number"]
    frozen(lab, first)
    second = lab.post("verify", checkpoint="lab/llama/20").json["number"]
    lab.service.wait_until(lambda: lab.job(second)["waits_for"] == "other jobs run")
    assert lab.ask(f"/v1/jobs/{second}/cancel", "POST").json["state"] == "cancelled"
    assert lab.ask(f"/v1/jobs/{first}/cancel", "POST").status == 202
    assert lab.wait(first)["state"] == "cancelled"
    assert lab.ask(f"/v1/jobs/{first}/cancel", "POST").status == 400
    assert lab.ask("/v1/jobs/99999/cancel", "POST").status == 404


@pytest.mark.long
def test_jobs_that_write_one_place_run_one_after_the_other(lab, tmp_path):
    first = lab.post("copy", checkpoint="lab/llama/10", to="lab/one/1").json["number"]
    pid = frozen(lab, first)
    second = lab.post("copy", "operate", checkpoint="lab/llama/20", to="lab/one/1").json["number"]
    lab.service.wait_until(
        lambda: lab.job(second)["waits_for"] == f"job {first} writes to the same place"
    )
    os.kill(pid, signal.SIGCONT)
    assert lab.wait(first)["state"] == "done"
    lost = lab.wait(second)
    assert (lost["state"], lost["error"]["code"]) == ("failed", "exists")
    same(lab.root / "one" / "1", lab.root / "llama" / "10")


@pytest.fixture
def queue(tmp_path):
    """A journal, a runner of its jobs without a service, and a function that adds a job."""
    for name in ("lab", "state", "locks"):
        (tmp_path / name).mkdir()
    about = {"subject": "lab/a/1", "destination": None, "who": "ann", "key": None}
    with closing(Journal(tmp_path / "state")) as jobs:
        roots = Roots([f"lab={tmp_path / 'lab'}"])
        jobs_of = runner.JobRunner(jobs, tmp_path / "locks", roots, at_once=1, options={})
        yield jobs, jobs_of, lambda operation: jobs.add(operation, {}, {}, **about)[0].number


@pytest.mark.parametrize("when", ["queued", "running"])
def test_a_cancelled_job_is_over_when_the_process_of_an_earlier_service_has_ended(
    tmp_path, queue, when
):
    jobs, jobs_of, add = queue
    number = add("copy")
    jobs.begin(number)
    if when == "running":
        jobs.cancel(number)
    jobs.end(number, "queued")
    if when == "queued":
        assert jobs.cancel(number).state == "queued"
    with (tmp_path / "locks" / f"{number}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        jobs_of._start_queued()
        assert jobs.job(number).state == "queued"
        assert "earlier service" in jobs_of.waits_for[number]
    jobs_of._start_queued()
    assert jobs.job(number).state == "cancelled"


def test_a_job_whose_lock_cannot_be_opened_does_not_keep_others_from_being_looked_at(
    tmp_path, queue
):
    jobs, jobs_of, add = queue
    first, second = (add("unknown") for _ in range(2))
    (tmp_path / "locks" / f"{first}.lock").mkdir()
    jobs_of._start_queued()
    assert "its lock cannot be read" in jobs_of.waits_for[first]
    assert jobs.job(second).state == "failed"


def test_places_of_jobs_that_wait_for_others_to_end_are_not_looked_at(tmp_path):
    class Counted(Roots):
        located = 0

        def locate(self, ident):
            Counted.located += 1
            return super().locate(ident)

    for name in ("lab", "state"):
        (tmp_path / name).mkdir()
    about = {"subject": "lab/a/1", "who": "ann", "key": None}
    with closing(Journal(tmp_path / "state")) as jobs:
        jobs_of = runner.JobRunner(
            jobs, tmp_path / "state", Counted([f"lab={tmp_path / 'lab'}"]), at_once=1, options={}
        )
        rows = [
            jobs.add("copy", {"to": n}, {}, destination=f"lab/b/{n}", **about)[0] for n in range(20)
        ]
        jobs_of._running[rows[0].number] = rows[0], None, threading.current_thread()
        jobs.begin(rows[0].number)
        jobs_of._start_queued()
        assert [*jobs_of.waits_for.values()] == ["other jobs run"] * 19
        assert Counted.located == 0


@pytest.mark.long
@pytest.mark.usefixtures("impatient")
def test_a_job_whose_process_dies_is_started_again_and_then_fails(lab):
    number = lab.post("copy", checkpoint="lab/llama/10", to="lab/killed/1").json["number"]
    os.kill(frozen(lab, number), signal.SIGKILL)
    job = lab.wait(number)
    assert (job["state"], job["tries"]) == ("done", 2)
    same(lab.root / "killed" / "1", lab.root / "llama" / "10")

    number = lab.post("copy", checkpoint="lab/llama/10", to="lab/killed/2").json["number"]
    lock = lab.root.parent / "state" / "jobs" / f"{number}.lock"
    end = time.monotonic() + 60
    while lab.job(number)["state"] != "failed":
        assert time.monotonic() < end
        try:
            os.kill(int(lock.read_text()), signal.SIGKILL)
        except (OSError, ValueError):
            time.sleep(0.005)
    job = lab.job(number)
    assert job["error"] == {
        "code": "storage",
        "message": "its process ended with signal 9; the log has more.",
    }
    assert job["tries"] == 3


def test_what_programs_that_a_job_starts_print_is_not_taken_for_its_result(tmp_path, monkeypatch):
    printing = (
        "import os; from dataclasses import replace; from shardckpt.serve.jobs import operations; "
        "operations.OPERATIONS['pin'] = replace(operations.OPERATIONS['pin'], "
        "run=lambda work: {'status': os.system('echo printed')}); "
    )
    monkeypatch.setattr(runner, "_WORKER", printing + runner._WORKER)
    process = runner.JobProcess(tmp_path / "jobs", Roots([f"lab={tmp_path}"]), {})
    request = {"operation": "pin", "arguments": {}, "job": 1, "who": "ann"}
    request |= {"again": False, "resume": {}}
    end = process.run("1", request, progress=lambda done, total: None)
    assert (end.result, end.error) == ({"status": 0}, None)


def test_a_job_that_the_service_is_killed_by_again_and_again_fails(tmp_path, webhook_receiver):
    (tmp_path / "state").mkdir()
    with closing(Journal(tmp_path / "state")) as jobs:
        about = {"subject": "a/b", "destination": None, "who": "ann", "key": None}
        number = jobs.add("verify", {}, {"checkpoint": "a/b"}, **about)[0].number
        begun = jobs.begin_verification("a/b", "x", number)
        jobs.update_verification(replace(begun, damaged=1))
    for starts in range(1, 20):
        with closing(Journal(tmp_path / "state")) as jobs:
            assert (jobs.job(number).state, jobs.job(number).tries) == ("queued", starts - 1)
            assert jobs.begin(number)
            if starts < 10:  # the place was busy, or the service was stopped
                jobs.end(number, "queued")
    bodies, webhook = webhook_receiver
    (tmp_path / "runs").mkdir()
    with operated(
        tmp_path, ("a", tmp_path / "runs"), webhook=webhook, audit_log=tmp_path / "audit"
    ) as lab:
        failed = lab.wait(number)
        assert (failed["state"], failed["error"]["code"]) == ("failed", "internal")
        assert "the service was killed while it ran" in failed["error"]["message"]
        lab.service.wait_until(lambda: len(bodies) == 2)
        assert not lab.service.upkeep.journal.unfinished_verification("a/b", number)
    assert [(one["event"], one["job"]) for one in bodies] == [
        ("damage", number),
        ("failed", number),
    ]


@pytest.mark.parametrize("when", ["queued", "running"])
def test_damage_that_a_cancelled_verification_has_found_is_told_of(
    tmp_path, webhook_receiver, when
):
    (tmp_path / "state").mkdir()
    (tmp_path / "runs").mkdir()
    with closing(Journal(tmp_path / "state")) as jobs:
        about = {"subject": "a/b", "destination": None, "who": "ann", "key": None}
        number = jobs.add("verify", {}, {"checkpoint": "a/b"}, **about)[0].number
        assert jobs.begin(number)
        begun = jobs.begin_verification("a/b", "x", number)
        jobs.update_verification(replace(begun, damaged=1))
        if when == "running":  # the service is killed before the job's process has ended
            jobs.cancel(number)
    bodies, webhook = webhook_receiver
    if when == "queued":
        options = ServeOptions(
            roots=(f"a={tmp_path / 'runs'}",), state=str(tmp_path / "state"), webhook=webhook
        )
        with closing(Service(options)) as service:
            identity = Identity("ann", {"*": "admin"})
            assert service.upkeep.cancel(identity, number).cancelling
    with operated(tmp_path, ("a", tmp_path / "runs"), webhook=webhook) as lab:
        assert lab.wait(number)["state"] == "cancelled"
        lab.service.wait_until(lambda: bodies)
        assert not lab.service.upkeep.journal.unfinished_verification("a/b", number)
    assert [(one["event"], one["job"]) for one in bodies] == [("damage", number)]


def test_a_job_that_runs_when_the_service_stops_is_queued(tmp_path):
    save_run(tmp_path / "runs" / "llama", (10,))
    with operated(tmp_path, ("lab", tmp_path / "runs")) as lab:
        lab.root = tmp_path / "runs"
        number = lab.post("verify", checkpoint="lab/llama/10").json["number"]
        frozen(lab, number)
    with closing(Journal(tmp_path / "state")) as jobs:
        assert (jobs.job(number).state, jobs.job(number).tries) == ("queued", 1)


def test_a_job_waits_while_no_thread_can_be_started(lab, monkeypatch):
    start = threading.Thread.start

    def refused(thread):
        if thread.name.startswith("shardckpt-job-"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        number = lab.post("pin", checkpoint="lab/llama/10").json["number"]
        lab.service.wait_until(
            lambda: "no thread can be started" in (lab.job(number)["waits_for"] or "")
        )
    assert lab.wait(number)["state"] == "done"


def test_slashes_at_the_ends_of_ids_are_left_out(lab):
    assert lab.done("pin", checkpoint="/lab/llama/10/")["pinned"]
    lab.done("copy", checkpoint="lab/llama/10/", to="lab/copies/slash/")
    same(lab.root / "copies" / "slash", lab.root / "llama" / "10")


def test_events_tell_the_progress_until_the_end(lab):
    number = lab.post("copy", checkpoint="lab/llama/10", to="lab/followed/1").json["number"]
    reply = lab.ask(f"/v1/jobs/{number}/events")
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = [
        json.loads(part.partition("data: ")[2])
        for part in reply.body.decode().split("\n\n")
        if part.startswith("event: job")
    ]
    assert events[-1]["state"] == "done"
    assert events[-1]["done"] == events[-1]["total"] > 0
    assert all(one["number"] == number for one in events)
    assert lab.ask("/v1/jobs/0/events").status == 404


@pytest.mark.long
def test_a_service_that_is_killed_goes_on_with_its_jobs_and_never_runs_one_twice_at_a_time(
    tmp_path,
):
    save_run(tmp_path / "runs" / "llama", (10,))
    with ServiceProcess(tmp_path, {"lab": tmp_path / "runs"}) as service:
        number = service.start("copy", checkpoint="lab/llama/10", to="lab/copies/1")
        lock = tmp_path / "state" / "jobs" / f"{number}.lock"
        end = time.monotonic() + 60
        while not (lock.exists() and lock.read_text()):
            assert time.monotonic() < end
        pid = int(lock.read_text())
        os.kill(pid, signal.SIGSTOP)
        queued = service.start("verify", checkpoint="lab/llama/10")
        service.kill()
        service.restart()
        # The process of the killed service is frozen: it still has the lease.
        service.wait_until(
            number,
            lambda job: job["error"] is not None and "earlier service" in job["error"]["message"],
        )
        os.kill(pid, signal.SIGCONT)  # it sees that its service is gone, and ends
        done = service.wait_until(number, lambda job: job["state"] == "done")
        assert done["tries"] > 1
        assert service.wait_until(queued, lambda job: job["state"] == "done")["result"]["ok"]
    same(tmp_path / "runs" / "copies" / "1", tmp_path / "runs" / "llama" / "10")


@pytest.mark.long
def test_what_was_done_before_a_kill_is_not_done_again_nor_an_error(tmp_path, monkeypatch):
    """The process of each operation has done everything, and the service did not learn of it."""
    save_run(tmp_path / "runs" / "llama", (10, 20))
    forget = journal.Journal.end
    lost = {}

    def end(self, number, state, **how):
        if state == "done" and number not in lost:
            lost[number] = True
            return forget(self, number, "queued")
        return forget(self, number, state, **how)

    monkeypatch.setattr(journal.Journal, "end", end)
    with operated(tmp_path, ("lab", tmp_path / "runs")) as lab:
        source = {"checkpoint": "lab/llama/10"}
        assert lab.done("copy", **source, to="lab/copies/10")["committed"]
        assert lab.done(
            "reshard", **source, to="lab/wide/10", mesh="x=2", rule=["**/embed.weight=(x,)"]
        )["done_before"]
        assert lab.done("export", **source, to="lab/exported", include=["model/**"])["done_before"]
        assert lab.done("export", **source, to="lab/one.safetensors", include=["model/**"])[
            "done_before"
        ]
        assert lab.done("import", **{"from": "lab/exported"}, to="lab/imported/10")["committed"]
        assert lab.done("delete", checkpoint="lab/llama/20")["deleted"]
        assert lab.done("verify", **source)["ok"]
        assert len(lost) == 7
    # The same export to a place where somebody else's file is fails, also when it is tried again.
    with operated(tmp_path, ("lab", tmp_path / "runs")) as lab:
        monkeypatch.setattr(journal.Journal, "end", forget)
        assert lab.run("export", **source, to="lab/one.safetensors")["error"]["code"] == "exists"


def test_a_deletion_never_hits_a_checkpoint_that_came_later(tmp_path):
    save_run(tmp_path / "runs" / "llama", (10,))
    with operated(tmp_path, ("lab", tmp_path / "runs")) as lab:
        first = lab.post("verify", checkpoint="lab/llama/10").json["number"]
        lock = tmp_path / "state" / "jobs" / f"{first}.lock"
        lab.service.wait_until(lambda: lock.exists() and lock.read_text())
        pid = int(lock.read_text())
        os.kill(pid, signal.SIGSTOP)
        number = lab.post("delete", checkpoint="lab/llama/10").json["number"]
        shardckpt.save(
            tmp_path / "runs" / "llama" / "10",
            {"new": np.ones(3)},
            options=shardckpt.SaveOptions(overwrite=True),
        )
        os.kill(pid, signal.SIGCONT)
        # It saw the first one replaced, or the second one; neither is damage.
        verified = lab.wait(first)
        assert (
            verified["result"]["ok"]
            if verified["state"] == "done"
            else verified["error"]["code"] == "replaced"
        )
        assert lab.wait(number)["error"]["code"] == "replaced"
    np.testing.assert_array_equal(
        shardckpt.restore(tmp_path / "runs" / "llama" / "10")["new"], np.ones(3)
    )


def test_a_journal_on_a_full_disk_refuses_jobs_and_gets_over(tmp_path):
    save_run(tmp_path / "runs" / "llama", (10,))
    with operated(tmp_path, ("lab", tmp_path / "runs")) as lab:
        path = tmp_path / "state" / "journal.sqlite"
        assert lab.done("verify", checkpoint="lab/llama/10")["ok"]
        db = lab.service.upkeep.journal._db
        pages = db.execute("PRAGMA page_count").fetchone()[0]
        db.execute(f"PRAGMA max_page_count = {pages}")
        replies = [
            lab.post("verify", checkpoint="lab/llama/10", key=f"{i:0200}") for i in range(60)
        ]
        assert replies[-1].status == 502
        assert "disk full" in replies[-1].json["detail"]
        assert lab.ask("/v1/jobs").status == lab.ask("/v1/checkpoints").status == 200
        db.execute("PRAGMA max_page_count = 1000000")
        assert lab.post("verify", checkpoint="lab/llama/10", key=f"{59:0200}").status == 202
    assert sqlite3.connect(path).execute("PRAGMA quick_check").fetchone() == ("ok",)


def test_a_damaged_journal_is_told_and_a_lost_catalogue_does_no_harm(tmp_path):
    save_run(tmp_path / "runs" / "llama", (10,))
    with operated(tmp_path, ("lab", tmp_path / "runs")) as lab:
        done = lab.run("pin", checkpoint="lab/llama/10")
        assert done["result"]["pinned"]
    (tmp_path / "state" / "catalogue.sqlite").unlink()
    with operated(tmp_path, ("lab", tmp_path / "runs")) as lab:
        assert lab.job(done["number"])["state"] == "done"
        assert lab.ask("/v1/checkpoints/lab/llama/10").json["entry"]["pinned"]
    (tmp_path / "state" / "journal.sqlite").write_bytes(b"nothing" * 1000)
    options = ServeOptions(roots=(f"lab={tmp_path / 'runs'}",), state=tmp_path / "state")
    with pytest.raises(StorageError, match=r"journal.*move it away"):
        Service(options)
    (tmp_path / "state" / "journal.sqlite").unlink()
    Service(options).close()


def test_the_journal_keeps_a_bounded_number_of_jobs(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "_MOST_JOBS", 150)
    monkeypatch.setattr(journal, "MOST_QUEUED", 50)
    jobs = Journal(tmp_path)
    for i in range(400):
        job, new = jobs.add(
            "pin", {"i": i}, {"i": i}, subject="a/b", destination=None, who="ann", key=None
        )
        assert new
        if i < 350:
            jobs.end(job.number, "done")
    with pytest.raises(OptionError, match="50 jobs wait already"):
        jobs.add("pin", {}, {}, subject="a/b", destination=None, who="ann", key=None)
    assert 150 <= len(jobs.jobs(limit=1000)) <= 250
    assert jobs.counts()["queued"] == 50
    jobs.close()


def test_numbers_of_jobs_tell_nothing_of_other_jobs(tmp_path, monkeypatch):
    jobs = Journal(tmp_path)

    def add():
        return jobs.add("pin", {}, {}, subject="a/b", destination=None, who="ann", key=None)[
            0
        ].number

    now = time.time()
    monkeypatch.setattr(database.time, "time", lambda: now)
    first = add()
    assert add() == first + 1
    monkeypatch.setattr(database.time, "time", lambda: now + 3600)
    assert add() == first + 360_000  # an hour later, whatever others have done
    monkeypatch.setattr(database.time, "time", lambda: 0.0)  # a clock that was set back
    assert add() == first + 360_001
    jobs.close()


@pytest.mark.long
def test_places_that_have_a_meaning_are_not_written_over(tmp_path):
    save_run(tmp_path / "runs" / "a", (10, 20))
    save_run(tmp_path / "runs" / "ended", (10,))
    (tmp_path / "runs" / "file").write_text("text")
    with operated(tmp_path, ("lab", tmp_path / "runs")) as lab:
        lab.done("end", run="lab/ended")
        source = {"checkpoint": "lab/a/10"}
        for operation, to, words in (
            ("copy", "lab/a", "it has other directories in it"),
            ("copy", "lab/ended/40", "marked as ended"),
            ("copy", "lab/file", "a file is there"),
            ("copy", "lab/file/x", "is a file"),
            ("export", "lab/a/20", "a checkpoint is there"),
        ):
            reply = lab.post(operation, **source, to=to)
            assert reply.status == 400, (operation, to)
            assert words in reply.json["detail"]
        assert lab.run("copy", **source, to="lab/a/20")["error"]["code"] == "exists"
        assert lab.post("copy", checkpoint="lab/a/99", to="lab/x/1").status == 404
        assert lab.post("reshard", **source, to="lab/x/1", mesh="x").status == 400
        assert lab.post("tag", **source, tag="step-3").status == 400
        first = lab.post("copy", **source, to="lab/nest").json["number"]
        root = lab.root = tmp_path / "runs"
        pid = frozen(lab, first)
        second = lab.post("copy", **source, to="lab/nest/inner").json["number"]
        lab.service.wait_until(
            lambda: lab.job(second)["waits_for"] == f"job {first} writes to the same place"
        )
        os.kill(pid, signal.SIGCONT)
        assert lab.wait(first)["state"] == "done"
        assert "lies in the checkpoint" in lab.wait(second)["error"]["message"]
        assert not (root / "nest" / "inner").exists()


@pytest.mark.long
def test_a_deletion_of_nothing_deletes_nothing_later(tmp_path):
    save_run(tmp_path / "runs" / "a", (10,))
    record = tmp_path / "runs" / "a" / "10" / "checkpoint.json"
    with operated(tmp_path, ("lab", tmp_path / "runs")) as lab:
        lab.root = tmp_path / "runs"
        assert lab.post("delete", checkpoint="lab/a/99").status == 404
        number = lab.post("verify", checkpoint="lab/a/10").json["number"]
        pid = frozen(lab, number)
        whole = record.read_bytes()
        record.write_bytes(whole[:-20] + b"x" * 20)
        # That of a damaged record.
        deleting = lab.post("delete", checkpoint="lab/a/10").json["number"]
        record.write_bytes(whole)  # restored from a copy
        os.kill(pid, signal.SIGCONT)
        assert lab.wait(deleting)["error"]["code"] == "replaced"
        record.write_bytes(whole[:-20] + b"x" * 20)
        verification = lab.done("verify", checkpoint="lab/a/10")
        assert (verification["ok"], verification["damage"][0]["file"]) == (False, "checkpoint.json")
        assert lab.done("delete", checkpoint="lab/a/10")["deleted"]


def test_a_run_with_two_ids_is_ruled_by_none(tmp_path):
    save_run(tmp_path / "runs" / "prod", (10, 20))
    (tmp_path / "runs" / "alias").symlink_to("prod")
    (tmp_path / "rules.toml").write_text(
        '[[keep]]\nruns = "lab/prod"\nlatest = 9\n[[keep]]\nruns = "lab/**"\nlatest = 1\n'
    )
    with operated(tmp_path, ("lab", tmp_path / "runs"), keep=tmp_path / "rules.toml") as lab:
        assert lab.done("retain", run="lab/prod")["steps"] == []
        assert "is also 'lab/prod'" in lab.run("retain", run="lab/alias")["error"]["message"]


def test_verifications_that_never_end_are_kept_in_bounded_number(tmp_path):
    jobs = Journal(tmp_path)
    for i in range(30):
        jobs.begin_verification("lab/a/1", "x", i)
    assert len(jobs.verifications("lab/a/1")) == 20
    jobs.close()


def test_cancelled_verifications_do_not_push_out_found_damage(tmp_path):
    jobs = Journal(tmp_path)
    one = jobs.begin_verification("lab/a/1", "x", 1)
    jobs.update_verification(replace(one, damaged=1), over=True)
    for i in range(50):
        assert not jobs.begin_verification("lab/a/1", "x", 2 + i).ok
    assert jobs.latest_verifications()["lab/a/1"].damaged == 1
    assert list(jobs.damaged_verifications()) == ["lab/a/1"]
    (tmp_path / "journal.sqlite").unlink()
    with pytest.raises(StorageError, match="deleted or moved"):
        jobs.begin_verification("lab/a/1", "x", 1)
    jobs.close()
