"""The service's background work: the scrub, retention by rules, and notices to a webhook."""

import datetime as dt
import hashlib
import hmac
import json
import random
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from job_services import operated
from serve_kills import ServiceProcess
from serving import save_run

import shardckpt
from shardckpt import SaveOptions
from shardckpt.errors import OptionError
from shardckpt.io.store import Store
from shardckpt.runs.ended import ended as read_mark
from shardckpt.runs.ended import mark_ended
from shardckpt.serve.catalogue.catalogue import Catalogue
from shardckpt.serve.jobs import keeper, operations, webhook
from shardckpt.serve.jobs.journal import Journal
from shardckpt.serve.jobs.retention import RetentionRules
from shardckpt.serve.jobs.scrub import Scrubber
from shardckpt.serve.jobs.tally import Tally
from shardckpt.serve.jobs.verification import VerificationNotes
from shardckpt.serve.jobs.webhook import Webhook
from shardckpt.serve.jobs.work import Work
from shardckpt.serve.roots import Roots
from shardckpt.serve.scanner import Scanner

RULES = '[[keep]]\nruns = "lab/*"\nlatest = 1\nbest = { metric = "loss", n = 1, mode = "max" }\n'


def flip(path, rng):
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def ended(service, ident):
    """The latest verification of a checkpoint that has ended."""
    history = service.ask(f"/v1/verifications?checkpoint={ident}").json["verifications"]
    return next((one for one in history if one["ended"]), None)


@pytest.mark.long
def test_one_cycle_of_the_scrub_finds_every_flip_and_tells_nothing_else(
    tmp_path, receiver, monkeypatch
):
    monkeypatch.setenv("SHARDCKPT_WEBHOOK_SECRET", "s3cret")
    rng, damaged = random.Random(0), set()
    for layout in ("packed", "zarr"):
        for step in range(6):
            place = tmp_path / "runs" / layout / str(step)
            state = {
                "a": np.arange(30_000, dtype=np.float32) + step,
                "b": np.ones((40, 50), np.int16),
            }
            shardckpt.save(place, state, options=SaveOptions(layout=layout))
            if step % 2:
                files = [
                    one
                    for one in sorted(place.rglob("*"))
                    if one.is_file() and one.stat().st_size and one.name != "checkpoint.json"
                ]
                flip(rng.choice(files), rng)
                damaged.add(f"lab/{layout}/{step}")
    shardckpt.save(tmp_path / "runs" / "record" / "1", {"w": np.ones(3)})
    flip(tmp_path / "runs" / "record" / "1" / "checkpoint.json", rng)  # listed as unreadable
    with operated(tmp_path, ("lab", tmp_path / "runs"), scrub=3600.0, webhook=receiver.url) as lab:
        lab.service.wait_until(lambda: lab.ask("/v1/scrub").json["due"] == 0, 120)
        latest = {
            f"lab/{layout}/{step}": ended(lab, f"lab/{layout}/{step}")
            for layout in ("packed", "zarr")
            for step in range(6)
        }
        assert {ident for ident, one in latest.items() if not one["ok"]} == damaged
        assert all(
            one["damaged"] == len(one["damage"]) > 0 for one in latest.values() if not one["ok"]
        )
        assert all(
            one["chunks"] == one["total"] > 0 and one["job"] is None for one in latest.values()
        )
        status = lab.ask("/v1/scrub").json
        assert (status["checkpoints"], status["keeps_up"]) == (13, True)
        lab.service.wait_until(lambda: len(receiver.notices) > len(damaged))
        assert [
            one["id"] for one in lab.ask("/v1/checkpoints?state=unreadable").json["checkpoints"]
        ] == ["lab/record/1"]
        text = lab.ask("/metrics").body.decode()
        assert f"shardckpt_serve_damaged_checkpoints {float(len(damaged))}" in text
        again = lab.run("verify", checkpoint="lab/packed/1")["number"]
        lab.service.wait_until(lambda: len(receiver.notices) > len(damaged) + 1)
        verifications = lab.ask("/v1/verifications?checkpoint=lab/packed/1").json["verifications"]
    bodies = [json.loads(body) for body, _ in receiver.notices]
    assert {one["checkpoint"] for one in bodies} == damaged | {"lab/record/1"}
    assert [(one["source"], one["job"]) for one in bodies] == [("scrub", None)] * (
        len(damaged) + 1
    ) + [("job", again)]
    mine = [
        (one["verification"], one["job"]) for one in bodies if one["checkpoint"] == "lab/packed/1"
    ]
    assert mine == [(one["number"], one["job"]) for one in reversed(verifications)]
    for body, headers in receiver.notices:
        assert (
            headers["X-Shardckpt-Signature"]
            == f"sha256={hmac.new(b's3cret', body, hashlib.sha256).hexdigest()}"
        )


