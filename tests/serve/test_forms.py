"""The forms of the page, as a browser sends them: who may, from where, once, and with which
errors."""

import re
from html import unescape
from urllib.parse import urlencode

import numpy as np
import pytest
from serving import serving

import shardckpt
from shardckpt.runs.pinning import pin
from shardckpt.serve.access.identity import SCOPES
from shardckpt.serve.access.tokens import add_token
from shardckpt.serve.health import with_verifications
from shardckpt.serve.jobs.journal import Journal


class Person:
    """Somebody who has signed in."""

    def __init__(self, service, token):
        self.service = service
        reply = service.ask("/ui/login", "POST", f"token={token}")
        self.cookie = reply.headers["set-cookie"].partition(";")[0]

    def see(self, path, status=200):
        reply = self.service.ask(path, Cookie=self.cookie)
        assert reply.status == status, reply
        return reply.body.decode()

    def send(self, path, *, origin=None, kind="application/x-www-form-urlencoded", **fields):
        headers = {
            "Cookie": self.cookie,
            "Content-Type": kind,
            "Origin": origin or self.service.url,
        }
        return self.service.ask(path, "POST", urlencode(fields, doseq=True), **headers)

    def forms(self, path):
        """The forms of a page that start jobs: operation → hidden fields."""
        by_operation = {}
        for operation, inside in re.findall(
            r'<form method="post" action="/ui/jobs/(\w+)".*?>(.*?)</form>',
            self.see(path),
            re.DOTALL,
        ):
            hidden = re.findall(r'<input type="hidden" name="([^"]*)" value="([^"]*)">', inside)
            by_operation[operation] = {name: unescape(value) for name, value in hidden}
        return by_operation

    def start(self, page, operation, **fields):
        """Fill in a form of a page and send it; return the number of the job that it leads to."""
        reply = self.send(f"/ui/jobs/{operation}", **{**self.forms(page)[operation], **fields})
        assert reply.status == 303, reply.body
        return int(re.fullmatch(r"/ui/job/(\d+)", reply.headers["location"])[1])

    def end(self, number):
        """The document of a job that has ended."""
        self.service.wait_until(lambda: self.job(number)["ended"], 60)
        return self.job(number)

    def job(self, number):
        return self.service.get(f"/v1/jobs/{number}", Cookie=self.cookie)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    top = tmp_path_factory.mktemp("forms")
    for step in (1, 2, 3):
        shardckpt.save(
            top / "lab" / "run" / str(step), {"w": np.arange(64, dtype=np.float32) + step}
        )
    pin(top / "lab" / "run" / "3")
    return top


@pytest.fixture(scope="module")
def people(place):
    """A service, and somebody with each scope."""
    tokens = {scope: add_token(place / "tokens", scope, scope) for scope in SCOPES}
    with serving(
        ("lab", place / "lab"), token_file=place / "tokens", state=place / "state"
    ) as service:
        yield {scope: Person(service, token) for scope, token in tokens.items()}


PAGE = "/ui/checkpoint/lab/run/1"


def test_each_sees_only_the_forms_that_they_may_send(people):
    assert people["read"].forms(PAGE) == {}
    assert set(people["operate"].forms(PAGE)) == {"verify", "pin", "tag", "copy", "export"}
    assert set(people["admin"].forms(PAGE)) == {"verify", "pin", "tag", "copy", "export", "delete"}
    assert "overwrite" not in people["operate"].see(PAGE)
    assert "overwrite" in people["admin"].see(PAGE)
    assert set(people["operate"].forms("/ui/checkpoint/lab/run/3")) == {
        "verify",
        "tag",
        "copy",
        "export",
    }
    assert set(people["admin"].forms("/ui/checkpoint/lab/run/3")) == {
        "verify",
        "unpin",
        "tag",
        "copy",
        "export",
    }
    for scope, expected in (("read", {}), ("operate", {"import"}), ("admin", {"import"})):
        assert set(people[scope].forms("/ui/jobs")) == set(expected)
        assert set(people[scope].forms("/ui/plan/lab/run/1?mesh=x%3D2")) == (
            {"reshard"} if expected else set()
        )


@pytest.mark.parametrize("options", [{}, {"state": "state"}, {"token_file": "tokens"}])
def test_a_service_without_tokens_or_state_has_no_forms(place, tmp_path, options):
    token = add_token(tmp_path / "tokens", "ann", "admin")
    with serving(
        ("lab", place / "lab"), **{name: tmp_path / value for name, value in options.items()}
    ) as service:
        someone = Person(service, token) if "token_file" in options else None
        for path in (PAGE, "/ui/plan/lab/run/1?mesh=x%3D2", "/ui/jobs"):
            reply = (
                service.ask(path) if someone is None else service.ask(path, Cookie=someone.cookie)
            )
            text = reply.body.decode()
            assert "/ui/jobs/" not in text
            assert ('href="/ui/jobs"' in text) == ("state" in options)
            assert reply.status == (403 if path == "/ui/jobs" and "state" not in options else 200)


