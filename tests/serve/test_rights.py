"""Rights per root: every endpoint is asked with every combination of rights at two roots.

Runs and checkpoints that a token may not read are hidden from it. Each route, each endpoint of a
checkpoint and each operation needs an entry here.
"""

import itertools
import json
import logging
import re
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from http.client import IncompleteRead
from urllib.parse import urlencode

import numpy as np
import pytest
from job_services import LaterJobs
from serving import serving

import shardckpt
from shardckpt import SaveOptions
from shardckpt.errors import OptionError
from shardckpt.runs.pinning import tag
from shardckpt.serve import api, pool
from shardckpt.serve.access import guard, identity
from shardckpt.serve.access import tokens as tokens_module
from shardckpt.serve.access.tokens import add_token
from shardckpt.serve.jobs import journal
from shardckpt.serve.jobs.operations import OPERATIONS
from shardckpt.serve.roots import Roots

RIGHTS = (None, "read", "operate", "admin")
ROOTS = ("crimson", "indigo")
PAIRS = list(itertools.product(RIGHTS, RIGHTS))
FORM = "application/x-www-form-urlencoded"
FREE = {"/healthz", "/readyz", "/static/{name}", "/ui/login", "/ui/logout"}
"""Routes without anything of a root."""
LISTS = {
    "/": ["/"],
    "/metrics": ["/metrics"],
    "/v1/openapi.json": ["/v1/openapi.json"],
    "/v1/scrub": ["/v1/scrub"],
    "/v1/runs": ["/v1/runs", "/v1/runs?text=run"],
    "/v1/checkpoints": [
        "/v1/checkpoints",
        "/v1/checkpoints?metric=crimsonmetric<9",
        "/v1/checkpoints?metric=indigometric<9",
        "/v1/checkpoints?tag=indigotag",
        "/v1/checkpoints?tag=crimsontag",
        "/v1/checkpoints?order=descending&text=run",
    ],
    "/v1/jobs": ["/v1/jobs", "/v1/jobs?operation=copy"],
    "/v1/verifications": ["/v1/verifications"],
    "/ui/runs": ["/ui/runs", "/ui/runs?text=run"],
    "/ui/storage": ["/ui/storage"],
    "/ui/jobs": ["/ui/jobs"],
    "/ui/health": ["/ui/health"],
}
"""Routes of all roots together."""
PLACES = {
    "/v1/checkpoints/{path:lines}": [],  # OF_CHECKPOINT
    "/files/{path:lines}": ["/files/{id}/", "/files/{id}/model.safetensors"],
    "/zarr/{path:lines}": ["/zarr/{id}/zarr.json"],
    "/raw/{path:lines}": ["/raw/{id}/checkpoint.json"],
    "/v1/diff": ["/v1/diff?a={id}&b={id}"],
    "/ui/diff": ["/ui/diff?a={id}&b={id}"],
    "/ui/run/{path:lines}": ["/ui/run/{root}/{root}run"],
    "/ui/checkpoint/{path:lines}": ["/ui/checkpoint/{id}", "/ui/checkpoint/{id}?text=w"],
    "/ui/tensor/{path:lines}": ["/ui/tensor/{id}?name=w", "/ui/tensor/{id}?name=w&values=read"],
    "/ui/plan/{path:lines}": ["/ui/plan/{id}?mesh=data=2"],
    "/api/models/{path:lines}": [
        "/api/models/{root}/{root}run",
        "/api/models/{root}/{root}run/tree/main",
    ],
    "/{ident:lines}/resolve/{rest:lines}": ["/{root}/{root}run/resolve/main/model.safetensors"],
}
"""Routes of a place in a root."""
OF_CHECKPOINT = {
    "": ["", "?only=w"],
    "tensors": ["/tensors/w", "/tensors/w?format=npy"],
    "layouts": ["/layouts/w"],
    "statistics": ["/statistics/w"],
    "plan": ["/plan?mesh=data=2"],
}
EMPTY_FOR_STRANGERS = [
    "/v1/checkpoints?run={root}/{root}run",
    "/v1/jobs?subject={id}",
    "/v1/verifications?checkpoint={id}",
    "/ui/jobs?subject={id}",
]
OF_RUNS = {"/v1/versions"}
"""Routes that a place is given to; `test_following` has their rights."""
OF_JOBS = {
    "/v1/jobs/{job}": "/v1/jobs/{job}",
    "/v1/jobs/{job}/events": "/v1/jobs/{job}/events",
    "/ui/job/{job}": "/ui/job/{job}",
}
WRITES = {
    "/v1/announcements",
    "/v1/leases",
    "/v1/jobs/{operation}",
    "/v1/jobs/{job}/cancel",
    "/ui/jobs/{operation}",
    "/ui/job/{job}/cancel",
}
NEEDS = {
    "verify": ("operate", {"checkpoint": "{id}"}),
    "pin": ("operate", {"checkpoint": "{id}"}),
    "tag": ("operate", {"checkpoint": "{id}", "tag": "x"}),
    "unpin": ("admin", {"checkpoint": "{id}"}),
    "untag": ("admin", {"checkpoint": "{id}", "tag": "x"}),
    "delete": ("admin", {"checkpoint": "{id}"}),
    "end": ("admin", {"run": "{run}"}),
    "reopen": ("admin", {"run": "{run}"}),
    "gc": ("admin", {"run": "{run}"}),
    "fold": ("operate", {"run": "{run}"}),
    "retain": ("operate", {"run": "{run}"}),
    "retain apply": ("admin", {"run": "{run}", "apply": "{dry}"}),
    "copy": ("operate", {"checkpoint": "{id}", "to": "{to}"}),
    "copy overwrite": ("admin", {"checkpoint": "{id}", "to": "{to}", "overwrite": True}),
    "reshard": ("operate", {"checkpoint": "{id}", "to": "{to}"}),
    "reshard overwrite": ("admin", {"checkpoint": "{id}", "to": "{to}", "overwrite": True}),
    "export": ("operate", {"checkpoint": "{id}", "to": "{to}"}),
    "export overwrite": ("admin", {"checkpoint": "{id}", "to": "{to}", "overwrite": True}),
    "import": ("operate", {"from": "{id}", "to": "{to}"}),
    "import overwrite": ("admin", {"from": "{id}", "to": "{to}", "overwrite": True}),
}
"""Right at the root that is written, and the arguments; a job with `to` also needs `read` at its
source."""


