"""Long answers: they have limits, end at their deadline, and keep nobody else waiting."""

import multiprocessing.forkserver
import threading
from pathlib import Path

import numpy as np
import pytest
from job_services import operated
from serving import save_run

import shardckpt
from shardckpt.serve import calculations

HUGE = "/v1/checkpoints/lab/odd/1/plan?mesh=data=1000000&rule=**%3D(data)"


@pytest.fixture(scope="module")
def top(tmp_path_factory):
    """A run, and a checkpoint whose plan for a large mesh takes minutes and gigabytes."""
    top = tmp_path_factory.mktemp("calculated")
    save_run(top / "runs" / "run", (10, 20))
    shardckpt.save(
        top / "runs" / "odd" / "1",
        {"w": np.ones((8, 8), np.float32), "odd": np.zeros((1,) * 32, np.float32)},
    )
    return top


@pytest.fixture
def lab(top, tmp_path):
    with operated(tmp_path, ("lab", top / "runs")) as service:
        yield service


def processes():
    """The calculations that are at work."""
    server = multiprocessing.forkserver._forkserver._forkserver_pid
    return Path(f"/proc/{server}/task/{server}/children").read_text().split()


def test_a_calculation_that_takes_too_much_memory_or_time_is_refused_and_its_process_ends(
    lab, monkeypatch
):
    monkeypatch.setattr(calculations, "_MEMORY", 64 << 20)
    reply = lab.ask(HUGE)
    assert (reply.status, reply.json["code"]) == (413, "memory"), reply
    assert processes() == []
    monkeypatch.setattr(calculations, "SECONDS", 0.0)
    reply = lab.ask("/v1/diff?a=lab/run/10&b=lab/run/20")
    assert reply.status == 503
    assert "takes longer than" in reply.json["detail"]
    assert processes() == []
    monkeypatch.undo()
    assert lab.ask("/v1/diff?a=lab/run/10&b=lab/run/20").status == 200


@pytest.mark.long
def test_long_requests_of_one_user_keep_no_other_user_waiting(lab, monkeypatch):
    monkeypatch.setattr(calculations, "SECONDS", 20.0)
    paths = (
        HUGE,
        HUGE.replace("/v1/checkpoints", "/ui/plan").replace("/plan?", "?"),
        "/v1/checkpoints/lab/run/10?only=**",
    )
    hostile = [
        threading.Thread(
            target=lab.ask, args=(paths[i % 3],), kwargs={"scope": "operate"}, daemon=True
        )
        for i in range(16)
    ]
    for one in hostile:
        one.start()
    lab.service.wait_until(processes)
    for path in (
        "/healthz",
        "/v1/runs",
        "/v1/checkpoints/lab/run/10",
        "/v1/checkpoints/lab/run/10/statistics/model~1embed.weight",
    ):
        assert lab.ask(path.replace("~1", "/"), scope="read").status == 200, path
    for one in hostile:
        one.join()
    lab.service.wait_until(lambda: not processes())


def test_a_calculation_ends_with_the_errors_of_the_library(lab):
    for path, status, code in (
        ("/v1/checkpoints/lab/run/10/statistics/none", 404, "names"),
        ("/v1/checkpoints/lab/run/10/plan?mesh=model=8&rule=x", 400, "option"),
        ("/v1/diff?a=lab/run/10&b=lab/run/11", 404, "not-found"),
    ):
        reply = lab.ask(path)
        assert (reply.status, reply.json["code"]) == (status, code), reply


def test_a_process_that_cannot_be_started_is_no_failure_of_the_service(lab, monkeypatch):
    def fail(process):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(calculations._context.Process, "start", fail)
    for _ in range(3):
        reply = lab.ask("/v1/diff?a=lab/run/10&b=lab/run/20")
        assert (reply.status, reply.headers["retry-after"]) == (503, "5"), reply
        assert "ulimit -u" in reply.json["detail"]
    monkeypatch.undo()
    assert lab.ask("/v1/diff?a=lab/run/10&b=lab/run/20").status == 200
