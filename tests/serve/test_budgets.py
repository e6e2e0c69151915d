"""Budgets of memory, descriptors and work: floods of requests take no more, and are told to come
again."""

import json
import shutil
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from job_services import operated
from load import apart, bomb, resident, slow_clients
from serving import save_run, serving
from starlette.exceptions import HTTPException

import shardckpt
from shardckpt.reading.checkpoint import Checkpoint
from shardckpt.serve import sources
from shardckpt.serve.opened import OpenCheckpoints
from shardckpt.serve.problems import DocumentResponse


@pytest.mark.long
def test_clients_that_do_not_read_take_a_bounded_amount_of_memory(tmp_path):
    rng = np.random.default_rng(1)
    shardckpt.save(
        tmp_path / "runs" / "a" / "1",
        {"w": rng.integers(0, 99, 12 << 20, np.uint8), "many": [np.ones(1)] * 20_000},
    )
    (tmp_path / "runs" / "a" / "tokenizer.json").write_bytes(b"{" + b" " * (33 << 20) + b"}")
    with apart(("lab", tmp_path / "runs")) as (service, process):
        assert service.ask("/lab/a/resolve/main/tokenizer.json").body.endswith(b" }")
        described = service.ask("/v1/checkpoints/lab/a/1").body
        service.ask("/files/lab/a/1/model.safetensors")
        before = resident(process)
        clients = []
        for path in (
            "/lab/a/resolve/main/tokenizer.json",
            "/v1/checkpoints/lab/a/1",
            "/v1/checkpoints/lab/a/1/tensors/w?format=raw",
            "/files/lab/a/1/model.safetensors",
        ):
            clients += slow_clients(service, path)
        service.wait_until(
            lambda: service.ask("/healthz").status == 200 and service.ask("/v1/runs").status == 200
        )
        in_flight = b"shardckpt_serve_requests_in_flight"
        service.wait_until(lambda: in_flight in service.ask("/metrics").body)
        assert resident(process) - before < 512 << 20
        for one in clients:
            one.close()
        service.wait_until(lambda: service.ask("/v1/checkpoints/lab/a/1").body == described)


def test_a_page_for_which_no_thread_is_free_is_a_page_that_says_so(service, monkeypatch):
    async def refuse(*arguments, **options):
        raise HTTPException(503, "too many requests are at work", {"Retry-After": "5"})

    monkeypatch.setattr("shardckpt.serve.ui.on_thread", refuse)
    reply = service.ask("/ui/runs")
    assert (reply.status, reply.headers["retry-after"]) == (503, "5")
    assert reply.headers["content-type"].startswith("text/html")


def test_an_answer_that_finds_no_memory_is_told_to_come_again(service, monkeypatch):
    monkeypatch.setattr(sources, "_WAIT_SECONDS", 0.0)
    monkeypatch.setattr(sources.ANSWERS, "_total", 1)
    monkeypatch.setattr("shardckpt.serve.access.guard._LARGE", 100)
    with sources.ANSWERS.lent(1):
        for path in (
            "/v1/runs",
            "/ui/runs",
            "/v1/checkpoints/lab/llama/10/tensors/model/embed.weight?format=raw",
        ):
            reply = service.ask(path)
            assert (reply.status, reply.headers["retry-after"]) == (503, "5"), path
            assert "large answers" in reply.json["detail"]
        assert service.ask("/healthz").status == 200
    reply = service.ask("/v1/checkpoints/lab/llama/10")
    assert reply.status == 200
    assert int(reply.headers["content-length"]) == len(reply.body)
    assert sources.ANSWERS._held == 0


@pytest.mark.long
def test_a_chunk_that_expands_beyond_memory_is_refused_everywhere(tmp_path):
    bomb(tmp_path / "runs" / "a" / "1")
    with apart(("lab", tmp_path / "runs")) as (service, process):
        before = resident(process)
        for path in (
            "/v1/checkpoints/lab/a/1/tensors/w?format=raw&box=0:1",
            "/v1/checkpoints/lab/a/1/statistics/w?budget=1",
            "/files/lab/a/1/model.safetensors",
            "/lab/a/resolve/main/model.safetensors",
            "/zarr/lab/a/1/w/c/0",
        ):
            reply = service.ask(path)
            assert (reply.status, reply.json["code"]) == (413, "memory"), (path, reply)
        assert service.ask("/v1/checkpoints/lab/a/1").status == 200
        assert resident(process) - before < 200 << 20


def test_a_large_file_that_is_replaced_while_it_is_sent_does_not_look_complete(tmp_path):
    save_run(tmp_path / "runs" / "a", (1,))
    file = tmp_path / "runs" / "a" / "tokenizer.json"
    file.write_bytes(b"a" * (40 << 20))
    with serving(("lab", tmp_path / "runs")) as service:
        one = slow_clients(service, "/lab/a/resolve/main/tokenizer.json", 1, 1 << 18)[0]
        begun = bytearray(one.recv(1 << 12))
        (tmp_path / "new").write_bytes(b"b" * (40 << 20))
        (tmp_path / "new").rename(file)
        with one:
            while part := one.recv(1 << 20):
                begun += part
        body = begun.partition(b"\r\n\r\n")[2]
        assert set(body) == {ord("a")}
        assert len(body) < 40 << 20
        assert service.ask("/lab/a/resolve/main/tokenizer.json").body == b"b" * (40 << 20)