@dataclass
class Team:
    service: object
    tokens: dict
    jobs: dict
    dry: dict
    top: object

    def ask(self, rights, path, method="GET", body=None, **headers):
        given = {"Authorization": f"Bearer {self.tokens[rights]}"} | headers
        return self.service.ask(path, method, None if body is None else json.dumps(body), **given)

    def hidden(self, rights):
        return [root for root, right in zip(ROOTS, rights, strict=True) if right is None]


def ident_in(root):
    return f"{root}/{root}run/2"


@pytest.fixture(scope="module")
def team(tmp_path_factory):
    top = tmp_path_factory.mktemp("team")
    for root in ROOTS:
        for step in (1, 2):
            options = SaveOptions(metadata={"metrics": {f"{root}metric": float(step)}})
            shardckpt.save(
                top / root / f"{root}run" / str(step), {"w": np.arange(8.0) + step}, options=options
            )
        shardckpt.save(top / root / "plain" / "1", {"w": np.arange(4)})
        tag(top / root / f"{root}run" / "1", f"{root}tag")
        (top / root / f"{root}odd").mkdir()
        (top / root / f"{root}odd" / "checkpoint.json").write_text("{}")
    based = SaveOptions(base=top / "indigo" / "indigorun" / "1", skip="w")
    shardckpt.save(
        top / "crimson" / "based" / "1", {"w": np.arange(8.0) + 1, "v": np.ones(2)}, options=based
    )
    (top / "crimson" / "linked").mkdir()
    (top / "crimson" / "linked" / "1").mkdir()
    for one in (top / "crimson" / "crimsonrun" / "2").iterdir():
        (top / "crimson" / "linked" / "1" / one.name).symlink_to(one)
    (top / "crimson" / "linked" / "1" / "more").symlink_to(top / "indigo" / "indigorun")
    (top / "rules.toml").write_text('[[keep]]\nruns = "*/*"\nlatest = 1\n')
    tokens = {}
    for pair in [*PAIRS, "all"]:
        rights = (
            ["admin"]
            if pair == "all"
            else [f"{root}={right}" for root, right in zip(ROOTS, pair, strict=True) if right]
        )
        name = pair if pair == "all" else "-".join(str(right) for right in pair)
        tokens[pair] = add_token(top / "tokens", name, *(rights or ["elsewhere=admin"]))
    options = {
        "token_file": top / "tokens",
        "state": top / "state",
        "keep": top / "rules.toml",
        "scrub": 1e6,
        "jobs": 4,
    }
    with serving(*((root, top / root) for root in ROOTS), **options) as service:
        members = Team(service, tokens, {}, {}, top)

        def done(operation, **arguments):
            reply = members.ask(
                "all", f"/v1/jobs/{operation}", "POST", arguments, Content_Type="application/json"
            )
            assert reply.status == 202, reply
            number = reply.json["number"]
            service.wait_until(lambda: members.ask("all", f"/v1/jobs/{number}").json["ended"], 100)
            return number

        for root in ROOTS:
            members.jobs[root, root] = done("verify", checkpoint=ident_in(root))
            members.dry[root] = done("retain", run=f"{root}/{root}run")
        members.jobs["crimson", "indigo"] = done(
            "copy", checkpoint="crimson/plain/1", to="indigo/kept/1"
        )
        members.jobs["indigo", "crimson"] = done(
            "copy", checkpoint="indigo/plain/1", to="crimson/kept/1"
        )
        service.wait_until(
            lambda: "crimson/kept/1" in members.ask("all", "/v1/checkpoints").body.decode()
        )
        service.wait_until(lambda: members.ask("all", "/v1/scrub").json["due"] == 0, 100)
        service.upkeep.runner._stopped.set()  # jobs wait from now on
        yield members


