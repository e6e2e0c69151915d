"""The audit log, and what the webhook tells of besides damage."""

import datetime as dt
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from job_services import LaterJobs, operated
from serving import save_run, serving

import shardckpt
from shardckpt import SaveOptions
from shardckpt.errors import StorageError
from shardckpt.io.store import Store
from shardckpt.serve.access.audit import AuditLog
from shardckpt.serve.access.tokens import add_token
from shardckpt.serve.rhythm import rhythm_of

TOKENS = {"ann": "read", "bob": "operate", "eve": "other=admin"}


@pytest.fixture
def place(tmp_path):
    save_run(tmp_path / "lab" / "a", (1, 2))
    return tmp_path, {
        name: add_token(tmp_path / "tokens", name, right) for name, right in TOKENS.items()
    }


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def post(service, token, operation, **arguments):
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    return service.ask(f"/v1/jobs/{operation}", "POST", json.dumps(arguments), **headers)


def test_writes_sign_ins_and_refusals_have_lines_and_reads_have_none(place):
    top, tokens = place
    log = top / "audit.jsonl"
    with serving(
        ("lab", top / "lab"), token_file=top / "tokens", state=top / "state", audit_log=log
    ) as service:
        for path in ("/v1/runs", "/ui/runs", "/v1/checkpoints/lab/a/1"):
            assert service.ask(path, Authorization=f"Bearer {tokens['ann']}").status == 200
        assert log.read_text() == ""
        assert service.ask("/v1/runs").status == 401
        assert service.ask("/v1/runs", Authorization="Bearer wrong").status == 401
        assert service.ask("/ui/login", "POST", f"token={tokens['ann']}").status == 303
        assert service.ask("/ui/login", "POST", "token=wrong").status == 403
        assert (
            service.ask("/v1/checkpoints/lab/a/1", Authorization=f"Bearer {tokens['eve']}").status
            == 404
        )
        assert post(service, tokens["ann"], "pin", checkpoint="lab/a/1").status == 403
        number = post(service, tokens["bob"], "pin", checkpoint="lab/a/1").json["number"]
        service.wait_until(lambda: any(one["result"] == "done" for one in lines(log)))
    entries = [(one["who"], one["what"], one["result"]) for one in lines(log)]
    assert entries[:8] == [
        (None, "GET /v1/runs", 401),
        (None, "GET /v1/runs", 401),
        ("ann", "POST /ui/login", 303),
        (None, "POST /ui/login", 403),
        ("eve", "GET /v1/checkpoints/lab/a/1", 404),
        ("ann", "POST /v1/jobs/pin", "asked"),
        ("ann", "POST /v1/jobs/pin", 403),
        ("bob", "POST /v1/jobs/pin", "asked"),
    ]
    rest = [one for one in lines(log) if one["who"] == "bob" and one["result"] != "asked"]
    assert {one["result"] for one in rest} == {202, "started", "done"}
    assert all(one["where"] == ["lab/a/1", None] for one in rest)
    assert {one.get("job") for one in rest if one["what"] == "pin"} == {number}
    assert next(one for one in lines(log) if one["who"] == "eve")["refused"] == "lab/a/1"
    assert {*lines(log)[0]} == {"time", "id", "who", "client", "what", "result"}
    assert tokens["ann"] not in log.read_text()


def test_without_the_audit_log_writes_are_refused_and_reads_go_on(place):
    top, tokens = place
    (top / "logs").mkdir()
    log = top / "logs" / "audit.jsonl"
    with serving(
        ("lab", top / "lab"), token_file=top / "tokens", state=top / "state", audit_log=log
    ) as service:
        runner = service.upkeep.runner
        runner._not_before = LaterJobs()
        number = post(service, tokens["bob"], "pin", checkpoint="lab/a/1").json["number"]  # waits
        log.unlink()
        log.mkdir()  # nothing can be written there
        runner._not_before = {}
        reply = post(service, tokens["bob"], "pin", checkpoint="lab/a/2")
        assert (reply.status, reply.json["code"]) == (503, "audit")
        headers = {"Authorization": f"Bearer {tokens['bob']}"}
        assert [one["number"] for one in service.get("/v1/jobs", **headers)["jobs"]] == [number]
        service.wait_until(
            lambda: (
                service.get(f"/v1/jobs/{number}", **headers)["waits_for"]
                == "the audit log cannot be written"
            )
        )
        log.rmdir()
        service.wait_until(lambda: service.get(f"/v1/jobs/{number}", **headers)["state"] == "done")
    with pytest.raises(StorageError, match="audit log"):
        AuditLog(top / "nowhere" / "audit")


def test_a_full_disk_is_no_line():
    log = AuditLog(None)
    log._path, log._fd = Path("/dev/full"), os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(StorageError, match="No space left"):
        log.write(who="ann")


@pytest.mark.parametrize("restarted", [False, True])
def test_a_line_that_a_full_disk_cuts_spoils_no_other(tmp_path, restarted):
    program = (
        "import resource, signal, sys, pathlib; from shardckpt.serve.access.audit import AuditLog\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "path = pathlib.Path(sys.argv[1]); log = AuditLog(path); log.write(who='ann')\n"
        "limit = path.stat().st_size + 20\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))\n"
        "try: log.write(who='bob')\n"
        "except OSError as e: assert 'disk is full' in str(e), e\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)\n"
        "log = AuditLog(path) if sys.argv[2] == 'True' else log\n"
        "log.write(who='eve'); log.write(who='fay')\n"
    )
    log = tmp_path / "audit"
    subprocess.run([sys.executable, "-c", program, str(log), str(restarted)], check=True)
    kept = [line for line in log.read_text().splitlines() if line.endswith("}")]
    assert [json.loads(line)["who"] for line in kept] == ["ann", "eve", "fay"]
    assert len(log.read_text().splitlines()) == 4