def test_requests_leave_no_descriptors_behind(tmp_path):
    save_run(tmp_path / "runs" / "a", (1,))
    with apart(("lab", tmp_path / "runs")) as (service, process):
        held = f"/proc/{process.pid}/fd"
        with ThreadPoolExecutor(8) as pool:
            assert {one.status for one in pool.map(service.ask, ["/v1/checkpoints"] * 64)} == {200}

        def databases():
            return sum(
                "catalogue" in str(link.readlink())
                for link in Path(held).iterdir()
                if link.is_symlink()
            )

        # Of the writer and of the connections that are kept: a database, its log and its index.
        assert databases() <= 3 + 3 * 8


def test_a_commit_is_found_without_opening_the_others(tmp_path, monkeypatch):
    save_run(tmp_path / "runs" / "a", (1,))
    for step in range(2, 60):
        shutil.copytree(tmp_path / "runs" / "a" / "1", tmp_path / "runs" / "b" / str(step))
    save_run(tmp_path / "runs" / "b", (1,))
    with serving(("lab", tmp_path / "runs")) as service:
        sha = service.get("/api/models/lab/b/revision/step-1+bfloat16")["sha"]
        opened = []
        monkeypatch.setattr(
            Checkpoint,
            "__init__",
            lambda *args, make=Checkpoint.__init__, **more: (
                opened.append(args[1]),
                make(*args, **more),
            )[1],
        )
        assert service.get(f"/api/models/lab/b/revision/{sha}")["sha"] == sha
        assert service.ask(f"/lab/b/resolve/{'f' * 40}/model.safetensors").status == 404
        assert len(opened) <= 1


def test_unknown_dtypes_of_revisions_are_not_kept(tmp_path, monkeypatch):
    save_run(tmp_path / "runs" / "a", (1,))
    begun = []
    monkeypatch.setattr(
        OpenCheckpoints,
        "__init__",
        lambda *args, make=OpenCheckpoints.__init__: (begun.append(args[0]), make(*args))[1],
    )
    with serving(("lab", tmp_path / "runs")) as service:
        for n in range(20):
            assert service.ask(f"/lab/a/resolve/main+{n}/model.safetensors").status == 400
        assert [len(one.parts) for one in begun[0]._opened.values()] == [1]


@pytest.mark.long
def test_verifications_of_checkpoints_that_are_gone_are_forgotten(tmp_path):
    save_run(tmp_path / "runs" / "a", (1, 2))
    with operated(tmp_path, ("lab", tmp_path / "runs"), scrub=3600.0) as lab:
        for step in (1, 2):
            lab.done("verify", checkpoint=f"lab/a/{step}")
        with sqlite3.connect(tmp_path / "state" / "journal.sqlite") as db:
            rows = (
                (
                    f"lab/r{i % 50}/{i}",
                    "x",
                    "2026-11-20T10:00:00+00:00",
                    "2026-11-20T10:00:05+00:00",
                )
                for i in range(3000)
            )
            db.executemany(
                "INSERT INTO verifications (id, attempt, begun, ended) VALUES (?,?,?,?)", rows
            )
        shutil.rmtree(tmp_path / "runs" / "a" / "1")
        lab.service.wait_until(lambda: len(lab.ask("/v1/checkpoints").json["checkpoints"]) == 1)
        tally = lab.service.upkeep.tally
        tally.forget_gone()
        # A checkpoint may be away for a moment.
        assert len(lab.service.upkeep.journal.verified_besides((), 9999, ("lab",))) == 3002
        tally.forget_gone()
        assert lab.service.upkeep.journal.verified_besides((), 9999, ("lab",)) == {"lab/a/2"}
        lab.service.wait_until(lambda: lab.ask("/v1/scrub").json["due"] == 0)


@pytest.mark.parametrize("path", ["/metrics", "/ui/health", "/v1/scrub"])
def test_no_request_counts_the_whole_journal_where_that_is_slow(tmp_path, monkeypatch, path):
    save_run(tmp_path / "runs" / "a", (1,))
    with operated(tmp_path, ("lab", tmp_path / "runs"), scrub=3600.0) as lab:
        tally = lab.service.upkeep.tally
        lab.service.wait_until(lambda: tally._counts is not None)
        counted = []
        monkeypatch.setattr(tally, "count", lambda: counted.append(1))
        tally._took, tally._counted, tally._complete = 10.0, 0.0, True
        tally._stopped.set()  # its own thread counts no more
        tally._wake.set()
        tally._thread.join()
        assert lab.ask(path).status == 200
        assert counted == []


@pytest.mark.parametrize("count", [0, 1, 500, 501, 1000, 1001])
def test_a_long_list_is_encoded_in_parts_as_in_one(count):
    document = {
        "names": [{"name": f"\ud800{i}"} for i in range(count)],
        "complete": True,
        "deep": {"list": [[]]},
    }
    body = DocumentResponse(document).body
    assert body == json.dumps(document, separators=(",", ":")).encode()