@pytest.mark.long
def test_every_route_endpoint_and_operation_has_declared_rights(team):
    declared = FREE | LISTS.keys() | PLACES.keys() | OF_JOBS.keys() | OF_RUNS | WRITES
    assert {route.path for route in team.service.routes} == declared
    assert api.OF_CHECKPOINT.keys() == OF_CHECKPOINT.keys()
    assert {name.partition(" ")[0] for name in NEEDS} == OPERATIONS.keys()
    posts = {route.path for route in team.service.routes if "POST" in (route.methods or ())}
    assert posts == WRITES | {"/ui/login", "/ui/logout"}


@pytest.mark.parametrize("rights", PAIRS)
def test_lists_counts_and_metrics_have_nothing_of_other_roots(team, rights):
    for path in itertools.chain(*LISTS.values()):
        reply = team.ask(rights, path)
        assert reply.status == (303 if path == "/" and reply.status == 303 else 200), path
        for root in team.hidden(rights):
            text = (
                reply.body.decode()
                .replace(f"metric={root}metric", "")
                .replace(f"tag={root}tag", "")
            )
            assert root not in text, (path, text)
            assert str(team.top / root) not in text
    checkpoints = team.ask(rights, "/v1/checkpoints").json["checkpoints"]
    states = [one["state"] for one in checkpoints]
    assert {one["id"].partition("/")[0] for one in checkpoints} == {
        one for one in ROOTS if one not in team.hidden(rights)
    }
    text = team.ask(rights, "/metrics").body.decode()
    metrics = dict(re.findall(r"^(shardckpt_serve_[^ ]+) (\S+)$", text, re.MULTILINE))
    assert float(metrics['shardckpt_serve_checkpoints{state="committed"}']) == states.count(
        "committed"
    )
    jobs = team.ask(rights, "/v1/jobs?limit=1000").json["jobs"]
    assert sum(float(n) for name, n in metrics.items() if "_jobs{" in name) == len(jobs)
    assert ("shardckpt_serve_scans_total" in metrics) == (rights == "all")
    scrub, readable = (
        team.ask(rights, "/v1/scrub").json,
        states.count("committed") + states.count("unreadable"),
    )
    assert scrub["checkpoints"] == readable
    stored = sum(one["stored_bytes"] or 0 for one in checkpoints)
    assert scrub["bytes"] == stored
    runs = team.ask(rights, "/v1/runs").json
    assert sum(one["stored_bytes"] for one in runs["runs"]) == stored


