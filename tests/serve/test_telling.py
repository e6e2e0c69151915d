"""The service tells what is so: of damage, of all and not of a page, and of jobs that cannot go
on."""

import json
import re
import shutil
import sqlite3
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from job_services import LaterJobs, operated
from serving import save_run, serving

import shardckpt
from shardckpt.serve.jobs import endpoints
from shardckpt.serve.jobs.journal import Journal
from shardckpt.serve.jobs.runner import _PAUSES, JobEnd, JobRunner
from shardckpt.serve.roots import Roots


def flip(place):
    file = max(
        (one for one in place.rglob("*") if one.is_file()), key=lambda one: one.stat().st_size
    )
    data = bytearray(file.read_bytes())
    data[50] ^= 1
    file.write_bytes(data)


def text_of(reply):
    return " ".join(re.sub(r"<[^>]*>", " ", reply.body.decode()).split())


def test_a_full_state_disk_takes_no_tries_of_a_job(tmp_path):
    (tmp_path / "state").mkdir()
    journal = Journal(tmp_path / "state")
    number = journal.add("verify", {}, {}, subject="lab/a", destination=None, who="ann", key=None)[
        0
    ].number
    runner = JobRunner(
        journal, tmp_path / "state" / "jobs", Roots([f"lab={tmp_path}"]), at_once=1, options={}
    )
    died = JobEnd(error={"code": "storage", "message": "its process died"}, again=True)
    journal.begin(number)
    pages = journal._db.execute("PRAGMA page_count").fetchone()[0]
    large = JobEnd(error={"code": "storage", "message": "x" * 100_000}, again=True)
    journal._db.execute(f"PRAGMA max_page_count = {pages}")
    for _ in range(2 * len(_PAUSES)):
        with pytest.raises(shardckpt.errors.StorageError, match="cannot be written"):
            runner._write_down(journal.job(number), large)
    journal._db.execute("PRAGMA max_page_count = 1000000")
    runner._write_down(journal.job(number), died)
    assert journal.job(number).state == "queued"
    assert runner._failures[number] == 1
    journal.close()


@pytest.mark.long
def test_damaged_rows_of_the_journal_hide_no_others(tmp_path):
    save_run(tmp_path / "runs" / "a", (1,))
    with operated(tmp_path, ("lab", tmp_path / "runs")) as lab:
        first, second, third = (lab.run("verify", checkpoint="lab/a/1")["number"] for _ in range(3))
        fourth = lab.run("pin", checkpoint="lab/a/1")["number"]
    with sqlite3.connect(tmp_path / "state" / "journal.sqlite") as db:
        db.execute(
            "UPDATE jobs SET arguments = '{', operation = 'unheard-of' WHERE number = ?", (first,)
        )
        db.execute(
            "UPDATE jobs SET result = '[1]', who = CAST(x'ff41' AS TEXT) WHERE number = ?",
            (second,),
        )
        db.execute(
            "UPDATE jobs SET arguments = 'nonsense', state = 'queued' WHERE number = ?", (third,)
        )
        db.execute(
            "UPDATE verifications SET damage = '[5]' WHERE number = (SELECT min(number) FROM "
            "verifications)"
        )
    with operated(tmp_path, ("lab", tmp_path / "runs")) as lab:
        assert lab.wait(third)["state"] == "failed"
        listed = {one["number"]: one["error"] for one in lab.ask("/v1/jobs").json["jobs"]}
        damaged = dict.fromkeys((first, second, third), "corrupt")
        assert {number: error and error["code"] for number, error in listed.items()} == damaged | {
            fourth: None
        }
        pages = [
            "/ui/jobs",
            "/ui/checkpoint/lab/a/1",
            "/ui/health",
            "/v1/verifications",
            *(f"/ui/job/{number}" for number in (first, second, third, fourth)),
        ]
        assert {path: lab.ask(path).status for path in pages} == dict.fromkeys(pages, 200)


@pytest.mark.long
def test_damage_is_red_and_not_the_gateways(tmp_path):
    save_run(tmp_path / "runs" / "a", (1, 2))
    flip(tmp_path / "runs" / "a" / "2")
    with operated(tmp_path, ("lab", tmp_path / "runs")) as lab:
        job = lab.run("verify", checkpoint="lab/a/2")
        assert (job["state"], job["found_damage"]) == ("done", True)
        for path in ("/ui/jobs", f"/ui/job/{job['number']}"):
            assert (
                f'<span class="state mark-unreadable" data-job="{job["number"]}">done, found '
                "damage</span>".encode()
                in lab.ask(path).body
            ), path
        reply = lab.ask("/v1/diff?a=lab/a/1&b=lab/a/2")
        assert (reply.status, reply.json["code"], reply.json["title"]) == (
            422,
            "corrupt",
            "Damaged",
        )
        page = lab.ask("/ui/diff?a=lab/a/1&b=lab/a/2")
        assert "422 Damaged" in text_of(page)


