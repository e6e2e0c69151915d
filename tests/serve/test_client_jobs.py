"""Jobs by the client, and by the commands `jobs` and `job`."""

import json
import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest
from typer.testing import CliRunner

import shardckpt
from shardckpt import Client
from shardckpt.cli.app import app
from shardckpt.errors import (
    AlreadyExistsError,
    CommitError,
    CoordinationError,
    NotFoundError,
    OptionError,
    StorageError,
)
from shardckpt.serve import client as module
from shardckpt.serve.jobs import endpoints


@pytest.fixture
def client(lab):
    with Client(lab.service.url, token=lab.tokens["admin"]) as opened:
        yield opened


@pytest.fixture
def run(lab, monkeypatch):
    """Runs a command with `--server`."""
    monkeypatch.setenv(
        "SHARDCKPT_HTTP_HEADERS", f"{lab.service.url} Authorization: Bearer {lab.tokens['admin']}"
    )
    monkeypatch.setenv("COLUMNS", "200")

    def run(*args, status=0):
        result = CliRunner().invoke(app, ["--server", lab.service.url, *map(str, args)])
        assert result.exit_code == status, result.output
        return result.stdout + result.stderr

    return run


@pytest.fixture
def frozen(lab, client):
    """A job that does not end."""
    number = client.start("verify", checkpoint="lab/llama/10")["number"]
    lock = lab.root.parent / "state" / "jobs" / f"{number}.lock"
    lab.service.wait_until(lambda: lock.exists() and lock.read_text())
    pid = int(lock.read_text())
    os.kill(pid, signal.SIGSTOP)
    yield number
    if client.job(number)["state"] == "running":
        client.cancel(number)
        lab.wait(number)


@pytest.mark.long
def test_jobs_are_started_followed_and_listed(client, lab, monkeypatch):
    seen = []
    first = client.start("copy", checkpoint="lab/llama/10", to="lab/copied/10")
    job = client.wait(first["number"], 60, lambda done, total: seen.append((done, total)))
    assert job["state"] == "done"
    assert job["result"]["committed"]
    assert seen[-1][0] == seen[-1][1] == job["total"]
    assert shardckpt.open(lab.root / "copied" / "10").verify().ok
    assert client.wait(first["number"]) == client.job(first["number"]) == job
    client.wait(
        client.start("export", checkpoint="lab/llama/10", to="lab/exported", include=["model/**"])[
            "number"
        ]
    )
    imported = client.start("import", from_="lab/exported", to="lab/imported/10")
    assert client.wait(imported["number"])["result"]["committed"]
    monkeypatch.setattr(module, "_PAGE", 1)
    numbers = [one["number"] for one in client.jobs()]
    assert len(numbers) >= 3
    assert numbers == sorted(numbers, reverse=True)
    assert [
        one["number"] for one in client.jobs("done", operation="import", subject="lab/exported")
    ] == [imported["number"]]
    assert client.operations()["copy"]["required"] == ["checkpoint", "to"]


def test_a_failed_job_raises_its_own_error(client):
    client.wait(client.start("copy", checkpoint="lab/llama/10", to="lab/twice/10")["number"])
    again = client.start("copy", checkpoint="lab/llama/20", to="lab/twice/10")["number"]
    with pytest.raises(
        AlreadyExistsError, match=rf"job {again} \(copy lab/llama/20\): lab/twice/10"
    ):
        client.wait(again)
    with pytest.raises(NotFoundError):
        client.wait(99999)
    with pytest.raises(NotFoundError, match="no operation"):
        client.start("nothing")
    with pytest.raises(OptionError, match="no parameter"):
        client.start("pin", checkpoint="lab/llama/10", other=1)
    with pytest.raises(OptionError, match="as JSON"):
        client.start("pin", checkpoint={1, 2})