def concrete(template, root):
    return template.format(id=ident_in(root), root=root)


@pytest.mark.long
@pytest.mark.parametrize("rights", PAIRS)
def test_a_place_that_may_not_be_read_answers_as_one_that_does_not_exist(team, rights):
    of_checkpoint = [
        f"/v1/checkpoints/{{id}}{tail}" for tail in itertools.chain(*OF_CHECKPOINT.values())
    ]
    for template in [*itertools.chain(*PLACES.values()), *of_checkpoint]:
        nothing = team.ask(rights, concrete(template, "nowhere"))
        assert nothing.status == 404, template
        for root in ROOTS:
            reply = team.ask(rights, concrete(template, root))
            if root not in team.hidden(rights):
                assert reply.status == 200, (template, reply)
                continue
            assert reply.status == 404, template
            assert re.sub(root, "nowhere", reply.body.decode()) == nothing.body.decode(), template
            assert reply.headers.get("x-error-code") == nothing.headers.get("x-error-code")
    for template in EMPTY_FOR_STRANGERS:
        nothing = team.ask(rights, concrete(template, "nowhere"))
        for root in team.hidden(rights):
            reply = team.ask(rights, concrete(template, root))
            texts = [
                re.sub(r'(name="key" value=)"[^"]*"', r"\1", one.body.decode())
                for one in (reply, nothing)
            ]
            assert (reply.status, texts[0].replace(root, "nowhere")) == (200, texts[1])
    for a, b in (("crimson", "indigo"), ("indigo", "crimson")):
        reply = team.ask(rights, f"/v1/diff?a={ident_in(a)}&b={ident_in(b)}")
        assert reply.status == (404 if team.hidden(rights) else 200)


@pytest.mark.parametrize("rights", PAIRS)
def test_a_job_between_roots_exists_for_those_who_read_both(team, rights):
    for roots, number in team.jobs.items():
        exists = not set(roots) & set(team.hidden(rights))
        for template in OF_JOBS.values():
            reply = team.ask(rights, template.format(job=number))
            assert reply.status == (200 if exists else 404), (roots, template)
            if not exists:
                nothing = team.ask(rights, template.format(job=999_999_999))
                assert (
                    re.sub(rf"\b{number};", "999999999;", reply.body.decode())
                    == nothing.body.decode()
                )
        if not exists:  # and none about it is listed
            assert number not in [
                one["number"] for one in team.ask(rights, "/v1/jobs?limit=1000").json["jobs"]
            ]