@pytest.mark.long
def test_pages_tell_totals_of_all_and_unfinished_saves(tmp_path):
    save_run(tmp_path / "runs" / "a", (1,))
    for step in range(2, 520):
        shutil.copytree(tmp_path / "runs" / "a" / "1", tmp_path / "runs" / "a" / str(step))
    (
        tmp_path / "runs" / "a" / "519" / "checkpoint.json"
    ).unlink()  # a save that was never published
    for run in range(210):
        shutil.copytree(tmp_path / "runs" / "a" / "1", tmp_path / "runs" / f"r{run}" / "1")
    with operated(tmp_path, ("lab", tmp_path / "runs")) as lab:
        assert "200 of 211 runs" in text_of(lab.ask("/ui/runs"))
        page = text_of(lab.ask("/ui/run/lab/a"))
        assert "Checkpoints 519" in page
        assert "500 of 519 checkpoints" in page
        assert "of it by unfinished saves" in page
        assert "Runs 211" in text_of(lab.ask("/ui/storage"))
        held = lab.ask("/v1/runs?limit=1").json["runs"][0]["unfinished_bytes"]
        assert held > 1000
        dry = lab.done("gc", run="lab/a", grace="0s", dry=True)
        assert (dry["removed"] + dry["published"], dry["dry"]) == (1, True)
        assert lab.post("gc", scope="operate", run="lab/a").status == 403
        assert lab.post("gc", run="lab/a", grace="soon").status == 400
        done = lab.done("gc", run="lab/a", grace="0s")
        assert done["removed"] + done["published"] == 1
        lab.service.wait_until(
            lambda: lab.ask("/v1/runs?limit=1").json["runs"][0]["unfinished_bytes"] == 0
        )


def test_the_page_of_a_dry_run_names_the_steps_that_it_would_delete(tmp_path):
    save_run(tmp_path / "runs" / "a", (1, 2, 3))
    (tmp_path / "rules.toml").write_text('[[keep]]\nruns = "lab/*"\nlatest = 1\n')
    with operated(tmp_path, ("lab", tmp_path / "runs"), keep=tmp_path / "rules.toml") as lab:
        number = lab.run("retain", run="lab/a")["number"]
        page = text_of(lab.ask(f"/ui/job/{number}"))
        assert "2 steps that the rules would delete" in page
        assert lab.job(number)["result"]["steps"][0]["name"] in page


def test_one_token_may_follow_half_of_the_streams(tmp_path, monkeypatch):
    monkeypatch.setattr(endpoints, "_MOST_STREAMS", 4)
    save_run(tmp_path / "runs" / "a", (1,))
    with operated(tmp_path, ("lab", tmp_path / "runs")) as lab:
        lab.service.upkeep.runner._not_before = LaterJobs()
        journal = lab.service.upkeep.journal
        number = journal.add(
            "verify",
            {},
            {"checkpoint": "lab/none"},
            subject="lab/none",
            destination=None,
            who="x",
            key=None,
        )[0].number

        def follow(scope):
            connection = lab.service.connect()
            connection.request(
                "GET",
                f"/v1/jobs/{number}/events",
                headers={"Authorization": f"Bearer {lab.tokens[scope]}"},
            )
            return connection, connection.getresponse()

        held = []
        for scope, status in (("read", 200), ("read", 200), ("read", 503), ("operate", 200)):
            connection, reply = follow(scope)
            if status == 200:
                reply.readline()
            assert reply.status == status, scope
            held.append(connection)
        for one in held:
            one.close()


@pytest.mark.parametrize(
    "to",
    [
        "lab/kept/20261126T105723-5c67f980",
        "lab/1/2/3/4/5/6",
        "lab/" + "x" * 300,
        "lab/" + "x/" * 2000 + "x",
    ],
)
def test_jobs_write_only_where_the_service_lists(lab, to):
    assert lab.post("copy", checkpoint="lab/llama/10", to=to).status in (400, 404)


def test_odd_numbers_and_cursors_are_no_failures(tmp_path):
    state = {
        "u": np.array([2**64 - 1], np.uint64),
        "big": np.full(5, 1e308),
        "near": np.array([1e308, np.nextafter(1e308, 2e308)]),
    }
    shardckpt.save(tmp_path / "runs" / "a" / "1", state)
    with serving(("lab", tmp_path / "runs")) as service, ThreadPoolExecutor(3) as pool:
        paths = [f"/v1/checkpoints/lab/a/1/statistics/{name}" for name in state]
        for reply in pool.map(service.ask, paths):
            assert reply.status == 200, reply
            assert sum(json.loads(reply.body)["histogram"]) in (1, 2, 5)
        assert service.ask("/v1/checkpoints?cursor=WyJcdWQ4MDAiLDEsImIiXQ").status == 400
        assert service.ask(f"/v1/checkpoints/lab/{'x' * 300}").status == 404