@pytest.mark.parametrize(
    ("code", "notices"), [("cancelled", 1), ("late", 1), ("storage", 1), ("replaced", 0)]
)
def test_damage_is_told_of_though_the_verification_cannot_end(tmp_path, code, notices):
    journal, roots = Journal(tmp_path), Roots([f"lab={tmp_path}"])
    journal.keeps_notices = True
    part = {"file": "f", "tensor": "w", "box": None, "reason": f"{tmp_path}/a/1/f: bad checksum"}
    state = {"attempt": "x", "chunks": 1, "total": 9, "bytes": 1, "over": False}
    notes = VerificationNotes(journal, roots, "lab/a/1", None)
    notes.note({**state, "damaged": 1, "damage": [part]})
    notes.end({"code": code, "message": "it failed"})
    bodies = [json.loads(body) for _, body in journal.notices()]
    assert [(one["event"], one["checkpoint"], one["damaged"]) for one in bodies] == [
        ("damage", "lab/a/1", 1)
    ] * notices
    assert str(tmp_path) not in json.dumps(bodies)
    assert journal.damaged_verifications()["lab/a/1"].error == "it failed"
    notes = VerificationNotes(journal, roots, "lab/a/2", None)
    notes.note({**state, "damaged": 0, "damage": []})
    notes.end({"code": code, "message": "it failed"})
    assert len(journal.notices()) == notices
    journal.close()


@pytest.mark.long
def test_a_scrub_keeps_its_rate_and_goes_on_where_it_was_killed(tmp_path):
    # 6 MiB.
    shardckpt.save(
        tmp_path / "runs" / "a" / "1", {"w": np.random.default_rng(0).normal(size=(3 << 18,))}
    )
    options = ("--scrub", "1h", "--scrub-rate", "1MiB")
    with ServiceProcess(tmp_path, {"lab": tmp_path / "runs"}, *options) as service:

        def last():
            verifications = service.http.get("/v1/verifications").json()["verifications"]
            return verifications[0] if verifications else {"chunks": 0, "ended": None}

        begun = time.monotonic()
        while not (before := last())["chunks"] > 0:
            assert time.monotonic() < begun + 60
            time.sleep(0.1)
        service.kill()
        assert before["ended"] is None
        service.restart()
        begun = time.monotonic()
        while last()["ended"] is None:
            assert last()["chunks"] >= before["chunks"]
            assert time.monotonic() < begun + 60
            time.sleep(0.1)
        done = last()
        assert (done["number"], done["chunks"], done["ok"]) == (
            before["number"],
            done["total"],
            True,
        )
        assert done["bytes"] >= 6 << 20  # what was read twice counts twice
        assert done["bytes"] < 11 << 20