def test_a_form_sent_twice_starts_one_job_and_one_that_was_changed_another(people, place):
    ann = people["operate"]
    hidden = ann.forms(PAGE)["copy"]
    sent = [
        ann.send("/ui/jobs/copy", **hidden, to="lab/copies/1").headers["location"] for _ in range(3)
    ]
    assert len(set(sent)) == 1
    other = ann.send("/ui/jobs/copy", **hidden, to="lab/copies/2").headers["location"]
    assert other not in sent
    for location, name in ((sent[0], "1"), (other, "2")):
        job = ann.end(int(location.rpartition("/")[2]))
        assert (job["state"], job["who"], job["destination"]) == (
            "done",
            "operate",
            f"lab/copies/{name}",
        )
        assert shardckpt.open(place / "lab" / "copies" / name).read("w")[0] == 1
    assert "The new checkpoint is" in ann.see(sent[0])
    assert ann.forms(PAGE)["copy"]["key"] != hidden["key"]


def test_a_form_from_elsewhere_is_refused(people):
    ann = people["operate"]
    fields = ann.forms(PAGE)["pin"]
    assert ann.send("/ui/jobs/pin", origin="http://evil.example", **fields).status == 403
    body = urlencode(fields)
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    # No Origin.
    assert ann.service.ask("/ui/jobs/pin", "POST", body, Cookie=ann.cookie, **form).status == 403
    # No session.
    assert (
        ann.service.ask("/ui/jobs/pin", "POST", body, Origin=ann.service.url, **form).status == 401
    )
    assert ann.service.ask("/ui/job/1/cancel", "POST", "", Cookie=ann.cookie).status == 403
    assert not any(
        one["operation"] == "pin" for one in ann.service.get("/v1/jobs", Cookie=ann.cookie)["jobs"]
    )


def test_mistakes_are_pages_that_say_what_to_do(people):
    ann, fields = people["operate"], people["operate"].forms(PAGE)["copy"]

    def refusal(path, status, text, **given):
        reply = (people["read"] if status == 403 else ann).send(path, **{**fields, **given})
        assert reply.status == status
        assert "content-security-policy" in reply.headers
        words = unescape(reply.body.decode())
        assert text in words
        return words

    assert f'href="{PAGE}"' in refusal("/ui/jobs/copy", 400, "to= is missing")
    refusal("/ui/jobs/copy", 404, "no root 'nowhere'", to="nowhere/1")
    refusal("/ui/jobs/copy", 400, "lies in the checkpoint", to="lab/run/1/x")
    refusal("/ui/jobs/copy", 400, "has no parameter 'color'", to="lab/x/1", color="red")
    refusal("/ui/jobs/copy", 400, "is given 2 times", to=["lab/x/1", "lab/x/2"])
    refusal("/ui/jobs/copy", 400, "1 to 200 visible", to="lab/x/1", key="a b")
    refusal("/ui/jobs/copy", 403, "the scope operate", to="lab/x/1")
    refusal("/ui/jobs/sing", 404, "there is no operation 'sing'")
    refusal("/ui/job/99999/cancel", 404, "there is no job 99999")
    refusal("/ui/job/x/cancel", 404, "there is no job 'x'")
    refusal("/ui/jobs/copy", 415, "send a form", to="lab/x/1", kind="application/json")
    evil = refusal(
        "/ui/jobs/copy", 404, "<svg onload", checkpoint="lab/<svg onload=alert(1)>", to="lab/x/1"
    )
    assert evil.count("<svg onload") == 2  # in the message and in the link back, both escaped
    raw = ann.send("/ui/jobs/copy", **{**fields, "checkpoint": "lab/<svg onload=alert(1)>"}).body
    assert b"<svg" not in raw
    overwriting = ann.send("/ui/jobs/copy", **fields, to="lab/x/1", overwrite="true")
    assert (overwriting.status, b"the scope admin" in overwriting.body) == (403, True)
    large = ann.send("/ui/jobs/copy", **fields, to="x" * (65 << 10))
    assert large.status == 413
    assert ann.send("/ui/jobs/copy", **fields, include=["a"] * 400).status == 400