def test_waits_are_bounded_and_jobs_can_be_cancelled(client, frozen):
    with pytest.raises(CoordinationError, match=f"job {frozen} has not ended within 0.2 s"):
        client.wait(frozen, 0.2)
    client.cancel(frozen)
    with pytest.raises(CommitError, match=f"job {frozen} .* was cancelled"):
        client.wait(frozen, 60)
    with pytest.raises(OptionError):
        client.cancel(frozen)


class Cutting:
    """A transport that loses some answers, counted from 0, after the service has seen the
    requests."""

    def __init__(self, inner, lost):
        self.inner, self.lost, self.asked = inner, lost, []

    def handle_request(self, request):
        reply = self.inner.handle_request(request)
        self.asked.append(request)
        if len(self.asked) - 1 in self.lost:
            reply.read()
            reply.close()
            raise httpx.ReadError("the connection was lost", request=request)
        return reply

    def close(self):
        self.inner.close()


@pytest.fixture
def cutting(client):
    """Lets the client lose some answers."""

    def cut(lost):
        client._http._transport = transport = Cutting(client._http._transport, lost)
        return transport

    return cut


def test_a_start_whose_answer_is_lost_starts_one_job(client, cutting):
    before = len(list(client.jobs()))
    transport = cutting(range(1))
    number = client.start("pin", checkpoint="lab/llama/20")["number"]
    assert len({one.headers["idempotency-key"] for one in transport.asked}) == 1
    assert len(transport.asked) == 2
    assert len(list(client.jobs())) == before + 1
    client.wait(number)
    numbers = {
        client.start("pin", key="mine", checkpoint="lab/llama/20")["number"] for _ in range(2)
    }
    assert len(numbers) == 1
    cutting(range(2))
    with pytest.raises(StorageError, match="does not answer"):
        client.start("pin", checkpoint="lab/llama/20")


def test_a_wait_goes_on_after_lost_streams_and_answers(client, cutting, monkeypatch):
    monkeypatch.setattr(module, "_PAUSE", 0.01)
    number = client.start("copy", checkpoint="lab/llama/10", to="lab/cut/10")["number"]
    transport = cutting(range(5))
    assert client.wait(number, 60)["state"] == "done"
    assert len(transport.asked) > 5


@pytest.mark.long
def test_a_wait_that_has_long_heard_nothing_goes_on_after_a_lost_answer(
    client, lab, frozen, cutting, monkeypatch
):
    monkeypatch.setattr(module, "SILENCE", 5.0)
    monkeypatch.setattr(client, "_timeout", 4.0)
    transport = cutting(range(1, 2))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.wait, frozen)
        lab.service.wait_until(lambda: len(transport.asked) > 2 or waiting.done())
        assert lab.ask(f"/v1/jobs/{frozen}/cancel", "POST").status == 202
        with pytest.raises(CommitError, match="was cancelled"):
            waiting.result(60)


def test_a_wait_goes_on_while_the_service_is_busy(monkeypatch):
    monkeypatch.setattr(module, "_PAUSE", 0.01)
    problem = {"code": "http-503", "detail": "too many requests are at work; try again."}
    failed = {"code": "storage", "detail": "the journal cannot be read now."}
    job = {"number": 7, "operation": "pin", "subject": "lab/a/1", "state": "done", "error": None}
    job |= {"done": None, "total": None}
    answers = [(503, problem), (502, {"message": "Bad Gateway"}), (502, failed), (200, job)]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            events = self.path.endswith("/events")
            status, document = (404, {}) if events else answers[0] if always else answers.pop(0)
            body = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    always = False
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with Client(f"http://127.0.0.1:{server.server_port}", timeout=0.5) as client:
            assert client.wait(7) == job
            always, answers = True, [(503, problem)]
            with pytest.raises(StorageError, match="too many requests"):
                client.wait(7)
        server.shutdown()


def test_a_wait_polls_where_no_more_streams_are_served(client, monkeypatch):
    monkeypatch.setattr(endpoints, "_MOST_STREAMS", 0)
    number = client.start("verify", checkpoint="lab/llama/10")["number"]
    assert client.wait(number)["result"]["ok"]