@pytest.mark.long
def test_checkpoints_are_due_by_their_attempt_and_not_by_a_clock_that_was_set_back(tmp_path):
    save_run(tmp_path / "runs" / "a", (1, 2))
    roots = Roots([f"lab={tmp_path / 'runs'}"])
    catalogue, journal = Catalogue(tmp_path / "state"), Journal(tmp_path / "state")
    scanner = Scanner(roots, catalogue)
    scanner.scan()
    tally = Tally(journal, catalogue, scanner, 3600.0)
    scrubber = Scrubber(journal, tally, tmp_path / "locks", roots, period=3600.0, rate=1 << 30)

    def due():
        tally.count()
        return tally.due

    assert due() == ["lab/a/1", "lab/a/2"]
    scrubber._verify("lab/a/1")
    assert due() == ["lab/a/2"]
    scrubber._verify("lab/a/2")
    assert due() == []
    for hours, expected in ((-2, ["lab/a/1", "lab/a/2"]), (2, ["lab/a/1", "lab/a/2"]), (-0.5, [])):
        moved = (dt.datetime.now(dt.UTC) + dt.timedelta(hours=hours)).isoformat(timespec="seconds")
        with journal._db as db:
            db.execute("UPDATE verifications SET ended = ?", (moved,))
        assert due() == expected
    shardckpt.save(
        tmp_path / "runs" / "a" / "2", {"w": np.ones(3)}, options=SaveOptions(overwrite=True)
    )
    time.sleep(0.01)
    Scanner(roots, catalogue).scan()
    assert due() == ["lab/a/2"]
    catalogue.close()
    journal.close()


def test_what_was_verified_while_checkpoints_were_counted_is_not_due(tmp_path):
    meanwhile, later = [], []

    class Slow(Journal):
        def verified(self, known):
            for ident in meanwhile:
                tally.drop(ident)
            return super().verified(known)

    class SlowTally(Tally):
        def _due(self, entries, verified):
            due = super()._due(entries, verified)
            for ident in later:
                self.drop(ident)
            return due

    save_run(tmp_path / "runs" / "a", (1, 2, 3))
    roots = Roots([f"lab={tmp_path / 'runs'}"])
    catalogue, journal = Catalogue(tmp_path / "state"), Slow(tmp_path / "state")
    scanner = Scanner(roots, catalogue)
    scanner.scan()
    tally = SlowTally(journal, catalogue, scanner, 3600.0)
    tally.count()
    tally.drop("lab/a/1")
    assert tally.due == ["lab/a/2", "lab/a/3"]
    meanwhile.append("lab/a/2")
    tally.count()
    assert tally.due == ["lab/a/1", "lab/a/3"]
    meanwhile.clear()
    later.append("lab/a/3")
    tally.count()
    assert tally.due == ["lab/a/1", "lab/a/2"]
    assert tally.get().due == 2
    later.clear()
    tally.count()
    assert tally.due == ["lab/a/1", "lab/a/2", "lab/a/3"]
    catalogue.close()
    journal.close()


def test_verifications_of_a_root_that_is_not_served_now_are_not_forgotten(tmp_path):
    save_run(tmp_path / "lab" / "a", (1,))
    catalogue, journal = Catalogue(tmp_path / "state"), Journal(tmp_path / "state")
    for ident in ("lab/a/1", "lab/a/2", "attic/a/1"):
        journal.begin_verification(ident, "x", None)
    scanner = Scanner(Roots([f"lab={tmp_path / 'lab'}"]), catalogue)
    scanner.scan()
    tally = Tally(journal, catalogue, scanner, 3600.0)
    tally.forget_gone()
    tally.forget_gone()
    assert {one.id for one in journal.verifications()} == {"lab/a/1", "attic/a/1"}
    catalogue.close()
    journal.close()