@pytest.mark.long
@pytest.mark.parametrize("rights", PAIRS)
def test_jobs_are_started_and_cancelled_with_the_rights_that_they_need(team, rights, monkeypatch):
    monkeypatch.setattr(journal, "MOST_QUEUED", 100_000)
    by_root = dict(zip(ROOTS, rights, strict=True))
    for name, (needed, template) in NEEDS.items():
        operation = name.partition(" ")[0]
        for source, target in itertools.product(ROOTS, ROOTS):
            if "to" not in template and source != target:
                continue
            fill = {
                "id": ident_in(source),
                "run": f"{source}/{source}run",
                "to": f"{target}/new/{time.monotonic_ns()}",
            }
            arguments = {
                key: value.format(**fill, dry="") if isinstance(value, str) else value
                for key, value in template.items()
            }
            if "apply" in arguments:
                arguments["apply"] = team.dry[source]
            reply = team.ask(
                rights, f"/v1/jobs/{operation}", "POST", arguments, Content_Type="application/json"
            )
            readable = by_root[source] and by_root[target]
            enough = readable and RIGHTS.index(by_root[target]) >= RIGHTS.index(needed)
            assert reply.status == (202 if enough else 403 if readable else 404), (
                name,
                source,
                target,
                reply,
            )
            if not readable:
                hidden = source if not by_root[source] else target
                elsewhere = json.loads(json.dumps(arguments).replace(hidden, "nowhere"))
                nothing = team.ask(
                    rights,
                    f"/v1/jobs/{operation}",
                    "POST",
                    elsewhere,
                    Content_Type="application/json",
                )
                assert (nothing.status, nothing.body) == (
                    404,
                    reply.body.replace(hidden.encode(), b"nowhere"),
                )
            full = ("all", f"/v1/jobs/{operation}", "POST", arguments)
            number = (reply if enough else team.ask(*full, Content_Type="application/json")).json[
                "number"
            ]
            cancelled = team.ask(rights, f"/v1/jobs/{number}/cancel", "POST")
            assert cancelled.status == reply.status
            if not enough:
                assert team.ask("all", f"/v1/jobs/{number}/cancel", "POST").status == 202


@pytest.mark.parametrize("rights", PAIRS)
def test_pages_have_the_forms_that_a_viewer_may_send_and_forms_need_the_same_rights(team, rights):
    service = team.service
    session = service.ask("/ui/login", "POST", urlencode({"token": team.tokens[rights]}))
    headers = {
        "Cookie": session.headers["set-cookie"].partition(";")[0],
        "Content-Type": FORM,
        "Origin": service.url,
    }
    for root, right in zip(ROOTS, rights, strict=True):
        reply = service.ask(
            "/ui/jobs/pin", "POST", urlencode({"checkpoint": ident_in(root), "key": "1"}), **headers
        )
        assert reply.status == (404 if right is None else 403 if right == "read" else 303)
        if reply.status == 303:
            number = reply.headers["location"].rpartition("/")[2]
            assert service.ask(f"/ui/job/{number}/cancel", "POST", "", **headers).status == 303
        if right is None:
            continue
        page = service.ask(f"/ui/checkpoint/{ident_in(root)}", **headers).body.decode()
        shown = {name for name in OPERATIONS if f'action="/ui/jobs/{name}"' in page}
        here = {
            "operate": {"verify", "pin", "tag"},
            "admin": {"verify", "pin", "tag", "delete"},
        }.get(right, set())
        elsewhere = (
            {"copy", "export"} if any(one in ("operate", "admin") for one in rights) else set()
        )
        assert shown == here | elsewhere


@pytest.mark.parametrize("rights", PAIRS)
def test_an_announcement_tells_nothing_of_other_roots(team, rights):
    for root, right in zip(ROOTS, rights, strict=True):
        reply = team.ask(
            rights, "/v1/announcements", "POST", {"url": str(team.top / ident_in(root))}
        )
        assert (reply.status, reply.json["id"]) == (202, ident_in(root) if right else None)