def test_what_is_quick_is_done_and_the_page_shows_it(people, place):
    ann, eve = people["operate"], people["admin"]
    page = "/ui/checkpoint/lab/run/2"
    tag = "best"
    assert ann.end(ann.start(page, "tag", tag=tag))["state"] == "done"
    ann.service.wait_until(lambda: f"tagged {tag}" in ann.see(page))
    assert "untag" not in ann.forms(page)
    assert eve.forms(page)["untag"]["tag"] == tag
    assert "delete" not in eve.forms(page)  # it is protected
    assert ann.send("/ui/jobs/untag", **eve.forms(page)["untag"]).status == 403
    assert eve.end(eve.start(page, "untag"))["result"] == {"tag": tag, "was_tagged": True}


def test_a_checkpoint_is_deleted_when_its_name_was_typed_and_only_the_one_that_was_seen(
    people, place
):
    eve, page = people["admin"], "/ui/checkpoint/lab/run/4"
    where = place / "lab" / "run" / "4"
    shardckpt.save(where, {"w": np.ones(2)})
    hidden = eve.forms(page)["delete"]
    for typed in ({}, {"confirm": "4"}, {"confirm": "lab/run/3"}):
        reply = eve.send("/ui/jobs/delete", **hidden, **typed)
        assert (reply.status, b"nothing was deleted" in reply.body) == (400, True)
    shardckpt.save(where, {"w": np.zeros(2)}, options=shardckpt.SaveOptions(overwrite=True))
    reply = eve.send("/ui/jobs/delete", **hidden, confirm=" lab/run/4 ")
    assert eve.end(int(reply.headers["location"].rpartition("/")[2]))["state"] == "failed"
    assert shardckpt.open(where).read("w")[0] == 0
    job = eve.end(eve.start(page, "delete", confirm="lab/run/4", reason="too old"))
    assert job["state"] == "done"
    assert "The checkpoint is deleted." in eve.see(f"/ui/job/{job['number']}")
    assert (
        not (where / "checkpoint.json").exists()
        or "too old" in (where / "checkpoint.json").read_text()
    )


def test_a_checkpoint_that_cannot_be_read_is_shown_and_deleted(people, place):
    where = place / "lab" / "run" / "5"
    shardckpt.save(where, {"w": np.ones(2)})
    (where / "checkpoint.json").write_text("{}")
    eve, page = people["admin"], "/ui/checkpoint/lab/run/5"
    assert "not a shardckpt record" in eve.see(page)
    assert str(place) not in eve.see(page)
    assert eve.end(eve.start(page, "delete", confirm="lab/run/5"))["state"] == "done"
    with pytest.raises(shardckpt.ShardckptError):
        shardckpt.open(where)


def test_a_backup_that_was_put_back_outlives_the_form_that_was_to_delete_what_it_replaced(
    people, place
):
    where = place / "lab" / "run" / "6"
    shardckpt.save(where, {"w": np.ones(2)})
    backup = (where / "checkpoint.json").read_bytes()
    (where / "checkpoint.json").write_text("{}")
    eve, page = people["admin"], "/ui/checkpoint/lab/run/6"
    hidden = eve.forms(page)["delete"]
    (where / "checkpoint.json").write_bytes(backup)
    reply = eve.send("/ui/jobs/delete", **hidden, confirm="lab/run/6")
    assert eve.end(int(reply.headers["location"].rpartition("/")[2]))["state"] == "failed"
    named_none = {"key": "k", "checkpoint": "lab/run/6", "confirm": "lab/run/6"}
    reply = eve.send("/ui/jobs/delete", **named_none)
    assert (reply.status, b"load the page again" in reply.body) == (400, True)
    assert shardckpt.open(where).read("w")[0] == 1


def test_a_reshard_is_started_with_the_options_of_its_plan(people, place):
    ann = people["operate"]
    plan = "/ui/plan/lab/run/1?" + urlencode({"mesh": "x=2", "rule": "w=(x) **=(None)"})
    number = ann.start(plan, "reshard", to="lab/resharded/1")
    job = ann.end(number)
    assert (job["state"], job["arguments"]["mesh"]) == ("done", "x=2"), job
    assert str(shardckpt.open(place / "lab" / "resharded" / "1").info("w").layout)
    assert (
        ann.service.get("/v1/checkpoints/lab/resharded/1/layouts/w", Cookie=ann.cookie)["mesh"]
        is not None
    )