@pytest.mark.long
def test_retention_deletes_what_a_dry_run_has_listed_of_an_ended_run(tmp_path):
    save_run(tmp_path / "runs" / "a", (1, 2, 3, 4, 5))  # the loss falls: 1 is the best by "max"
    (tmp_path / "rules.toml").write_text(RULES)
    with operated(tmp_path, ("lab", tmp_path / "runs"), keep=tmp_path / "rules.toml") as lab:
        pinned = lab.run("pin", checkpoint="lab/a/3")["number"]
        dry = lab.run("retain", run="lab/a")
        assert dry["result"]["dry"]
        assert [one["name"] for one in dry["result"]["steps"]] == ["2", "4"]
        assert dry["result"]["bytes"] == sum(one["bytes"] for one in dry["result"]["steps"]) > 0
        assert dry["result"]["left"] == {"3": "it is pinned"}
        assert lab.post("retain", "operate", run="lab/a", apply=dry["number"]).status == 403
        refused = lab.run("retain", run="lab/a", apply=dry["number"])
        assert "not marked as ended" in refused["error"]["message"]
        assert lab.post("retain", run="lab/a", apply=999).status == 404
        assert "apply=" in lab.post("retain", run="lab/a", apply=pinned).json["detail"]
        assert lab.done("end", run="lab/a") == {"ended": True}
        lab.done("tag", checkpoint="lab/a/4", tag="released")
        result = lab.done("retain", run="lab/a", apply=dry["number"])
        assert [one["name"] for one in result["steps"]] == ["2"]
        assert "tagged released" in result["left"]["4"]
        assert sorted(one.name for one in (tmp_path / "runs" / "a").iterdir() if one.is_dir()) == [
            "1",
            "3",
            "4",
            "5",
        ]
        save_run(tmp_path / "runs" / "a", (6,))
        again = lab.run("retain", run="lab/a")
        lab.done("untag", checkpoint="lab/a/4", tag="released")
        assert (
            "6 was saved after"
            in lab.run("retain", run="lab/a", apply=again["number"])["error"]["message"]
        )
        assert lab.done("reopen", run="lab/a")["was_ended"]
        assert "no rule" in lab.run("retain", run="lab")["error"]["message"]


@pytest.mark.long
def test_the_keeper_waits_a_day_after_the_dry_run_and_after_a_jump_of_the_clock(
    tmp_path, monkeypatch
):
    save_run(tmp_path / "runs" / "a", (1, 2, 3))
    save_run(tmp_path / "runs" / "going", (1, 2, 3))
    (tmp_path / "rules.toml").write_text(RULES)
    with operated(tmp_path, ("lab", tmp_path / "runs"), keep=tmp_path / "rules.toml") as lab:
        lab.done("end", run="lab/a")
        upkeeper = lab.service.upkeep.keeper
        jobs = lab.service.upkeep.journal

        def looked():
            upkeeper.look()
            made = jobs.jobs(operation="retain")
            return [
                (lab.wait(one.number)["state"], one.subject, one.arguments["apply"], one.who)
                for one in made
            ]

        upkeeper._not_before = time.monotonic()  # at its first start the clock is not known
        first = ("done", "lab/a", None, "rules")
        assert looked() == [first]
        assert looked() == [first]
        dry = jobs.jobs(operation="retain")[0].number

        def pass_time(hours):
            with jobs._db as db:
                moved = (dt.datetime.now(dt.UTC) - dt.timedelta(hours=hours)).isoformat(
                    timespec="seconds"
                )
                db.execute("UPDATE jobs SET ended = ? WHERE operation = 'retain'", (moved,))

        pass_time(23)
        assert looked() == [first]
        pass_time(25)
        monkeypatch.setattr(keeper, "_offset", lambda: time.time() - time.monotonic() + 90_000)
        assert looked() == [first]  # the day may have been none
        upkeeper._not_before = time.monotonic()
        assert looked() == [("done", "lab/a", dry, "rules"), first]
        assert sorted(one.name for one in (tmp_path / "runs" / "a").iterdir() if one.is_dir()) == [
            "1",
            "3",
        ]
        assert len(list((tmp_path / "runs" / "going").iterdir())) == 3
        assert looked() == [("done", "lab/a", dry, "rules"), first]