def test_a_base_or_link_into_another_root_needs_read_there(team):
    for checkpoint, why in (
        ("crimson/based/1", b"its base another place, which you may not read"),
        ("crimson/linked/1", b"the link 'more'"),
    ):
        for path in (
            f"/v1/checkpoints/{checkpoint}",
            f"/v1/checkpoints/{checkpoint}?only=v",
            f"/raw/{checkpoint}/checkpoint.json",
            f"/ui/tensor/{checkpoint}?name=w",
        ):
            # Opened before by somebody else.
            assert team.ask(("read", "read"), path).status == 200, path
            reply = team.ask(("admin", None), path)
            assert reply.status in (404, 422), path
            assert why in reply.body.replace(b"&#x27;", b"'"), path
            assert b"indigo" not in reply.body, path
    listed = {
        one["id"]: one["bases"]
        for one in team.ask(("admin", None), "/v1/checkpoints").json["checkpoints"]
    }
    assert listed["crimson/based/1"] == []
    assert (
        "indigo"
        in team.ask(("read", "read"), "/v1/checkpoints?run=crimson/based").json["checkpoints"][0][
            "bases"
        ][0]
    )


@pytest.mark.long
def test_a_job_reads_no_base_in_a_root_that_its_user_may_not_read(tmp_path):
    shardckpt.save(tmp_path / "indigo" / "run" / "1", {"w": np.arange(8.0)})
    based = SaveOptions(base=tmp_path / "indigo" / "run" / "1", skip="w")
    shardckpt.save(
        tmp_path / "crimson" / "based" / "1", {"w": np.arange(8.0), "v": np.ones(2)}, options=based
    )
    (tmp_path / "crimson" / "import").mkdir()
    (tmp_path / "crimson" / "import" / "model.safetensors").symlink_to(
        tmp_path / "indigo" / "run" / "1" / "checkpoint.json"
    )
    token = add_token(tmp_path / "tokens", "ann", "crimson=admin")
    both = add_token(tmp_path / "tokens", "bob", "crimson=admin", "indigo=read")
    options = {"token_file": tmp_path / "tokens", "state": tmp_path / "state"}
    with serving(
        ("crimson", tmp_path / "crimson"), ("indigo", tmp_path / "indigo"), **options
    ) as service:

        def end(secret, operation, **arguments):
            headers = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}
            number = service.ask(
                f"/v1/jobs/{operation}", "POST", json.dumps(arguments), **headers
            ).json["number"]
            service.wait_until(lambda: service.get(f"/v1/jobs/{number}", **headers)["ended"], 100)
            return service.get(f"/v1/jobs/{number}", **headers)

        for to, operation, more in (
            ("crimson/a/1", "copy", {}),
            ("crimson/b/1", "export", {}),
            ("crimson/c/1", "reshard", {"mesh": "data=1"}),
        ):
            job = end(token, operation, checkpoint="crimson/based/1", to=to, **more)
            assert (job["state"], job["error"]["code"]) == ("failed", "format"), job
            assert "indigo" not in json.dumps(job)
        job = end(token, "import", **{"from": "crimson/import", "to": "crimson/d/1"})
        assert "the link" in job["error"]["message"]
        assert end(token, "verify", checkpoint="crimson/based/1")["state"] == "failed"
        assert end(both, "copy", checkpoint="crimson/based/1", to="crimson/e/1")["state"] == "done"