def test_a_wait_ends_where_nobody_answers(monkeypatch):
    monkeypatch.setattr(module, "_PAUSE", 0.01)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with Client(f"http://127.0.0.1:{closed.getsockname()[1]}", timeout=0.2) as nobody:
            with pytest.raises(StorageError, match="does not answer"):
                nobody.wait(1)
            with pytest.raises((StorageError, CoordinationError)):
                nobody.wait(1, 0.05)


@pytest.mark.long
def test_commands_start_show_and_list_jobs(run):
    assert "done" in run(
        "job", "start", "copy", "checkpoint=lab/llama/10", "to=lab/typed/10", "--wait"
    )
    with_values = ("checkpoint=lab/llama/20", "to=lab/typed/10", "overwrite=true")
    job = json.loads(
        run(
            "job",
            "start",
            "reshard",
            *with_values,
            "mesh=x=2",
            "rule=**/embed.weight=(x,)",
            "--wait",
            "--json",
        )
    )
    assert job["state"] == "done"
    assert (job["arguments"]["overwrite"], job["arguments"]["rule"]) == (
        True,
        ["**/embed.weight=(x,)"],
    )
    number = job["number"]
    assert (
        json.loads(run("job", "show", number, "--json"))
        == json.loads(run("job", "wait", number, "--json"))
        == job
    )
    assert "reshard lab/llama/20 to lab/typed/10: done" in run("job", "show", number)
    assert json.loads(run("jobs", "--state", "done", "--json"))["jobs"][0] == job
    (line,) = (line for line in run("jobs").splitlines() if line.split()[0] == str(number))
    assert line.split()[1:6] == ["reshard", "lab/llama/20", "lab/typed/10", "done", "100%"]
    assert "no jobs in the state queued" in run("jobs", "--state", "queued")


def test_commands_wait_and_cancel(run, frozen):
    assert "has not ended within 1 s" in run("job", "wait", frozen, "--timeout", "1s", status=7)
    cancelling = json.loads(run("job", "cancel", frozen, "--json"))
    assert cancelling["cancelling"] or cancelling["state"] == "cancelled"
    assert "was cancelled" in run("job", "wait", frozen, status=7)
    assert json.loads(run("job", "wait", frozen, "--json", status=7))["error"]["code"] == "commit"


@pytest.mark.long
def test_commands_end_with_the_status_of_the_error(run, lab):
    assert "there is no job" in run("job", "show", 99999, status=3)
    assert "no operation" in run("job", "start", "nothing", status=3)
    for values, words in (
        (("checkpoint",), "give NAME=VALUE"),
        (("checkpoint=a", "checkpoint=b"), "given twice"),
        (("checkpoint=lab/llama/10", "to=lab/x/1", "overwrite=yes"), "give true or false"),
        (("checkpoint=lab/llama/10", "to=lab/x/1", "more=1"), "no parameter 'more'"),
    ):
        assert words in run("job", "start", "copy", *values, status=2)
    assert "give an integer" in run("job", "start", "retain", "run=lab/llama", "apply=x", status=2)
    run("job", "start", "copy", "checkpoint=lab/llama/10", "to=lab/there/10", "--wait")
    run("job", "start", "copy", "checkpoint=lab/llama/20", "to=lab/there/10", "--wait", status=7)
    place = lab.root / "there" / "10"
    data = max(
        (one for one in place.rglob("*") if one.is_file()), key=lambda one: one.stat().st_size
    )
    data.unlink()
    assert "ok: false" in run(
        "job", "start", "verify", "checkpoint=lab/there/10", "--wait", status=1
    )
    for command in (("jobs",), ("job", "show", "1")):
        result = CliRunner().invoke(app, list(command))
        assert result.exit_code == 2
        assert "--server https://HOST" in result.stderr