def test_a_job_that_failed_is_started_again_and_one_that_waits_is_cancelled(people):
    ann, bob = people["operate"], people["read"]
    failed = ann.end(ann.start(PAGE, "export", to="lab/exports/m.safetensors", dtype="nonsense"))
    assert failed["state"] == "failed"
    page = f"/ui/job/{failed['number']}"
    assert unescape(failed["error"]["message"])[:20] in unescape(ann.see(page))
    assert set(ann.forms(page)) == {"export"}
    assert bob.forms(page) == {}
    again = ann.start(page, "export")
    assert again > failed["number"]
    assert ann.end(again)["arguments"] == failed["arguments"]
    ended = ann.send(f"/ui/job/{again}/cancel")
    assert (ended.status, b"can be cancelled" in ended.body) == (400, True)
    many = [
        ann.start(PAGE, "export", to=f"lab/exports/{i}.safetensors", include="w\nno-such-*")
        for i in range(3)
    ]
    assert "Cancel" not in bob.see(f"/ui/job/{many[-1]}")
    assert bob.send(f"/ui/job/{many[-1]}/cancel").status == 403
    ann.send(f"/ui/job/{many[-1]}/cancel")
    last = ann.end(many[-1])
    assert last["state"] in ("cancelled", "done")
    assert last["arguments"]["include"] == ["w", "no-such-*"]


@pytest.mark.long
def test_jobs_are_listed_by_state_and_page(people):
    ann = people["operate"]
    for number in [ann.start(PAGE, "verify", key=f"k{i}") for i in range(3)]:
        ann.end(number)
    assert "There are no such jobs." in ann.see("/ui/jobs?state=cancelled&subject=lab/run/77")
    numbers = [int(n) for n in re.findall(r'href="/ui/job/(\d+)"', ann.see("/ui/jobs?state=done"))]
    assert numbers == sorted(numbers, reverse=True)
    assert f"/ui/job/{numbers[1]}" in ann.see(f"/ui/jobs?before={numbers[0]}")
    assert f'"/ui/job/{numbers[0]}"' not in ann.see(f"/ui/jobs?before={numbers[0]}")
    for bad in ("state=odd", "before=x", "before=0"):
        ann.see(f"/ui/jobs?{bad}", 400)
    ann.see("/ui/job/99999", 404)


DAMAGE = {"file": "d/<b>0", "tensor": "<i>w", "box": "[0:4]", "reason": "crc32c differs"}


def test_damage_is_shown_wherever_checkpoints_are(tmp_path):
    """Of the attempt that is there, by the latest verification that has ended."""
    for step in range(1, 6):
        shardckpt.save(tmp_path / "lab" / "run" / str(step), {"w": np.ones(3)})
    attempts = {
        step: shardckpt.open(tmp_path / "lab" / "run" / str(step)).record.attempt
        for step in range(1, 6)
    }
    (tmp_path / "state").mkdir()
    journal = Journal(tmp_path / "state")

    def verified(step, damaged, attempt=None, *, over=True):
        one = journal.begin_verification(f"lab/run/{step}", attempt or attempts[step], None)
        journal.update_verification(
            type(one)(
                **{**_dict(one), "chunks": 9, "damaged": damaged, "damage": [DAMAGE][:damaged]}
            ),
            over=over,
        )

    verified(1, 2)  # damaged, and said so again by one that is not over
    verified(1, 0, over=False)
    verified(2, 3)  # repaired
    verified(2, 0)
    verified(3, 1, "another-attempt")
    verified(4, 0)
    journal.close()
    with serving(("lab", tmp_path / "lab"), state=tmp_path / "state") as service:
        entries = {
            one["name"]: one["verification"]
            for one in service.get("/v1/checkpoints")["checkpoints"]
        }
        assert {
            name: one and (one["ok"], one["damaged"], one["job"]) for name, one in entries.items()
        } == {
            "1": (False, 2, None),
            "2": (True, 0, None),
            "3": None,
            "4": (True, 0, None),
            "5": None,
        }
        assert service.get("/v1/checkpoints/lab/run/1")["entry"]["verification"] == entries["1"]
        assert service.get("/v1/runs")["runs"][0]["damaged"] == 1
        with shardckpt.Client(service.url) as client:
            assert [
                one["id"]
                for one in client.checkpoints()
                if one["verification"] and one["verification"]["damaged"]
            ] == ["lab/run/1"]

        def see(path):
            return service.ask(path).body.decode()

        assert "1 damaged" in see("/ui/runs")
        assert see("/ui/run/lab/run").count("committed, damaged") == 1
        page = see("/ui/checkpoint/lab/run/1")
        assert "2 damaged parts; the first 1 of them" in page
        assert "&lt;i&gt;w" in page
        assert "<i>w" not in page
        assert "Not verified yet" in see("/ui/checkpoint/lab/run/3")
        assert "of an earlier attempt" in see("/ui/checkpoint/lab/run/3")
        health = see("/ui/health")
        assert health.index("2 damaged parts of 9 chunks") < health.index("Latest verifications")
        assert '<data value="1" data-key="damaged">1</data>' in health
        assert '<data value="2" data-key="never_verified">2</data>' in health
        assert "does not scrub" in health