def test_a_token_ends_at_its_time_with_its_sessions(tmp_path, monkeypatch):
    shardckpt.save(tmp_path / "lab" / "run" / "1", {"w": np.ones(2)})
    file = tmp_path / "tokens"
    short, long = (
        add_token(file, "ann", "lab=operate", expires="1h"),
        add_token(file, "bob", "lab=read", "*=read"),
    )
    assert re.search(
        r"^ann lab=operate [0-9a-f]{64} \d{4}-\d\d-\d\dT[0-9:]{8}\+00:00$",
        file.read_text(),
        re.MULTILINE,
    )
    with serving(("lab", tmp_path / "lab"), token_file=file) as service:
        cookie = (
            service.ask("/ui/login", "POST", f"token={short}")
            .headers["set-cookie"]
            .partition(";")[0]
        )
        for headers in (
            {"Authorization": f"Bearer {short}"},
            {"Cookie": cookie},
            {"Authorization": f"Bearer {long}"},
        ):
            assert service.ask("/v1/runs", **headers).status == 200
        now = time.time
        monkeypatch.setattr(tokens_module.time, "time", lambda: now() + 3601)
        expired = [service.ask("/v1/runs", Authorization=f"Bearer {short}") for _ in range(12)]
        # Never 429.
        assert {(one.status, one.json["detail"]) for one in expired} == {
            (401, "this token has expired.")
        }
        assert service.ask("/v1/runs", Cookie=cookie).status == 401
        assert b"has expired" in service.ask("/ui/login", "POST", f"token={short}").body
        assert service.ask("/v1/runs", Authorization=f"Bearer {long}").status == 200
        monkeypatch.undo()
        for end in ("2099-12-31", "2099-12-31T08:00+02:00"):
            dated = add_token(file, "eve", expires=end)
            assert service.ask("/v1/runs", Authorization=f"Bearer {dated}").status == 200, end
        assert re.findall(r"^eve .* 2(\S+)$", file.read_text(), re.MULTILINE) == [
            "099-12-31T00:00:00+00:00",
            "099-12-31T06:00:00+00:00",
        ]
        for end in ("2020-01-01", "0d"):
            with pytest.raises(OptionError, match="is over"):
                add_token(file, "eve", expires=end)
        for end in ("2026-13-01", "soon", "90", "99999999999d"):
            with pytest.raises(OptionError, match='or a date, such as "2026-12-31"'):
                add_token(file, "eve", expires=end)
        for text, bad in (("2020-01-01", 0), ("2099-01-01", 0), ("soon", 1)):
            lines = [
                line.rpartition(" ")[0] if line.startswith("ann") else line
                for line in file.read_text().splitlines()
            ]
            file.write_text("\n".join([f"{lines[0]} {text}", *lines[1:]]) + "\n")
            assert service.ask("/v1/runs", Authorization=f"Bearer {short}").status == (
                200 if "2099" in text else 401
            )
            assert (
                f"bad_token_lines {bad}.0"
                in service.ask("/metrics", Authorization=f"Bearer {long}").body.decode()
            )


@pytest.mark.parametrize("ends", ["revoked", "other rights"])
def test_what_is_still_sent_ends_with_the_token_without_an_error(
    tmp_path, monkeypatch, caplog, ends
):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(guard, "_RECHECK_SECONDS", 0.1)
    monkeypatch.setattr(pool, "_KEEPALIVE_SECONDS", 0.2)
    shardckpt.save(tmp_path / "lab" / "run" / "1", {"w": np.ones(2)})
    large = tmp_path / "lab" / "run" / "tokenizer.json"
    large.write_bytes(b" " * (40 << 20))
    file = tmp_path / "tokens"
    ann, bob = add_token(file, "ann", "lab=operate"), add_token(file, "bob", "lab=operate")
    with (
        serving(("lab", tmp_path / "lab"), token_file=file, state=tmp_path / "state") as service,
        ExitStack() as stack,
    ):
        service.upkeep.runner._not_before = LaterJobs()
        headers = {"Authorization": f"Bearer {bob}", "Content-Type": "application/json"}
        number = service.ask(
            "/v1/jobs/verify", "POST", '{"checkpoint": "lab/run/1"}', **headers
        ).json["number"]
        events, download = (
            stack.enter_context(closing(service.connect())),
            stack.enter_context(closing(service.connect())),
        )
        events.request(
            "GET", f"/v1/jobs/{number}/events", headers={"Authorization": f"Bearer {ann}"}
        )
        stream = events.getresponse()
        assert stream.readline() == b"event: job\n"
        download.request(
            "GET",
            "/lab/run/resolve/main/tokenizer.json",
            headers={"Authorization": f"Bearer {ann}"},
        )
        body = download.getresponse()
        assert body.status == 200, body.read()
        body.read(1 << 20)
        lines = file.read_text().splitlines()
        file.write_text(
            "\n".join(
                lines[1:] if ends == "revoked" else [lines[0].replace("operate", "admin"), lines[1]]
            )
            + "\n"
        )
        time.sleep(0.3)
        for one in (body, stream):
            with pytest.raises((IncompleteRead, ConnectionResetError)):
                one.read()
        assert service.ask("/v1/runs", **headers).status == 200
    messages = [(one.levelname, one.getMessage()) for one in caplog.records]
    assert sum("the rights of its user have changed" in text for _, text in messages) == 2
    assert [one for one in messages if one[0] not in ("INFO", "DEBUG")] == []