def test_an_audit_log_that_cannot_be_opened_again_says_why(tmp_path):
    log = AuditLog(tmp_path / "audit")
    log.reopen()
    (tmp_path / "audit").unlink()
    (tmp_path / "audit").mkdir()
    with pytest.raises(StorageError, match="Is a directory"):
        log.write(who="ann")


def until_written(log, text, process):
    end = time.monotonic() + 60
    while not log.exists() or text not in log.read_text():
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.long
def test_the_audit_log_is_opened_again_after_sighup(place):
    top, tokens = place
    command = [
        sys.executable,
        "-m",
        "shardckpt",
        "serve",
        f"lab={top / 'lab'}",
        "--port",
        "0",
        "--token-file",
        str(top / "tokens"),
    ]
    command += ["--state", str(top / "state"), "--audit-log", str(top / "audit")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            url = process.stdout.readline().split()[-1]
            with shardckpt.Client(url, token=tokens["bob"]) as client:
                client.start("pin", checkpoint="lab/a/1")
                until_written(top / "audit", "lab/a/1", process)  # after the answer
                (top / "audit").rename(top / "audit.1")
                process.send_signal(signal.SIGHUP)
                client.start("pin", checkpoint="lab/a/2")
            until_written(top / "audit", "lab/a/2", process)
            assert "lab/a/1" in (top / "audit.1").read_text()
        finally:
            process.terminate()


@pytest.mark.long
def test_the_webhook_tells_of_failed_jobs(tmp_path, webhook_receiver):
    bodies, webhook = webhook_receiver
    save_run(tmp_path / "lab" / "a", (1,))
    (tmp_path / "lab" / "foreign").mkdir()
    with operated(tmp_path, ("lab", tmp_path / "lab"), webhook=webhook) as lab:
        job = lab.run("import", **{"from": "lab/foreign", "to": "lab/b/1"})
        assert job["state"] == "failed"
        lab.service.wait_until(lambda: bodies)
    assert bodies[0]["event"] == "failed"
    assert (bodies[0]["job"], bodies[0]["operation"], bodies[0]["destination"]) == (
        job["number"],
        "import",
        "lab/b/1",
    )
    assert bodies[0]["message"] == job["error"]["message"]
    assert str(tmp_path) not in json.dumps(bodies)


def test_the_webhook_tells_once_of_a_run_that_stopped_saving(
    tmp_path, webhook_receiver, monkeypatch
):
    bodies, webhook = webhook_receiver
    for run in ("stops", "ends", "old", "closed"):
        save_run(tmp_path / "lab" / run, (1, 2, 3))
    begin = dt.datetime.now(dt.UTC) - dt.timedelta(minutes=12)
    with operated(tmp_path, ("lab", tmp_path / "lab"), webhook=webhook) as lab:
        silence = lab.service.upkeep.silence
        entries = {}

        def recent(run, most):
            return [
                {"created": (one + entries.get(run, dt.timedelta())).isoformat()} for one in times
            ]

        times = [begin + n * dt.timedelta(minutes=5) for n in range(3)]
        entries["lab/old"] = dt.timedelta(days=-30)
        silence._catalogue = type(
            "Catalogue",
            (),
            {"all_runs": silence._catalogue.all_runs, "recent": staticmethod(recent)},
        )
        silence.look()
        lab.done("end", run="lab/ends")
        assert lab.service.upkeep.journal.saving() == {"lab/closed", "lab/stops", "lab/ends"}

        def denied(store, key, exists=Store.exists):
            if store.location.name == "closed":
                raise StorageError("403 Forbidden")
            return exists(store, key)

        monkeypatch.setattr(Store, "exists", denied)
        times = [one - dt.timedelta(minutes=30) for one in times]
        silence.look()
        silence.look()
        lab.service.wait_until(lambda: bodies)
    assert [(one["event"], one["run"], one["every"]) for one in bodies] == [
        ("silent", "lab/stops", 300.0)
    ]


def test_a_rhythm_is_the_median_of_the_last_ten_commits():
    now = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)
    times = [(now - dt.timedelta(minutes=5 * n)).isoformat() for n in range(1, 11)]
    assert (
        rhythm_of([*times, "1999-01-01T00:00:00+00:00", "forged", None, "2026-01-01"], now).every
        == 300
    )
    assert rhythm_of(times[:2], now).every is None
    assert rhythm_of(["forged"], now) is None
    assert not rhythm_of(times, now + dt.timedelta(minutes=9)).silent
    assert rhythm_of(times, now + dt.timedelta(minutes=11)).silent


def test_recent_commits_are_those_of_the_catalogue(lab):
    shardckpt.save(
        lab.root / "fresh" / "7",
        {"w": np.ones(2)},
        options=SaveOptions(metadata={"metrics": {"loss": 2.0}}),
    )
    lab.service.wait_until(lambda: "lab/fresh/7" in lab.ask("/v1/checkpoints").body.decode())
    (commit,) = lab.service.upkeep.silence._catalogue.recent("lab/fresh", 10)
    assert (commit["id"], commit["step"], commit["metrics"]) == ("lab/fresh/7", 7, {"loss": 2.0})