def test_dry_runs_of_users_do_not_put_off_the_deletion_by_the_keeper(tmp_path):
    save_run(tmp_path / "lab" / "a", (1, 2))
    mark_ended(Store.open(tmp_path / "lab" / "a"), "ann")
    (tmp_path / "rules.toml").write_text(RULES)
    roots, rules = Roots([f"lab={tmp_path / 'lab'}"]), RetentionRules.read(tmp_path / "rules.toml")
    catalogue, jobs = Catalogue(tmp_path / "state"), Journal(tmp_path / "state")
    Scanner(roots, catalogue).scan()
    upkeeper = keeper.Keeper(jobs, catalogue, roots, rules)
    upkeeper._not_before = time.monotonic()

    def end(job):
        mark = read_mark(Store.open(tmp_path / "lab" / "a")).when
        steps = [{"name": "1", "attempt": "x"}]
        jobs.begin(job.number)
        jobs.end(job.number, "done", result={"dry": True, "ended": mark, "steps": steps})

    def pass_a_day():
        moved = (dt.datetime.now(dt.UTC) - dt.timedelta(hours=25)).isoformat(timespec="seconds")
        jobs._db.execute("UPDATE jobs SET ended = ? WHERE ended IS NOT NULL", (moved,))

    def add(who, apply=None):
        about = {"subject": "lab/a", "destination": None, "who": who, "key": None}
        return jobs.add("retain", {}, {"run": "lab/a", "apply": apply}, **about)[0]

    upkeeper.look()
    (dry,) = jobs.jobs()
    end(dry)
    pass_a_day()
    for _ in range(3):
        end(add("ann"))
    upkeeper.look()
    last = jobs.jobs()[0]
    assert (last.who, last.arguments["apply"]) == ("rules", dry.number)
    # A deletion that a user has started is not made twice.
    jobs.end(last.number, "failed")
    pass_a_day()
    upkeeper.look()
    dry = jobs.jobs()[0]
    assert dry.arguments["apply"] is None
    end(dry)
    pass_a_day()
    deletion = add("ann", apply=dry.number)
    upkeeper.look()
    assert jobs.jobs()[0] == deletion
    jobs.begin(deletion.number)
    upkeeper.look()
    jobs.end(deletion.number, "failed")
    upkeeper.look()
    assert jobs.jobs()[0].number == deletion.number
    catalogue.close()
    jobs.close()


def test_a_run_of_any_length_is_listed_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(operations, "_MOST_STEPS", 2)
    monkeypatch.setattr(operations, "_MOST_REASONS", 1)
    save_run(tmp_path / "runs" / "a", (1, 2, 3, 4, 5, 6))
    (tmp_path / "rules.toml").write_text(RULES)
    roots, lists, counts = Roots([f"lab={tmp_path / 'runs'}"]), [], []
    mark_ended(Store.open(roots.locate("lab/a")), "ann")
    options = {"keep": tmp_path / "rules.toml"}
    work = Work(roots, "ann", False, options, lambda *_: None, lambda _: None)
    for _ in range(3):
        dry = operations.retain(work, "lab/a", None, None)
        assert dry["bytes"] == sum(one["bytes"] for one in dry["steps"])
        listed = {one["name"]: one["attempt"] for one in dry["steps"]}
        done = operations.retain(work, "lab/a", 1, listed)
        assert done["steps"] == dry["steps"]
        lists.append([*listed])
        counts.append((dry["left_count"], len(done["left"]), done["left_count"]))
    assert lists == [["2", "3"], ["4", "5"], []]
    assert counts == [(0, 1, 2), (0, 0, 0), (0, 0, 0)]


@pytest.mark.long
def test_a_list_from_before_the_mark_of_the_end_is_made_anew(tmp_path):
    save_run(tmp_path / "runs" / "a", (1, 2, 3))
    (tmp_path / "rules.toml").write_text(RULES)
    with operated(tmp_path, ("lab", tmp_path / "runs"), keep=tmp_path / "rules.toml") as lab:
        upkeeper, jobs = lab.service.upkeep.keeper, lab.service.upkeep.journal
        upkeeper._not_before = time.monotonic()

        def looked_two_days_later():
            with jobs._db as db:
                moved = (dt.datetime.now(dt.UTC) - dt.timedelta(days=2)).isoformat()
                db.execute("UPDATE jobs SET ended = ?, created = ?", (moved, moved))
            upkeeper.look()
            made = jobs.jobs(operation="retain")
            return [(lab.wait(one.number)["state"], one.arguments["apply"]) for one in made]

        assert lab.post("retain", "operate", run="lab/a").status == 202
        lab.service.wait_until(lambda: jobs.jobs(state="done", operation="retain"))
        time.sleep(1)  # marks have times to the second
        lab.done("end", run="lab/a")
        assert looked_two_days_later() == [("done", None)] * 2
        time.sleep(1)
        lab.done("reopen", run="lab/a")
        lab.done("end", run="lab/a")
        assert looked_two_days_later() == [("done", None)] * 3
        dry = jobs.jobs(operation="retain")[0].number
        assert looked_two_days_later() == [("done", dry), *[("done", None)] * 3]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "keep = 3",
        "[[keep]]\nlatest = 1",
        '[[keep]]\nruns = "a"\nlatest = 0',
        '[[keep]]\nruns = "a"\nfirst = 3',
    ],
)
def test_rules_that_are_none_are_refused_at_the_start(tmp_path, text):
    (tmp_path / "rules.toml").write_text(text)
    with pytest.raises(OptionError, match=r"rules\.toml"):
        RetentionRules.read(tmp_path / "rules.toml")