@pytest.mark.parametrize(
    "line",
    ["ann lab=rule", "ann lab=read,", "ann =read", "ann a/b=read", "group: read", "group:a,b read"],
)
def test_odd_rights_are_bad_lines(tmp_path, line):
    file = tmp_path / "tokens"
    token = add_token(file, "bob", "read")
    file.write_text(file.read_text() + f"{line} {'0' * 64 if line.startswith('ann') else ''}\n")
    known = tokens_module.Tokens(file)
    assert known.bad_lines == 1
    assert known.identity(token).may("read", "anything")


def test_a_token_file_without_a_last_newline_loses_nobody(tmp_path):
    file = tmp_path / "tokens"
    ann = add_token(file, "ann", "read")
    file.write_bytes(file.read_bytes().rstrip())
    bob = add_token(file, "bob", "operate")
    known = tokens_module.Tokens(file)
    assert [known.identity(one).name for one in (ann, bob)] == ["ann", "bob"]
    assert file.read_text().count("\n") == 2


def test_rights_are_for_one_root_or_for_all(tmp_path):
    known = identity.parse_rights(["llama=operate", "llama=read", "*=read"])
    ann = identity.Identity("ann", known)
    assert ann.may("operate", "llama")
    assert ann.may("read", "other")
    assert not ann.may("operate", "other")
    assert ann.roots is None
    assert identity.Identity("bob", {"a": "read", "b": "admin"}).roots == ["a", "b"]
    with pytest.raises(OptionError, match="llama=operate"):
        add_token(tmp_path / "tokens", "ann", "llama=rule")
    assert not (tmp_path / "tokens").exists()


def test_a_root_whose_name_begins_as_another_is_another(tmp_path):
    """`lab0` follows `lab/` in the order of ids, as those below `lab` do."""
    shardckpt.save(tmp_path / "lab" / "run" / "1", {"w": np.ones(2)})
    shardckpt.save(tmp_path / "lab0", {"w": np.ones(2)})
    shardckpt.save(tmp_path / "lab-2" / "run" / "1", {"w": np.ones(2)})
    token = add_token(tmp_path / "tokens", "ann", "lab=read")
    roots = [(name, tmp_path / name) for name in ("lab", "lab0", "lab-2")]
    with serving(*roots, token_file=tmp_path / "tokens") as service:
        checkpoints = service.get("/v1/checkpoints", Authorization=f"Bearer {token}")["checkpoints"]
        assert [one["id"] for one in checkpoints] == ["lab/run/1"]
    places = Roots([f"{name}={place}" for name, place in roots])
    (tmp_path / "link").symlink_to(tmp_path / "lab-2")
    linked = Roots([f"lab={tmp_path / 'lab'}", f"hidden={tmp_path / 'link'}"])
    before = identity.WHO.set(identity.Identity("ann", {"lab": "read"}))
    try:
        assert places.without_places(f"{tmp_path}/lab/run/1: odd") == "lab/run/1: odd"
        hidden = places.without_places(f"'{tmp_path}/lab-2/run/1' and {tmp_path}/lab0/x: odd")
        # A name may have blanks and quotes: its end is not known.
        assert hidden == "'another place, which you may not read"
        assert (
            linked.without_places(f"its base {tmp_path}/lab-2/run/1 lies")
            == "its base another place, which you may not read"
        )
    finally:
        identity.WHO.reset(before)