def test_health_says_how_far_the_scrub_is(tmp_path):
    shardckpt.save(tmp_path / "lab" / "1", {"w": np.ones(3000)})
    with serving(
        ("lab", tmp_path / "lab"), state=tmp_path / "state", scrub=1000.0, scrub_rate=1
    ) as service:
        text = service.ask("/ui/health").body.decode()
    for words in ("16 min", "1 B/s", "0 of 1 checkpoint", "does not keep up", "<progress"):
        assert words in text


def test_arguments_without_an_encoding_are_in_documents_and_on_pages(people):
    """JSON has lone surrogates as escapes."""
    ann = people["operate"]
    body = r'{"checkpoint": "lab/run/1", "to": "lab/exports/odd", "include": ["\ud800"]}'
    reply = ann.service.ask(
        "/v1/jobs/export",
        "POST",
        body,
        Cookie=ann.cookie,
        Origin=ann.service.url,
        Content_Type="application/json",
    )
    assert reply.status == 202
    assert ann.end(reply.json["number"])["arguments"]["include"] == ["\ud800"]
    assert "\\ud800" in ann.see(f"/ui/job/{reply.json['number']}")


def test_a_page_of_ten_thousand_rows_asks_the_journal_once(tmp_path, monkeypatch):
    journal, asked = Journal(tmp_path), []
    for i in range(3):
        journal.update_verification(journal.begin_verification(f"lab/{i}", "a", None), over=True)
    original = Journal.latest_verifications
    monkeypatch.setattr(
        Journal,
        "latest_verifications",
        lambda self, idents: (asked.append(len(idents)), original(self, idents))[1],
    )
    scanner = type("Scanner", (), {"watch": type("Watch", (), {"vanished": {}})})
    service = type(
        "Service", (), {"upkeep": type("Upkeep", (), {"journal": journal}), "scanner": scanner}
    )
    entries = [
        {"id": f"lab/{i}", "attempt": "a", "bases": [], "reason": None} for i in range(10_000)
    ]
    assert sum(one["verification"] is not None for one in with_verifications(service, entries)) == 3
    assert asked == [10_000]


def _dict(one):
    return {name: getattr(one, name) for name in one.__slots__}


@pytest.mark.long
def test_the_page_of_a_run_lists_what_rules_give_up_and_deletes_it_when_the_run_has_ended(tmp_path):
    for step in (1, 2, 3):
        shardckpt.save(
            tmp_path / "lab" / "run" / str(step), {"w": np.arange(64, dtype=np.float32) + step}
        )
    (tmp_path / "rules.toml").write_text('[[keep]]\nruns = "lab/run"\nlatest = 1\n')
    tokens = {scope: add_token(tmp_path / "tokens", scope, scope) for scope in SCOPES}
    options = {
        "token_file": tmp_path / "tokens",
        "state": tmp_path / "state",
        "keep": tmp_path / "rules.toml",
    }
    with serving(("lab", tmp_path / "lab"), **options) as service:
        people = {scope: Person(service, token) for scope, token in tokens.items()}
        page, admin = "/ui/run/lab/run", people["admin"]
        assert people["read"].forms(page) == {}
        assert set(people["operate"].forms(page)) == {"retain"}
        assert set(admin.forms(page)) == {"retain", "end", "gc"}
        assert admin.end(people["operate"].start(page, "retain"))["result"]["dry"]
        shown = admin.see(page)
        assert "2 steps that the rules would delete" in shown
        assert "for ever" not in shown  # the run has not ended
        assert "Rules would free" in admin.see("/ui/storage")
        admin.end(admin.start(page, "end"))
        assert "Delete 2 steps for ever" in admin.see(page)
        assert "for ever" not in people["operate"].see(page)
        # The last form of that operation is the one that deletes.
        deleted = admin.end(admin.start(page, "retain"))["result"]
        assert [one["name"] for one in deleted["steps"]] == ["1", "2"]
        assert "2 steps deleted" in admin.see(page)
        assert set(admin.forms(page)) == {"retain", "reopen", "gc"}
    assert [one.name for one in (tmp_path / "lab" / "run").iterdir() if one.is_dir()] == ["3"]