class Receiver:
    """A web server that takes notices."""

    def __init__(self):
        self.notices, self.answers, self.asked = [], [], []
        self.refused = b"refused"
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status = receiver.answers.pop(0) if receiver.answers else 204
                status = 413 if receiver.refused in body else status
                receiver.asked.append(self.path)
                if status == 204:
                    receiver.notices.append((body, dict(self.headers)))
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", "/elsewhere")
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def receiver():
    """A web server that takes notices."""
    server = Receiver()
    yield server
    server.server.shutdown()
    server.server.server_close()


def test_notices_are_kept_until_they_are_received_and_follow_no_redirect(
    tmp_path, receiver, monkeypatch
):
    monkeypatch.setattr(webhook, "_POLL", 0.01)
    monkeypatch.setattr(webhook, "_LONGEST_PAUSE", 0.05)
    journal = Journal(tmp_path)
    receiver.answers = [500, 302, 204]
    sending = Webhook(journal, receiver.url)
    journal.add_notice({"event": "damage", "checkpoint": "lab/a/1"})
    sending.start()
    end = time.monotonic() + 60
    while not receiver.notices:
        assert time.monotonic() < end
        time.sleep(0.01)
    sending.stop()
    assert receiver.asked == ["/hook"] * 3
    assert json.loads(receiver.notices[0][0]) == {"event": "damage", "checkpoint": "lab/a/1"}
    assert "X-Shardckpt-Signature" not in receiver.notices[0][1]
    assert journal.notices() == []
    gone = Webhook(journal, "http://127.0.0.1:9/closed")
    journal.add_notice({"event": "damage", "checkpoint": "lab/a/2"})
    gone.start()
    time.sleep(0.2)
    gone.stop()
    journal.close()
    journal = Journal(tmp_path)
    assert [json.loads(body)["checkpoint"] for _, body in journal.notices()] == ["lab/a/2"]
    journal.close()


def test_a_notice_that_is_refused_for_ever_holds_up_no_other(tmp_path, receiver, monkeypatch):
    monkeypatch.setattr(webhook, "_POLL", 0.01)
    monkeypatch.setattr(webhook, "_LONGEST_PAUSE", 0.05)
    journal = Journal(tmp_path)
    for n in range(40):
        journal.add_notice({"event": "refused" if n < 12 or n == 20 else "damage", "n": n})
    sending = Webhook(journal, receiver.url)
    sending.start()
    end = time.monotonic() + 60
    while len(journal.notices(limit=99)) > 13:
        assert time.monotonic() < end
        time.sleep(0.01)
    receiver.refused = b"nothing"
    while journal.notices():
        assert time.monotonic() < end
        time.sleep(0.01)
    sending.stop()
    assert sorted(json.loads(body)["n"] for body, _ in receiver.notices) == [*range(40)]
    journal.close()


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "gopher://x", "http://user:pass@host/", "//host", "http://"]
)
def test_a_webhook_is_a_web_server(tmp_path, url):
    with pytest.raises(OptionError, match="--webhook"):
        Webhook(None, url)
